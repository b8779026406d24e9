"""What `hold_gradients` makes of a few lines of text, and what it leaves."""

from commfuse_fx.ir.core.program import Program
from commfuse_fx.passes.declaration import Pass
from commfuse_fx.passes.distribute.micro_batches.add_held_gradients import AddHeldGradients
from commfuse_fx.passes.distribute.micro_batches.hold_gradients import HoldGradients
from tests.passes.cases import Applied, check

INPUTS = """
    in  %a: f32[4] = parameter
    in  %b: f32[4] = parameter
"""
HELD = """
    in  %a.grad: f32[4] = gradient
    in  %b.grad: f32[4] = gradient
"""
BACKWARD = """
    fwd %/dot.0: f32[] = aten.dot(%a, %b)
    bwd %/grad.mul.0: f32[4] = aten.mul.Tensor(%b, %/dot.0)
    bwd %/grad.mul.1: f32[4] = aten.mul.Tensor(%a, %/dot.0)
"""
RETURN = """
    return [%/dot.0, %/grad.mul.0, %/grad.mul.1]
"""


def test_gradients_are_added_at_the_end_and_none_is_returned() -> None:
    check(
        INPUTS + BACKWARD + RETURN,
        HoldGradients(),
        f"""
        {INPUTS}
        {HELD}
        {BACKWARD}
        upd %reduce/a/hold: f32[4] = aten.add_.Tensor(%a.grad, %/grad.mul.0)
        upd %reduce/b/hold: f32[4] = aten.add_.Tensor(%b.grad, %/grad.mul.1)
        return [%/dot.0]
        """,
    )


def test_an_evaluation_has_no_gradients() -> None:
    check(f"# step: eval\n{INPUTS}{BACKWARD.splitlines()[1]}\nreturn [%/dot.0]", HoldGradients(), None)


# Of a divided graph, whose batch is divided over dp: the gradient of a is a sum over dp that is still to come, and that
# of b is what all ranks have.

DIVIDED = "# mesh: dp=2xtp=2\n# parallel_mode: semi_auto\n"
SUM = """
    bwd %/grad.mul.0/sum: f32[4] = sum_partial(%/grad.mul.0, dp, sum)
"""
OF_SUM = RETURN.replace("%/grad.mul.0", "%/grad.mul.0/sum")


def over_dp(made: Pass) -> Applied:
    def apply(program: Program) -> bool:
        program.batch_axes = "dp"
        return made(program)

    return Applied(made, apply)


def test_a_sum_over_ranks_is_left_to_the_last_micro_batch() -> None:
    check(
        DIVIDED + INPUTS + BACKWARD + SUM + OF_SUM,
        over_dp(HoldGradients()),
        f"""
        {INPUTS}
        {HELD}
        {BACKWARD}
        upd %reduce/b/share: f32[4] = aten.div.Scalar(%/grad.mul.1, 2)
        upd %reduce/a/hold: f32[4] = aten.add_.Tensor(%a.grad, %/grad.mul.0)
        upd %reduce/b/hold: f32[4] = aten.add_.Tensor(%b.grad, %reduce/b/share)
        return [%/dot.0]
        """,
    )


def test_the_last_micro_batch_adds_ahead_of_the_sum_over_ranks_or_sums_what_is_held() -> None:
    check(
        DIVIDED + INPUTS + BACKWARD + SUM + OF_SUM,
        over_dp(AddHeldGradients()),
        f"""
        {INPUTS}
        {HELD}
        {"".join(f"{line}" + chr(10) for line in BACKWARD.splitlines()[:3])}
        bwd %reduce/a/sum: f32[4] = aten.add.Tensor(%a.grad, %/grad.mul.0)
        {BACKWARD.splitlines()[3]}
        bwd %reduce/b/held: f32[4] = sum_partial(%b.grad, dp, sum)
        bwd %reduce/b/sum: f32[4] = aten.add.Tensor(%reduce/b/held, %/grad.mul.1)
        {SUM.replace("sum_partial(%/grad.mul.0", "sum_partial(%reduce/a/sum")}
        return [%/dot.0, %/grad.mul.0/sum, %reduce/b/sum]
        """,
    )
