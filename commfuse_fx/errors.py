"""The errors commfuse-fx raises. Each also derives from the builtin its caller would expect."""

from __future__ import annotations


class CommFuseError(Exception):
    """Base of every error that commfuse-fx raises on purpose."""


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


class CaptureError(CommFuseError, RuntimeError):
    """The model cannot be traced."""


class PlanMismatchError(CommFuseError, RuntimeError):
    """The ranks compiled different plans.

    may_agree: all of them captured the same graph, and not all have planned it with the prices of one rank yet.
    """

    may_agree = False


class CollectiveError(CommFuseError, RuntimeError):
    """A collective failed."""


class PeerFailedError(CommFuseError, RuntimeError):
    """Another rank failed in this step."""


class ForkError(CommFuseError, RuntimeError):
    """A forked process asks for what only its parent can do: communicate with the other ranks."""


class VirtualWorldError(CommFuseError, RuntimeError):
    """A step was called in a virtual world, which has no devices to run on."""


class VerificationError(CommFuseError, RuntimeError):
    """A pass broke an invariant of the graph."""
