"""What `resend_rows` makes of a few lines of text, and what it leaves."""

from commfuse_fx.passes.rewrite.resend_rows import ResendRows
from tests.passes.cases import check

TIED = """
    # optimizer: SGD (sgd)
    in  %w: f32[32,4] = parameter
    in  %x: i64[2] = input
    in  %update.0.lr: number = hyper-parameter of the optimizer
    in  %update.0.momentum: number = hyper-parameter of the optimizer
    in  %update.0.weight_decay: number = hyper-parameter of the optimizer
    in  %update.0.dampening: number = hyper-parameter of the optimizer
    in  %update.0.is_first_step: number = hyper-parameter of the optimizer
    fwd %/embedding.0: f32[2,4] = aten.embedding(%w, %x)
    fwd %/t.0: f32[4,32](1,4) = aten.t(%w)
    fwd %/mm.0: f32[2,32] = aten.mm(%/embedding.0, %/t.0)
    fwd %/sum.0: f32[] = aten.sum(%/mm.0)
    bwd %/grad.ones_like.0: f32[2,32] = aten.ones_like(%/mm.0)
    bwd %/grad.t.0: f32[32,2](1,32) = aten.t(%/grad.ones_like.0)
    bwd %/grad.mm.0: f32[32,4] = aten.mm(%/grad.t.0, %/embedding.0)
    bwd %/grad.mm.1: f32[2,4] = aten.mm(%/grad.ones_like.0, %w)
    bwd %/grad.embedding_dense_backward.0: f32[32,4] = aten.embedding_dense_backward(%/grad.mm.1, %x, 32, -1, False)
    bwd %/grad.add.0: f32[32,4] = aten.add.Tensor(%/grad.mm.0, %/grad.embedding_dense_backward.0)
    bwd %reduce/w/all_reduce: f32[32,4] = _c10d_functional.all_reduce(%/grad.add.0, sum, dp)  {group=dp(2) op=sum dtype=f32 bytes=512 members=[w]}
    bwd %reduce/w/wait: f32[32,4] = _c10d_functional.wait_tensor(%reduce/w/all_reduce)
    upd %update.0/sgd: - = aten._fused_sgd_([%w], [%reduce/w/wait], [], lr=%update.0.lr, momentum=%update.0.momentum, weight_decay=%update.0.weight_decay, dampening=%update.0.dampening, nesterov=False, maximize=False, is_first_step=%update.0.is_first_step)
    return [%/sum.0]
"""


def test_the_early_part_of_a_tied_embedding_leaves_early_and_looked_up_rows_once_more() -> None:
    check(
        TIED,
        ResendRows(),
        """
        in  %w: f32[32,4] = parameter
        in  %x: i64[2] = input
        in  %update.0.lr: number = hyper-parameter of the optimizer
        in  %update.0.momentum: number = hyper-parameter of the optimizer
        in  %update.0.weight_decay: number = hyper-parameter of the optimizer
        in  %update.0.dampening: number = hyper-parameter of the optimizer
        in  %update.0.is_first_step: number = hyper-parameter of the optimizer
        fwd %rows/w/numbers: i64[2] = aten.view(%x, [2])
        fwd %rows/w/numbers/all_gather: i64[4] = _c10d_functional.all_gather_into_tensor(%rows/w/numbers, 2, dp)  {group=dp(2) dtype=i64 bytes=32 members=[rows/w/numbers]}
        fwd %/embedding.0: f32[2,4] = aten.embedding(%w, %x)
        fwd %/t.0: f32[4,32](1,4) = aten.t(%w)
        fwd %/mm.0: f32[2,32] = aten.mm(%/embedding.0, %/t.0)
        fwd %/sum.0: f32[] = aten.sum(%/mm.0)
        bwd %/grad.ones_like.0: f32[2,32] = aten.ones_like(%/mm.0)
        bwd %/grad.t.0: f32[32,2](1,32) = aten.t(%/grad.ones_like.0)
        bwd %/grad.mm.0: f32[32,4] = aten.mm(%/grad.t.0, %/embedding.0)
        bwd %rows/w/numbers/wait: i64[4] = _c10d_functional.wait_tensor(%rows/w/numbers/all_gather)
        bwd %rows/w/early: f32[4,4] = aten.index_select(%/grad.mm.0, 0, %rows/w/numbers/wait)
        bwd %reduce/w/all_reduce: f32[32,4] = _c10d_functional.all_reduce(%/grad.mm.0, sum, dp)  {group=dp(2) op=sum dtype=f32 bytes=512 members=[w]}
        bwd %/grad.mm.1: f32[2,4] = aten.mm(%/grad.ones_like.0, %w)
        bwd %/grad.embedding_dense_backward.0: f32[32,4] = aten.embedding_dense_backward(%/grad.mm.1, %x, 32, -1, False)
        bwd %rows/w/lookup: f32[4,4] = aten.index_select(%/grad.embedding_dense_backward.0, 0, %rows/w/numbers/wait)
        bwd %rows/w/sum: f32[4,4] = aten.add.Tensor(%rows/w/early, %rows/w/lookup)
        bwd %reduce/w/rows/all_reduce: f32[4,4] = _c10d_functional.all_reduce(%rows/w/sum, sum, dp)  {group=dp(2) op=sum dtype=f32 bytes=64 members=[w/rows]}
        bwd %reduce/w/wait: f32[32,4] = _c10d_functional.wait_tensor(%reduce/w/all_reduce)
        bwd %reduce/w/rows/wait: f32[4,4] = _c10d_functional.wait_tensor(%reduce/w/rows/all_reduce)
        upd %put_rows.w: f32[32,4] = commfuse.put_rows_(%reduce/w/wait, %rows/w/numbers/wait, %reduce/w/rows/wait)
        upd %update.0/sgd: - = aten._fused_sgd_([%w], [%put_rows.w], [], lr=%update.0.lr, momentum=%update.0.momentum, weight_decay=%update.0.weight_decay, dampening=%update.0.dampening, nesterov=False, maximize=False, is_first_step=%update.0.is_first_step)
        return [%/sum.0]
        """,
    )


def test_where_most_rows_are_looked_up_the_gradient_stays_whole() -> None:
    check(TIED, ResendRows(most=0.1), None)
    check(TIED.replace("aten.add.Tensor", "aten.mul.Tensor"), ResendRows(), None)
