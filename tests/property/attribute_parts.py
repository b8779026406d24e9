"""Parts of random models whose forward sets, deletes and restores attributes."""

from __future__ import annotations

import copy
import random
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


class SetsAttributes(nn.Module):
    """Each of some ways changes attributes, and the output goes by what they were."""

    def __init__(self, rng: random.Random, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.drop = nn.Dropout(0.0)
        self.ways = rng.sample(list(WAYS), 2)
        self.first, self.phase, self.is_odd = None, "warm", False
        self.config = types.SimpleNamespace(problem=None, table={"mode": "a", "inner": {"deep": None}})
        self.rows, self.marks = 0, [False, "b"]
        self.spare = 1

    def forward(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        for way in self.ways:
            x = WAYS[way](self, x)
        return x * self.weight

    @property
    def may_count_rows(self) -> bool:
        """Whether the forward reads all of its attributes by `vars`, so that one of them may be made of the other."""
        return {"deleted", "written_only"} <= set(self.ways)

    def turn(self, rng: random.Random) -> None:
        """What users set back, or set."""
        which = rng.randrange(5)
        if which == 0:
            self.first = self.config.problem = None
        elif which == 1:
            self.spare = 2
        elif which == 2:
            self.phase, self.rows = "warm", -1
        elif which == 3:
            vars(self).pop("is_ready", None)
            self.config.table["mode"] = "a"
        else:
            self.is_odd = not self.is_odd

    @contextmanager
    def activated(self) -> Iterator[None]:
        self.activation = torch.tanh
        try:
            yield
        finally:
            del self.activation


class Counts(nn.Module):
    """Counts its calls in an attribute, which decides nothing: a compiled step warns of it."""

    def __init__(self, rng: random.Random, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.calls = 0

    def forward(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return torch.tanh(x * self.weight)


def _first(part: Any, x: torch.Tensor) -> torch.Tensor:
    if part.first is None:
        part.first = 1
        x = x * 0.5
    return x


def _absent(part: Any, x: torch.Tensor) -> torch.Tensor:
    if not hasattr(part, "is_ready"):
        part.is_ready = True
        x = x + 0.3
    return x


def _problem(part: Any, x: torch.Tensor) -> torch.Tensor:
    if part.config.problem is None:
        part.config.problem = "four" if len(x) == 4 else "another"
    return x * (len(part.config.problem) / 4)


def _deleted(part: Any, x: torch.Tensor) -> torch.Tensor:
    if "spare" in vars(part):
        del part.spare
        x = x * 0.7
    return x


def _turned(part: Any, x: torch.Tensor) -> torch.Tensor:
    part.is_odd = not part.is_odd
    return x * (0.9 if part.is_odd else 1.1)


def _phase(part: Any, x: torch.Tensor) -> torch.Tensor:
    part.phase = {"warm": "run", "run": "cool", "cool": "warm"}[part.phase]
    return x + 0.1 * (part.phase == "cool")


def _items(part: Any, x: torch.Tensor) -> torch.Tensor:
    table = part.config.table
    table["mode"] = "b" if table["mode"] == "a" else "c"
    table["inner"]["deep"] = "z"
    part.marks[0] = True
    return x * (ord(table["mode"]) / 100)


def _written_only(part: Any, x: torch.Tensor) -> torch.Tensor:
    part.rows = len(x)
    part.drop.note = f"{len(x)} rows"
    return x


def _restored(part: Any, x: torch.Tensor) -> torch.Tensor:
    with part.activated():
        return part.activation(x)


def _mode(part: Any, x: torch.Tensor) -> torch.Tensor:
    part.drop.eval()
    return part.drop(x)


WAYS: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "first": _first,
    "absent": _absent,
    "problem": _problem,
    "deleted": _deleted,
    "turned": _turned,
    "phase": _phase,
    "items": _items,
    "written_only": _written_only,
    "restored": _restored,
    "mode": _mode,
}

_CHANGED = ("first", "phase", "is_odd", "config", "rows", "marks", "spare", "is_ready", "activation", "forward")

ATTRIBUTE_PARTS: dict[str, type[Any]] = {"sets_attributes": SetsAttributes, "counts": Counts}


def attributes_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """What forwards and users have left in attributes, as names: those of parts, and methods in place of forward."""
    found = []
    for path, module in model.named_modules():
        if "forward" in vars(module):
            found.append(f"{path}.forward")
        if isinstance(module, SetsAttributes):
            held = {name: vars(module)[name] for name in _CHANGED if name in vars(module) and name != "forward"}
            held |= {"note": getattr(module.drop, "note", None), "mode": module.drop.training}
            found += [f"{path}.{name} is {value}" for name, value in held.items()]
    return dict.fromkeys(found, torch.tensor(0))


def take_attributes(model: nn.Module, other: nn.Module) -> None:
    """Give a model the attributes of another one like it."""
    for mine, theirs in zip(model.modules(), other.modules(), strict=True):
        if "forward" not in vars(theirs):
            vars(mine).pop("forward", None)
        if isinstance(theirs, SetsAttributes):
            for name in _CHANGED[:-1]:
                vars(mine).pop(name, None)
                if name in vars(theirs):
                    setattr(mine, name, copy.deepcopy(vars(theirs)[name]))
            mine.drop.training = theirs.drop.training
            vars(mine.drop).pop("note", None)
            vars(mine.drop).update({"note": theirs.drop.note} if hasattr(theirs.drop, "note") else {})
