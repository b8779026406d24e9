"""What `split_updates` makes of a few lines of text, and what it leaves."""

from commfuse_fx.passes.rewrite.split_updates import SplitUpdates
from tests.passes.cases import check

INPUTS = """
    # optimizer: SGD (sgd)
    in  %a: f32[16] = parameter
    in  %b: f32[4,4](1,4) = parameter
    in  %update.0.weight_decay: number = hyper-parameter of the optimizer
    in  %update.0.momentum: number = hyper-parameter of the optimizer
    in  %update.0.lr: number = hyper-parameter of the optimizer
    in  %update.0.dampening: number = hyper-parameter of the optimizer
    in  %update.0.is_first_step: number = hyper-parameter of the optimizer
"""
UPDATE = """
    upd %update.0/sgd: - = aten._fused_sgd_([%a, %b], [%reduce/a/wait, %reduce/b/wait], [], weight_decay=%update.0.weight_decay, momentum=%update.0.momentum, lr=%update.0.lr, dampening=%update.0.dampening, nesterov=False, maximize=False, is_first_step=%update.0.is_first_step)
    return [%/dot.0]
"""
REDUCED = """
    fwd %/view.0: f32[4,4] = aten.view(%a, [4, 4])
    fwd %/mul.0: f32[4,4] = aten.mul.Tensor(%/view.0, %b)
    fwd %/dot.0: f32[] = aten.sum(%/mul.0)
    bwd %/grad.mul.0: f32[16] = aten.mul.Tensor(%a, %/dot.0)
    bwd %reduce/a/all_reduce: f32[16] = _c10d_functional.all_reduce(%/grad.mul.0, sum, dp)  {group=dp(2) op=sum dtype=f32 bytes=64 members=[a]}
    bwd %reduce/a/wait: f32[16] = _c10d_functional.wait_tensor(%reduce/a/all_reduce)
    bwd %/grad.mul.1: f32[4,4](1,4) = aten.mul.Tensor(%b, %/dot.0)
    bwd %reduce/b/all_reduce: f32[4,4](1,4) = _c10d_functional.all_reduce(%/grad.mul.1, sum, dp)  {group=dp(2) op=sum dtype=f32 bytes=64 members=[b]}
    bwd %reduce/b/wait: f32[4,4](1,4) = _c10d_functional.wait_tensor(%reduce/b/all_reduce)
"""


def test_every_bucket_has_an_update_of_its_own() -> None:
    check(
        INPUTS + REDUCED + UPDATE,
        SplitUpdates(),
        """
        in  %a: f32[16] = parameter
        in  %b: f32[4,4](1,4) = parameter
        in  %update.0.weight_decay: number = hyper-parameter of the optimizer
        in  %update.0.momentum: number = hyper-parameter of the optimizer
        in  %update.0.lr: number = hyper-parameter of the optimizer
        in  %update.0.dampening: number = hyper-parameter of the optimizer
        in  %update.0.is_first_step: number = hyper-parameter of the optimizer
        in  %update.1.weight_decay: number = hyper-parameter of the optimizer
        in  %update.1.momentum: number = hyper-parameter of the optimizer
        in  %update.1.lr: number = hyper-parameter of the optimizer
        in  %update.1.dampening: number = hyper-parameter of the optimizer
        in  %update.1.is_first_step: number = hyper-parameter of the optimizer
        fwd %/view.0: f32[4,4] = aten.view(%a, [4, 4])
        fwd %/mul.0: f32[4,4] = aten.mul.Tensor(%/view.0, %b)
        fwd %/dot.0: f32[] = aten.sum(%/mul.0)
        bwd %/grad.mul.0: f32[16] = aten.mul.Tensor(%a, %/dot.0)
        bwd %reduce/a/all_reduce: f32[16] = _c10d_functional.all_reduce(%/grad.mul.0, sum, dp)  {group=dp(2) op=sum dtype=f32 bytes=64 members=[a]}
        bwd %reduce/a/wait: f32[16] = _c10d_functional.wait_tensor(%reduce/a/all_reduce)
        bwd %/grad.mul.1: f32[4,4](1,4) = aten.mul.Tensor(%b, %/dot.0)
        bwd %reduce/b/all_reduce: f32[4,4](1,4) = _c10d_functional.all_reduce(%/grad.mul.1, sum, dp)  {group=dp(2) op=sum dtype=f32 bytes=64 members=[b]}
        bwd %reduce/b/wait: f32[4,4](1,4) = _c10d_functional.wait_tensor(%reduce/b/all_reduce)
        upd %update.0/sgd: - = aten._fused_sgd_([%a], [%reduce/a/wait], [], weight_decay=%update.0.weight_decay, momentum=%update.0.momentum, lr=%update.0.lr, dampening=%update.0.dampening, nesterov=False, maximize=False, is_first_step=%update.0.is_first_step)
        upd %update.1/sgd: - = aten._fused_sgd_([%b], [%reduce/b/wait], [], weight_decay=%update.1.weight_decay, momentum=%update.1.momentum, lr=%update.1.lr, dampening=%update.1.dampening, nesterov=False, maximize=False, is_first_step=%update.1.is_first_step)
        return [%/dot.0]
        """,
    )


