"""Find modules and parameters by patterns of their paths: `*` inside one component, `**` for any number of them."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TypeVar

from torch import nn

from commfuse_fx.errors import ConfigValueError

T = TypeVar("T")


def matches(pattern: str, path: str) -> bool:
    """Whether a pattern such as "h.*.attn" or "**.c_fc" matches this path."""
    return _match(pattern.split("."), path.split("."))


def find_modules(model: nn.Module, pattern: str) -> dict[str, nn.Module]:
    """The modules whose path matches, each once, by path."""
    return _select(pattern, dict(model.named_modules()))


def find_parameters(model: nn.Module, pattern: str) -> dict[str, nn.Parameter]:
    """The parameters whose name matches, by name. A tied parameter appears under each of its names that match."""
    return _select(pattern, dict(model.named_parameters(remove_duplicate=False)))


def nothing_matches(model: nn.Module, pattern: str, place: str) -> ConfigValueError:
    """The error for a pattern that matches neither a module nor a parameter. It lists similar paths."""
    names = [name for name, _ in model.named_modules() if name]
    names.extend(name for name, _ in model.named_parameters(remove_duplicate=False))
    near = near_matches(pattern, names)
    hint = f"; near are {', '.join(near)}" if near else f"; paths start with {', '.join(_heads(names)) or 'nothing'}"
    return ConfigValueError(
        f"{place}: pattern {pattern!r} matches no module and no parameter of {type(model).__name__}{hint} "
        "(* stands for part of one component, ** for any number of components)"
    )


def near_matches(pattern: str, names: Sequence[str], most: int = 3) -> list[str]:
    """The names that are most similar to the pattern, at most `most`.

    Numbers count as `*`, so the blocks of a model count as one name.
    """
    shown: dict[str, str] = {}
    for name in names:
        shown.setdefault(_generalised(name), name)
    return [shown[name] for name in difflib.get_close_matches(_generalised(pattern), list(shown), most)]


def _generalised(path: str) -> str:
    return ".".join("*" if part.isdigit() or part == "**" else part for part in path.split("."))


def _heads(names: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(name.split(".")[0] for name in names))[:8]


def _select(pattern: str, named: Mapping[str, T]) -> dict[str, T]:
    parts = pattern.split(".")
    return {name: value for name, value in named.items() if _match(parts, name.split("."))}


def _match(pattern: Sequence[str], path: Sequence[str]) -> bool:
    if not pattern:
        return not path
    if pattern[0] == "**":
        return any(_match(pattern[1:], path[skip:]) for skip in range(len(path) + 1))
    return bool(path) and fnmatchcase(path[0], pattern[0]) and _match(pattern[1:], path[1:])
