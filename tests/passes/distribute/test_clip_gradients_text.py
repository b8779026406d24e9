"""What `clip_gradients` makes of a few lines of text, and what it leaves."""

from dataclasses import replace

from commfuse_fx.ir.core.placement import S
from commfuse_fx.ir.core.program import Program
from commfuse_fx.passes.distribute.clip_gradients import ClipGradients
from tests.passes.cases import Applied, check

INPUTS = """
    in  %a: f32[4] = parameter
    in  %b: f32[4] = parameter
"""
BACKWARD = """
    fwd %/dot.0: f32[] = aten.dot(%a, %b)
    bwd %/grad.mul.0: f32[4] = aten.mul.Tensor(%b, %/dot.0)
    bwd %/grad.mul.1: f32[4] = aten.mul.Tensor(%a, %/dot.0)
"""
RETURN = """
    return [%/dot.0, %/grad.mul.0, %/grad.mul.1]
"""
STEP = INPUTS + BACKWARD + RETURN


def test_all_gradients_are_scaled_by_what_follows_from_their_norm() -> None:
    check(
        f"# optimizer: SGD (sgd)\n{STEP}",
        ClipGradients(max_norm=0.5),
        f"""
        {INPUTS}
        {BACKWARD}
        upd %update/norms: (f32[], f32[]) = aten._foreach_norm.Scalar([%/grad.mul.0, %/grad.mul.1], 2)
        upd %update/stacked: f32[2] = aten.stack(%update/norms)
        upd %update/norm: f32[] = aten.linalg_vector_norm(%update/stacked, 2)
        upd %update/shifted: f32[] = aten.add.Tensor(%update/norm, 1e-06)
        upd %update/inverse: f32[] = aten.reciprocal(%update/shifted)
        upd %update/quotient: f32[] = aten.mul.Tensor(%update/inverse, 0.5)
        upd %update/coefficient: f32[] = aten.clamp(%update/quotient, None, 1.0)
        upd %update/clipped.a: f32[4] = aten.mul.Tensor(%/grad.mul.0, %update/coefficient)
        upd %update/clipped.b: f32[4] = aten.mul.Tensor(%/grad.mul.1, %update/coefficient)
        return [%/dot.0, %update/clipped.a, %update/clipped.b]
        """,
    )


ONE_DIVIDED = f"""
    {INPUTS}
    {BACKWARD}
    upd %update/norms: (f32[]) = aten._foreach_norm.Scalar([%/grad.mul.0], 2)
    upd %update/stacked: f32[1] = aten.stack(%update/norms)
    upd %update/norm: f32[] = aten.linalg_vector_norm(%update/stacked, 2)
    upd %update/norms.tp: (f32[]) = aten._foreach_norm.Scalar([%/grad.mul.1], 2)
    upd %update/stacked.tp: f32[1] = aten.stack(%update/norms.tp)
    upd %update/norm.tp: f32[] = aten.linalg_vector_norm(%update/stacked.tp, 2)
    upd %update/square.tp: f32[] = aten.pow.Tensor_Scalar(%update/norm.tp, 2)
    upd %update/all_reduce.tp: f32[] = _c10d_functional.all_reduce(%update/square.tp, sum, tp)  {{group=tp(2) op=sum dtype=f32 bytes=4 members=[update/square.tp]}}
    upd %update/wait.tp: f32[] = _c10d_functional.wait_tensor(%update/all_reduce.tp)
    upd %update/root.tp: f32[] = aten.sqrt(%update/wait.tp)
    upd %update/stacked.all: f32[2] = aten.stack([%update/norm, %update/root.tp])
    upd %update/norm.all: f32[] = aten.linalg_vector_norm(%update/stacked.all, 2)
    upd %update/shifted: f32[] = aten.add.Tensor(%update/norm.all, 1e-06)
    upd %update/inverse: f32[] = aten.reciprocal(%update/shifted)
    upd %update/quotient: f32[] = aten.mul.Tensor(%update/inverse, 0.5)
    upd %update/coefficient: f32[] = aten.clamp(%update/quotient, None, 1.0)
    upd %update/clipped.a: f32[4] = aten.mul.Tensor(%/grad.mul.0, %update/coefficient)
    upd %update/clipped.b: f32[4] = aten.mul.Tensor(%/grad.mul.1, %update/coefficient)
    return [%/dot.0, %update/clipped.a, %update/clipped.b]
"""


def test_the_squares_of_parts_are_added_up_over_the_axes_that_divide_a_parameter() -> None:
    made = ClipGradients(max_norm=0.5)

    def divided(program: Program) -> bool:
        program.params["b"] = replace(program.params["b"], layout=(("tp", S(0)),))
        return made(program)

    header = "# mesh: dp=2xtp=2\n# optimizer: SGD (sgd)\n# parallel_mode: semi_auto\n"
    check(header + STEP, Applied(made, divided), ONE_DIVIDED)


def test_parameters_of_single_ranks_are_divided_over_all_axes() -> None:
    made = ClipGradients(max_norm=0.5, layerwise_group="tp")

    def layerwise(program: Program) -> bool:
        program.params["b"] = replace(program.params["b"], layerwise_parallel=True)
        return made(program)

    header = "# mesh: tp=2\n# optimizer: SGD (sgd)\n# parallel_mode: hybrid_parallel\n"
    check(header + STEP, Applied(made, layerwise), ONE_DIVIDED)


def test_without_an_optimizer_gradients_stay_as_they_are() -> None:
    check(STEP, ClipGradients(max_norm=0.5), None)
