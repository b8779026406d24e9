"""What the compiler refuses by design, of all that cases do."""

from __future__ import annotations

REFUSALS: dict[str, str] = {
    "the loss depends on no trainable parameter": "nothing is left to train",
}
"""A piece of the message -> the reason, under which refusals are counted."""


def reason_of(error: Exception) -> str | None:
    """The reason, or None for an error that no case should meet."""
    text = str(error)
    return next((reason for piece, reason in REFUSALS.items() if piece in text), None)
