"""A step that is run once more on copies, by another program that has to compute the same.

Why: docs/decisions.md, "A step is verified by its replay on the same ranks, not on one device".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from commfuse_fx.ir.core.program import Program
from commfuse_fx.runtime.execute.executor import Executor
from commfuse_fx.runtime.execute.random_states import RandomStates
from commfuse_fx.runtime.memory.copied_memory import copied
from commfuse_fx.runtime.memory.flat_pool import FlatPool
from commfuse_fx.runtime.memory.held_gradients import HeldGradients
from commfuse_fx.runtime.memory.storage import Storage
from commfuse_fx.runtime.ranks.groups import Groups


@dataclass(frozen=True)
class Pair:
    """A value of a step, and the same value of its replay.

    kind: "parameter", "buffer", "loss", "gradient", "output", "sum of gradients", or the name of an optimizer state.
    name: of the parameter, buffer or output; "" for the loss.
    """

    kind: str
    name: str
    found: torch.Tensor
    replayed: torch.Tensor

    def __str__(self) -> str:
        return f"{self.kind} of {self.name}" if self.kind not in ("parameter", "buffer") else f"{self.kind} {self.name}"


@dataclass
class _Optimizer:
    """What storage uses of an optimizer."""

    state: dict[Any, dict[str, Any]]
    param_groups: list[dict[str, Any]]


class ReplayedStep:
    """A replay works on copies of all that a step reads and writes, which are made before the step.

    executor: runs the step. inputs: of the step. nbytes: what the copies take.
    """

    def __init__(
        self, executor: Executor, program: Program, inputs: Mapping[str, torch.Tensor], groups: Groups | None
    ) -> None:
        self._executor = executor
        self._random = RandomStates(executor.generators)
        self._seed = executor.seed
        updated, optimizer = executor.storage.params, executor.storage.optimizer
        members = _members(executor)
        states = {name: _state(executor, name) for name in members}
        held = executor.held.tensors()
        kept = [*executor.values.values(), *updated.values(), *executor.buffers.values(), *inputs.values()]
        kept += held.values()
        kept += (each for state in states.values() for each in state.values() if isinstance(each, torch.Tensor))
        copies = copied(kept)
        self.nbytes = sum(copy.nbytes for copy in copies.values())
        params: dict[int, nn.Parameter] = {}
        for param in (*executor.values.values(), *updated.values()):
            params.setdefault(id(param), nn.Parameter(copies[id(param)], requires_grad=param.requires_grad))
        own_values = {name: params[id(param)] for name, param in executor.values.items()}
        own_updated = {name: params[id(param)] for name, param in updated.items()}
        own: Any = _Optimizer(
            {own_updated[name]: {k: copies.get(id(v), v) for k, v in states[name].items()} for name in members},
            [] if optimizer is None else [dict(group) for group in optimizer.param_groups],
        )
        self._inputs = {path: copies[id(each)] for path, each in inputs.items()}
        self._buffers = {name: copies[id(each)] for name, each in executor.buffers.items()}
        self._held = HeldGradients()
        for name, tensor in held.items():
            self._held.put(name, own_values[name], copies[id(tensor)])
        self._pool = FlatPool()
        self._replay = Executor(
            program, own_values, self._buffers, own, groups, executor.rank, self._pool, None, self._held
        )
        self._replay.storage = Storage(program, own_updated, own, self._pool, self._buffers)
        self._replay.wire.distress = executor.wire.distress
        self._replay.wire.is_of_replay = True
        self._replay.prepare(lambda: None, lambda: None)
        self._replay.bind()

    def pairs(self, outputs: Sequence[Any]) -> Iterator[Pair]:
        """Run the replay, and return all values of the step beside its own. Random numbers are those of the step.

        outputs: what the step has returned, which is complete.
        """
        after = RandomStates(self._executor.generators)
        self._random.restore()
        self._replay.seed = self._seed
        try:
            again = self._replay.run(self._inputs)
            self._replay.synchronize()
        finally:
            after.restore()
        return self._pairs(outputs, again)

    def _pairs(self, outputs: Sequence[Any], again: Sequence[Any]) -> Iterator[Pair]:
        """All values of the step beside those of the replay."""
        executor, replay = self._executor, self._replay
        grads = executor.program.grads
        labels = [("loss", ""), *(("gradient", name) for name in grads)]
        labels += [("output", name) for name in executor.program.aux]
        for (kind, name), one, other in zip(labels, outputs, again, strict=True):
            if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
                yield Pair(kind, name, one, other)
        for name, value in executor.values.items():
            yield Pair("parameter", name, value, replay.values[name])
        for name, held in self._held.tensors().items():
            if name in (own := executor.held.tensors()):
                yield Pair("sum of gradients", name, own[name], held)
        for name in _members(executor):
            own_state, other_state = _state(executor, name), _state(replay, name)
            for key, state in own_state.items():
                if isinstance(state, torch.Tensor) and isinstance(other := other_state.get(key), torch.Tensor):
                    yield Pair(key, name, state, other)
        for name, buffer in executor.buffers.items():
            yield Pair("buffer", name, buffer, self._buffers[name])


def _members(executor: Executor) -> list[str]:
    """The parameters that a step updates."""
    updates = executor.program.updates
    return [name for update in updates for segment in update.segments for name, _ in segment.members]


def _state(executor: Executor, name: str) -> dict[str, Any]:
    """The states of what a rank updates of a parameter."""
    storage = executor.storage
    return dict((storage.optimizer and storage.optimizer.state.get(storage.params[name])) or {})
