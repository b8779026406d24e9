"""Plans a target for several cases, and traces it as seldom as that allows.

Why: docs/decisions.md, "What-ifs with other numbers of devices keep the global batch".
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass

from commfuse_fx.api import compile
from commfuse_fx.capture.guards.tree import flatten, unflatten
from commfuse_fx.capture.trace.meta_tensors import device_of
from commfuse_fx.commands.arguments import compile_options
from commfuse_fx.commands.targets import Target
from commfuse_fx.commands.what_if import Case
from commfuse_fx.config.compile_config import CompileConfig
from commfuse_fx.cost.model import cost_model
from commfuse_fx.cost.too_little_memory import TooLittleMemory
from commfuse_fx.errors import ConfigValueError
from commfuse_fx.frontends.step import CompiledStep
from commfuse_fx.inspect.explain.strategy_table import StrategyTable, strategy_table
from commfuse_fx.ir.core.meta import tensor_spec
from commfuse_fx.ir.core.program import Program
from commfuse_fx.machine.source import cluster_of, default_cluster
from commfuse_fx.planning.batches import with_rows
from commfuse_fx.planning.compile_call import plan_step
from commfuse_fx.planning.compiled import Compiled
from commfuse_fx.planning.variants.attempts import Attempt, shown_plans
from commfuse_fx.planning.variants.choose import STOPPED
from commfuse_fx.planning.variants.plan_names import is_data_parallel
from commfuse_fx.sharding.dividing.strategies import Strategies
from commfuse_fx.sharding.marking.part_ops import has_parts
from commfuse_fx.support.progress import progress


@dataclass(frozen=True)
class PlannedCase:
    """What was planned for a case.

    cluster: its name. global_batch: rows of the batch of all ranks; 0 where that is not known. traced: whether the
    model was traced for this case. table: of the plans. was_interrupted: the table has those before an interrupt.
    report: the file of the page about the chosen plan; None where none was written. helps: where no plan fits, what
    would make one fit. no_plan: why nothing was planned; "" where something was.
    """

    case: Case
    cluster: str
    global_batch: int
    traced: bool
    table: StrategyTable
    was_interrupted: bool
    report: str | None = None
    helps: tuple[str, ...] = ()
    no_plan: str = ""


@dataclass
class _Traced:
    """What was traced for a number of devices."""

    step: CompiledStep
    compiled: Compiled

    @property
    def captured(self) -> Program:
        """The graph before it is divided."""
        assert self.compiled.captured is not None, "a step that is planned again keeps what was captured"
        return self.compiled.captured


class Cases:
    """Plans one target for cases."""

    def __init__(self, target: Target, options: argparse.Namespace) -> None:
        self._target = target
        self._options = options
        self._known: _Traced | None = None
        self.chosen: Program | None = None
        """The final program of the last case; None where nothing fits."""

    def check(self, cases: Sequence[Case]) -> None:
        """Raises ConfigValueError for a case that the cluster cannot have, before any is planned."""
        for case in cases:
            case.config(self._step(case.devices).config)

    def plan(self, case: Case) -> PlannedCase:
        """Plan one case: for the global batch of the first one, of which ranks have other parts where there are more or
        fewer of them. Raises what compiling raises, but for memory that is too little in a what-if."""
        step, known = self._step(case.devices), self._known
        config = case.config(step.config)
        cluster = cluster_of(config.cluster).name
        rows = 0 if known is None else _rows(known.captured)
        if rows % case.devices:
            self.chosen = None
            why = f"the global batch of {rows} rows does not divide among {case.devices} devices"
            return PlannedCase(case, cluster, rows, False, StrategyTable((), (), (), ()), False, no_plan=why)
        reuses = known is not None and (known.step.mesh.world == case.devices or not has_parts(known.captured))
        made: list[Attempt] = []
        chosen: Program | None
        helps: tuple[str, ...] = ()
        if known is not None and reuses:
            chosen, helps = _plan_again(str(case), _captured(known, step, config), config, known, made)
        else:
            self._known = None  # before there are two large graphs
            known = self._known = self._trace(step, rows // case.devices, made)
            chosen = known.compiled.program
        self.chosen = chosen
        notes = () if chosen is None else tuple((note.topic, note.subject) for note in chosen.notes)
        if not any(map(is_data_parallel, made)) and STOPPED not in notes:
            only_batch = _captured(known, step, config)
            axes = dict(zip(step.mesh.names, step.mesh.shape, strict=True))
            mesh = next((each.program.strategies.mesh for each in made if each.program is not None), axes)
            only_batch.strategies = Strategies(mesh=mesh, axes={})
            _plan_again(f"data parallel, {case}", only_batch, config, known, made)
        return PlannedCase(
            case,
            cluster,
            _rows(known.captured),
            not reuses,
            strategy_table(made, chosen, cost_model(config.cluster), config.strategy_ckpt_load_file is not None),
            STOPPED in notes,
            helps=helps,
        )

    def _step(self, devices: int) -> CompiledStep:
        """The step for so many devices, which is not traced yet."""
        asked = compile_options(argparse.Namespace(**{**vars(self._options), "devices": devices}))
        for name, value, instead in (("device_num", devices, "--devices"), ("parallel_mode", "auto", "commfuse lower")):
            if asked[name] != value:
                raise ConfigValueError(
                    f"--set {name}={asked[name]!r}: a search of strategies has {value!r}; use {instead}"
                )
        target = self._target
        if asked.get("cluster") is None:
            asked["cluster"] = default_cluster(device_of(target.model).type, devices)
        step = compile(target.model, loss_fn=target.loss_fn, optimizer=target.optimizer, **asked)
        if not isinstance(step, CompiledStep):
            raise ConfigValueError("strategies are searched for a step")
        if isinstance(step.config.cluster, str | None):
            raise ConfigValueError(
                "plans are compared by the prices of a cluster, and a virtual world measures none: give a preset or a "
                "file as --cluster, and leave --schedule auto out"
            )
        return step

    def _trace(self, step: CompiledStep, rows: int, made: list[Attempt]) -> _Traced:
        """Trace the target and plan its step. Adds the plans to those that were made.

        rows: of the batch that a rank is handed; 0: those of the target.
        """
        args, kwargs = self._target.args, self._target.kwargs
        if rows:
            leaves, structure = flatten((args, kwargs), "")
            args, kwargs = unflatten(structure, (tensor for _, tensor in with_rows(leaves, rows)))
        step.planner.on_plan = made.append
        with redirect_stdout(sys.stderr):  # the model may print while it is traced
            step.lower(*args, **kwargs)
        step.planner.on_plan = None
        return _Traced(step, step.planner.read(step.planner.take_apart(args, kwargs)))


def _captured(known: _Traced, step: CompiledStep, config: CompileConfig) -> Program:
    """What was traced, for this step."""
    captured = known.captured.copy()
    captured.mesh, captured.config = step.mesh, config
    return captured


def _plan_again(
    what: str, captured: Program, config: CompileConfig, known: _Traced, made: list[Attempt]
) -> tuple[Program | None, tuple[str, ...]]:
    """The program of the fastest plan. Where nothing fits None, and what would help. Adds the plans to those that were
    made."""
    what = f"planning for {what}"
    with progress(what) as show:
        try:
            planned = plan_step(captured, config, known.compiled.asked, on_plan=shown_plans(what, show, made.append))
            return planned[0], ()
        except TooLittleMemory as error:
            return None, error.helps


def _rows(captured: Program) -> int:
    nodes = (captured.placeholder("input", path) for path in captured.batch_inputs)
    return next((tensor_spec(node).shape[0] for node in nodes if node is not None), 0)
