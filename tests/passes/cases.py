"""What a pass makes of a program, both as text, and that all ranks then compute what they computed before.

Why: docs/decisions.md, "A pass is tested on ten lines of text, and all ranks run them".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from commfuse_fx.cost.model import cost_model
from commfuse_fx.ir.core.meta import Spec, TensorSpec, info
from commfuse_fx.ir.core.program import Program
from commfuse_fx.ir.core.verify import verify
from commfuse_fx.machine.source import resolve_costs
from commfuse_fx.passes.declaration import Pass, PassContext, PricedPass
from commfuse_fx.passes.distribute.divide import Divide
from commfuse_fx.runtime.execute.executor import Executor
from commfuse_fx.runtime.memory.flat_pool import FlatPool
from commfuse_fx.sharding.marking.marks import MarkedParameter, Marks, ParameterMark
from commfuse_fx.sharding.marking.strategy import parse_tensor
from commfuse_fx.testing import assert_pass, parse_program
from commfuse_fx.virtual.ranks_program import RanksProgram

Values = dict[str, torch.Tensor]

_CONVOLUTIONS = (torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default)


@dataclass(frozen=True)
class Applied:
    """A pass, and how it is called with what it needs besides the text of a program."""

    made: Pass
    call: Callable[[Program], bool]

    @property
    def numerics(self) -> str:
        return self.made.numerics

    def __call__(self, program: Program) -> bool:
        return self.call(program)


def check(before: str, apply: Pass | Applied, after: str | None, *, numerics: str = "", **given: Any) -> Program:
    """Assert that the pass makes `after` of `before`; None: that it changes nothing. Returns what it has made.

    Both are texts of valid programs, whose specs are what their ops make. Lines of the header that `before` begins
    with hold for `after` too. numerics: as for `Pass`, by default what the pass declares. Ranks are compared with what
    they computed before, but where it "defines" what they compute. given: as for `parse_program`.
    """
    program = read(before, **given)
    made = assert_pass(program, apply, after)
    if after is not None:
        header = [line.strip() for line in before.splitlines() if line.strip().startswith("#")]
        read("\n".join([*header, after]), **given)
    numerics = numerics or apply.numerics
    if numerics != "defines":
        assert_same(outcome(program), outcome(made), numerics == "bitwise")
    return made


def read(text: str, **given: Any) -> Program:
    """The program of a text; `verify` compares its specs with what the ops make, as it does for nodes of passes."""
    program = parse_program(text, **given)
    for node in program.graph.nodes:
        # On tensors without data, convolutions do not follow the strides of what they are given.
        info(node).declared = node.target not in _CONVOLUTIONS
    verify(program, "reading")
    return program


@dataclass(frozen=True)
class Outcome:
    """What one step leaves on each rank: (loss, *gradients), parameters and buffers."""

    outputs: list[list[torch.Tensor]]
    values: list[Values]


def outcome(program: Program) -> Outcome:
    """One step of all ranks, from values that depend on names only. Ranks have inputs and buffers of their own."""
    executors, inputs, values = [], [], []
    for rank in range(program.mesh.world):
        params = {name: nn.Parameter(_value(param.spec, name)) for name, param in program.params.items()}
        named = [(source, info(node).spec) for node, source in program.sources.items()]
        buffers, given = (
            {source.name: _value(spec, source.name, rank) for source, spec in named if source.kind == kind}
            for kind in ("buffer", "input")
        )
        optimizer = _optimizer(program, params)
        executor = Executor(program, params, buffers, optimizer, None, rank, FlatPool())
        executor.bind()
        executors.append(executor)
        inputs.append(given)
        values.append({**params, **buffers})
    torch.manual_seed(0)
    ranks = RanksProgram(program, executors)
    outputs = [[value.clone() for value in each] for each in ranks.step(inputs)]
    ranks.finish()
    return Outcome(outputs, values)


def _value(spec: Spec, name: str, rank: int = 0) -> torch.Tensor:
    assert isinstance(spec, TensorSpec)
    random = torch.Generator().manual_seed(sum(name.encode()) * 7 + rank)
    value = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype)
    if spec.dtype.is_floating_point:
        return value.copy_(torch.randn(spec.shape, generator=random))
    return value.copy_(torch.randint(0, 2, spec.shape, generator=random))


def _optimizer(program: Program, params: dict[str, nn.Parameter]) -> torch.optim.Optimizer | None:
    found = program.optimizer
    if found is None:
        return None
    groups: list[dict[str, Any]] = []
    for group in found.groups:
        flags = {name: flag for name, flag in group.flags if name != "decoupled"}
        for name, number in (("momentum", 0.9), ("weight_decay", 0.1)):
            if name in flags:
                flags[name] = number if flags[name] else 0.0
        groups.append({"params": [params[name] for name in group.params], **flags})
    made: torch.optim.Optimizer = getattr(torch.optim, found.class_name)(groups, lr=0.1)
    return made


def assert_same(before: Outcome, after: Outcome, bitwise: bool, name: str = "") -> None:
    """Compare what ranks got. name: of the pass between the two."""
    for want, have in zip(before.outputs, after.outputs, strict=True):
        for i, (one, other) in enumerate(zip(want, have, strict=True)):
            _assert_close(one, other, bitwise, f"{name}: output {i}")
    for values, others in zip(before.values, after.values, strict=True):
        for key, value in values.items():
            _assert_close(value.detach(), others[key].detach(), bitwise, f"{name}: {key}")


def _assert_close(want: torch.Tensor, have: torch.Tensor, bitwise: bool, name: str) -> None:
    largest = float(want.abs().max()) if want.numel() else 0.0
    tolerance = (0.0, 0.0) if bitwise else (1e-4, 1e-4 * largest)
    torch.testing.assert_close(
        have, want, rtol=tolerance[0], atol=tolerance[1], check_stride=False, msg=lambda text: f"{name}: {text}"
    )


def divided(marks: Mapping[str, Any] | None = None, batch: Sequence[str] = (), **options: Any) -> Applied:
    """The pass that divides a graph. marks: strategies of parameters, as for `cf.shard`."""
    made = Divide(**options)

    def apply(program: Program) -> bool:
        found = [
            MarkedParameter(name, program.params[name].spec.shape, ParameterMark(parse_tensor(strategy, name), "here"))
            for name, strategy in (marks or {}).items()
        ]
        program.marks, program.batch_inputs = Marks(parameters=tuple(found)), tuple(batch)
        return made(program)

    return Applied(made, apply)


def priced(make: Callable[..., PricedPass], cluster: str = "gloo-1gbit", **options: Any) -> Applied:
    """A pass that asks what things cost: on this cluster."""
    made = make(**options)
    context = PassContext(cost_model(resolve_costs(cluster)))
    return Applied(made, lambda program: made(program, context))
