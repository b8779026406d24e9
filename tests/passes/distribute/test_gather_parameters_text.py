"""What `gather_parameters` makes of a few lines of text, and what it leaves."""

from commfuse_fx.passes.distribute.gather_parameters import GatherParameters
from tests.passes.cases import check

UPDATED = """
    in  %a: f32[13,2] = parameter
    in  %b: f32[16] = parameter
    in  %x: f32[2] = input
    in  %update.0.weight_decay: number = hyper-parameter of the optimizer
    in  %update.0.momentum: number = hyper-parameter of the optimizer
    in  %update.0.lr: number = hyper-parameter of the optimizer
    in  %update.0.dampening: number = hyper-parameter of the optimizer
    in  %update.0.is_first_step: number = hyper-parameter of the optimizer
    fwd %/mv.0: f32[13] = aten.mv(%a, %x)
    fwd %/sum.0: f32[] = aten.sum(%/mv.0)
    fwd %/sum.1: f32[] = aten.sum(%b)
    fwd %/mul.0: f32[] = aten.mul.Tensor(%/sum.0, %/sum.1)
    bwd %/grad.expand.0: f32[13,2](0,1) = aten.expand(%x, [13, 2])
    bwd %/grad.mul.0: f32[13,2] = aten.mul.Tensor(%/grad.expand.0, %/sum.1)
    bwd %shard/a/padded_gradient: f32[14,2] = aten.constant_pad_nd(%/grad.mul.0, [0, 0, 0, 1])
    bwd %reduce/a/reduce_scatter: f32[7,2] = _c10d_functional.reduce_scatter_tensor(%shard/a/padded_gradient, avg, 2, dp)  {group=dp(2) op=avg dtype=f32 bytes=104 members=[a]}
    bwd %/grad.expand.1: f32[16](0) = aten.expand(%/sum.0, [16])
    bwd %/grad.clone.0: f32[16] = aten.clone(%/grad.expand.1, memory_format=contiguous_format)
    bwd %reduce/b/reduce_scatter: f32[8] = _c10d_functional.reduce_scatter_tensor(%/grad.clone.0, avg, 2, dp)  {group=dp(2) op=avg dtype=f32 bytes=64 members=[b]}
    bwd %reduce/a/wait: f32[7,2] = _c10d_functional.wait_tensor(%reduce/a/reduce_scatter)
    bwd %reduce/b/wait: f32[8] = _c10d_functional.wait_tensor(%reduce/b/reduce_scatter)
    upd %shard/a/padded: f32[14,2] = aten.constant_pad_nd(%a, [0, 0, 0, 1])
    upd %shard/index/dp: - = axis_index(dp)
    upd %shard/begin.7/dp: - = mul(%shard/index/dp, 7)
    upd %shard/a/rows: f32[7,2] = aten.narrow(%shard/a/padded, 0, %shard/begin.7/dp, 7)
    upd %shard/begin.8/dp: - = mul(%shard/index/dp, 8)
    upd %shard/b/rows: f32[8] = aten.narrow(%b, 0, %shard/begin.8/dp, 8)
    upd %update.0/sgd: - = aten._fused_sgd_([%shard/a/rows, %shard/b/rows], [%reduce/a/wait, %reduce/b/wait], [], weight_decay=%update.0.weight_decay, momentum=%update.0.momentum, lr=%update.0.lr, dampening=%update.0.dampening, nesterov=False, maximize=False, is_first_step=%update.0.is_first_step)
    return [%/mul.0]
"""


