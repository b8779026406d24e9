"""What `issue_by_need` makes of a few lines of text, and what it leaves."""

from commfuse_fx.passes.schedule.issue_by_need import IssueByNeed
from tests.passes.cases import check, priced

STEP = """
    in  %x: f32[1024,1024] = input
    in  %y: f32[4] = input
    fwd %x/all_reduce: f32[1024,1024] = _c10d_functional.all_reduce(%x, sum, dp)  {group=dp(2) op=sum dtype=f32 bytes=4194304 members=[x]}
    fwd %/neg.0: f32[4] = aten.neg(%y)
    fwd %y/all_reduce: f32[4] = _c10d_functional.all_reduce(%/neg.0, sum, dp)  {group=dp(2) op=sum dtype=f32 bytes=16 members=[y]}
    fwd %y/wait: f32[4] = _c10d_functional.wait_tensor(%y/all_reduce)
    fwd %/dot.0: f32[] = aten.dot(%y/wait, %/neg.0)
    fwd %/mm.0: f32[1024,1024] = aten.mm(%x, %x)
    fwd %x/wait: f32[1024,1024] = _c10d_functional.wait_tensor(%x/all_reduce)
    fwd %/add.0: f32[1024,1024] = aten.add.Tensor(%x/wait, %/mm.0)
    fwd %/sum.0: f32[] = aten.sum(%/add.0)
    fwd %/add.1: f32[] = aten.add.Tensor(%/sum.0, %/dot.0)
    return [%/add.1]
"""


def test_a_large_message_that_is_needed_late_lets_a_small_one_pass() -> None:
    check(
        STEP,
        priced(IssueByNeed),
        """
        in  %x: f32[1024,1024] = input
        in  %y: f32[4] = input
        fwd %/neg.0: f32[4] = aten.neg(%y)
        fwd %y/all_reduce: f32[4] = _c10d_functional.all_reduce(%/neg.0, sum, dp)  {group=dp(2) op=sum dtype=f32 bytes=16 members=[y]}
        fwd %x/all_reduce: f32[1024,1024] = _c10d_functional.all_reduce(%x, sum, dp)  {group=dp(2) op=sum dtype=f32 bytes=4194304 members=[x]}
        fwd %y/wait: f32[4] = _c10d_functional.wait_tensor(%y/all_reduce)
        fwd %/dot.0: f32[] = aten.dot(%y/wait, %/neg.0)
        fwd %/mm.0: f32[1024,1024] = aten.mm(%x, %x)
        fwd %x/wait: f32[1024,1024] = _c10d_functional.wait_tensor(%x/all_reduce)
        fwd %/add.0: f32[1024,1024] = aten.add.Tensor(%x/wait, %/mm.0)
        fwd %/sum.0: f32[] = aten.sum(%/add.0)
        fwd %/add.1: f32[] = aten.add.Tensor(%/sum.0, %/dot.0)
        return [%/add.1]
        """,
    )


def test_messages_that_are_needed_in_the_order_in_which_they_are_ready_keep_it() -> None:
    lines = STEP.splitlines()
    lines.insert(6, lines.pop(9))
    check("\n".join(lines), priced(IssueByNeed), None)
