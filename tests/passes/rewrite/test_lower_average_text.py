"""What `lower_average` makes of a few lines of text, and what it leaves."""

from commfuse_fx.passes.rewrite.lower_average import LowerAverage
from tests.passes.cases import check

BACKWARD = """
    in  %w: f32[16] = parameter
    in  %x: f32[16] = input
    in  %update.0.lr: number = hyper-parameter of the optimizer
    in  %update.0.momentum: number = hyper-parameter of the optimizer
    in  %update.0.weight_decay: number = hyper-parameter of the optimizer
    in  %update.0.dampening: number = hyper-parameter of the optimizer
    in  %update.0.is_first_step: number = hyper-parameter of the optimizer
    fwd %/dot.0: f32[] = aten.dot(%w, %x)
    bwd %/grad.mul.0: f32[16] = aten.mul.Tensor(%x, %/dot.0)
    bwd %reduce/w/all_reduce: f32[16] = _c10d_functional.all_reduce(%/grad.mul.0, avg, dp)  {group=dp(2) op=avg dtype=f32 bytes=64 members=[w]}
    bwd %reduce/w/wait: f32[16] = _c10d_functional.wait_tensor(%reduce/w/all_reduce)
"""
UPDATE = """
    upd %update.0/sgd: - = aten._fused_sgd_([%w], [%reduce/w/wait], [], lr=%update.0.lr, momentum=%update.0.momentum, weight_decay=%update.0.weight_decay, dampening=%update.0.dampening, nesterov=False, maximize=False, is_first_step=%update.0.is_first_step)
    return [%/dot.0]
"""


def test_a_fused_update_divides_the_sum_while_it_reads_it() -> None:
    check(
        BACKWARD + UPDATE,
        LowerAverage(),
        """
        in  %w: f32[16] = parameter
        in  %x: f32[16] = input
        in  %update.0.lr: number = hyper-parameter of the optimizer
        in  %update.0.momentum: number = hyper-parameter of the optimizer
        in  %update.0.weight_decay: number = hyper-parameter of the optimizer
        in  %update.0.dampening: number = hyper-parameter of the optimizer
        in  %update.0.is_first_step: number = hyper-parameter of the optimizer
        fwd %/dot.0: f32[] = aten.dot(%w, %x)
        bwd %/grad.mul.0: f32[16] = aten.mul.Tensor(%x, %/dot.0)
        bwd %reduce/w/all_reduce: f32[16] = _c10d_functional.all_reduce(%/grad.mul.0, sum, dp)  {group=dp(2) op=sum dtype=f32 bytes=64 members=[w]}
        bwd %reduce/w/wait: f32[16] = _c10d_functional.wait_tensor(%reduce/w/all_reduce)
        upd %update.0/sgd/world_size: f32[] = aten.full([], 2.0, dtype=f32, device=cpu)
        upd %update.0/sgd: - = aten._fused_sgd_([%w], [%reduce/w/wait], [], lr=%update.0.lr, momentum=%update.0.momentum, weight_decay=%update.0.weight_decay, dampening=%update.0.dampening, nesterov=False, maximize=False, is_first_step=%update.0.is_first_step, grad_scale=%update.0/sgd/world_size)
        return [%/dot.0]
        """,
    )


def test_where_others_read_the_mean_too_the_sum_is_divided() -> None:
    check(
        """
        in  %w: f32[16] = parameter
        in  %x: f32[16] = input
        fwd %/dot.0: f32[] = aten.dot(%w, %x)
        bwd %/grad.mul.0: f32[16] = aten.mul.Tensor(%x, %/dot.0)
        bwd %reduce/w/all_reduce: f32[16] = _c10d_functional.all_reduce(%/grad.mul.0, avg, dp)  {group=dp(2) op=avg dtype=f32 bytes=64 members=[w]}
        bwd %reduce/w/wait: f32[16] = _c10d_functional.wait_tensor(%reduce/w/all_reduce)
        return [%/dot.0, %reduce/w/wait]
        """,
        LowerAverage(),
        """
        in  %w: f32[16] = parameter
        in  %x: f32[16] = input
        fwd %/dot.0: f32[] = aten.dot(%w, %x)
        bwd %/grad.mul.0: f32[16] = aten.mul.Tensor(%x, %/dot.0)
        bwd %reduce/w/all_reduce: f32[16] = _c10d_functional.all_reduce(%/grad.mul.0, sum, dp)  {group=dp(2) op=sum dtype=f32 bytes=64 members=[w]}
        bwd %reduce/w/wait: f32[16] = _c10d_functional.wait_tensor(%reduce/w/all_reduce)
        bwd %reduce/w/wait/mean: f32[16] = aten.div.Scalar(%reduce/w/wait, 2)
        return [%/dot.0, %reduce/w/wait/mean]
        """,
    )


def test_sums_stay_sums() -> None:
    check((BACKWARD + UPDATE).replace("avg", "sum"), LowerAverage(), None)


CLIPPED = """
    upd %update/norms: (f32[]) = aten._foreach_norm.Scalar([%reduce/w/wait], 2)
    upd %update/stacked: f32[1] = aten.stack(%update/norms)
    upd %update/coefficient: f32[] = aten.linalg_vector_norm(%update/stacked, 2)
    upd %update/clipped.w: f32[16] = aten.mul.Tensor(%reduce/w/wait, %update/coefficient)
    upd %update.0/sgd: - = aten._fused_sgd_([%w], [%update/clipped.w], [], lr=%update.0.lr, momentum=%update.0.momentum, weight_decay=%update.0.weight_decay, dampening=%update.0.dampening, nesterov=False, maximize=False, is_first_step=%update.0.is_first_step)
    return [%/dot.0]
"""


def test_of_gradients_that_are_clipped_the_norms_and_the_coefficient_are_divided() -> None:
    check(
        BACKWARD + CLIPPED,
        LowerAverage(),
        f"""
        {BACKWARD.replace("avg", "sum")}
        upd %update/norms: (f32[]) = aten._foreach_norm.Scalar([%reduce/w/wait], 2)
        upd %update/norms/mean: (f32[]) = aten._foreach_div.Scalar(%update/norms, 2)
        upd %update/stacked: f32[1] = aten.stack(%update/norms/mean)
        upd %update/coefficient: f32[] = aten.linalg_vector_norm(%update/stacked, 2)
        upd %update/coefficient/mean: f32[] = aten.div.Scalar(%update/coefficient, 2)
        upd %update/clipped.w: f32[16] = aten.mul.Tensor(%reduce/w/wait, %update/coefficient/mean)
        upd %update.0/sgd: - = aten._fused_sgd_([%w], [%update/clipped.w], [], lr=%update.0.lr, momentum=%update.0.momentum, weight_decay=%update.0.weight_decay, dampening=%update.0.dampening, nesterov=False, maximize=False, is_first_step=%update.0.is_first_step)
        return [%/dot.0]
        """,
    )


def test_the_norm_of_a_sum_may_be_too_large_for_half_precision() -> None:
    half = (BACKWARD + CLIPPED).replace("f32", "f16").replace("bytes=64", "bytes=32")
    check(
        half,
        LowerAverage(),
        half.replace("avg", "sum")
        .replace("%reduce/w/wait, %update", "%reduce/w/wait/mean, %update")
        .replace("[%reduce/w/wait]", "[%reduce/w/wait/mean]")
        .replace(
            "    upd %update/norms",
            "    bwd %reduce/w/wait/mean: f16[16] = aten.div.Scalar(%reduce/w/wait, 2)\n    upd %update/norms",
        ),
        numerics="defines",
    )
