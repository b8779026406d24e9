"""Record what a function does on a CUDA device in a CUDA graph, and repeat it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Protocol
from weakref import WeakSet

import torch

from commfuse_fx.runtime.ranks.distress import keep_forever
from commfuse_fx.support.gc_pause import no_garbage_collection


class Recording(Protocol):
    """A recording repeats what a function has done on the device.

    outputs: what the function returned. Each repetition writes their values again, in the same memory.
    """

    @property
    def outputs(self) -> Sequence[Any]: ...

    def replay(self) -> None:
        """Start a repetition on the current stream, and return at once."""

    def close(self) -> None:
        """Free what the recording holds. The device must have finished its repetitions."""


class Recorder(Protocol):
    """A recorder makes recordings that share their memory, so no two of them may run at a time.

    device: where the recorded kernels run.
    """

    @property
    def device(self) -> torch.device: ...

    def record(self, compute: Callable[[], Sequence[Any]], generators: Iterable[torch.Generator]) -> Recording:
        """Call `compute` once for a recording, without running any kernel.

        generators: those that `compute` may draw from. Each repetition goes on from their state at that time.
        """

    def is_recording(self) -> bool:
        """Whether somebody records what the current stream does."""

    def has_room(self) -> bool:
        """Whether the memory of a recording leaves enough for what runs without one."""

    def mark(self) -> Callable[[], bool]:
        """A function that tells whether the device has finished all that the current stream has been given so far."""


class CudaRecorder:
    """Records in CUDA graphs of one device, from one stream. Those that are open together share a pool of memory."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream: Any = None
        self._small: Any = None
        self._pool: Any = None
        self._recordings: WeakSet[_CudaRecording] = WeakSet()

    def record(self, compute: Callable[[], Sequence[Any]], generators: Iterable[torch.Generator]) -> Recording:
        # torch's own generators take part in every graph.
        others = [
            each for each in generators if each.device.type == "cuda" and each not in torch.cuda.default_generators
        ]
        # If a capture fails, torch.cuda.graph may leave its stream the current one.
        with torch.cuda.device(self.device), torch.cuda.stream(torch.cuda.current_stream()):
            if self._stream is None:
                self._stream, self._small = torch.cuda.Stream(), torch.zeros(1, device=self.device)
            # PyTorch takes no pool into use again whose graphs have all gone.
            if self._pool is None or not any(each.is_open for each in self._recordings):
                self._pool = torch.cuda.graph_pool_handle()
            graph = torch.cuda.CUDAGraph()
            try:
                with _workspaces_of_its_own():
                    outputs = self._captured(graph, self._pool, compute, others)
            except BaseException:
                self._clear_up_after(graph, others)
                raise
        recording = _CudaRecording(graph, outputs)
        self._recordings.add(recording)
        return recording

    def _captured(
        self,
        graph: torch.cuda.CUDAGraph,
        pool: Any,
        compute: Callable[[], Sequence[Any]],
        generators: Sequence[torch.Generator],
    ) -> Sequence[Any]:
        for generator in generators:
            graph.register_generator_state(generator)
        # Threads that pin memory, and NCCL's, may go on: only this one must not synchronise. And what the garbage
        # collector finds may be CUDA's, and not to be freed now.
        with (
            no_garbage_collection(),
            torch.cuda.graph(graph, pool, self._stream, capture_error_mode="thread_local"),
        ):
            return compute()

    def _clear_up_after(self, graph: torch.cuda.CUDAGraph, generators: Sequence[torch.Generator]) -> None:
        """End what a failed capture leaves as if it went on.

        Until then the allocator gives no cached memory back, nor that of the capture. And up to PyTorch 2.12 nobody can
        draw from the generators, nor replay another graph: the end of a capture that succeeds ends it for them.
        """
        keep_forever(graph)  # the allocator of pinned memory goes on asking it
        graph.reset()
        pool, self._pool = self._pool, None
        with suppress(RuntimeError):  # the allocator knows already that the capture is over
            torch._C._cuda_endAllocateToPool(self.device.index, pool)
            torch._C._cuda_releasePool(self.device.index, pool)
        small = torch.cuda.CUDAGraph()  # it needs no memory, of which there may be none
        self._captured(small, None, lambda: (self._small.zero_(),), generators)
        small.reset()

    def is_recording(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def has_room(self) -> bool:
        # A recording keeps what a step needs for the time of a step. Another shape may need as much besides.
        free, _ = torch.cuda.mem_get_info(self.device)
        needed = torch.cuda.max_memory_allocated(self.device) - torch.cuda.memory_allocated(self.device)
        return free + self._unused() >= 2 * needed

    def _unused(self) -> int:
        """Bytes that PyTorch has for the device and nobody uses, without those that graphs of others keep."""
        if torch.cuda.get_allocator_backend() != "native":
            return torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        unused, pools = 0, ((0, 0), self._pool)
        for segment in torch.cuda.memory_snapshot(include_traces=False):
            if segment["device"] == self.device.index and segment["segment_pool_id"] in pools:
                unused += segment["total_size"] - segment["allocated_size"]
        return unused

    def mark(self) -> Callable[[], bool]:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event.query


@contextmanager
def _workspaces_of_its_own() -> Iterator[None]:
    """cuBLAS keeps a workspace for each stream. Inside of the block it makes one in the memory of the capture, which
    nobody else frees, and it does not keep that."""
    torch._C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()


class _CudaRecording:
    def __init__(self, graph: torch.cuda.CUDAGraph, outputs: Sequence[Any]) -> None:
        self.outputs = outputs
        self.is_open = True
        self._graph = graph

    def replay(self) -> None:
        self._graph.replay()

    def close(self) -> None:
        self.is_open = False
        self.outputs = ()
        self._graph.reset()
