"""The executors of one rank, which share flat memory and the parts of divided parameters."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from commfuse_fx.ir.core.mesh import Mesh
from commfuse_fx.ir.core.program import Parameter, Program
from commfuse_fx.runtime.execute.executor import Executor
from commfuse_fx.runtime.execute.halves_executor import HalvesExecutor
from commfuse_fx.runtime.memory.divided_gradients import DividedGradients
from commfuse_fx.runtime.memory.flat_pool import FlatPool
from commfuse_fx.runtime.memory.held_gradients import HeldGradients
from commfuse_fx.runtime.memory.layout import divided_parameters
from commfuse_fx.runtime.memory.shards import Shards, layouts_of
from commfuse_fx.runtime.ranks.exchange import Exchange
from commfuse_fx.runtime.ranks.groups import Groups


class RankExecutors:
    """Makes the executors of one rank of a step.

    exchange: makes the exchange for programs on this mesh that divide parameters alike. Its second argument is their
        key from `layouts_of`.
    before_reading: called before parts are gathered, to complete the last step.
    beneath: for the update of a module that divides its parameters, what these are divided by, given the update.
    """

    beneath: Callable[[Program], Shards] | None = None

    def __init__(
        self,
        rank: int,
        exchange: Callable[[Mesh, Any], Exchange],
        before_reading: Callable[[], None],
    ) -> None:
        self.shards: Shards | None = None
        """The divided parameters of the last step; None if it divided none."""
        self.held = HeldGradients()
        """The gradients of the micro-batches since the last update."""
        self._rank = rank
        self._exchange = exchange
        self._before_reading = before_reading
        self._pool = FlatPool()
        self._known: dict[Any, Shards] = {}
        self._alive: weakref.WeakSet[Executor] = weakref.WeakSet()

    def make(
        self,
        program: Program,
        params: Mapping[str, nn.Parameter],
        buffers: Mapping[str, torch.Tensor],
        optimizer: torch.optim.Optimizer | None,
        groups: Groups | None = None,
    ) -> Executor:
        """A new executor, which shares parts and flat memory with this rank's other executors.

        params: the user's parameters, by name. It has to be the same object until a parameter is replaced.
        """
        divides = optimizer is not None or program.has_two_halves
        shards = self.shards_of(program, params, optimizer) if divides else None
        kind = HalvesExecutor if program.has_two_halves else Executor
        made = kind(program, params, buffers, optimizer, groups, self._rank, self._pool, shards, self.held)
        self._alive.add(made)
        self._pool.keep_memory(key for each in self._alive for key in each.kept)
        return made

    @property
    def divided(self) -> Mapping[str, Parameter]:
        """What the last step has made of the parameters, if a rank holds nothing but its parts of them now."""
        shards = self.shards
        held = shards is not None and shards.is_divided and shards.divides_parameters
        return shards.described if shards is not None and held else {}

    def hand_over(self, executor: Executor) -> None:
        """Before this executor runs: make parameters whole if it divides them in another way than the last one."""
        if self.shards is not None and executor.shards is None and not executor.program.updates:
            if not self.shards.divides_parameters:
                return  # it neither reads nor writes optimizer states
        self.divide_by(executor.shards)

    def divide_by(self, shards: Shards | None) -> None:
        """From now on parameters are divided like this. All ranks call it together where that is another way."""
        if self.shards is shards:
            return
        self.open()
        if self.shards is not None:
            self.shards.leave()
        self.shards = shards

    def open(self) -> None:
        """Make the parameters whole, and gradients of theirs. All ranks have to call this together."""
        if self.shards is not None:
            self.shards.open()
            if self.shards.gradients is not None:
                self.shards.gradients.open()

    def let_go(self) -> None:
        """Give back what executors keep between steps and the next one need not have. No step may be pending."""
        self._pool.let_go()

    @contextmanager
    def shapes_only(self) -> Iterator[None]:
        """Inside the `with` block divided parameters have memory but no values.

        This is enough to trace the model, and needs no communication.
        """
        if self.shards is None:
            yield
            return
        gradients = self.shards.gradients
        with self.shards.shapes_only(), nullcontext() if gradients is None else gradients.shapes_only():
            yield

    def parts(self, key: Any) -> Mapping[str, torch.Tensor]:
        """This rank's parts for programs with this key from `layouts_of`, by name."""
        return self._known[key].parts()

    def release(self) -> None:
        """Drop all process groups."""
        for shards in self._known.values():
            shards.exchange.release()
            if shards.gradients is not None:
                shards.gradients.exchange.release()

    def shards_of(
        self, program: Program, params: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer | None
    ) -> Shards | None:
        """The divided parameters of a program, shared by all programs that divide the same parameters alike."""
        if not divided_parameters(program):
            return None
        key = layouts_of(program)
        known, beneath = self._known.get(key), None if self.beneath is None else self.beneath(program)
        if known is None or known.params is not params or known.beneath is not beneath:
            exchange = self._exchange(program.mesh, key)
            known = Shards(program, params, optimizer, self._rank, exchange, self._before_reading, beneath)
            if optimizer is None:
                known.gradients = DividedGradients(known.by_name, self._exchange(program.mesh, key))
            self._known[key] = known
        return known
