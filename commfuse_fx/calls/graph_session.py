"""What runs one graph of a model that Dynamo has cut into several: one vote and one set of groups serve all of them.

Why: docs/decisions.md, "A graph of Dynamo is a model of its own".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import torch
from torch import nn

from commfuse_fx.calls.compiled_call import CompiledCall
from commfuse_fx.calls.module_backward import Calls, ModuleCall, OnWritten
from commfuse_fx.calls.module_session import ModuleSession
from commfuse_fx.capture.guards.tree import unflatten
from commfuse_fx.config.compile_config import CompileConfig
from commfuse_fx.config.fusion_marks import is_of_each_rank
from commfuse_fx.inspect.lowered import Lowered, lowered_of
from commfuse_fx.inspect.on_compile import Publisher
from commfuse_fx.planning.planner import Planner
from commfuse_fx.planning.request import Call
from commfuse_fx.runtime.ranks.callers import lock_of
from commfuse_fx.runtime.ranks.group_holders import release_at_exit
from commfuse_fx.runtime.ranks.groups import Groups


class GraphSession(ModuleSession):
    """The session of one graph. It votes as a part of `owner`, so that ranks may make graphs in any order."""

    def __init__(self, planner: Planner, owner: ModuleSession) -> None:
        self._owner = owner
        super().__init__(planner, owner.rank)
        self.voting.is_started = owner.voting.is_started
        self.parts, self.uneven = owner.parts, owner.uneven

    def take_apart(self, args: Sequence[Any]) -> Call:
        """The call that is planned for a call with these arguments."""
        return self.planner.take_apart(tuple(args), {})

    def _join(self, config: CompileConfig) -> Groups:
        self.agreement = self._owner.agreement
        release_at_exit(self)
        groups = self._owner.runners.groups
        assert groups is not None, "the owner's world has several ranks"
        return groups


_numbers = count()


class GraphCalls:
    """The calls of one graph, which is a model of its own.

    owner: what all graphs of the user's model belong to. number: counts up in the order in which they are made.
    reduces: whether its backward may reduce gradients. buffers: the names of those that its backward sends.
    make_session: makes what runs the calls.
    """

    def __init__(
        self,
        model: nn.Module,
        owner: CompiledCall,
        reduces: bool = True,
        make_session: Callable[[Planner, ModuleSession], GraphSession] = GraphSession,
    ) -> None:
        self.number = next(_numbers)
        # What no graph of a backward reaches is seen at its end, over the whole model.
        config = replace(owner.config, find_unused_parameters=False, enable_parallel_optimizer=False)
        assert isinstance(owner.session, ModuleSession)
        # Ranks come to a graph at other times, as values and sizes say: they never ask each other for prices.
        by_rules, publisher = owner.mesh.world > 1, Publisher(owner.rank)
        self._planner = Planner(model, None, None, config, owner.mesh, publisher, "module", by_rules)
        self._session = make_session(self._planner, owner.session)
        self._calls = Calls()
        self._reduces = reduces
        sent = dict(model.named_buffers()) if config.broadcast_buffers else {}
        self.buffers = [name for name, each in sent.items() if not is_of_each_rank(each, config.parallel_mode)]

    def compile(self, args: Sequence[Any]) -> None:
        """Trace and compile the graph for these arguments. Raises what tracing raises."""
        self._session.compile(tuple(args), {})

    def read(self, args: Sequence[Any]) -> Lowered:
        """The graph as it is compiled for these arguments. Raises what tracing raises; nothing is sent."""
        with lock_of(self._planner.model):
            compiled = self._planner.read(self._session.take_apart(args))
            if not self._reduces:
                compiled = self._planner.other_backward(compiled, "local", ())
        return lowered_of(compiled, self._session.rank)

    def run(self, args: Sequence[Any], syncs: bool, on_written: OnWritten) -> Any:
        """Run the forward. syncs: whether its backward is to reduce gradients. The other ranks are not told of an
        error."""
        forward = self._session.forward(tuple(args), {}, False)
        outputs = ModuleCall(self._session, forward, self._calls, syncs, on_written).apply()
        return unflatten(forward.described.nest, iter(outputs))

    def reduce(self, gradients: Mapping[str, torch.Tensor | None]) -> dict[str, torch.Tensor]:
        """Reduce gradients over the ranks, for a model that returns its parameters."""
        with torch.enable_grad():
            forward = self._session.forward((), {}, True)
        given = tuple(gradients[name] for name in self._planner.watch.params)
        return self._session.backward(forward, given, "reduced", False)[0]

    def lowered(self) -> list[Lowered]:
        """What has been compiled for this graph, to read."""
        plans = list(self._planner.plans.values())
        if not self._reduces:
            plans = [self._session.plan_of(plan, "local", ()) for plan in plans]
        return [lowered_of(plan.compiled, self._session.rank) for plan in plans]

    def retrace(self) -> None:
        """Forget what has been compiled."""
        self._planner.retrace()
