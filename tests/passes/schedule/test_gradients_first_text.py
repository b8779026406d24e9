"""What `gradients_first` makes of a few lines of text, and what it leaves."""

from commfuse_fx.passes.schedule.gradients_first import GradientsFirst
from commfuse_fx.testing import assert_pass
from tests.passes.cases import check

STEP = """
    in  %v: f32[4,4] = parameter
    in  %w: f32[4,4] = parameter
    in  %x: f32[4,4] = input
    fwd %0/mm.0: f32[4,4] = aten.mm(%x, %v)
    fwd %1/mm.0: f32[4,4] = aten.mm(%0/mm.0, %w)
    fwd %/sum.0: f32[] = aten.sum(%1/mm.0)
    bwd %/grad.mul.0: f32[4,4] = aten.mul.Tensor(%1/mm.0, %/sum.0)
    bwd %1/grad.t.0: f32[4,4](1,4) = aten.t(%w)
    bwd %1/grad.mm.0: f32[4,4] = aten.mm(%/grad.mul.0, %1/grad.t.0)
    bwd %1/grad.t.1: f32[4,4](1,4) = aten.t(%0/mm.0)
    bwd %1/grad.mm.1: f32[4,4] = aten.mm(%1/grad.t.1, %/grad.mul.0)
    bwd %reduce/w/all_reduce: f32[4,4] = _c10d_functional.all_reduce(%1/grad.mm.1, sum, dp)  {group=dp(2) op=sum dtype=f32 bytes=64 members=[w]}
    bwd %0/grad.t.0: f32[4,4](1,4) = aten.t(%x)
    bwd %0/grad.mm.0: f32[4,4] = aten.mm(%0/grad.t.0, %1/grad.mm.0)
    bwd %reduce/w/wait: f32[4,4] = _c10d_functional.wait_tensor(%reduce/w/all_reduce)
    return [%/sum.0, %0/grad.mm.0, %reduce/w/wait]
"""


def test_the_gradient_of_a_weight_is_computed_before_that_of_what_the_layer_was_given() -> None:
    check(
        STEP,
        GradientsFirst(),
        """
        in  %v: f32[4,4] = parameter
        in  %w: f32[4,4] = parameter
        in  %x: f32[4,4] = input
        fwd %0/mm.0: f32[4,4] = aten.mm(%x, %v)
        bwd %1/grad.t.1: f32[4,4](1,4) = aten.t(%0/mm.0)
        fwd %1/mm.0: f32[4,4] = aten.mm(%0/mm.0, %w)
        fwd %/sum.0: f32[] = aten.sum(%1/mm.0)
        bwd %/grad.mul.0: f32[4,4] = aten.mul.Tensor(%1/mm.0, %/sum.0)
        bwd %1/grad.mm.1: f32[4,4] = aten.mm(%1/grad.t.1, %/grad.mul.0)
        bwd %reduce/w/all_reduce: f32[4,4] = _c10d_functional.all_reduce(%1/grad.mm.1, sum, dp)  {group=dp(2) op=sum dtype=f32 bytes=64 members=[w]}
        bwd %1/grad.t.0: f32[4,4](1,4) = aten.t(%w)
        bwd %1/grad.mm.0: f32[4,4] = aten.mm(%/grad.mul.0, %1/grad.t.0)
        bwd %0/grad.t.0: f32[4,4](1,4) = aten.t(%x)
        bwd %0/grad.mm.0: f32[4,4] = aten.mm(%0/grad.t.0, %1/grad.mm.0)
        bwd %reduce/w/wait: f32[4,4] = _c10d_functional.wait_tensor(%reduce/w/all_reduce)
        return [%/sum.0, %0/grad.mm.0, %reduce/w/wait]
        """,
    )


def test_gradients_that_nobody_reduces_stay_where_they_are() -> None:
    check(STEP.replace("members=[w]", "members=[loss]"), GradientsFirst(), None)


SENT = """
        in  %b: f32[4] = parameter
        in  %norm.mean: f32[4] = buffer
        in  %x: f32[4] = input
        fwd %/add.0: f32[4] = aten.add.Tensor(%x, %b)
        fwd %outputs: (f32[4]) = hand_over([%/add.0])
        bwd %buffers/norm.mean/broadcast: f32[4] = _c10d_functional.broadcast(%norm.mean, 0, dp)  {group=dp(2) dtype=f32 bytes=16 members=[norm.mean]}
        bwd %output.0.grad: f32[4] = getitem(%outputs, 0)
        bwd %reduce/b/all_reduce: f32[4] = _c10d_functional.all_reduce(%output.0.grad, sum, dp)  {group=dp(2) op=sum dtype=f32 bytes=16 members=[b]}
        bwd %buffers/norm.mean/wait: f32[4] = _c10d_functional.wait_tensor(%buffers/norm.mean/broadcast)
        bwd %reduce/b/wait: f32[4] = _c10d_functional.wait_tensor(%reduce/b/all_reduce)
        upd %update/norm.mean: f32[4] = aten.copy_(%norm.mean, %buffers/norm.mean/wait)
        return [%outputs, %reduce/b/wait]
"""


def test_buffers_are_sent_ahead_of_gradients() -> None:
    assert_pass(SENT, GradientsFirst(), None)
