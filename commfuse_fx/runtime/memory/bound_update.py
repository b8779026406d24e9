"""One update of a program, bound to the user's parameters and to the states in `optimizer.state`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import nn

from commfuse_fx.errors import ConfigValueError
from commfuse_fx.ir.core.meta import TensorSpec, same_layout
from commfuse_fx.ir.core.program import Program, Segment, Update
from commfuse_fx.ir.updates.update_layout import LayoutConflict
from commfuse_fx.kernels.update_rules import RULES, Rule
from commfuse_fx.runtime.memory.flat_pool import FlatPool, part_of_flat
from commfuse_fx.runtime.memory.own_storage import has_aliases
from commfuse_fx.runtime.memory.scalar_states import Optimizer, ScalarStates

_VALUES = dict.values
_END = (object(),)


def _addresses(tensors: Sequence[torch.Tensor]) -> list[int]:
    return list(map(torch.Tensor.data_ptr, tensors))


class BoundUpdate:
    """A bound update holds the tensors that one update of a program works on.

    flats: the flat tensors of the parameters, by the name of their first member.
    lists: for each state its tensors, one per segment of the update.
    """

    def __init__(
        self,
        program: Program,
        update: Update,
        params: Mapping[str, nn.Parameter],
        optimizer: Optimizer,
        pool: FlatPool,
    ) -> None:
        self.update = update
        self.params = params
        self.optimizer = optimizer
        self.pool = pool
        self.rule: Rule = RULES[update.rule]
        assert program.optimizer is not None
        self.flags = dict(program.optimizer.groups[update.group].flags)
        self.names = self.rule.states(self.flags)
        self.scalars = ScalarStates(self.rule, params, optimizer, update.group, pool)
        self.is_plain = not program.params[update.segments[0].members[0][0]].is_block
        self.forget()
        pool.holders.add(self)

    def forget(self) -> None:
        """Let go of all tensors. The update has to be bound again before it runs."""
        self.flats: dict[str, torch.Tensor] = {}
        self.lists: dict[str, list[torch.Tensor]] = {}
        self.first_step = False
        self._bound = False
        # States and flat parameters, with their addresses when they were bound: `share_memory_()` moves a tensor.
        self._placed: list[torch.Tensor] = []
        self._addresses: list[int] = []
        # States as `optimizer.state` should show them; `_holders` and `_entries` help to check that it still does.
        self._shown: list[tuple[nn.Parameter, str, torch.Tensor]] = []
        self._holders: tuple[list[nn.Parameter], list[dict[str, Any]]] = ([], [])
        self._held: list[Any] = []  # all values in the holders
        self._entries: list[tuple[dict[str, Any], str, torch.Tensor]] = []
        self._published = False

    def numbers(self) -> dict[str, Any]:
        values: dict[str, Any] = self.rule.hyper(self.optimizer.param_groups[self.update.group])
        values["is_first_step"] = self.first_step
        return values

    def is_bound(self) -> bool:
        if _addresses(self._placed) != self._addresses:
            return False
        if not self._bound or not self._published:
            return self._bound and not self._shown
        # This runs before every step, so it runs no Python line per tensor unless users have added states.
        params, holders = self._holders
        if not all(map(is_, map(self.optimizer.state.get, params), holders)):
            return False
        if all(map(is_, chain(chain.from_iterable(map(_VALUES, holders)), _END), self._held)):
            return True
        return all(held.get(name) is value for held, name, value in self._entries)

    def publish(self) -> bool:
        if self._published:
            return False
        self.first_step = False
        state = self.optimizer.state
        for param, name, value in self._shown:
            state[param][name] = value
        params = list(dict.fromkeys(param for param, _, _ in self._shown))
        self._holders = params, [state[param] for param in params]
        self._held = [*(value for held in self._holders[1] for value in held.values()), *_END]
        self._entries = [(state[param], name, value) for param, name, value in self._shown]
        self._published = True
        return True

    def tensors(self) -> Iterator[torch.Tensor]:
        """The parameters and states that this update writes."""
        yield from (self.params[name] for name in self.members())
        yield from (value for _, _, value in self._shown)

    def check_uniform(self) -> None:
        """One update of several parameters needs one step count; SGD needs all or none of the momentum buffers."""
        for segment in self.update.segments:
            self.scalars.check_uniform(segment)
        if self.rule.name == "sgd" and self.names:
            missing = [self._state_of(name, "momentum_buffer") is None for name in self.members()]
            group = self.optimizer.param_groups[self.update.group]
            if any(missing) and not all(missing) and group["dampening"] != 0:
                raise LayoutConflict("opaque", "only some parameters have a momentum buffer, and dampening is not 0")

    def bind_params(self) -> None:
        self._bound = False
        self._placed, self._addresses = [], []
        for segment in self.update.segments:
            if not segment.is_flat:
                continue
            params = [self.params[name] for name, _ in segment.members]
            flat = self.pool.find("parameter", segment, params)
            if flat is None:
                flat = self.pool.add("parameter", segment, self._move_params(segment))
            self.flats[segment.members[0][0]] = flat
            self._placed.extend(params)

    def _move_params(self, segment: Segment) -> torch.Tensor:
        first = self.params[segment.members[0][0]]
        flat = torch.zeros(segment.numel, dtype=first.dtype, device=first.device)
        for name, offset in segment.members:
            param = self.params[name]
            place = part_of_flat(flat, param, offset)
            place.copy_(param.detach())
            if param.is_cpu and param.is_shared():
                self.pool.warn_of_shared_memory(name)
            elif has_aliases(param):
                self.pool.warn_of_aliases(name)
            param.data = place
        return flat

    def bind_states(self) -> None:
        self._shown = []
        self._published = False
        self.lists = {name: [] for name in self.names}
        for name in self.rule.scalars:
            self.lists |= {name: [], f"{name}s": []}
        if self.rule.name == "sgd":  # without momentum no step is the first, of which the kernel would warn
            self.first_step = bool(self.names) and all(
                self._state_of(name, "momentum_buffer") is None for name in self.members()
            )
        for segment in self.update.segments:
            for name in self.rule.scalars:  # first, as torch.optim has them in its state
                self._bind_scalar(segment, name)
            for name in self.names:
                self.lists[name].append(self._bind_state(segment, name))
        self._addresses = _addresses(self._placed)
        self._bound = True

    def _bind_scalar(self, segment: Segment, state: str) -> None:
        numbers, held = self.scalars.bind(segment, state)
        for (name, _), number in zip(segment.members, held, strict=True):
            self._shown.append((self.params[name], state, number))
            self._placed.append(number)
        self.lists[f"{state}s"].append(numbers)
        self.lists[state].append(numbers[0])

    def _bind_state(self, segment: Segment, state: str) -> torch.Tensor:
        first = self.params[segment.members[0][0]]
        value = self.rule.value_at_first(state, self.optimizer.param_groups[self.update.group])
        if not segment.is_flat:
            held: torch.Tensor | None = self._state_of(segment.members[0][0], state)
            if held is None or held.dtype != first.dtype or not self._lies_well(held, first):
                old, held = held, torch.full_like(first.detach(), value, memory_format=torch.preserve_format)
                if old is not None:
                    held.copy_(old)
            self._shown.append((first, state, held))
            self._placed.append(held)
            return held
        parts = [self._state_of(name, state) for name, _ in segment.members]
        params = [self.params[name] for name, _ in segment.members]
        flat = self.pool.find(state, segment, parts, like=params)
        if flat is None:
            flat = torch.zeros(segment.numel, dtype=first.dtype, device=first.device)
            for i, (name, offset) in enumerate(segment.members):
                place = part_of_flat(flat, self.params[name], offset)
                place.fill_(value) if parts[i] is None else place.copy_(parts[i])
                parts[i] = place
            self.pool.add(state, segment, flat)
        for part, (name, _) in zip(parts, segment.members, strict=True):
            self._shown.append((self.params[name], state, part))
            self._placed.append(part)
        return flat

    def _lies_well(self, held: torch.Tensor, param: torch.Tensor) -> bool:
        """Whether the update can work on a state in its present layout.

        An update of single parameters takes any dense layout; others need the strides of the parameter.
        """
        if self.is_plain:
            return held.shape == param.shape and TensorSpec.of(held).is_dense
        return same_layout(param.shape, held.stride(), param.stride())

    def members(self) -> list[str]:
        return [name for segment in self.update.segments for name, _ in segment.members]

    def moved(self) -> list[str]:
        """The names of the parameters that lie in flat storage."""
        return [name for segment in self.update.segments if segment.is_flat for name, _ in segment.members]

    def _state_of(self, name: str, state: str) -> Any:
        param = self.params[name]
        held = self.optimizer.state.get(param)
        value = None if held is None else held.get(state)
        if state in self.names and value is not None and value.shape != param.shape:
            raise ConfigValueError(
                f"the optimizer's {state} of {name} has the shape {tuple(value.shape)}, and what is updated here "
                f"of the parameter has {tuple(param.shape)}: clear optimizer.state[parameter], or give it state of "
                "this shape"
            )
        return value