def test_rows_are_gathered_and_written_without_their_padding() -> None:
    check(
        UPDATED,
        GatherParameters(),
        """
        in  %a: f32[13,2] = parameter
        in  %b: f32[16] = parameter
        in  %x: f32[2] = input
        in  %update.0.weight_decay: number = hyper-parameter of the optimizer
        in  %update.0.momentum: number = hyper-parameter of the optimizer
        in  %update.0.lr: number = hyper-parameter of the optimizer
        in  %update.0.dampening: number = hyper-parameter of the optimizer
        in  %update.0.is_first_step: number = hyper-parameter of the optimizer
        fwd %/mv.0: f32[13] = aten.mv(%a, %x)
        fwd %/sum.0: f32[] = aten.sum(%/mv.0)
        fwd %/sum.1: f32[] = aten.sum(%b)
        fwd %/mul.0: f32[] = aten.mul.Tensor(%/sum.0, %/sum.1)
        bwd %/grad.expand.0: f32[13,2](0,1) = aten.expand(%x, [13, 2])
        bwd %/grad.mul.0: f32[13,2] = aten.mul.Tensor(%/grad.expand.0, %/sum.1)
        bwd %shard/a/padded_gradient: f32[14,2] = aten.constant_pad_nd(%/grad.mul.0, [0, 0, 0, 1])
        bwd %reduce/a/reduce_scatter: f32[7,2] = _c10d_functional.reduce_scatter_tensor(%shard/a/padded_gradient, avg, 2, dp)  {group=dp(2) op=avg dtype=f32 bytes=104 members=[a]}
        bwd %/grad.expand.1: f32[16](0) = aten.expand(%/sum.0, [16])
        bwd %/grad.clone.0: f32[16] = aten.clone(%/grad.expand.1, memory_format=contiguous_format)
        bwd %reduce/b/reduce_scatter: f32[8] = _c10d_functional.reduce_scatter_tensor(%/grad.clone.0, avg, 2, dp)  {group=dp(2) op=avg dtype=f32 bytes=64 members=[b]}
        bwd %reduce/a/wait: f32[7,2] = _c10d_functional.wait_tensor(%reduce/a/reduce_scatter)
        bwd %reduce/b/wait: f32[8] = _c10d_functional.wait_tensor(%reduce/b/reduce_scatter)
        upd %shard/a/padded: f32[14,2] = aten.constant_pad_nd(%a, [0, 0, 0, 1])
        upd %shard/index/dp: - = axis_index(dp)
        upd %shard/begin.7/dp: - = mul(%shard/index/dp, 7)
        upd %shard/a/rows: f32[7,2] = aten.narrow(%shard/a/padded, 0, %shard/begin.7/dp, 7)
        upd %shard/begin.8/dp: - = mul(%shard/index/dp, 8)
        upd %shard/b/rows: f32[8] = aten.narrow(%b, 0, %shard/begin.8/dp, 8)
        upd %update.0/sgd: - = aten._fused_sgd_([%shard/a/rows, %shard/b/rows], [%reduce/a/wait, %reduce/b/wait], [], weight_decay=%update.0.weight_decay, momentum=%update.0.momentum, lr=%update.0.lr, dampening=%update.0.dampening, nesterov=False, maximize=False, is_first_step=%update.0.is_first_step)
        upd %shard/a/all_gather: f32[14,2] = _c10d_functional.all_gather_into_tensor(%shard/a/rows, 2, dp)  {group=dp(2) dtype=f32 bytes=104 members=[a]}
        upd %shard/a/wait: f32[14,2] = _c10d_functional.wait_tensor(%shard/a/all_gather)
        upd %shard/a/without_padding: f32[13,2] = aten.narrow(%shard/a/wait, 0, 0, 13)
        upd %shard/a/write: f32[13,2] = aten.copy_(%a, %shard/a/without_padding)
        upd %shard/b/all_gather: f32[16] = _c10d_functional.all_gather_into_tensor(%shard/b/rows, 2, dp)  {group=dp(2) dtype=f32 bytes=64 members=[b]}
        upd %shard/b/wait: f32[16] = _c10d_functional.wait_tensor(%shard/b/all_gather)
        upd %shard/b/write: f32[16] = aten.copy_(%b, %shard/b/wait)
        return [%/mul.0]
        """,
    )


OWNED = (
    UPDATED[: UPDATED.index("    bwd %shard")]
    + """\
    bwd %reduce/a/reduce: f32[13,2] = commfuse.reduce(%/grad.mul.0, sum, 0, dp)  {group=dp(2) op=sum dtype=f32 bytes=104 members=[a]}
    bwd %reduce/a/wait: f32[13,2] = _c10d_functional.wait_tensor(%reduce/a/reduce)
    upd %shard/a/gradient: f32[13,2] = commfuse.of_owner(%reduce/a/wait, 0, 2, dp)
    upd %shard/a/rows: f32[13,2] = commfuse.of_owner(%a, 0, 2, dp)
    upd %update.0/sgd: - = aten._fused_sgd_([%shard/a/rows], [%shard/a/gradient], [], weight_decay=%update.0.weight_decay, momentum=%update.0.momentum, lr=%update.0.lr, dampening=%update.0.dampening, nesterov=False, maximize=False, is_first_step=%update.0.is_first_step)
"""
)


def test_what_an_owner_has_updated_is_broadcast() -> None:
    check(
        f"{OWNED}    return [%/mul.0]\n",
        GatherParameters(),
        f"""{OWNED}
    upd %shard/a/broadcast: f32[13,2] = _c10d_functional.broadcast(%a, 0, dp)  {{group=dp(2) dtype=f32 bytes=104 members=[a]}}
    upd %shard/a/wait: f32[13,2] = _c10d_functional.wait_tensor(%shard/a/broadcast)
    upd %shard/a/write: f32[13,2] = aten.copy_(%a, %shard/a/wait)
    return [%/mul.0]
""",
    )


def test_parameters_that_every_rank_updates_are_left() -> None:
    whole = [line for line in UPDATED.splitlines() if "reduce_scatter" not in line and "%shard" not in line]
    text = "\n".join(whole[:-2]).replace("%reduce/a/wait", "%x")
    nothing = "\n".join(line for line in text.splitlines() if "%reduce/" not in line and "update.0" not in line)
    check(f"{nothing}\n    return [%/mul.0]\n", GatherParameters(), None)
