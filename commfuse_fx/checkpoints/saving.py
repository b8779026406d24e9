"""A save that may still be running."""

from __future__ import annotations

import threading
from collections.abc import Callable

from commfuse_fx.support.logs import logger

log = logger("runtime")


class Saving:
    """A save of a checkpoint, as `CompiledStep.save` returns it.

    work: what is still to be done, in a thread of its own. None: nothing is. A program that ends waits for it.
    """

    def __init__(self, work: Callable[[], None] | None = None) -> None:
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        if work is not None:
            self._thread = threading.Thread(target=self._run, args=(work,), name="commfuse checkpoint")
            self._thread.start()

    @property
    def is_done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> None:
        """Wait until the checkpoint is complete on all ranks.

        Raises what kept it from that, as `CompiledStep.save` does; the second time, and in the next save, no more.
        """
        self.finish()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def finish(self) -> None:
        """Wait until it has ended, well or not."""
        if self._thread is not None:
            self._thread.join()

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self._error = error
            log.error("a checkpoint has not been written: %s", error)  # a program may end without asking
