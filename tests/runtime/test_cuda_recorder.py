"""How captures call torch.cuda, which is replaced here: no GPU is needed, and none of its work is done."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from commfuse_fx.runtime.execute.cuda_graphs.cuda_graph import CudaRecorder

CUDA = torch.device("cuda", 0)


class Device:
    """What a capture asks of torch.cuda, with PyTorch's rules for pools of memory and random generators.

    ends_badly: the end of a capture raises, and leaves its stream current.
    pools: how many graphs use each pool. underway: the pools of captures that go on, for all that the allocator knows.
    drawing: whether the generator of the device takes part in a capture. workspaces: the pool of each stream's.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.stream: Any = "main"
        self.ends_badly = False
        self.captures: list[dict[str, Any]] = []
        self.graphs: list[Any] = []
        self.pools: dict[Any, int] = {}
        self.underway: list[Any] = []
        self.drawing = False
        self.workspaces: dict[Any, Any] = {}
        self.signature = inspect.signature(torch.cuda.graph)
        for name in ("graph", "stream"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, f"_{name}"))
        monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: self.stream)
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
        monkeypatch.setattr(torch.cuda, "Stream", object)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", self._new_graph)
        monkeypatch.setattr(torch, "zeros", lambda size, device: self._allocated())
        for name in ("endAllocateToPool", "releasePool", "clearCublasWorkspaces"):
            monkeypatch.setattr(torch._C, f"_cuda_{name}", getattr(self, f"_{name}"), raising=False)

    def _allocated(self) -> torch.Tensor:
        assert not self.underway, "there may be no memory when a capture has failed"
        return torch.ones(1)

    def multiply(self) -> None:
        """A product of matrices takes the workspace of its stream, or makes one."""
        self.workspaces.setdefault(self.stream, self.underway[-1] if self.underway else None)

    def _new_graph(self) -> Any:
        made = SimpleNamespace(registered=[], replays=0, pool=None)
        made.register_generator_state = made.registered.append
        made.replay = lambda: setattr(made, "replays", made.replays + 1)
        made.reset = lambda: self._reset(made)
        self.graphs.append(made)
        return made

    def _reset(self, graph: Any) -> None:
        graph.replays = None
        if graph.pool is not None:
            self.pools[graph.pool] -= 1
            graph.pool = None

    def _endAllocateToPool(self, index: int, pool: Any) -> None:
        if pool not in self.underway:
            raise RuntimeError("not currently recording to mempool_id")
        self.underway.remove(pool)

    def _releasePool(self, index: int, pool: Any) -> None:
        self.pools[pool] -= 1

    def _clearCublasWorkspaces(self) -> None:
        self.workspaces.clear()

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
        pool = given["pool"] or object()
        held = [*self.workspaces.values()]
        self.pools = {each: count for each, count in self.pools.items() if count or each in held}
        if self.pools.get(pool) == 0:
            raise RuntimeError("use_count > 0 INTERNAL ASSERT FAILED")
        self.pools[pool] = self.pools.get(pool, 0) + 1
        self.underway.append(pool)
        self.drawing = True
        try:
            yield
        finally:
            if self.ends_badly:
                self.ends_badly = False
                raise RuntimeError("capture was invalidated")
            self._endAllocateToPool(0, pool)
            given["cuda_graph"].pool = pool
            self.drawing = False
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
    assert not device.drawing, "the generator draws nothing as long as it takes part in a capture"
    assert not device.underway and not any(device.pools.values()), "the allocator has its memory back"


def test_an_error_of_python_leaves_no_memory_behind(device: Device) -> None:
    """The capture itself ends well."""
    recorder = CudaRecorder(CUDA)
    with pytest.raises(ValueError, match="literal"):
        recorder.record(lambda: (int("x"),), ())
    assert not device.underway and not any(device.pools.values())


def test_a_failed_capture_leaves_others_as_they_were(device: Device) -> None:
    recorder = CudaRecorder(CUDA)
    recording = recorder.record(tuple, ())
    (pool,) = device.pools
    device.ends_badly = True
    with pytest.raises(RuntimeError, match="invalidated"):
        recorder.record(tuple, ())
    assert device.pools[pool] == 1
    recorder.record(tuple, ())
    assert device.captures[-1]["pool"] is not pool, "the allocator of pinned memory takes the pool for one in use"
    recording.close()
    assert not device.pools[pool]


def test_a_capture_when_all_others_have_gone(device: Device) -> None:
    """Somebody may still hold memory of theirs, and PyTorch does not take their pool into use again."""
    recorder = CudaRecorder(CUDA)
    for _ in range(2):
        recording = recorder.record(tuple, ())
        device.workspaces["of somebody"] = device.captures[-1]["pool"]
        recording.close()
    one, other = device.captures
    assert one["pool"] is not other["pool"] and one["stream"] is other["stream"]


def test_a_capture_keeps_its_own_workspace_and_no_other_one(device: Device) -> None:
    """Else a recording would go on with memory that another one, or torch.compile, gives back to the allocator."""
    recorder = CudaRecorder(CUDA)
    recorder.record(tuple, ())
    stream = device.captures[0]["stream"]
    device.workspaces[stream] = None  # the user's stream may be the same one
    seen = []

    def compute() -> tuple[()]:
        device.multiply()
        seen.append(device.workspaces[stream])
        return ()

    recorder.record(compute, ())
    assert seen == [device.captures[1]["pool"]] and not device.workspaces


@pytest.mark.parametrize(
    ("free", "backend", "has_room"), [(700, "native", True), (699, "native", False), (700, "cudaMallocAsync", True)]
)
def test_room_for_a_capture(
    device: Device, monkeypatch: pytest.MonkeyPatch, free: int, backend: str, has_room: bool
) -> None:
    """A step needs 500 bytes at its peak. 300 that the process has are unused, and 5,000 more by graphs of others."""
    recorder = CudaRecorder(CUDA)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 7))
    recorder.record(tuple, ())
    sizes = [(0, (0, 0), 200), (0, (0, 7), 100), (0, (0, 8), 5000), (1, (0, 0), 5000)]
    segments = [
        {"device": number, "segment_pool_id": pool, "total_size": size + 10, "allocated_size": 10}
        for number, pool, size in sizes
    ]
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: backend)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda include_traces: segments)
    for name, value in {
        "mem_get_info": (free, 9000),
        "memory_allocated": 1000,
        "memory_reserved": 1300,
        "max_memory_allocated": 1500,
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    assert recorder.has_room() is has_room
