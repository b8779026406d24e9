"""Where the parameters and the optimizer state of a compiled step live.

Parameters that are updated together become parts of one flat tensor, and so do their optimizer states. Each part has
a storage of its own over its bytes of the flat memory, so that a file or a copy of it holds nothing else.
To the user nothing changes: `param`, `optimizer.state[param]` and both state_dicts stay what they were,
and values that the user loads or assigns are taken over at the next step.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from operator import is_
from typing import Any, Protocol

import torch
from torch import nn

from commfuse_fx.errors import ConfigValueError
from commfuse_fx.ir.meta import TensorSpec, same_layout
from commfuse_fx.ir.program import Program, Segment, Source, Update
from commfuse_fx.ir.shared_memory import overlaps
from commfuse_fx.ir.update_layout import LayoutConflict
from commfuse_fx.kernels.update_rules import RULES, Rule
from commfuse_fx.runtime.memory.own_storage import with_own_storage

log = logging.getLogger("commfuse_fx.runtime")

_VALUES = dict.values
_END = (object(),)

FIRST_STEP = "is_first_step"


def part_of_flat(flat: torch.Tensor, like: torch.Tensor, offset: int) -> torch.Tensor:
    """The part of `flat` at `offset` (elements) with shape and strides of `like`, in a storage of its own."""
    return with_own_storage(flat.as_strided(like.shape, like.stride(), flat.storage_offset() + offset))


class FlatPool:
    """The flat tensors of a step, shared by its programs: another input shape must not move parameters again."""

    def __init__(self) -> None:
        self._flats: dict[tuple[str, Segment], torch.Tensor] = {}
        self._memory: dict[tuple[str, TensorSpec], torch.Tensor] = {}
        self._warned = False

    def memory(self, name: str, spec: TensorSpec) -> torch.Tensor:
        """Memory for gradients, the same in every step: large blocks are slow to get from the system."""
        key = (name, spec)
        if key not in self._memory:
            self._memory[key] = torch.empty(spec.shape, dtype=spec.dtype, device=spec.device)
        return self._memory[key]

    def forget_memory(self) -> None:
        """After a step that failed while they may have been on the wire."""
        self._memory.clear()

    def find(
        self,
        what: str,
        segment: Segment,
        parts: Sequence[torch.Tensor | None],
        like: Sequence[torch.Tensor] | None = None,
    ) -> torch.Tensor | None:
        """The flat tensor in which these very parts lie where `segment` wants them, if there is one.

        like: the tensors whose strides and dtypes the parts must have.
        """
        flat = self._flats.get((what, segment))
        if flat is None:
            return None
        start, size = flat.data_ptr(), flat.element_size()
        for part, other, (_, offset) in zip(parts, like or parts, segment.members, strict=True):
            if part is None or other is None or (part.stride(), part.dtype) != (other.stride(), other.dtype):
                return None
            if part.dtype != flat.dtype or part.data_ptr() != start + offset * size:
                return None
        return flat

    def warn_of_shared_memory(self, name: str) -> None:
        """Say once that a parameter leaves memory that other processes see."""
        if not self._warned:
            log.warning(
                "parameter %s lies in memory shared with other processes, and the step takes it out of there: they "
                "keep the values of now. Send copies after a step, such as param.detach().clone()",
                name,
            )
            self._warned = True

    def add(self, what: str, segment: Segment, flat: torch.Tensor) -> torch.Tensor:
        """Keep a new flat tensor, and let go of those whose members it takes over."""
        taken = dict.fromkeys(name for name, _ in segment.members)
        for key in [key for key in self._flats if key[0] == what and any(name in taken for name, _ in key[1].members)]:
            del self._flats[key]
        self._flats[what, segment] = flat
        return flat


class States(Protocol):
    """Optimizer state by parameter; a parameter that has none gets it at the first look with [...]."""

    def __getitem__(self, param: Any, /) -> Any: ...

    def get(self, param: Any, /) -> Any: ...


class Optimizer(Protocol):
    """What storage needs of an optimizer."""

    @property
    def state(self) -> States: ...

    @property
    def param_groups(self) -> list[dict[str, Any]]: ...


class Storage:
    """Binds the inputs of one program that belong to its parameters and its optimizer."""

    def __init__(
        self,
        program: Program,
        params: Mapping[str, nn.Parameter],
        optimizer: Optimizer | None,
        pool: FlatPool | None = None,
        buffers: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        self.program = program
        self.params = params
        self.buffers = buffers or {}
        self.optimizer = optimizer
        self.pool = FlatPool() if pool is None else pool
        self.flats: dict[tuple[int, str], torch.Tensor] = {}
        self._updates = [_BoundUpdate(self, update, i) for i, update in enumerate(program.updates)]

    def bind(self) -> None:
        """Take over parameters and state as they are now. Raises LayoutConflict; then nothing has changed."""
        for update in self._updates:
            update.check_uniform()
        self._check_own_memory()
        with torch.no_grad():
            for update in self._updates:
                update.bind_params()
                update.bind_states()

    def is_bound(self) -> bool:
        """False when the user has replaced a parameter's or a state's memory since the last step."""
        return all(update.is_bound() for update in self._updates)

    def _check_own_memory(self) -> None:
        """Parameters that the plan takes for tensors of their own may have been made to share memory since."""
        if not self._updates:
            return
        shared = overlaps({**self.params, **self.buffers})
        updated = dict.fromkeys(name for update in self._updates for name in update.members())
        for name, others in shared.items():
            if name in updated and not self.program.params[name].shares:
                raise LayoutConflict("separate", f"{name} shares memory with {', '.join(others)} now")

    def publish(self) -> bool:
        """After the first update: show the states in `optimizer.state`. Returns whether there was anything new."""
        new = [update.publish() for update in self._updates]
        return any(new)

    def tensors(self) -> list[torch.Tensor]:
        """What the updates write: parameters, and states as `optimizer.state` shows them."""
        return [tensor for update in self._updates for tensor in update.tensors()]

    def value(self, source: Source) -> Any:
        """The tensor, or list of tensors, for a flat or state input."""
        if source.kind == "flat":
            return self.flats[source.owner, source.name]
        return self._updates[source.owner].lists[source.name]

    def numbers(self) -> list[dict[str, Any]]:
        """The hyper-parameters of each update, read from the optimizer now."""
        return [update.numbers() for update in self._updates]


def _addresses(tensors: Sequence[torch.Tensor]) -> list[int]:
    return list(map(torch.Tensor.data_ptr, tensors))


class _BoundUpdate:
    def __init__(self, storage: Storage, update: Update, owner: int) -> None:
        self.storage = storage
        self.update = update
        self.owner = owner
        self.rule: Rule = RULES[update.rule]
        assert storage.optimizer is not None and storage.program.optimizer is not None
        self.optimizer = storage.optimizer
        self.flags = dict(storage.program.optimizer.groups[update.group].flags)
        self.names = self.rule.states(self.flags)
        self.is_plain = not storage.program.params[update.segments[0].members[0][0]].movable
        self.lists: dict[str, list[torch.Tensor]] = {}
        self.first_step = False
        self._bound = False
        # States, and what lies in flat memory, and where it lay when it was bound: `share_memory_()` moves a tensor
        # elsewhere.
        self._placed: list[torch.Tensor] = []
        self._addresses: list[int] = []
        # States as `optimizer.state` should show them; `_holders` and `_entries` serve to see that it still does.
        self._shown: list[tuple[nn.Parameter, str, torch.Tensor]] = []
        self._holders: tuple[list[nn.Parameter], list[dict[str, Any]]] = ([], [])
        self._held: list[Any] = []  # all that the holders hold
        self._entries: list[tuple[dict[str, Any], str, torch.Tensor]] = []
        self._published = False

    def numbers(self) -> dict[str, Any]:
        values: dict[str, Any] = self.rule.hyper(self.optimizer.param_groups[self.update.group])
        values[FIRST_STEP] = self.first_step
        return values

    def is_bound(self) -> bool:
        if _addresses(self._placed) != self._addresses:
            return False
        if not self._bound or not self._published:
            return self._bound and not self._shown
        # Without a line of Python per tensor, as long as nobody adds states of his own: this runs before every step.
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
        """Parameters and states that this update writes."""
        yield from (self.storage.params[name] for name in self.members())
        yield from (value for _, _, value in self._shown)

    def check_uniform(self) -> None:
        """One update of several parameters needs one step count; SGD needs all or none of the momentum buffers."""
        for segment in self.update.segments:
            if segment.is_flat and self.rule.has_step:
                counts = [self._step_count(name) for name, _ in segment.members]
                if any(count != counts[0] for count in counts):
                    raise LayoutConflict("separate", "parameters of one bucket have different step counts")
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
            params = [self.storage.params[name] for name, _ in segment.members]
            flat = self.storage.pool.find("parameter", segment, params)
            if flat is None:
                flat = self.storage.pool.add("parameter", segment, self._move_params(segment))
            self.storage.flats[self.owner, segment.members[0][0]] = flat
            self._placed.extend(params)

    def _move_params(self, segment: Segment) -> torch.Tensor:
        first = self.storage.params[segment.members[0][0]]
        flat = torch.zeros(segment.numel, dtype=first.dtype, device=first.device)
        for name, offset in segment.members:
            param = self.storage.params[name]
            place = part_of_flat(flat, param, offset)
            place.copy_(param.detach())
            if param.is_cpu and param.is_shared():
                self.storage.pool.warn_of_shared_memory(name)
            param.data = place
        return flat

    def bind_states(self) -> None:
        self._shown = []
        self._published = False
        self.lists = {name: [] for name in self.names}
        if self.rule.has_step:
            self.lists["steps"] = []
            self.lists["step"] = []
        if self.rule.name == "sgd":
            self.first_step = all(self._state_of(name, "momentum_buffer") is None for name in self.members())
        for segment in self.update.segments:
            for name in self.names:
                self.lists[name].append(self._bind_state(segment, name))
            if self.rule.has_step:
                self._bind_steps(segment)
        self._addresses = _addresses(self._placed)
        self._bound = True

    def _bind_state(self, segment: Segment, state: str) -> torch.Tensor:
        first = self.storage.params[segment.members[0][0]]
        if not segment.is_flat:
            held: torch.Tensor | None = self._state_of(segment.members[0][0], state)
            if held is None or held.dtype != first.dtype or not self._lies_well(held, first):
                old, held = held, torch.zeros_like(first.detach(), memory_format=torch.preserve_format)
                if old is not None:
                    held.copy_(old)
            self._shown.append((first, state, held))
            self._placed.append(held)
            return held
        parts = [self._state_of(name, state) for name, _ in segment.members]
        params = [self.storage.params[name] for name, _ in segment.members]
        flat = self.storage.pool.find(state, segment, parts, like=params)
        if flat is None:
            flat = torch.zeros(segment.numel, dtype=first.dtype, device=first.device)
            for i, (name, offset) in enumerate(segment.members):
                place = part_of_flat(flat, self.storage.params[name], offset)
                if parts[i] is not None:
                    place.copy_(parts[i])
                parts[i] = place
            self.storage.pool.add(state, segment, flat)
        for part, (name, _) in zip(parts, segment.members, strict=True):
            self._shown.append((self.storage.params[name], state, part))
            self._placed.append(part)
        return flat

    def _lies_well(self, held: torch.Tensor, param: torch.Tensor) -> bool:
        """Whether the update can work on a state as it lies: as its parameter does, or, one by one, in any way in
        which each element has a place of its own."""
        if self.is_plain:
            return held.shape == param.shape and TensorSpec.of(held).is_dense
        return same_layout(param.shape, held.stride(), param.stride())

    def _bind_steps(self, segment: Segment) -> None:
        """Every parameter keeps a step count of its own, so that eager steps can go on from here."""
        names = [name for name, _ in segment.members]
        held = [self._state_of(name, "step") for name in names]
        by_index = Segment(tuple((name, i) for i, name in enumerate(names)), len(names))
        counts = self.storage.pool.find("step", by_index, [h if isinstance(h, torch.Tensor) else None for h in held])
        if counts is None:
            values = torch.tensor([self._step_count(name) for name in names], dtype=torch.float32)
            counts = values.to(self.storage.params[names[0]].device)
            held = [with_own_storage(count) for count in counts.unbind()]
            self.storage.pool.add("step", by_index, counts)
        for name, count in zip(names, held, strict=True):
            self._shown.append((self.storage.params[name], "step", count))
            self._placed.append(count)
        self.lists["steps"].append(counts)
        self.lists["step"].append(counts[0])

    def members(self) -> list[str]:
        return [name for segment in self.update.segments for name, _ in segment.members]

    def _state_of(self, name: str, state: str) -> Any:
        param = self.storage.params[name]
        held = self.optimizer.state.get(param)
        value = None if held is None else held.get(state)
        if state in self.names and value is not None and value.shape != param.shape:
            raise ConfigValueError(
                f"the optimizer's {state} of {name} has the shape {tuple(value.shape)}, the parameter now has "
                f"{tuple(param.shape)}: clear optimizer.state[parameter], or give it state of this shape"
            )
        return value

    def _step_count(self, name: str) -> float:
        held = self._state_of(name, "step")
        return 0.0 if held is None else float(held)
