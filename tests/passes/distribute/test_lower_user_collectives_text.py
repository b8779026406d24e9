"""What `lower_user_collectives` makes of a few lines of text, and what it leaves."""

from commfuse_fx.passes.distribute.lower_user_collectives import LowerUserCollectives
from tests.passes.cases import check


def test_collectives_of_the_model_become_starts_and_waits() -> None:
    check(
        """
        # world: 4
        # mesh: dp=2xtp=2
        in  %x: f32[3,4] = input
        fwd %a/all_reduce.0: f32[3,4] = commfuse.all_reduce(%x, sum, 2, dp, 7)
        fwd %b/all_gather.0: f32[6,4] = commfuse.all_gather(%a/all_reduce.0, 2, tp, -1)
        fwd %c/t.0: f32[4,6](1,4) = aten.t(%b/all_gather.0)
        fwd %c/broadcast.0: f32[4,6] = commfuse.broadcast(%c/t.0, 0, 2, tp, -1)
        fwd %/sum.0: f32[] = aten.sum(%c/broadcast.0)
        return [%/sum.0]
        """,
        LowerUserCollectives(),
        """
        in  %x: f32[3,4] = input
        fwd %a/all_reduce.0/all_reduce: f32[3,4] = _c10d_functional.all_reduce(%x, sum, dp)  {group=dp(2) op=sum dtype=f32 bytes=48 fusion_id=7 members=[a/all_reduce.0]}
        fwd %a/all_reduce.0/wait: f32[3,4] = _c10d_functional.wait_tensor(%a/all_reduce.0/all_reduce)
        fwd %b/all_gather.0/all_gather: f32[6,4] = _c10d_functional.all_gather_into_tensor(%a/all_reduce.0/wait, 2, tp)  {group=tp(2) dtype=f32 bytes=96 members=[b/all_gather.0]}
        fwd %b/all_gather.0/wait: f32[6,4] = _c10d_functional.wait_tensor(%b/all_gather.0/all_gather)
        fwd %c/t.0: f32[4,6](1,4) = aten.t(%b/all_gather.0/wait)
        fwd %c/broadcast.0/contiguous: f32[4,6] = aten.clone(%c/t.0, memory_format=contiguous_format)
        fwd %c/broadcast.0/broadcast: f32[4,6] = _c10d_functional.broadcast(%c/broadcast.0/contiguous, 0, tp)  {group=tp(2) dtype=f32 bytes=96 members=[c/broadcast.0]}
        fwd %c/broadcast.0/wait: f32[4,6] = _c10d_functional.wait_tensor(%c/broadcast.0/broadcast)
        fwd %/sum.0: f32[] = aten.sum(%c/broadcast.0/wait)
        return [%/sum.0]
        """,
    )


def test_rows_that_do_not_divide_are_padded_before_they_are_scattered() -> None:
    check(
        """
        in  %x: f32[3,4] = input
        fwd %/reduce_scatter.0: f32[2,4] = commfuse.reduce_scatter(%x, sum, 2, dp, -1)
        fwd %/sum.0: f32[] = aten.sum(%/reduce_scatter.0)
        return [%/sum.0]
        """,
        LowerUserCollectives(),
        """
        in  %x: f32[3,4] = input
        fwd %/reduce_scatter.0/pad: f32[4,4] = aten.constant_pad_nd(%x, [0, 0, 0, 1], 0)
        fwd %/reduce_scatter.0/reduce_scatter: f32[2,4] = _c10d_functional.reduce_scatter_tensor(%/reduce_scatter.0/pad, sum, 2, dp)  {group=dp(2) op=sum dtype=f32 bytes=64 members=[/reduce_scatter.0]}
        fwd %/reduce_scatter.0/wait: f32[2,4] = _c10d_functional.wait_tensor(%/reduce_scatter.0/reduce_scatter)
        fwd %/sum.0: f32[] = aten.sum(%/reduce_scatter.0/wait)
        return [%/sum.0]
        """,
    )


ALONE = """
    in  %x: f32[4] = input
    fwd %/all_reduce.0: f32[4] = commfuse.all_reduce(%x, sum, 1, dp, -1)
    fwd %/sum.0: f32[] = aten.sum(%/all_reduce.0)
    return [%/sum.0]
"""


def test_a_group_of_one_rank_sends_nothing() -> None:
    check(
        f"# world: 1\n{ALONE}",
        LowerUserCollectives(),
        """
        in  %x: f32[4] = input
        fwd %/sum.0: f32[] = aten.sum(%x)
        return [%/sum.0]
        """,
    )
    check(ALONE.replace("commfuse.all_reduce(%x, sum, 1, dp, -1)", "aten.neg(%x)"), LowerUserCollectives(), None)
