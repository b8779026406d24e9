"""What `broadcast_buffers` makes of a few lines of text, and what it leaves."""

from commfuse_fx.passes.distribute.broadcast_buffers import BroadcastBuffers
from commfuse_fx.testing import assert_pass
from tests.passes.cases import check

STEP = """
    in  %w: f32[2,2] = parameter
    in  %norm.mean: f32[2] = buffer
    in  %norm.table: f32[2,2](1,2) = buffer
    fwd %/add.0: f32[2] = aten.add.Scalar(%norm.mean, 1.0)
    fwd %/mul.0: f32[2,2] = aten.mul.Tensor(%w, %norm.table)
    fwd %/sum.0: f32[] = aten.sum(%/mul.0)
    bwd %/grad.mul.0: f32[2,2] = aten.mul.Tensor(%w, %/sum.0)
    upd %update/norm.mean: f32[2] = aten.copy_(%norm.mean, %/add.0)
    return [%/sum.0, %/grad.mul.0]
"""


def test_readers_and_written_values_follow_from_what_rank_0_sends() -> None:
    check(
        STEP,
        BroadcastBuffers("dp"),
        """
        in  %w: f32[2,2] = parameter
        in  %norm.mean: f32[2] = buffer
        in  %norm.table: f32[2,2](1,2) = buffer
        fwd %buffers/norm.mean/broadcast: f32[2] = _c10d_functional.broadcast(%norm.mean, 0, dp)  {group=dp(2) dtype=f32 bytes=8 members=[norm.mean]}
        fwd %buffers/norm.mean/wait: f32[2] = _c10d_functional.wait_tensor(%buffers/norm.mean/broadcast)
        fwd %buffers/norm.table/flat: f32[4] = aten.as_strided(%norm.table, [4], [1])
        fwd %buffers/norm.table/broadcast: f32[4] = _c10d_functional.broadcast(%buffers/norm.table/flat, 0, dp)  {group=dp(2) dtype=f32 bytes=16 members=[norm.table]}
        fwd %/add.0: f32[2] = aten.add.Scalar(%buffers/norm.mean/wait, 1.0)
        fwd %buffers/norm.table/wait: f32[4] = _c10d_functional.wait_tensor(%buffers/norm.table/broadcast)
        fwd %buffers/norm.table/value: f32[2,2](1,2) = aten.as_strided(%buffers/norm.table/wait, [2, 2], [1, 2])
        fwd %/mul.0: f32[2,2] = aten.mul.Tensor(%w, %buffers/norm.table/value)
        fwd %/sum.0: f32[] = aten.sum(%/mul.0)
        bwd %/grad.mul.0: f32[2,2] = aten.mul.Tensor(%w, %/sum.0)
        upd %update/norm.table: f32[2,2](1,2) = aten.copy_(%norm.table, %buffers/norm.table/value)
        upd %update/norm.mean: f32[2] = aten.copy_(%norm.mean, %/add.0)
        return [%/sum.0, %/grad.mul.0]
        """,
    )


def test_an_evaluation_and_one_rank_send_nothing() -> None:
    check(f"# step: eval\n{STEP}", BroadcastBuffers("dp"), None)
    check(f"# world: 1\n{STEP}", BroadcastBuffers("dp"), None)
    check(STEP, BroadcastBuffers(None), None)


def test_where_the_caller_starts_the_backward_they_are_sent_ahead_of_gradients() -> None:
    assert_pass(
        """
        in  %w: f32[2,2] = parameter
        in  %norm.mean: f32[2] = buffer
        in  %x: f32[2,2] = input
        fwd %/mm.0: f32[2,2] = aten.mm(%x, %w)
        fwd %/mean.0: f32[2] = aten.mean.dim(%/mm.0, [0])
        upd %update/norm.mean: f32[2] = aten.copy_(%norm.mean, %/mean.0)
        fwd %outputs: (f32[2,2]) = hand_over([%/mm.0])
        bwd %output.grad: f32[2,2] = getitem(%outputs, 0)
        bwd %/grad.mm.0: f32[2,2] = aten.mm(%x, %output.grad)
        return [%outputs, %/grad.mm.0]
        """,
        BroadcastBuffers("dp"),
        """
        in  %w: f32[2,2] = parameter
        in  %norm.mean: f32[2] = buffer
        in  %x: f32[2,2] = input
        fwd %/mm.0: f32[2,2] = aten.mm(%x, %w)
        fwd %/mean.0: f32[2] = aten.mean.dim(%/mm.0, [0])
        upd %update/norm.mean: f32[2] = aten.copy_(%norm.mean, %/mean.0)
        fwd %outputs: (f32[2,2]) = hand_over([%/mm.0])
        bwd %buffers/norm.mean/broadcast: f32[2] = _c10d_functional.broadcast(%norm.mean, 0, dp)  {group=dp(2) dtype=f32 bytes=8 members=[norm.mean]}
        bwd %output.grad: f32[2,2] = getitem(%outputs, 0)
        bwd %/grad.mm.0: f32[2,2] = aten.mm(%x, %output.grad)
        bwd %buffers/norm.mean/wait: f32[2] = _c10d_functional.wait_tensor(%buffers/norm.mean/broadcast)
        upd %update/norm.mean.0: f32[2] = aten.copy_(%norm.mean, %buffers/norm.mean/wait)
        return [%outputs, %/grad.mm.0]
        """,
    )
