"""The errors commfuse-fx raises. Each also derives from the builtin its caller would expect."""

from __future__ import annotations


class CommFuseError(Exception):
    """This is the base of every error that commfuse-fx raises on purpose."""


class ConfigTypeError(CommFuseError, TypeError):
    """An option or mark has the wrong type."""


class ConfigKeyError(CommFuseError, KeyError):
    """An option has an unknown or missing name, kind, mode or key."""

    def __str__(self) -> str:
        """The message itself: KeyError would print it quoted."""
        return Exception.__str__(self)


class ConfigValueError(CommFuseError, ValueError):
    """An option or mark has the right type but a value that is not allowed."""


class NotAvailableError(CommFuseError, NotImplementedError):
    """An option is valid but not available yet."""


class NotThereError(CommFuseError, AttributeError):
    """What is compiled has no such attribute: DistributedDataParallel, a module or a step has it."""


class CaptureError(CommFuseError, RuntimeError):
    """The model or the loss cannot be traced into one graph. The message names module and source line."""


class PlanMismatchError(CommFuseError, RuntimeError):
    """The ranks compiled different plans, call different steps, or differ in what they divide. Nothing was updated.

    may_agree: whether all ranks captured the same graph, and not all have planned it with the prices of one
        rank yet.
    """

    may_agree = False


class CollectiveError(CommFuseError, RuntimeError):
    """A collective failed or timed out, or another rank left the step between its collectives."""


class PeerFailedError(CommFuseError, RuntimeError):
    """Another rank failed in this step before its vote. Nothing was updated, and the ranks may go on."""


class CheckpointError(CommFuseError, RuntimeError):
    """A checkpoint cannot be written or read, or it is of another model. Nothing has changed."""


class ForkError(CommFuseError, RuntimeError):
    """A forked process asks for what only its parent can do: communicate with the other ranks."""


class VirtualWorldError(CommFuseError, RuntimeError):
    """A step was called in a virtual world, which has no devices to run on."""


class VerificationError(CommFuseError, RuntimeError):
    """A pass broke an invariant of the graph, or a verified step does not have the values of its replay.

    This is a bug of a pass; in a step it may be damage in the memory of a device, too.
    """
