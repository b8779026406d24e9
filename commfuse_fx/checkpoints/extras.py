"""What users put into a checkpoint besides the step: objects with a state of their own, and plain values."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch

from commfuse_fx.checkpoints.damage import damage_told
from commfuse_fx.checkpoints.held import Held
from commfuse_fx.checkpoints.plain_values import replaced
from commfuse_fx.errors import CheckpointError, ConfigTypeError
from commfuse_fx.support.checks import show

Undo = Callable[[], None]


class Extras:
    """The extras of one save or load, by name. Raises ConfigTypeError unless they are a dict with names."""

    def __init__(self, given: object) -> None:
        if given is not None and not isinstance(given, Mapping):
            raise ConfigTypeError(f'extra is {show(given)}; give a dict such as {{"scheduler": scheduler}}')
        self._given: dict[str, Any] = dict(given or {})
        for name in self._given:
            if not isinstance(name, str):
                raise ConfigTypeError(f"extra has the name {show(name)}; give a str")

    def held(self) -> dict[str, Any]:
        """All of them as plain values and tensors that are held: states of objects, and the rest."""
        objects = {name: _state_of(each) for name, each in self._given.items() if _has_state(each)}
        others = {name: each for name, each in self._given.items() if name not in objects}
        held: dict[str, Any] = replaced({"objects": objects, "values": others}, _held, "extra")
        return held

    def check(self, saved: Mapping[str, Any]) -> None:
        """Raises CheckpointError or ConfigTypeError if not all of these can be loaded. saved: what `held` has given."""
        known = saved["objects"]
        if not isinstance(known, Mapping) or not isinstance(saved["values"], Mapping):
            raise CheckpointError(f"the checkpoint's extras are {show(saved)}: take another checkpoint")
        for name, each in self._given.items():
            if not _has_state(each):
                raise ConfigTypeError(
                    f"extra[{name!r}] is {show(each)}, into which nothing can be loaded: leave it out, what was "
                    "saved is in the dict that load() returns"
                )
            if name not in known:
                found = ", ".join(map(str, known)) or "none"
                raise CheckpointError(
                    f"the checkpoint has no object extra[{name!r}]; its objects: {found}. Leave it out, or hand it "
                    "over when saving"
                )

    def put(self, saved: Mapping[str, Any]) -> Undo:
        """Give each object the state that was saved. Returns what gives all of them back those that they have now.

        Raises what their methods raise; all of them are then as before.
        """
        before = {name: copy.deepcopy(_state_of(each)) for name, each in self._given.items()}
        touched: list[str] = []

        def undo() -> None:
            for name in touched:
                _give_state(self._given[name], before[name])

        try:
            for name, each in self._given.items():
                touched.append(name)
                _give_state(each, saved["objects"][name])
        except BaseException:
            undo()
            raise
        return undo

    def rest(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """What nobody was given: plain values, and states of objects that are not among these."""
        objects = {name: each for name, each in saved["objects"].items() if name not in self._given}
        return {**saved["values"], **objects}


def _held(path: str, value: Any) -> Any:
    return Held.whole(value, path, is_own=True) if isinstance(value, torch.Tensor) else value


def _has_state(value: object) -> bool:
    if isinstance(value, torch.Generator):
        return True
    return all(callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict"))


def _state_of(value: Any) -> Any:
    return value.get_state() if isinstance(value, torch.Generator) else value.state_dict()


def _give_state(value: Any, state: Any) -> None:
    if isinstance(value, torch.Generator):
        with damage_told("the state of a generator"):
            value.set_state(state)
    else:
        value.load_state_dict(state)
