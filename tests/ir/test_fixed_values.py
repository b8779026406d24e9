"""Which nodes depend on nothing but shapes and constants, and what their values are."""

import torch

from commfuse_fx.ir.core.meta import info
from commfuse_fx.ir.core.program import Program
from commfuse_fx.ir.ops.fixed_values import FixedValues, fixed_nodes
from commfuse_fx.testing import parse_program

CAUSAL = """
    in  %w: f32[3,3] = parameter
    in  %x: f32[3,3] = input
    in  %constant: f32[] = constant
    fwd %/arange.0: i64[3] = aten.arange.start_step(0, 3, layout=strided, device=cpu, pin_memory=False)
    fwd %/unsqueeze.0: i64[3,1] = aten.unsqueeze(%/arange.0, 1)
    fwd %/le.0: b8[3,3] = aten.le.Tensor(%/arange.0, %/unsqueeze.0)
    fwd %/lift_fresh_copy.0: f32[] = aten.lift_fresh_copy(%constant)
    fwd %/mm.0: f32[3,3] = aten.mm(%x, %w)
    fwd %/zeros_like.0: f32[3,3] = aten.zeros_like(%/mm.0)
    fwd %/where.0: f32[3,3] = aten.where.self(%/le.0, %/zeros_like.0, %/lift_fresh_copy.0)
    fwd %/add.0: f32[3,3] = aten.add.Tensor(%/mm.0, %/where.0)
    fwd %/sum.0: f32[] = aten.sum(%/add.0)
    return [%/sum.0]
"""


def names(program: Program) -> list[str]:
    return [info(node).name for node in fixed_nodes(program)]


def test_a_causal_mask_is_fixed_and_has_its_value() -> None:
    program = parse_program(CAUSAL, constants={"constant": torch.tensor(-9.0)})
    values = FixedValues(program, device="cpu")
    mask = next(node for node in program.graph.nodes if info(node).name == "/where.0")

    assert names(program) == [
        "constant",
        "/arange.0",
        "/unsqueeze.0",
        "/le.0",
        "/lift_fresh_copy.0",
        "/zeros_like.0",
        "/where.0",
    ]
    assert torch.equal(values.of(mask), torch.full((3, 3), -9.0).triu(1))
    assert values.of(mask) is values.of(mask)


def test_no_value_without_that_of_a_constant_above_the_limit_or_of_what_is_not_fixed() -> None:
    program = parse_program(CAUSAL)
    nodes = {info(node).name: node for node in program.graph.nodes}
    values, small = FixedValues(program), FixedValues(program, at_most=8)

    assert values.of(nodes["/where.0"]) is None
    assert torch.equal(values.of(nodes["/le.0"]), torch.ones(3, 3).tril().bool())
    assert small.of(nodes["/le.0"]) is None
    assert values.of(nodes["/mm.0"]) is None


def test_what_is_written_to_drawn_handed_out_or_the_users_own_tensor_is_not_fixed() -> None:
    program = parse_program(
        """
        in  %w: f32[2] = parameter
        in  %own: f32[2] = constant
        in  %constant: f32[2] = constant
        fwd %/lift_fresh_copy.0: f32[2] = aten.lift_fresh_copy(%constant)
        fwd %/neg.0: f32[2] = aten.neg(%own)
        fwd %/ones.0: f32[2] = aten.ones([2], device=cpu, pin_memory=False)
        fwd %/view.0: f32[2] = aten.view(%/ones.0, [2])
        fwd %/neg.1: f32[2] = aten.neg(%/view.0)
        fwd %/rand.0: f32[2] = aten.rand([2], device=cpu, pin_memory=False)
        fwd %/zeros.0: f32[2] = aten.zeros([2], device=cpu, pin_memory=False)
        fwd %/max.0: (f32[], i64[]) = aten.max.dim(%/lift_fresh_copy.0, 0)
        fwd %/getitem.0: f32[] = getitem(%/max.0, 0)
        fwd %/getitem.1: i64[] = getitem(%/max.0, 1)
        fwd %/add_.0: f32[] = aten.add_.Scalar(%/getitem.0, 1.0)
        fwd %/add_.1: f32[2] = aten.add_.Tensor(%/view.0, %/rand.0)
        fwd %/mul.0: f32[2] = aten.mul.Tensor(%/neg.0, %w)
        fwd %/mul.1: f32[2] = aten.mul.Tensor(%/mul.0, %/neg.1)
        fwd %/mul.2: f32[2] = aten.mul.Tensor(%/mul.1, %/getitem.0)
        fwd %/mul.3: f32[2] = aten.mul.Tensor(%/mul.2, %/getitem.1)
        fwd %/sum.0: f32[] = aten.sum(%/mul.3)
        return [%/sum.0, %/zeros.0]
        """,
        gradients=["w"],
    )

    assert names(program) == ["constant", "/lift_fresh_copy.0"]
