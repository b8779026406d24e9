"""From the arguments of a call to a compiled plan: signatures, the cache of graphs, and re-tracing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import nn

from commfuse_fx.capture.guards.differences import cause
from commfuse_fx.capture.guards.forward_writes import WholeCall
from commfuse_fx.capture.guards.guards import Guards, OwnValues
from commfuse_fx.capture.guards.model_structure import ModelStructure
from commfuse_fx.capture.guards.reads import Reads
from commfuse_fx.capture.guards.signature import Signature, Watch
from commfuse_fx.capture.guards.tree import argument_path, flatten
from commfuse_fx.capture.loss import LossFn, name_arguments
from commfuse_fx.capture.outputs.absent_gradients import leave_out
from commfuse_fx.capture.trace.meta_tensors import check_memory
from commfuse_fx.config.compile_config import CompileConfig
from commfuse_fx.config.parallel_optimizer import PARAMETERS
from commfuse_fx.cost.model import cost_model
from commfuse_fx.ir.core.halves import crossing
from commfuse_fx.ir.core.mesh import Mesh
from commfuse_fx.ir.core.meta import info
from commfuse_fx.ir.core.program import OptimizerInfo, Parameter, Program
from commfuse_fx.ir.updates.update_layout import LayoutConflict
from commfuse_fx.kernels.described_optimizer import check_optimizer, describe_optimizer
from commfuse_fx.planning.batches import on_one_part, on_whole_batch
from commfuse_fx.planning.compile_call import compile_call, plan_step, verify_if_asked
from commfuse_fx.planning.compiled import Compiled
from commfuse_fx.planning.fixed_layouts import FixedLayouts
from commfuse_fx.planning.plan_cache import MAX_GRAPHS, Plan, PlanCache
from commfuse_fx.planning.request import Call, CompileRequest, OtherBatch, PassRequest, Sharding, batch_ways
from commfuse_fx.planning.retrace_log import Findings, Traces
from commfuse_fx.planning.variants.attempts import OnPlan, shown_plans
from commfuse_fx.planning.variants.before_fusion import before_fusion
from commfuse_fx.planning.variants.shared_prices import Seconds, seconds_by_name
from commfuse_fx.sharding.dividing.strategies import Strategies
from commfuse_fx.sharding.marking.marks import collect
from commfuse_fx.support.logs import logger
from commfuse_fx.support.progress import progress

_PLAN = logger("plan")

_EARLY: tuple[str, tuple[int, ...]] = ("local", ())
"""Where a plan keeps that of the micro-batches ahead of its own."""

_ON_PARTS: tuple[str, tuple[int, ...]] = ("parts", ())
"""Where the plan of an evaluation keeps that for parameters which are divided."""


class OnCompile(Protocol):
    """What is to happen with each compile, besides its being used."""

    def keeps_captured(self) -> bool:
        """Whether the graph as captured has to be kept until the call."""
        ...

    def __call__(self, compiled: Compiled) -> None:
        """A graph has been compiled."""
        ...


class Planner:
    """Finds or makes the plan of a call.

    on_compile: sees each compile. form: as in `CompileRequest`. by_rules: as in `PassRequest`.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn | None,
        optimizer: torch.optim.Optimizer | None,
        config: CompileConfig,
        mesh: Mesh,
        on_compile: OnCompile,
        form: str = "step",
        by_rules: bool = False,
    ) -> None:
        self.model = model
        self._by_rules = by_rules
        self.form = form
        self.loss_fn = loss_fn
        self.optimizer = optimizer
        self.config = config
        self.mesh = mesh
        self._on_compile = on_compile
        self.on_plan: OnPlan | None = None
        """Told of each plan that is made and compared when a call is traced."""
        self.watch = Watch(model, optimizer, trains_in_eval_mode=form != "step")
        self.plans = PlanCache()
        self.keeps_captured = config.accumulate_steps > 1 or config.parallel_mode == "auto"
        """Whether plans keep what was captured: to be made with other options, or read without another search."""
        self._traces = Traces(type(model).__qualname__)
        self._findings = Findings()
        self._reads: Reads | None = None  # of a trace whose guards have not been made yet
        self._own_values: OwnValues = {}
        self.whole_call = WholeCall()
        """What sessions do a call in, as graphs do not set the attributes that forwards set."""
        self._has_compiled = False
        self._fixed = FixedLayouts()
        file = config.strategy_ckpt_load_file
        self._strategies = None if file is None else Strategies.of_file(file)
        # What nodes of training and evaluation count as, once the ranks have found that their batches differ too much.
        self._common: dict[tuple[bool, ModelStructure], Seconds] = {}

    def take_apart(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
        """Raises ConfigTypeError for arguments that are neither tensors, constants nor containers of these."""
        leaves, structure = flatten(name_arguments(args, kwargs, self.loss_fn), "")
        return Call(structure, [(argument_path(path), tensor) for path, tensor in leaves])

    def signature(self, call: Call) -> Signature:
        return self.watch.signature(call.structure, [tensor for _, tensor in call.leaves])

    def known_plan(self, call: Call) -> Plan | None:
        """The plan for this call, if it has been made and nothing that its trace has read is another value now."""
        plan = self.plans.find(self.signature(call))
        if plan is not None:
            self.plans.last = plan
            self.whole_call.writes = plan.writes
        return plan

    def plan(self, call: Call) -> Plan:
        """The plan of a call that is to run, traced where there is none. Raises CaptureError for tensors on meta."""
        plan = self.known_plan(call)
        if plan is None or not plan.may_run:
            check_memory(self.model, call.leaves)
        if plan is None:
            signature = self.signature(call)
            self.plans.release_others(signature)
            self._traces.again(self._why(signature))
            plan = self.plans.last = self._keep(signature, self._compile(call))
        plan.may_run = True
        return plan

    def retrace(self) -> None:
        """Forget all graphs: the next call traces again."""
        if self.plans:
            self._traces.cause = "step.retrace() was called"
        self.plans.clear()

    def read(self, call: Call) -> Compiled:
        """The same graph with what it takes to replay the passes; a plan that runs already is left alone."""
        signature = self.signature(call)
        plan = self.plans.find(signature)
        if plan is not None and plan.compiled.captured is not None:
            return plan.compiled
        if plan is not None:  # as it was planned, which the optimizer's state may have had a say in
            return self._compile(call, keep_captured=True, like=plan)
        compiled = self._compile(call, keep_captured=True)
        self._keep(signature, compiled)
        return compiled

    def planned_as(
        self, compiled: Compiled, config: CompileConfig, common: Seconds | None = None, flat_updates: bool = True
    ) -> Compiled:
        """The same call planned with other options. `compiled` keeps what was captured.

        common: what nodes take, by name, where ranks whose batches differ in size are to come to the same plan.
        """
        captured = self._captured_again(compiled, config)
        if compiled.program.has_two_halves:  # a forward may run the backward of another plan
            captured.saved = tuple(info(node).name for node in crossing(compiled.program))
        asked = replace(compiled.asked, common=common or compiled.asked.common, flat_updates=flat_updates)
        planned = plan_step(captured.copy(), captured.config, asked)
        return replace(compiled, captured=captured, program=planned[0], pipeline=planned[1], records=planned[2])

    def plan_as(self, config: CompileConfig) -> None:
        """Make all plans anew with other options, from now on."""
        if config.header() != self.config.header():
            self.config = config
            self.plans.clear()

    def publish(self, compiled: Compiled) -> None:
        """Tell who wants to know that this graph is the one that runs from now on."""
        self._on_compile(compiled)

    def replan(self, plan: Plan, call: Call, conflict: LayoutConflict) -> None:
        """Compile the plan again so that it suits the present state of parameters and optimizer."""
        _PLAN.info("re-planning the update: %s", conflict)
        plan.flat_updates = plan.flat_updates and conflict.remedy == "capture"
        plan.opaque = str(conflict) if conflict.remedy == "opaque" else ""
        compiled = self._compile(call, like=plan)
        plan.guards, plan.writes = self._guards(), self.whole_call.writes
        asked, common = plan.config, plan.common
        plan.compiled = compiled if asked is None else self.planned_as(compiled, asked, common, plan.flat_updates)

    @property
    def plans_by_cost(self) -> bool:
        """Whether plans follow from prices."""
        return self.config.plans_by_cost and not self._by_rules

    @property
    def has_common_plan(self) -> bool:
        """Whether plans for the present model are already those that ranks have in common."""
        return self._mode in self._common

    @property
    def _mode(self) -> tuple[bool, ModelStructure]:
        return self.watch.trains, self.watch.structure

    def seconds_by_name(self, call: Call) -> Seconds:
        """What this rank can offer for `plan_in_common`."""
        compiled = self.read(call)
        assert compiled.captured is not None
        return seconds_by_name(compiled.captured, compiled.pipeline, cost_model(self.config.cluster))

    def plan_in_common(self, seconds: Seconds) -> None:
        """Make all plans for the model as it is now anew, and from now on, with prices that all ranks have."""
        self._common[self._mode] = seconds
        self.plans.clear()

    def _why(self, signature: Signature) -> str:
        """What has changed since the last call; empty for the first one."""
        if self.plans.last is None:
            return ""
        found = cause(signature, self.plans.last.signature, self.model) or self.plans.last.guards.difference()
        return found or f"it is no longer among the {MAX_GRAPHS} graphs that are kept"

    def _keep(self, signature: Signature, compiled: Compiled) -> Plan:
        plan = Plan(compiled, signature, self._guards(), self.whole_call.writes)
        self.plans.keep(plan)
        return plan

    def _guards(self) -> Guards:
        """Those of the last trace."""
        reads, self._reads = self._reads, None
        watch = self.watch
        guards = Guards([] if reads is None else reads.finish(), self._own_values, lambda: watch.own_tensors)
        self._findings.report_changes(guards.changes)
        self._findings.report_numbers(() if reads is None else reads.python_numbers)
        return guards

    def _compile(self, call: Call, keep_captured: bool = False, like: Plan | None = None) -> Compiled:
        """like: a plan of this call, with whose strategies and treatment of the update it is compiled again."""
        training = self.watch.trains
        if not training and self.form == "step":
            self._findings.report_evaluation(self.model, is_first=not self._has_compiled)
        self._has_compiled = True
        keep_captured = keep_captured or self.keeps_captured or (not training and self._divides_evaluations)
        request = CompileRequest(
            self.model,
            self.loss_fn,
            call,
            self.mesh,
            self.config,
            training,
            self._describe_optimizer("" if like is None else like.opaque) if training else None,
            self._asked(flat_updates=like is None or like.flat_updates),
            keep_captured or self.form == "module" or self._on_compile.keeps_captured(),
            self.form,
        )
        what = f"{'training' if training else 'evaluation'} step" if self.form == "step" else self.form
        with progress(f"compiling the {what}") as show:
            request = replace(request, on_plan=shown_plans(f"compiling the {what}", show, self.on_plan))
            divides = self.config.divides_graphs
            compiled = self._compile_divided(request, like) if divides else self._trace(on_one_part(request))
        self._on_compile(compiled)
        if not keep_captured and self.form != "module":
            compiled.captured = None
        return compiled

    def other_backward(
        self,
        compiled: Compiled,
        gradients: str,
        absent: tuple[int, ...],
        config: CompileConfig | None = None,
        common: Seconds | None = None,
    ) -> Compiled:
        """The same module with another treatment of its gradients, as in `Situation`, and for a loss that does not use
        some outputs, given by their numbers. config, common: as in `Plan`."""
        assert compiled.captured is not None, "a module keeps what was captured"
        captured = compiled.captured.copy()
        captured.saved = tuple(info(node).name for node in crossing(compiled.program))
        if absent:
            assert compiled.outputs is not None
            leave_out(captured, absent, compiled.outputs.functions)
            verify_if_asked(captured, "leave_out")
        with progress("compiling the module's backward"):
            asked = self._asked(gradients=gradients)
            asked = asked if common is None else replace(asked, common=common)
            planned = plan_step(captured, config or self.config, asked)
        return replace(compiled, program=planned[0], pipeline=planned[1], records=planned[2], asked=asked)

    def early(self, plan: Plan) -> Plan:
        """The plan of a call that this plan would serve if it were not one of the first micro-batches of an update."""
        if _EARLY not in plan.others:
            with progress("compiling the micro-batches ahead of an update"):
                compiled = self.read_early(plan.compiled)
            self._on_compile(compiled)
            plan.others[_EARLY] = Plan(compiled, plan.signature, plan.guards)
        return plan.others[_EARLY]

    def read_early(self, compiled: Compiled) -> Compiled:
        """The same for a call that is only to be read."""
        return self._planned_again(self._captured_again(compiled), replace(compiled.asked, gradients="local"), compiled)

    def on_parts(self, plan: Plan, parts: Mapping[str, Parameter]) -> Plan:
        """The plan of an evaluation, where ranks have parts of the parameters alone. It gathers each one for its use.

        parts: the parameters that the training step has divided; empty: all are whole, and the plan is as it was.
        """
        if not parts or not self._divides_evaluations:
            return plan
        known = plan.others.get(_ON_PARTS)
        if known is None or known.parts is not parts:
            with progress("compiling the evaluation of divided parameters"):
                compiled = self.read_on_parts(plan.compiled, parts)
            self._on_compile(compiled)
            known = plan.others[_ON_PARTS] = Plan(compiled, plan.signature, plan.guards, parts=parts)
        return known

    def read_on_parts(self, compiled: Compiled, parts: Mapping[str, Parameter]) -> Compiled:
        """The same for a call that is only to be read."""
        if not parts or not self._divides_evaluations:
            return compiled
        captured = self._captured_again(compiled)
        for name, part in parts.items():
            group = part.layout[-1][0] if part.rows_alone else part.shard
            captured.params[name] = replace(
                captured.params[name], shard=group, owner=part.owner, rows_alone=part.rows_alone
            )
        return self._planned_again(captured, compiled.asked, compiled)

    def read_before_fusion(self, plan: Plan, call: Call) -> Program:
        """What a plan of this call computes, as `before_fusion` makes it."""
        compiled = plan.compiled if plan.compiled.captured is not None else self.read(call)
        return before_fusion(self._captured_again(compiled), plan.compiled.pipeline)

    @property
    def _divides_evaluations(self) -> bool:
        """Whether parameters may have other parts in an evaluation after a training step than in one without it."""
        config = self._fixed.as_chosen(self.config)
        asked, may_be = config.parallel_optimizer, bool(config.free_levels)
        is_divided = asked is not None and (asked.level == PARAMETERS or config.divides_graphs)
        return self.form == "step" and (is_divided or may_be)

    def _captured_again(self, compiled: Compiled, config: CompileConfig | None = None) -> Program:
        assert compiled.captured is not None, "what is planned again keeps what was captured"
        captured = compiled.captured.copy()
        captured.config = self._fixed.as_chosen(config or captured.config)
        if self._fixed.layouts is not None:
            captured.layouts = self._fixed.layouts
        return captured

    def _planned_again(self, captured: Program, asked: PassRequest, compiled: Compiled) -> Compiled:
        planned = plan_step(captured.copy(), captured.config, asked)
        return replace(
            compiled, captured=captured, program=planned[0], pipeline=planned[1], records=planned[2], asked=asked
        )

    def _asked(self, flat_updates: bool = True, gradients: str = "") -> PassRequest:
        common = self._common.get(self._mode) if self._common else None
        if not gradients and self.form == "update":
            gradients = "given"
        gradients = gradients or ("accumulated" if self.config.accumulate_steps > 1 else "reduced")
        return PassRequest(flat_updates=flat_updates, common=common, gradients=gradients, by_rules=self._by_rules)

    def _compile_divided(self, request: CompileRequest, like: Plan | None) -> Compiled:
        """Ranks keep their parts of parameters where one call is a whole step, with an update made of ops."""
        described = self._describe_optimizer("")
        local = described is not None and described.rule != "opaque"
        marks = collect(self.model)
        structure, is_final = self.watch.structure, request.training or self.config.parallel_mode != "auto"
        if not self._fixed.holds_for(structure, is_final):
            if self._fixed.structure == structure:
                self.plans.clear()  # evaluations that lie as they would be searched alone
            self._fixed = FixedLayouts(structure, is_final)
        request = replace(request, config=self._fixed.as_chosen(request.config))
        parts = batch_ways(marks, self.mesh, self.config)
        strategies = self._strategies if like is None else like.compiled.program.strategies
        while True:
            ways = 1 if self.config.full_batch else parts
            sharding = Sharding(marks, ways, parts, local, self._fixed.layouts, strategies)
            try:
                compiled = self._trace(on_whole_batch(request, sharding))
            except OtherBatch as other:
                if other.ways == parts:
                    raise
                parts = other.ways
                continue
            self._fixed.note(compiled.program, self.config)
            return compiled

    def _trace(self, request: CompileRequest) -> Compiled:
        self._reads = Reads(self.model, self.loss_fn, self.whole_call)
        with self.whole_call.tracing():
            return compile_call(request, self._reads)

    def _describe_optimizer(self, opaque: str) -> OptimizerInfo | None:
        if self.optimizer is None:
            return None
        check_optimizer(self.optimizer, self.model)
        described = describe_optimizer(self.optimizer, self.model)
        return replace(described, rule="opaque", why_opaque=opaque) if opaque else described
