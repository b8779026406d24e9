"""The CUDA streams that work on a step's memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch


class Streams:
    """The streams that are the current ones of some CUDA devices when this is made."""

    def __init__(self, devices: Sequence[int]) -> None:
        self._streams = [torch.cuda.current_stream(device) for device in devices]

    @contextmanager
    def current(self) -> Iterator[None]:
        """Inside the `with` block they are the current ones again. What comes after it on other streams waits for them.

        The stream that owns the memory of a collective has to be the one that waits for it: PyTorch gives the memory to
        other tensors of that stream as soon as the collective has been waited for, whatever another stream still reads
        (pytorch issue 188655).
        """
        away = [stream for stream in self._streams if torch.cuda.current_stream(stream.device) != stream]
        with ExitStack() as entered:
            for stream in away:
                entered.enter_context(torch.cuda.stream(stream))
            yield
        for stream in away:
            torch.cuda.current_stream(stream.device).wait_stream(stream)
