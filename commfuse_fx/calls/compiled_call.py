"""What a compiled step and a compiled module have in common: model, ranks and plans, and how to look at them."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from itertools import count
from typing import Any

import torch
from torch import nn

from commfuse_fx.calls.session import Session
from commfuse_fx.capture.loss import LossFn
from commfuse_fx.capture.trace.meta_tensors import device_of
from commfuse_fx.config.compile_config import CompileConfig
from commfuse_fx.cost.priced import priced_for
from commfuse_fx.errors import CommFuseError, ConfigValueError, NotThereError
from commfuse_fx.gradients.parameter_hooks import remove_hooks_of_graphs
from commfuse_fx.inspect.explain.explanation import Explanation
from commfuse_fx.inspect.lowered import Lowered, LoweredCall
from commfuse_fx.inspect.on_compile import Publisher, check_files
from commfuse_fx.ir.core.collectives import collective_of
from commfuse_fx.ir.core.mesh import Mesh
from commfuse_fx.ir.rows.shard_rows import sharing_ranks
from commfuse_fx.machine.source import Costs
from commfuse_fx.machine.step_profile import StepProfile
from commfuse_fx.planning.compiled import Compiled
from commfuse_fx.planning.planner import Planner
from commfuse_fx.runtime.memory.modes import outside_inference_mode
from commfuse_fx.runtime.ranks.callers import lock_of
from commfuse_fx.runtime.ranks.joining.joined_world import JoinedWorld, check_joined, check_same_turn
from commfuse_fx.sharding.dividing.fit_marks import refine
from commfuse_fx.support.logs import configure_logs
from commfuse_fx.support.ranks import joined_rank, joined_size
from commfuse_fx.support.tracebacks import user_frames_only
from commfuse_fx.support.warned import warn_once_per_step
from commfuse_fx.trials.alternatives import as_kept

_numbers = count(1)
"""Counts what is compiled for several ranks, or may be."""

_waiting: weakref.WeakValueDictionary[int, CompiledCall] = weakref.WeakValueDictionary()
"""By its number, what was compiled while this process had joined no group of several ranks."""


class CompiledCall:
    """A compiled call knows the model, the ranks and the plans of what users call.

    form: "step", "module" or "update", as in `CompileRequest`.
    """

    form = "step"

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn | None,
        optimizer: torch.optim.Optimizer | None,
        config: CompileConfig,
    ) -> None:
        configure_logs()
        warn_once_per_step()
        self.model = model
        self.loss_fn = loss_fn
        self.optimizer = optimizer
        self.virtual = config.device_num is not None
        self._asked = config
        self._number = 0 if self.virtual or config.parallel_mode == "stand_alone" else next(_numbers)
        self._begin(config)
        if self._number and self.session.agreement is None:
            _waiting[self._number] = self

    def _begin(self, config: CompileConfig) -> None:
        """Take the ranks that there are now."""
        model, loss_fn, optimizer = self.model, self.loss_fn, self.optimizer
        self._joined = JoinedWorld()
        self.rank = config.global_rank if config.global_rank is not None else joined_rank()
        check_files(config, self.rank)
        self.mesh = _mesh_of(config)
        measures = self._measures(config)
        first = config.first if measures else as_kept(config, config.unmeasured, self.form)
        self.config = _priced(first, model, self.mesh)
        self.planner = Planner(model, loss_fn, optimizer, self.config, self.mesh, Publisher(self.rank), self.form)
        self._given = config.figures
        self.session = self._make_session()
        if measures:
            self.session.try_plans(config, _priced(config.unmeasured, model, self.mesh))

    def _measures(self, config: CompileConfig) -> bool:
        """Whether plans are made of what is measured while the ranks train."""
        is_real = not self.virtual and self.mesh.world > 1 and config.parallel_mode != "stand_alone"
        if self.form == "module" and config.parallel_optimizer is not None:
            return False  # forwards communicate as well, and nothing measures these
        may_change = bool(config.replan) and not torch.are_deterministic_algorithms_enabled()
        return config.measures and is_real and may_change and config.capture == "trace"

    def _make_session(self) -> Session:
        return Session(self.planner, self.rank)

    def _follow_world(self) -> bool:
        """Go on with the process group that there is now. What uses the ranks calls this first.

        Returns whether it is one that was joined after compiling. All ranks call this together then. Raises
        CommFuseError where a launcher has started several ranks and none is joined, or where the group that this was
        compiled for is gone.
        """
        if self.virtual or self._joined.stays():
            return False
        with lock_of(self.model):
            return not self._joined.stays() and self._take_up_world()

    def _take_up_world(self) -> bool:
        before, is_alone = self.session, joined_size() == 1
        if before.is_closed:
            return False
        if before.agreement is not None:
            raise CommFuseError(
                f"the process group for which this {self.form} was compiled has been destroyed: keep it while you "
                f"train, or call cf.compile again, on all ranks, {'before' if is_alone else 'for'} another one"
            )
        if is_alone:
            if self.config.parallel_mode != "stand_alone":
                check_joined()
            self._joined.follow_alone()
            return False
        if before.micro_batches.count:
            raise CommFuseError(
                f"a process group was joined after {before.micro_batches.count} of {self.config.accumulate_steps} "
                "micro-batches of an update: join it before the first of them, or call step.drop_micro_batches() to "
                "forget their gradients"
            )
        before.synchronize()
        self._begin(self._asked)
        self.session.go_on(before.steps, None)
        self.session.timeline = before.timeline
        self.session.verified.begin(before.verified.every)
        if self.session.agreement is not None:
            what = f"{self.form} {self._place()}, of {type(self.model).__qualname__}"
            check_same_turn(self.session.agreement.from_all(what))
        return True

    def _place(self) -> int:
        """Its place, from 1, among what waits for a group, in the order in which it was compiled. It waits no more.

        What nobody can call any more does not count: ranks may have compiled other things before.
        """
        _waiting.pop(self._number, None)
        gc.collect()
        return 1 + sum(number < self._number for number in _waiting)

    def synchronize(self) -> None:
        """Wait until the last step is complete."""
        self.session.synchronize()

    def profile_used(self) -> StepProfile | None:
        """What was measured of network and nodes while training, to plan with; None until it has been.

        It is the same on every rank. `compile` takes it as `cluster=`, and `save` writes a file that `commfuse explain`
        reads. Once a plan stays, the profile has its name: keep it in a checkpoint (`to_json`), and what is compiled
        with it and `schedule="auto"` goes on with that plan.
        """
        return None if self.session.replan is None else self.session.replan.profile_used

    @property
    def _figures(self) -> Costs | None:
        """What plans are compared by: what was measured while training, else what was given; None: what is assumed."""
        return self.profile_used() or self._given

    @user_frames_only
    def explain(self, cluster: Any = None, timings: bool = False) -> Explanation:
        """Say why the graph that runs is as it is: that of the last call, or of a module's last backward.

        The arguments are those of `Lowered.explain`. Raises ConfigValueError where none has run yet.
        """
        ran = self.session.ran
        if ran is None:
            raise ConfigValueError(
                f"explain() is of the graph that runs, and no {self.form} has run yet: call it first, or use "
                "lower(...).explain()"
            )
        return self._lowered(ran.compiled, (), {}).explain(cluster, timings)

    def __repr__(self) -> str:
        return f"<compiled {self._summary()}>"

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_") and hasattr(nn.Module, name):
            raise NotThereError(
                f"a compiled {self.form} has no {name}: ask the model, which stays as it is: {self.form}.model.{name}"
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _summary(self) -> str:
        """What was compiled, in one line: form, model, ranks, and what the graph that runs sends."""
        ranks = " x ".join(f"{axis}={size}" for axis, size in zip(self.mesh.names, self.mesh.shape, strict=True))
        ran, planned = self.session.ran, "nothing has run"
        if ran is not None:
            program = ran.compiled.program
            sent = [collective_of(node) for node in program.collectives()]
            kinds = Counter(each.kind for each in sent)
            counts = ", ".join(f"{number} {kind}" for kind, number in kinds.items()) or "no collectives"
            planned = f"{len(program.graph.nodes)} nodes, {counts}, {sum(each.nbytes for each in sent)} bytes"
        return f"{self.form} of {type(self.model).__name__}, {self.config.parallel_mode} on {ranks}: {planned}"

    @user_frames_only
    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """Trace and compile a call without running it.

        The arguments are those of a call; tensors serve as examples of shape and dtype. It works in a virtual
        world. Raises what compiling raises.
        """
        self._follow_world()
        self.synchronize()
        remove_hooks_of_graphs(self.model)
        with lock_of(self.model), outside_inference_mode():
            with self.session.shapes_only():
                compiled = self.planner.read(self.planner.take_apart(args, kwargs))
            compiled = self.session.shown(compiled)
        return self._lowered(compiled, args, kwargs)

    def _lowered(self, compiled: Compiled, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Lowered:
        call = LoweredCall(self, args, kwargs, self._figures)
        return Lowered(
            compiled.program, self.rank, compiled.records, compiled.replay, call, compiled.captured, compiled.pipeline
        )


def _priced(config: CompileConfig, model: nn.Module, mesh: Mesh) -> CompileConfig:
    """The configuration with the cluster that its plans need, and that the cluster was checked against."""
    if not config.plans_by_cost:
        return config
    params = dict(model.named_parameters())
    return replace(config, cluster=priced_for(config.cluster, device_of(model).type, mesh, params))


def _mesh_of(config: CompileConfig) -> Mesh:
    """The ranks as a grid. Raises ConfigValueError where no so many of them can share an update as are asked for."""
    divided = config.parallel_optimizer
    ranks = 0 if divided is None or config.divides_graphs else divided.sharing
    if isinstance(config.mesh, tuple):
        mesh = Mesh.of_sizes(config.mesh)
    elif config.mesh is not None:
        mesh = Mesh.of_device_mesh(config.mesh)
    else:
        mesh = Mesh.of_sizes((config.device_num or joined_size(),))
        if 1 < ranks < mesh.world and mesh.world % ranks == 0:
            mesh = refine(mesh, {mesh.all_axes: (mesh.world // ranks, ranks)})
    if ranks != 1:
        sharing_ranks(mesh, mesh.all_axes, ranks)
    return mesh