def test_where_no_update_waits_for_the_next_step_they_stay_together() -> None:
    check(INPUTS + REDUCED + UPDATE, SplitUpdates(across_steps=False), None)


def test_a_gradient_is_copied_into_the_strides_of_its_parameter() -> None:
    plain = REDUCED.replace("aten.mul.Tensor(%b, %/dot.0)", "aten.mul.Tensor(%/view.0, %/dot.0)")
    plain = plain.replace("f32[4,4](1,4)", "f32[4,4]")
    check(
        INPUTS + plain + UPDATE,
        SplitUpdates(across_steps=False),
        """
        in  %a: f32[16] = parameter
        in  %b: f32[4,4](1,4) = parameter
        in  %update.0.weight_decay: number = hyper-parameter of the optimizer
        in  %update.0.momentum: number = hyper-parameter of the optimizer
        in  %update.0.lr: number = hyper-parameter of the optimizer
        in  %update.0.dampening: number = hyper-parameter of the optimizer
        in  %update.0.is_first_step: number = hyper-parameter of the optimizer
        fwd %/view.0: f32[4,4] = aten.view(%a, [4, 4])
        fwd %/mul.0: f32[4,4] = aten.mul.Tensor(%/view.0, %b)
        fwd %/dot.0: f32[] = aten.sum(%/mul.0)
        bwd %/grad.mul.0: f32[16] = aten.mul.Tensor(%a, %/dot.0)
        bwd %reduce/a/all_reduce: f32[16] = _c10d_functional.all_reduce(%/grad.mul.0, sum, dp)  {group=dp(2) op=sum dtype=f32 bytes=64 members=[a]}
        bwd %reduce/a/wait: f32[16] = _c10d_functional.wait_tensor(%reduce/a/all_reduce)
        bwd %/grad.mul.1: f32[4,4] = aten.mul.Tensor(%/view.0, %/dot.0)
        bwd %reduce/b/all_reduce: f32[4,4] = _c10d_functional.all_reduce(%/grad.mul.1, sum, dp)  {group=dp(2) op=sum dtype=f32 bytes=64 members=[b]}
        bwd %reduce/b/wait: f32[4,4] = _c10d_functional.wait_tensor(%reduce/b/all_reduce)
        upd %update.0/grads.b.permute: f32[4,4](1,4) = aten.permute(%reduce/b/wait, [1, 0])
        upd %update.0/grads.b.laid_out: f32[4,4] = aten.clone(%update.0/grads.b.permute, memory_format=contiguous_format)
        upd %update.0/grads.b.as_parameter: f32[4,4](1,4) = aten.permute(%update.0/grads.b.laid_out, [1, 0])
        upd %update.0/sgd: - = aten._fused_sgd_([%a, %b], [%reduce/a/wait, %update.0/grads.b.as_parameter], [], weight_decay=%update.0.weight_decay, momentum=%update.0.momentum, lr=%update.0.lr, dampening=%update.0.dampening, nesterov=False, maximize=False, is_first_step=%update.0.is_first_step)
        return [%/dot.0]
        """,
        numerics="defines",
    )


def test_updates_that_wait_for_one_norm_stay_together() -> None:
    clipped = """
    upd %update/norms: (f32[], f32[]) = aten._foreach_norm.Scalar([%reduce/a/wait, %reduce/b/wait], 2)
    upd %update/stacked: f32[2] = aten.stack(%update/norms)
    upd %update/coefficient: f32[] = aten.linalg_vector_norm(%update/stacked, 2)
    upd %update/clipped.a: f32[16] = aten.mul.Tensor(%reduce/a/wait, %update/coefficient)
    upd %update/clipped.b: f32[4,4](1,4) = aten.mul.Tensor(%reduce/b/wait, %update/coefficient)
    """
    update = UPDATE.replace("[%reduce/a/wait, %reduce/b/wait]", "[%update/clipped.a, %update/clipped.b]")
    check(INPUTS + REDUCED + clipped + update, SplitUpdates(), None)
