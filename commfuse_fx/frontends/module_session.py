"""How a compiled module runs on this rank: forwards, and backwards that the caller's autograd starts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from commfuse_fx.capture.joint import Outputs
from commfuse_fx.errors import PlanMismatchError
from commfuse_fx.frontends.gradient_parts import GradientParts
from commfuse_fx.frontends.runners import ballot_of_module
from commfuse_fx.frontends.session import Session
from commfuse_fx.ir.halves import USED
from commfuse_fx.ir.json.read import from_json
from commfuse_fx.ir.json.write import to_json
from commfuse_fx.ir.program import Program
from commfuse_fx.planning.plan_cache import Plan
from commfuse_fx.planning.planner import Planner
from commfuse_fx.planning.request import Call
from commfuse_fx.planning.shared_prices import Seconds
from commfuse_fx.runtime.execute.answer import answer
from commfuse_fx.runtime.execute.halves_executor import HalvesExecutor, NamedGradients
from commfuse_fx.runtime.execute.interrupts import interrupts_deferred
from commfuse_fx.runtime.execute.wire import Wire
from commfuse_fx.runtime.ranks.agreement import Agreement
from commfuse_fx.runtime.ranks.callers import OutOfTurn, lock_of
from commfuse_fx.runtime.ranks.start_values import send_start_values


@dataclass(frozen=True)
class Roll:
    """active: the ranks that still have batches. syncs: whether they reduce gradients this time. needs_plan: whether
    some other rank has never run the module."""

    active: list[int]
    syncs: bool
    needs_plan: bool

    @property
    def source(self) -> int:
        """The rank whose buffers count."""
        return self.active[-1] if self.active else 0


@dataclass
class Forward:
    """A forward holds its outputs, and what its backward needs.

    described: how the outputs nest, and which have a gradient.
    inputs: the call's tensors that require a gradient, by path.
    values: what was saved, under the names of `names`.
    versions: names, tensors and their versions, of what the user can change and the backward reads.
    """

    plan: Plan
    outputs: list[torch.Tensor]
    described: Outputs
    inputs: dict[str, torch.Tensor]
    names: tuple[str, ...]
    values: list[Any] | None
    versions: list[tuple[str, torch.Tensor, int]]


class ModuleSession(Session):
    """The state behind one compiled module on one rank.

    roll: which ranks still have batches, in a `Join` context. mean_of_active: whether only these count in means.
    parts: what of gradients has been reduced.
    """

    def __init__(self, planner: Planner, rank: int) -> None:
        super().__init__(planner, rank)
        self.roll: Roll | None = None
        self.mean_of_active = False
        self.parts = GradientParts(sums=self.agreement is not None and not planner.config.gradients_mean)
        self._prices: Seconds | None = None  # what nodes take on rank 0, where plans follow from that
        self._last: Plan | None = None  # the plan of the last forward
        self._given: Program | None = None  # what other ranks run, where this one has run nothing

    def __reduce__(self) -> tuple[Any, ...]:
        return ModuleSession, (self.planner, self.rank)

    @property
    def params(self) -> Mapping[str, torch.nn.Parameter]:
        """The user's parameters, by name."""
        return self.planner.watch.params

    def send_start_values(self) -> None:
        """Compare what parameters there are, and let all ranks begin with rank 0's parameters and buffers."""
        if self.agreement is None:
            return
        send_start_values(self.planner.model, self.agreement, self.planner.config.parameter_broadcast)
        if self.planner.config.parameter_broadcast:
            self._voting.is_started = True

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return next((param.device for param in self.planner.model.parameters()), torch.device("cpu"))

    def take_roll(self, syncs: bool) -> None:
        """In a `Join` context, once per forward: learn which ranks still have batches. syncs: whether the backward of
        this forward reduces."""
        roll = self._roll(is_active=True, syncs=syncs, needs_plan=False)
        if roll.needs_plan:
            assert self._last is not None, "a forward has run"
            text = [to_json(self._last.compiled.program)]
            dist.broadcast_object_list(text, roll.source)

    def answer(self) -> None:
        """In a `Join` context, on a rank without batches: take part in one iteration of the others."""
        roll = self._roll(is_active=False, syncs=False, needs_plan=self._last is None and self._given is None)
        if roll.needs_plan:
            text: list[Any] = [None]
            dist.broadcast_object_list(text, roll.source)
            if self._last is None and self._given is None:
                self._given = from_json(text[0])
        if not roll.syncs or self.agreement is None:
            return
        program = self._given if self._last is None else self._last.compiled.program
        assert program is not None
        agreement, ballot = self.agreement, ballot_of_module(program, self.agreement.number, self.planner)
        wire = Wire(program, self.runners.groups, self.rank)
        wire.distress, wire.buffers_from = agreement.distress, roll.source
        with agreement.callers.turn(agreement.number), self._voted():
            cast, settle = partial(agreement.cast, ballot.signature), partial(agreement.settle, ballot)
            answer(program, wire, self.device, cast, settle)

    def _roll(self, is_active: bool, syncs: bool, needs_plan: bool) -> Roll:
        world = dist.get_world_size()
        told = torch.zeros(world + 2, dtype=torch.int64, device=self.device)
        told[self.rank], told[world], told[world + 1] = int(is_active), int(syncs), int(needs_plan)
        dist.all_reduce(told)
        *ranks, reducing, needing = told.tolist()
        active = [rank for rank, count in enumerate(ranks) if count]
        self.roll = Roll(active, bool(reducing), bool(needing))
        return self.roll

    def forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], syncs: bool) -> Forward:
        """Run the compiled forward. syncs: whether its backward is to reduce: other ranks will wait for this one.

        Raises what compiling raises, and what the model does.
        """
        try:
            return self._forward(args, kwargs)
        except Exception as error:
            if syncs:
                self.tell(error)
            raise

    def tell(self, error: Exception) -> None:
        """Tell the other ranks, which will wait for this one in their backward, that its forward has failed."""
        if self.agreement is not None:
            with self.agreement.callers.turn(self.agreement.number):
                self.agreement.begin_step()
                self.agreement.leave_step(error, expected=True)

    def compile(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Make the plan of a call. Raises what compiling raises; the other ranks are not told."""
        with lock_of(self.planner.model):
            self._compiled(self.planner.take_apart(args, kwargs))

    def _compiled(self, call: Call) -> Plan:
        if self.agreement is not None and self.planner.config.plans_by_cost:
            self._plan_by_prices_of_rank_0(self.agreement, call)
        return self.planner.plan(call)

    def _forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Forward:
        with lock_of(self.planner.model):
            call = self.planner.take_apart(args, kwargs)
            plan = self._compiled(call)
            executor = self._executor_of(plan)
            outputs, saved = executor.forward(dict(call.leaves))
            assert plan.compiled.outputs is not None
            outputs = guarded(outputs, plan.compiled.outputs.differentiable)
            self._last = plan
        watched = _read_late(plan.compiled.outputs, executor, dict(call.leaves), outputs)
        versions = [(name, tensor, tensor._version) for name, tensor in watched]
        inputs = {path: tensor for path, tensor in call.leaves if tensor.requires_grad}
        return Forward(plan, outputs, plan.compiled.outputs, inputs, executor.saved, list(saved), versions)

    def _plan_by_prices_of_rank_0(self, agreement: Agreement, call: Call) -> None:
        """Batches of other sizes would lead to other plans. All ranks come here in their first forward; for a model
        that has changed since, the prices are those of then."""
        self.planner.signature(call)  # looks at the model
        if self.planner.has_common_plan:
            return
        if self._prices is None:
            mine = None
            try:
                if self.rank == 0:
                    mine = self.planner.seconds_by_name(call)
            finally:
                self._prices = agreement.from_rank_0(mine)
        if self._prices is not None:
            self.planner.plan_in_common(self._prices)

    def backward(
        self, forward: Forward, gradients: tuple[torch.Tensor | None, ...], mode: str, keep: bool
    ) -> NamedGradients:
        """Run the backward of a forward: gradients of parameters and of inputs.

        mode: what becomes of the gradients, as in `Situation`. keep: whether the backward may run again.

        Raises PlanMismatchError, PeerFailedError or CollectiveError as a step does.
        """
        agreement = self.agreement if mode != "local" else None
        if agreement is None:
            with lock_of(self.planner.model):
                return self._backward(forward, gradients, mode, keep)
        self.check_process()
        with agreement.callers.turn(agreement.number), self._voted():
            return self._backward(forward, gradients, mode, keep)

    @contextmanager
    def _voted(self) -> Iterator[None]:
        """A backward that sends is one step of the ranks."""
        agreement = self.agreement
        assert agreement is not None
        self._calls += 1
        agreement.begin_step()
        try:
            with lock_of(self.planner.model):
                yield
        except OutOfTurn as other:
            raise PlanMismatchError(
                f"rank 0 runs the backward of compiled module {other.first}, counted in the order in which they were "
                f"compiled, and this rank that of module {agreement.number}: run backwards in the same order on all "
                "ranks"
            ) from None
        except BaseException as error:
            agreement.leave_step(error, expected=True)
            raise
        agreement.end_step()

    def _backward(
        self, forward: Forward, gradients: tuple[torch.Tensor | None, ...], mode: str, keep: bool
    ) -> NamedGradients:
        values = values_of(forward)
        _check_versions(forward)
        differentiable = forward.described.differentiable
        absent = tuple(i for i, grad in enumerate(gradients) if grad is None and differentiable[i])
        plan, executor, places = self._taking(forward, mode, absent)
        self._about_to_run(plan, executor, mode)
        taken = [values[place] for place in places]
        if not keep:
            forward.values = None
            forward.versions.clear()
            del values  # the executor lets go of each when it has been used
        held: dict[str, torch.Tensor | None] = {}
        if mode == "accumulated":
            held = self.parts.unreduced(executor.params)
            if self.planner.config.find_unused_parameters:
                held[USED] = self._reached_before(plan.compiled.program)
        grads, of_inputs = executor.backward(taken, gradients, held)
        self._to_mean_of_active(grads, mode)
        return grads, of_inputs

    def _about_to_run(self, plan: Plan, executor: HalvesExecutor, mode: str) -> None:
        """Agree on first values where that has still to be done, and let the wire know who looks on and who sends."""
        runner = self.runners.of(plan)
        if mode != "local" and not self._voting.is_started and runner is not None:
            self._voting.start(runner)
        self._watch_wire(executor)
        executor.wire.buffers_from = None if self.roll is None else self.roll.source

    def _to_mean_of_active(self, grads: Mapping[str, torch.Tensor], mode: str) -> None:
        """Where only ranks that still have batches count, make means over all ranks means over those, in place."""
        if mode != "local" and self.roll is not None and self.mean_of_active:
            for grad in grads.values():
                grad.mul_(self.planner.mesh.world / len(self.roll.active))

    def _reached_before(self, program: Program) -> torch.Tensor:
        """Parameters whose gradients have not been reduced since a backward has reached them."""
        params = self.planner.watch.params
        names = [name for name, param in program.params.items() if param.trainable]
        counts = [name in self.parts.local and params[name].grad is not None for name in names]
        return torch.tensor(counts, dtype=torch.int32, device=self.device)

    def _taking(self, forward: Forward, mode: str, absent: tuple[int, ...]) -> tuple[Plan, HalvesExecutor, list[int]]:
        """What runs this backward, and where among the saved values are those that it takes."""
        plan = self.plan_of(forward.plan, mode, absent)
        executor = self._executor_of(plan)
        places = executor.places_in(forward.names)
        if places is None:
            # Passes have arranged the whole otherwise for the outputs that are left. Zeros are right as well.
            assert absent, "the passes before gradients are reduced do not know what becomes of them"
            return self._taking(forward, mode, ())
        return plan, executor, places

    def plan_of(self, plan: Plan, mode: str, absent: tuple[int, ...]) -> Plan:
        """The plan of a backward. mode: as in `backward`. absent: which outputs have no gradient."""
        if mode == "reduced" and not absent:
            return plan
        if (mode, absent) not in plan.others:
            compiled = self.planner.other_backward(plan.compiled, mode, absent)
            plan.others[mode, absent] = Plan(compiled, plan.signature, plan.guards)
        return plan.others[mode, absent]

    def _executor_of(self, plan: Plan) -> HalvesExecutor:
        runner = self.runners.of(plan) or self.runners.make(plan, self._prepare)
        executor = runner.executor
        assert isinstance(executor, HalvesExecutor)
        return executor


def write_gradients(
    params: Mapping[str, torch.nn.Parameter], grads: Mapping[str, torch.Tensor], mode: str, parts: GradientParts
) -> None:
    """Let `.grad` hold them, as the backward of eager PyTorch does: an existing `.grad` stays the same tensor.

    mode: what has become of them, as in `Situation`. parts: what each `.grad` has held so far.
    """
    with torch.no_grad(), interrupts_deferred():
        for name, grad in grads.items():
            param = params[name]
            if param.grad is None:
                param.grad = grad
            elif mode == "accumulated" and not parts.is_sum(name, param):
                param.grad.copy_(grad)
            else:
                param.grad.add_(grad)


def values_of(forward: Forward) -> list[Any]:
    """What a forward has saved. Raises RuntimeError, as autograd does, where a backward has used it up."""
    if forward.values is None:
        raise RuntimeError(
            "Trying to backward through the graph a second time (or directly access saved tensors after they have "
            "already been freed): pass retain_graph=True to the first backward"
        )
    return forward.values


def guarded(outputs: Sequence[torch.Tensor], differentiable: Sequence[bool]) -> list[torch.Tensor]:
    """Autograd lets nobody change a view in place that a function of its own returns. That is right for outputs that
    share memory: a change of one would not reach the gradient of the other."""
    memory = [out.untyped_storage()._cdata if out.layout is torch.strided else id(out) for out in outputs]
    sharing = Counter(each for each, has_gradient in zip(memory, differentiable, strict=True) if has_gradient)
    found = []
    for output, each in zip(outputs, memory, strict=True):
        if sharing[each] > 1:
            found.append(output if output._is_view() else output.view_as(output))
        else:
            found.append(output.data if output._is_view() else output)
    return found


def _read_late(
    described: Outputs, executor: HalvesExecutor, inputs: Mapping[str, torch.Tensor], outputs: list[torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """What the user can change although the backward reads it."""
    held = {"parameter": executor.params, "buffer": executor.buffers, "input": inputs}
    for source in described.read_late:
        yield source.name, held[source.kind][source.name]
    for number in described.outputs_read_late:
        yield f"output {number}", outputs[number].detach()  # not what leads back to here: that would be a cycle


def _check_versions(forward: Forward) -> None:
    for name, tensor, version in forward.versions:
        if tensor._version != version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"{name} is at version {tensor._version}; expected version {version} instead"
            )
