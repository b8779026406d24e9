"""What `schedule` makes of a few lines of text, and what it leaves."""

from commfuse_fx.passes.schedule.schedule import Schedule
from tests.passes.cases import check, priced
from tests.passes.schedule.test_overlap_text import STEP


def test_the_fastest_arrangement_is_that_of_overlap_where_nothing_is_urgent() -> None:
    check(
        STEP,
        priced(Schedule),
        """
        in  %a: f32[4] = parameter
        in  %b: f32[4] = parameter
        fwd %/dot.0: f32[] = aten.dot(%a, %b)
        bwd %/grad.mul.0: f32[4] = aten.mul.Tensor(%a, %/dot.0)
        bwd %reduce/b/all_reduce: f32[4] = _c10d_functional.all_reduce(%/grad.mul.0, sum, dp)  {group=dp(2) op=sum dtype=f32 bytes=16 members=[b]}
        bwd %/grad.mul.1: f32[4] = aten.mul.Tensor(%b, %/dot.0)
        bwd %reduce/a/all_reduce: f32[4] = _c10d_functional.all_reduce(%/grad.mul.1, sum, dp)  {group=dp(2) op=sum dtype=f32 bytes=16 members=[a]}
        bwd %reduce/b/wait: f32[4] = _c10d_functional.wait_tensor(%reduce/b/all_reduce)
        bwd %reduce/a/wait: f32[4] = _c10d_functional.wait_tensor(%reduce/a/all_reduce)
        return [%/dot.0, %reduce/a/wait, %reduce/b/wait]
        """,
    )


def test_a_step_without_collectives_has_no_arrangements() -> None:
    check(
        """
        in  %x: f32[4] = input
        fwd %/sum.0: f32[] = aten.sum(%x)
        return [%/sum.0]
        """,
        priced(Schedule),
        None,
    )


def test_what_the_limit_tries_out_leaves_no_memory_to_write_into() -> None:
    check(
        """
        in  %x: f32[2,4] = input
        fwd %/mul.0: f32[2,4] = aten.mul.Tensor(%x, %x)
        fwd %/_log_softmax.0: f32[2,4] = aten._log_softmax(%/mul.0, 1, False)
        fwd %/sum.0: f32[] = aten.sum(%/_log_softmax.0)
        return [%/sum.0]
        """,
        priced(Schedule, memory_limit=1 << 20),
        None,
    )
