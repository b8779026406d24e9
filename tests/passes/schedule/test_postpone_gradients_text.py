"""What `postpone_gradients` makes of a few lines of text, and what it leaves."""

from commfuse_fx.passes.schedule.postpone_gradients import PostponeGradients
from tests.passes.cases import check, priced

STEP = """
    in  %v: f32[512,64] = parameter
    in  %w: f32[64,64] = parameter
    in  %x: f32[64,512] = input
    fwd %0/mm.0: f32[64,64] = aten.mm(%x, %v)
    fwd %1/mm.0: f32[64,64] = aten.mm(%0/mm.0, %w)
    fwd %/sum.0: f32[] = aten.sum(%1/mm.0)
    bwd %1/grad.t.0: f32[64,64](1,64) = aten.t(%0/mm.0)
    bwd %1/grad.mm.0: f32[64,64] = aten.mm(%1/grad.t.0, %1/mm.0)
    bwd %reduce/w/all_reduce: f32[64,64] = _c10d_functional.all_reduce(%1/grad.mm.0, sum, dp)  {group=dp(2) op=sum dtype=f32 bytes=16384 members=[w]}
    bwd %0/grad.t.0: f32[512,64](1,512) = aten.t(%x)
    bwd %0/grad.mm.0: f32[512,64] = aten.mm(%0/grad.t.0, %1/mm.0)
    bwd %reduce/v/all_reduce: f32[512,64] = _c10d_functional.all_reduce(%0/grad.mm.0, sum, dp)  {group=dp(2) op=sum dtype=f32 bytes=131072 members=[v]}
    bwd %reduce/w/wait: f32[64,64] = _c10d_functional.wait_tensor(%reduce/w/all_reduce)
    bwd %reduce/v/wait: f32[512,64] = _c10d_functional.wait_tensor(%reduce/v/all_reduce)
    return [%/sum.0, %reduce/v/wait, %reduce/w/wait]
"""


def test_a_gradient_that_can_wait_is_computed_while_the_last_one_is_on_the_wire() -> None:
    check(
        STEP,
        priced(PostponeGradients),
        """
        in  %v: f32[512,64] = parameter
        in  %w: f32[64,64] = parameter
        in  %x: f32[64,512] = input
        fwd %0/mm.0: f32[64,64] = aten.mm(%x, %v)
        fwd %1/mm.0: f32[64,64] = aten.mm(%0/mm.0, %w)
        fwd %/sum.0: f32[] = aten.sum(%1/mm.0)
        bwd %0/grad.t.0: f32[512,64](1,512) = aten.t(%x)
        bwd %0/grad.mm.0: f32[512,64] = aten.mm(%0/grad.t.0, %1/mm.0)
        bwd %reduce/v/all_reduce: f32[512,64] = _c10d_functional.all_reduce(%0/grad.mm.0, sum, dp)  {group=dp(2) op=sum dtype=f32 bytes=131072 members=[v]}
        bwd %1/grad.t.0: f32[64,64](1,64) = aten.t(%0/mm.0)
        bwd %1/grad.mm.0: f32[64,64] = aten.mm(%1/grad.t.0, %1/mm.0)
        bwd %reduce/w/all_reduce: f32[64,64] = _c10d_functional.all_reduce(%1/grad.mm.0, sum, dp)  {group=dp(2) op=sum dtype=f32 bytes=16384 members=[w]}
        bwd %reduce/w/wait: f32[64,64] = _c10d_functional.wait_tensor(%reduce/w/all_reduce)
        bwd %reduce/v/wait: f32[512,64] = _c10d_functional.wait_tensor(%reduce/v/all_reduce)
        return [%/sum.0, %reduce/v/wait, %reduce/w/wait]
        """,
    )


def test_what_the_last_gradient_needs_stays_before_it() -> None:
    needed = STEP.replace("aten.mm(%0/grad.t.0, %1/mm.0)", "aten.mm(%0/grad.t.0, %1/grad.mm.0)")
    check(needed, priced(PostponeGradients), None)


def test_one_gradient_has_no_other_to_wait_for_it() -> None:
    check(STEP.replace("members=[w]", "members=[loss]"), priced(PostponeGradients), None)
