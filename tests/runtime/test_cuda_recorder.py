"""How captures call torch.cuda, which is replaced here: no GPU is needed, and none of its work is done."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from commfuse_fx.runtime.execute.cuda_graph import CudaRecorder

CUDA = torch.device("cuda", 0)


class Device:
    """What a capture asks of torch.cuda. `ends_badly`: the end of a capture raises, and leaves its stream current."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.stream: Any = "main"
        self.ends_badly = False
        self.captures: list[dict[str, Any]] = []
        self.graphs: list[Any] = []
        self.signature = inspect.signature(torch.cuda.graph)
        for name in ("graph", "stream"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, f"_{name}"))
        monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: self.stream)
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: object())
        monkeypatch.setattr(torch.cuda, "Stream", lambda: object())
        monkeypatch.setattr(torch.cuda, "CUDAGraph", self._new_graph)

    def _new_graph(self) -> Any:
        made = SimpleNamespace(registered=[], replays=0)
        made.register_generator_state = made.registered.append
        made.replay = lambda: setattr(made, "replays", made.replays + 1)
        made.reset = lambda: setattr(made, "replays", None)
        self.graphs.append(made)
        return made

    @contextmanager
    def _stream(self, stream: Any) -> Iterator[None]:
        before, self.stream = self.stream, stream
        try:
            yield
        finally:
            self.stream = before

    @contextmanager
    def _graph(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        given = self.signature.bind(*args, **kwargs).arguments
        self.captures.append(given)
        before, self.stream = self.stream, given["stream"]
        try:
            yield
        finally:
            if self.ends_badly:
                raise RuntimeError("capture was invalidated")
            self.stream = before


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return Device(monkeypatch)


def test_captures_share_memory_and_run_on_one_stream_of_their_own(device: Device) -> None:
    recorder = CudaRecorder(CUDA)
    seen = []
    for number in range(2):
        recording = recorder.record(lambda number=number: (seen.append(device.stream), number), ())
        assert recording.outputs[1] == number
        recording.replay()
    one, other = device.captures
    assert one["pool"] is other["pool"] and one["stream"] is other["stream"] is seen[0] is seen[1]
    assert one["capture_error_mode"] == "thread_local" and device.stream == "main"
    assert [graph.replays for graph in device.graphs] == [1, 1]
    recording.close()
    assert not recording.outputs and device.graphs[1].replays is None


def test_generators_of_the_user_take_part(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    own, default = SimpleNamespace(device=CUDA), SimpleNamespace(device=CUDA, is_default=True)
    on_host = SimpleNamespace(device=torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "default_generators", (default,))
    CudaRecorder(CUDA).record(tuple, (on_host, default, own))
    assert device.graphs[0].registered == [own]


def test_a_failed_capture_leaves_the_stream_as_it_was(device: Device) -> None:
    def fail() -> tuple[()]:
        raise ValueError("the host waits")

    device.ends_badly = True
    with pytest.raises(RuntimeError, match="invalidated") as raised:
        CudaRecorder(CUDA).record(fail, ())
    assert isinstance(raised.value.__context__, ValueError) and device.stream == "main"


@pytest.mark.parametrize(("free", "has_room"), [(1000, True), (100, False)])
def test_room_for_a_capture(monkeypatch: pytest.MonkeyPatch, free: int, has_room: bool) -> None:
    """A step needs 500 bytes at its peak; 300 that the process has are unused."""
    for name, value in {
        "mem_get_info": (free, 5000),
        "memory_allocated": 1000,
        "memory_reserved": 1300,
        "max_memory_allocated": 1500,
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    assert CudaRecorder(CUDA).has_room() is has_room
