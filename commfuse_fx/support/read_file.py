"""Text files that users name: read whole, or refused with a reason."""

from __future__ import annotations

from pathlib import Path

from commfuse_fx.errors import ConfigValueError
from commfuse_fx.support.strict_json import MOST_CHARACTERS


def read_file(path: Path, argument: str, give: str) -> str:
    """The text of a file, of at most MOST_CHARACTERS bytes.

    argument: what the caller calls the path. give: what errors say to give instead.
    Raises ConfigValueError for what is missing, empty, too large, no UTF-8 or no regular file.
    """
    try:
        if not path.exists():
            raise ConfigValueError(f"there is no file {str(path)!r}; {give}")
        if not path.is_file():  # a pipe might never end
            raise ConfigValueError(f"{str(path)!r} is no regular file; {give}")
        size = path.stat().st_size
        if size > MOST_CHARACTERS:
            raise ConfigValueError(f"{str(path)!r} has {size} bytes, and at most {MOST_CHARACTERS} are read; {give}")
        if size == 0:
            raise ConfigValueError(f"{str(path)!r} is empty; {give}")
        return path.read_text(encoding="utf-8")
    except ConfigValueError:
        raise
    except (OSError, ValueError) as error:  # ValueError: no UTF-8, or a NUL in the path
        raise unreadable(path, argument, error, give) from None


def unreadable(path: Path, argument: str, error: Exception, give: str) -> ConfigValueError:
    """The error to raise where the system, or the text of a file, does not let it be read."""
    if isinstance(error, UnicodeDecodeError):
        reason = "it is no UTF-8 text"
    else:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return ConfigValueError(f"{argument} is {str(path)!r}, which cannot be read: {reason}; {give}")
