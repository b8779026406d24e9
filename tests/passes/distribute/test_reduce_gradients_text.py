"""What `reduce_gradients` makes of a few lines of text, and what it leaves."""

from commfuse_fx.passes.distribute.reduce_gradients import ReduceGradients
from tests.passes.cases import check

STEP = """
    in  %a: f32[4] = parameter
    in  %b: bf16[4] = parameter
    fwd %/_to_copy.0: f32[4] = aten._to_copy(%b, dtype=f32)
    fwd %/dot.0: f32[] = aten.dot(%a, %/_to_copy.0)
    bwd %/grad.mul.0: f32[4] = aten.mul.Tensor(%/_to_copy.0, %/dot.0)
    bwd %/grad.mul.1: f32[4] = aten.mul.Tensor(%a, %/dot.0)
    bwd %/grad._to_copy.0: bf16[4] = aten._to_copy(%/grad.mul.1, dtype=bf16)
    return [%/dot.0, %/grad.mul.0, %/grad._to_copy.0]
"""


def test_every_gradient_is_averaged_low_precision_in_fp32() -> None:
    check(
        STEP,
        ReduceGradients("dp"),
        """
        in  %a: f32[4] = parameter
        in  %b: bf16[4] = parameter
        fwd %/_to_copy.0: f32[4] = aten._to_copy(%b, dtype=f32)
        fwd %/dot.0: f32[] = aten.dot(%a, %/_to_copy.0)
        bwd %/grad.mul.0: f32[4] = aten.mul.Tensor(%/_to_copy.0, %/dot.0)
        bwd %reduce/a/all_reduce: f32[4] = _c10d_functional.all_reduce(%/grad.mul.0, avg, dp)  {group=dp(2) op=avg dtype=f32 bytes=16 members=[a]}
        bwd %/grad.mul.1: f32[4] = aten.mul.Tensor(%a, %/dot.0)
        bwd %/grad._to_copy.0: bf16[4] = aten._to_copy(%/grad.mul.1, dtype=bf16)
        bwd %reduce/b/f32: f32[4] = aten._to_copy(%/grad._to_copy.0, dtype=f32)
        bwd %reduce/b/all_reduce: f32[4] = _c10d_functional.all_reduce(%reduce/b/f32, avg, dp)  {group=dp(2) op=avg dtype=f32 bytes=16 members=[b]}
        bwd %reduce/a/wait: f32[4] = _c10d_functional.wait_tensor(%reduce/a/all_reduce)
        bwd %reduce/b/wait: f32[4] = _c10d_functional.wait_tensor(%reduce/b/all_reduce)
        bwd %reduce/b/bf16: bf16[4] = aten._to_copy(%reduce/b/wait, dtype=bf16)
        return [%/dot.0, %reduce/a/wait, %reduce/b/bf16]
        """,
    )


def test_a_sum_in_the_dtype_of_the_gradient() -> None:
    check(
        STEP,
        ReduceGradients("dp", mean=False, fp32=False),
        """
        in  %a: f32[4] = parameter
        in  %b: bf16[4] = parameter
        fwd %/_to_copy.0: f32[4] = aten._to_copy(%b, dtype=f32)
        fwd %/dot.0: f32[] = aten.dot(%a, %/_to_copy.0)
        bwd %/grad.mul.0: f32[4] = aten.mul.Tensor(%/_to_copy.0, %/dot.0)
        bwd %reduce/a/all_reduce: f32[4] = _c10d_functional.all_reduce(%/grad.mul.0, sum, dp)  {group=dp(2) op=sum dtype=f32 bytes=16 members=[a]}
        bwd %/grad.mul.1: f32[4] = aten.mul.Tensor(%a, %/dot.0)
        bwd %/grad._to_copy.0: bf16[4] = aten._to_copy(%/grad.mul.1, dtype=bf16)
        bwd %reduce/b/all_reduce: bf16[4] = _c10d_functional.all_reduce(%/grad._to_copy.0, sum, dp)  {group=dp(2) op=sum dtype=bf16 bytes=8 members=[b]}
        bwd %reduce/a/wait: f32[4] = _c10d_functional.wait_tensor(%reduce/a/all_reduce)
        bwd %reduce/b/wait: bf16[4] = _c10d_functional.wait_tensor(%reduce/b/all_reduce)
        return [%/dot.0, %reduce/a/wait, %reduce/b/wait]
        """,
    )


def test_one_rank_reduces_nothing() -> None:
    check(f"# world: 1\n{STEP}", ReduceGradients("dp"), None)
    check(STEP, ReduceGradients(None), None)


def test_a_gradient_of_two_parameters_is_reduced_once() -> None:
    check(
        """
        in  %a: f32[4] = parameter
        in  %b: f32[4] = parameter
        fwd %/add.0: f32[4] = aten.add.Tensor(%a, %b)
        fwd %/sum.0: f32[] = aten.sum(%/add.0)
        bwd %/grad.mul.0: f32[4] = aten.mul.Tensor(%/add.0, %/sum.0)
        bwd %/grad.clone.0: f32[4] = aten.clone(%/grad.mul.0)
        return [%/sum.0, %/grad.mul.0, %/grad.clone.0]
        """,
        ReduceGradients("dp"),
        """
        in  %a: f32[4] = parameter
        in  %b: f32[4] = parameter
        fwd %/add.0: f32[4] = aten.add.Tensor(%a, %b)
        fwd %/sum.0: f32[] = aten.sum(%/add.0)
        bwd %/grad.mul.0: f32[4] = aten.mul.Tensor(%/add.0, %/sum.0)
        bwd %reduce/a/all_reduce: f32[4] = _c10d_functional.all_reduce(%/grad.mul.0, avg, dp)  {group=dp(2) op=avg dtype=f32 bytes=16 members=[a, b]}
        bwd %/grad.clone.0: f32[4] = aten.clone(%/grad.mul.0)
        bwd %reduce/a/wait: f32[4] = _c10d_functional.wait_tensor(%reduce/a/all_reduce)
        bwd %reduce/b/own: f32[4] = aten.clone(%reduce/a/wait)
        return [%/sum.0, %reduce/a/wait, %reduce/b/own]
        """,
    )
