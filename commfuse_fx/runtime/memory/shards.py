"""The divided parameters of a step, and the whole tensors that the user sees of them.

Between steps a rank keeps only its part of a divided parameter and of its optimizer states. The user's own tensors
keep their shape but lose their memory. When code touches one of them, all of them are gathered from all ranks. The
next step takes its parts from them again, with all values that the user has written meanwhile.

Why: docs/decisions.md, "The user's parameters stay whole in shape".
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from commfuse_fx.errors import CommFuseError
from commfuse_fx.ir.core.program import Program
from commfuse_fx.ir.ops.shared_memory import is_part_of_storage
from commfuse_fx.runtime.memory.divided import DividedParameter, allocate, free, gather
from commfuse_fx.runtime.memory.divided_gradients import DividedGradients
from commfuse_fx.runtime.memory.guard import Guard, finish_others
from commfuse_fx.runtime.memory.layout import divided_parameters, joined_group
from commfuse_fx.runtime.memory.modes import outside_modes
from commfuse_fx.runtime.memory.own_storage import has_aliases
from commfuse_fx.runtime.memory.places import Place
from commfuse_fx.runtime.memory.value_checksum import value_checksum
from commfuse_fx.runtime.memory.whole_states import gather_for_state_dict
from commfuse_fx.runtime.ranks.exchange import Exchange

log = logging.getLogger("commfuse_fx.runtime")


class Shards:
    """The divided parameters of one rank, shared by all programs of a step that divide them alike.

    described: what the compiler knows of the divided parameters, by name. by_name: what this rank has of them.
    values: the tensors that a graph reads, by parameter name. They are parts, or the user's own undivided tensors.
    updated: what of them this rank updates, by the same names.
    optimizer: the user's optimizer with the states of the parts in place of the whole ones; None: there is none.
    beneath: those of a module that divides the parameters themselves, where this one divides their states alone.
    gradients: where parameters are divided whose caller updates them, the gradients of the parts.

    before_reading: called before parts are gathered. It has to finish pending updates.
    """

    gradients: DividedGradients | None = None

    def __init__(
        self,
        program: Program,
        params: Mapping[str, nn.Parameter],
        optimizer: torch.optim.Optimizer | None,
        rank: int,
        exchange: Exchange,
        before_reading: Callable[[], None],
        beneath: Shards | None = None,
    ) -> None:
        self.params = params
        self.beneath = beneath
        self.key = layouts_of(program)
        self.exchange = exchange
        self.mesh = program.mesh
        self._users = optimizer
        self._before_reading = before_reading
        self.described = divided = divided_parameters(program)
        parts: dict[str, nn.Parameter] = (
            {} if beneath is None else {name: each.part for name, each in beneath.by_name.items()}
        )
        self._divided: list[DividedParameter] = [
            DividedParameter(param, params[name], program.mesh, rank, parts.get(name), updates=optimizer is not None)
            for name, param in divided.items()
        ]
        self.by_name: dict[str, DividedParameter] = {each.name: each for each in self._divided}
        self.values: Mapping[str, nn.Parameter] = {**params, **{each.name: each.part for each in self._divided}}
        self.updated: Mapping[str, nn.Parameter] = {**params, **{each.name: each.updated for each in self._divided}}
        states: dict[torch.Tensor, dict[str, Any]] = {each.updated: each.state for each in self._divided}
        self.optimizer = None if optimizer is None else DividedOptimizer(optimizer, states)
        if optimizer is not None:
            gather_for_state_dict(optimizer)
        self._guard = Guard(self.open, alone=False)
        self._taken = False
        self._has_released = self._has_warned = False
        self._loaded: dict[str, int] = {}  # checksums of states that were replaced while they were divided
        self._kept: list[torch.Tensor] = []  # not released yet, because other tensors use their memory

    @property
    def guard(self) -> Guard:
        return self._guard

    @property
    def is_divided(self) -> bool:
        """Whether the user's tensors have to be gathered to be read."""
        return self._guard.is_closed

    @property
    def divides_parameters(self) -> bool:
        """Whether parameters are divided, not their optimizer states alone."""
        return any(each.is_divided for each in self._divided)

    def take(self) -> None:
        """Before a step, copy the values that the user has written since the last one into the parts."""
        if self.beneath is not None:
            self.beneath.take()
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            if self._guard.is_closed:
                if self._take_replaced_states():
                    self.show()
            else:
                wholes = (tensor for each in self._divided for tensor in (each.whole, *self._states_of(each)))
                finish_others(wholes, *([] if self.beneath is None else [self.beneath.guard]))
                for each in self._divided:
                    each.take()
                    each.follow()
                    each.take_state(self._state(each), is_whole=True)
            for each in self._divided:
                each.follow()
        self._taken = True

    def written(self, but_parameters: bool = False) -> dict[str, int]:
        """Checksums of what users may have written since the last step, by the keys of tensors: `release` leaves parts
        of them alone. All of them are compared, as writes to `param.data` leave no trace.

        but_parameters: states of the optimizer alone.
        """
        found = {} if self.beneath is None else self.beneath.written(but_parameters)
        if self._guard.is_closed:
            return {**found, **self._loaded}
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            for each in self._divided:
                if each.is_divided and not but_parameters:
                    found[each.name] = value_checksum([each.whole])
                found.update(self._checksums_of_states(each, but={}))
        return found

    def _checksums_of_states(self, each: DividedParameter, but: Mapping[str, torch.Tensor]) -> dict[str, int]:
        held = {name: value for name, value in self._state(each).items() if each.is_like_the_whole(value)}
        return {f"{each.name}/{name}": value_checksum([held[name]]) for name in held if held[name] is not but.get(name)}

    def release(self) -> None:
        """Release the memory of the whole tensors. This is called when nothing can keep the step from running."""
        if not self._taken:
            self.take()
        self._taken = False
        self._loaded.clear()
        if self.beneath is not None:
            self.beneath.release()
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            if self._guard.is_closed:
                self._kept = [tensor for tensor in self._kept if not free(tensor)]
            else:
                self._warn_of_aliases()
                wholes = [tensor for each in self._divided for tensor in each.wholes()]
                self._kept = [tensor for tensor in wholes if not free(tensor)]
                self._guard.close(wholes)
                self.show()

    def _warn_of_aliases(self) -> None:
        """Warn once if another tensor uses the memory of a divided parameter: it keeps old values from now on."""
        for each in self._divided:
            if self._has_warned or not each.is_divided:
                continue
            # After the first step only for a part of a larger storage: others may be entries of an old state_dict.
            if has_aliases(each.whole) and (not self._has_released or is_part_of_storage(each.whole)):
                self._has_warned = True
                log.warning(
                    "parameter %s is divided among ranks, but another tensor looks at its memory (a view of it, "
                    "param.data, an entry of an earlier state_dict, a larger tensor that contains it): that tensor "
                    "keeps the present values until the parameter itself is read, and values written to it may be "
                    "lost. Use the parameter instead, or leave it whole",
                    each.name,
                )
        self._has_released = True

    def show(self) -> None:
        """After an update, put the states that it has made into the user's optimizer."""
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            for each in self._divided:
                if each.state and self._users is not None:
                    self._guard.close(each.show(self._users.state[each.whole]))

    def open(self) -> None:
        """Gather the user's tensors. All ranks have to call this together; raises CollectiveError if some do not."""
        with self._guard.lock:
            self._before_reading()
            if not self._guard.is_closed:
                return
            self.exchange.meet()
            # This also fills a state that the user has replaced: it may have become another parameter's state.
            with outside_modes():
                gather(self.exchange, [(each, piece) for each in self._divided for piece in each.held()])
                for each in self._divided:
                    each.note_gathered()
            self._kept.clear()
            self._taken = False
            self._guard.open()

    @property
    def group_of_rows(self) -> str:
        """The mesh axes over which a module has divided gradients: the same for all."""
        return joined_group(self._divided[0].state_layout, self.mesh)

    def changes(self, name: str) -> int:
        """A number that is another one when the values of a divided parameter have changed."""
        with torch._C.DisableTorchFunctionSubclass():
            each = self.by_name[name]
            return each.changes + (not self._guard.is_closed and each.was_written())

    def has_changed(self, names: Iterable[str]) -> None:
        """Updates have written to the parts of these parameters."""
        for name in names:
            if name in self.by_name:
                self.by_name[name].changes += 1

    def leave(self) -> None:
        """Others divide the parameters from now on, or nobody does."""
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            for each in self._divided:
                each.leave()

    @contextmanager
    def shapes_only(self) -> Iterator[None]:
        """Inside the `with` block the user's tensors have memory but no values, which is enough to trace the model."""
        if not self._guard.is_closed:
            yield
            return
        wholes = [tensor for each in self._divided for tensor in each.wholes()]
        self._guard.open()
        try:
            for tensor in wholes:
                allocate(tensor)
            yield
        finally:
            self._kept += [tensor for tensor in wholes if not free(tensor)]
            self._guard.close(wholes)

    def parts(self) -> dict[str, torch.Tensor]:
        """All tensors that this rank holds parts of, by their keys."""
        return {piece.key: piece.part for each in self._divided for piece in each.held()}

    def places(self) -> dict[int, tuple[torch.Tensor, Place]]:
        """This rank's part of each of the user's tensors and its place there, by the `id` of the user's tensor.

        Only while they are divided.
        """
        found: dict[int, tuple[torch.Tensor, Place]] = {}
        for each in self._divided:
            if each.is_divided:
                found[id(each.whole)] = each.part, each.place
            found.update({id(shown): (each.state[name], each.state_place) for name, shown in each.shown.items()})
        return found

    def state_places(self) -> dict[str, Place]:
        """Where this rank's part of an optimizer state lies in one of the parameter's shape, by parameter name.

        Only while they are divided. A parameter whose states alone are divided is among these.
        """
        return {each.name: each.state_place for each in self._divided}

    def put_states(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Give the parts of all divided parameters these optimizer states, by the names of parameter and state.

        Tensors of the part's shape are parts. Only while the parameters are divided.
        """
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            for each in self._divided:
                self._drop(each.put_state(states.get(each.name, {})))
        self.show()

    def _take_replaced_states(self) -> bool:
        """Take states that the user has loaded into the optimizer without touching a tensor.

        Returns whether there were any.
        """
        replaced = [each for each in self._divided if not each.has_state_of(self._state(each))]
        # States that were loaded may be those of another step, which holds them in parts.
        finish_others((tensor for each in replaced for tensor in self._states_of(each)), self._guard)
        if replaced:
            self._before_reading()  # a pending update belongs to the old state
        for each in replaced:
            self._loaded.update(self._checksums_of_states(each, each.shown))
            self._drop(each.take_state(self._state(each), is_whole=False))
        return bool(replaced)

    def _drop(self, tensors: Iterable[torch.Tensor]) -> None:
        """The user may still hold these whole tensors, which will never get values again."""
        for tensor in tensors:
            self._guard.release(tensor)
            _gone.mark(tensor)

    def _states_of(self, each: DividedParameter) -> list[torch.Tensor]:
        """The tensors that the user's optimizer has for a parameter."""
        return [value for value in self._state(each).values() if isinstance(value, torch.Tensor)]

    def _state(self, each: DividedParameter) -> dict[str, Any]:
        held: dict[str, Any] = {} if self._users is None else self._users.state.get(each.whole, {})
        return held


class DividedOptimizer:
    """The user's optimizer, which shows the states of the parts in place of those of divided parameters."""

    def __init__(self, users: torch.optim.Optimizer, parts: Mapping[torch.Tensor, dict[str, Any]]) -> None:
        self._users = users
        self.state = _States(users, parts)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self._users.param_groups


class _States:
    def __init__(self, users: torch.optim.Optimizer, parts: Mapping[torch.Tensor, dict[str, Any]]) -> None:
        self._users = users
        self._parts = parts

    def __getitem__(self, param: torch.Tensor) -> dict[str, Any]:
        held: dict[str, Any] = self._parts[param] if param in self._parts else self._users.state[param]
        return held

    def get(self, param: torch.Tensor) -> dict[str, Any] | None:
        held: dict[str, Any] | None = self._parts[param] if param in self._parts else self._users.state.get(param)
        return held


def layouts_of(program: Program) -> Any:
    """A key that is equal for programs that divide the same parameters alike, and so can share their parts."""
    divided = divided_parameters(program)
    return (program.mesh, *((name, p.layout, p.shard, p.owner, p.spec) for name, p in divided.items()))


def _refuse() -> None:
    raise CommFuseError(
        "this tensor was optimizer state that has been replaced before anybody read it, so its values are gone: "
        "call optimizer.state_dict() and copy it before you load another one"
    )


_gone = Guard(_refuse)
