"""Record what a function does on a CUDA device in a CUDA graph, and repeat it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch

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
    """Records in CUDA graphs of one device, from one stream and into one pool of memory."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pool: Any = None
        self._stream: Any = None

    def record(self, compute: Callable[[], Sequence[Any]], generators: Iterable[torch.Generator]) -> Recording:
        # If a capture fails, torch.cuda.graph may leave its stream the current one.
        with torch.cuda.device(self.device), torch.cuda.stream(torch.cuda.current_stream()):
            if self._pool is None:
                self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
            graph = torch.cuda.CUDAGraph()
            for generator in generators:  # torch's own take part in every graph
                if generator.device.type == "cuda" and generator not in torch.cuda.default_generators:
                    graph.register_generator_state(generator)
            # Threads that pin memory, and NCCL's, may go on: only this one must not synchronise. And what the garbage
            # collector finds may be CUDA's, and not to be freed now.
            with (
                no_garbage_collection(),
                torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"),
            ):
                outputs = compute()
        return _CudaRecording(graph, outputs)

    def is_recording(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def has_room(self) -> bool:
        # A recording keeps what a step needs for the time of a step. Another shape may need as much besides.
        free, _ = torch.cuda.mem_get_info(self.device)
        allocated = torch.cuda.memory_allocated(self.device)
        unused = torch.cuda.memory_reserved(self.device) - allocated
        return free + unused >= 2 * (torch.cuda.max_memory_allocated(self.device) - allocated)

    def mark(self) -> Callable[[], bool]:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event.query


class _CudaRecording:
    def __init__(self, graph: torch.cuda.CUDAGraph, outputs: Sequence[Any]) -> None:
        self.outputs = outputs
        self._graph = graph

    def replay(self) -> None:
        self._graph.replay()

    def close(self) -> None:
        self.outputs = ()
        self._graph.reset()
