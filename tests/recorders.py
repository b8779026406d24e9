"""A recorder for tests on CPU, which treats a step as a CUDA graph would."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import commfuse_fx as cf
from commfuse_fx.runtime.execute.cuda_graphs.step_graphs import FIRST


class CpuRecorder:
    """Its recordings repeat ops on the very tensors of the recording, and no Python around them.

    A recorder that calls the step's code again would hide what a graph gets wrong: numbers and seeds that have changed.
    Nothing is sent while it records. On several ranks, all of them make their recorders together.

    recordings: all that were made. error: what recording raises. is_busy, is_full: what `is_recording` and not
    `has_room` return.
    """

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.recordings: list[CpuRecording] = []
        self.error: Exception | None = None
        self.is_busy = False
        self.is_full = False
        self._alone: Any = None
        if dist.is_initialized():
            self._alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]

    def record(self, compute: Callable[[], Sequence[Any]], generators: Iterable[torch.Generator]) -> CpuRecording:
        if self.error is not None:
            raise self.error
        tape = _Tape(self._alone)
        try:
            with tape:
                outputs = compute()
        finally:
            tape.undo()
        self.recordings.append(CpuRecording(tape, outputs))
        return self.recordings[-1]

    def is_recording(self) -> bool:
        return self.is_busy

    def has_room(self) -> bool:
        return not self.is_full

    def mark(self) -> Callable[[], bool]:
        return lambda: True

    @property
    def replays(self) -> list[int]:
        """How often each recording has run."""
        return [recording.replays for recording in self.recordings]


class CpuRecording:
    """See `Recording`. replays: how often it has run."""

    def __init__(self, tape: _Tape, outputs: Sequence[Any]) -> None:
        self.outputs = outputs
        self.replays = 0
        self.is_closed = False
        self._tape = tape

    def replay(self) -> None:
        assert not self.is_closed
        self.replays += 1
        self._tape.run()

    def close(self) -> None:
        self.is_closed = True
        self.outputs = ()
        self._tape.calls.clear()


class _Tape(TorchDispatchMode):
    """Notes all ops that run, and what they write to that was there before. alone: a process group of this rank."""

    def __init__(self, alone: Any) -> None:
        super().__init__()
        self._alone = alone
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self._before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("operation not permitted when stream is capturing")
        for tensor in _written(func, args, kwargs):
            block = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
            self._before.setdefault(tensor.untyped_storage()._cdata, (block, block.clone()))
        result = func(*(self._alone.boxed() if _is_group(each) else each for each in args), **kwargs)
        self.calls.append((func, args, kwargs, result))
        return result

    def undo(self) -> None:
        """Give all memory the values from before the recording."""
        for block, before in reversed(self._before.values()):
            block.copy_(before)
        self._before.clear()

    @torch.no_grad()
    def run(self) -> None:
        for func, args, kwargs, recorded in self.calls:
            if func._schema.is_mutable or func.namespace == "c10d":
                made = func(*args, **kwargs)
                if func.namespace == "c10d":
                    made[-1].wait()
                continue
            for own, value in zip(pytree.tree_leaves(recorded), pytree.tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(own, torch.Tensor) and own.data_ptr() != value.data_ptr():
                    own.copy_(value)


def _is_group(value: Any) -> bool:
    return isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type())


def _written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    if func.namespace == "c10d":  # its schemas do not say so
        given: list[Any] = [args, kwargs]
    else:
        arguments = enumerate(func._schema.arguments)
        written = [(i, each.name) for i, each in arguments if each.alias_info is not None and each.alias_info.is_write]
        given = [kwargs[name] if name in kwargs else args[i] for i, name in written]
    return [each for each in pytree.tree_leaves(given) if isinstance(each, torch.Tensor)]


def recorded(step: cf.CompiledStep, first: int = FIRST) -> CpuRecorder:
    """Let a step on CPU run as one on CUDA would: captured by the recorder that is returned. first: as `FIRST`."""
    recorder = CpuRecorder()
    step.session.capture_with(recorder)
    assert step.session.graphs is not None
    step.session.graphs.first = first
    return recorder
