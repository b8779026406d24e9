"""What `vote_first` makes of a few lines of text, and what it leaves."""

from commfuse_fx.passes.schedule.vote_first import VoteFirst
from tests.passes.cases import check, priced

STEP = """
    in  %w: f32[32,4] = parameter
    in  %x: i64[2] = input
    fwd %rows/w/numbers: i64[2] = aten.view(%x, [2])
    fwd %rows/w/numbers/all_gather: i64[4] = _c10d_functional.all_gather_into_tensor(%rows/w/numbers, 2, dp)  {group=dp(2) dtype=i64 bytes=32 members=[rows/w/numbers]}
    fwd %/embedding.0: f32[2,4] = aten.embedding(%w, %x)
    fwd %/neg.0: f32[2,4] = aten.neg(%/embedding.0)
    fwd %/exp.0: f32[2,4] = aten.exp(%/neg.0)
    fwd %/sum.0: f32[] = aten.sum(%/exp.0)
    bwd %rows/w/numbers/wait: i64[4] = _c10d_functional.wait_tensor(%rows/w/numbers/all_gather)
    bwd %/grad.embedding_dense_backward.0: f32[32,4] = aten.embedding_dense_backward(%/exp.0, %x, 32, -1, False)
    bwd %rows/w/lookup: f32[4,4] = aten.index_select(%/grad.embedding_dense_backward.0, 0, %rows/w/numbers/wait)
    return [%/sum.0]
"""


def test_numbers_of_rows_leave_in_the_middle_of_the_time_to_their_wait() -> None:
    check(
        STEP,
        priced(VoteFirst),
        """
        in  %w: f32[32,4] = parameter
        in  %x: i64[2] = input
        fwd %rows/w/numbers: i64[2] = aten.view(%x, [2])
        fwd %/embedding.0: f32[2,4] = aten.embedding(%w, %x)
        fwd %/neg.0: f32[2,4] = aten.neg(%/embedding.0)
        fwd %rows/w/numbers/all_gather: i64[4] = _c10d_functional.all_gather_into_tensor(%rows/w/numbers, 2, dp)  {group=dp(2) dtype=i64 bytes=32 members=[rows/w/numbers]}
        fwd %/exp.0: f32[2,4] = aten.exp(%/neg.0)
        fwd %/sum.0: f32[] = aten.sum(%/exp.0)
        bwd %rows/w/numbers/wait: i64[4] = _c10d_functional.wait_tensor(%rows/w/numbers/all_gather)
        bwd %/grad.embedding_dense_backward.0: f32[32,4] = aten.embedding_dense_backward(%/exp.0, %x, 32, -1, False)
        bwd %rows/w/lookup: f32[4,4] = aten.index_select(%/grad.embedding_dense_backward.0, 0, %rows/w/numbers/wait)
        return [%/sum.0]
        """,
    )


def test_any_other_collective_starts_where_it_stands() -> None:
    check(STEP.replace("members=[rows/w/numbers]", "members=[x]"), priced(VoteFirst), None)
