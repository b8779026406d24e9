"""What `stream_buckets` makes of a few lines of text, and what it leaves."""

import pytest

from commfuse_fx.passes.schedule.stream_buckets import StreamBuckets
from commfuse_fx.testing import assert_pass, parse_program
from tests.passes.cases import check

STEP = """
    in  %a: f32[16] = parameter
    in  %b: f32[16] = parameter
    fwd %/dot.0: f32[] = aten.dot(%a, %b)
    bwd %bucket.0/storage: f32[32] = aten.empty.memory_format([32], dtype=f32, device=cpu)
    bwd %bucket.0/place.b: f32[16] = aten.as_strided(%bucket.0/storage, [16], [1], 0)
    bwd %bucket.0/write.b: f32[16] = aten.mul.out(%a, %/dot.0, out=%bucket.0/place.b)
    bwd %bucket.0/place.a: f32[16] = aten.as_strided(%bucket.0/storage, [16], [1], 16)
    bwd %bucket.0/write.a: f32[16] = aten.mul.out(%b, %/dot.0, out=%bucket.0/place.a)
    bwd %bucket.0/in_place: f32[32] = _c10d_functional.all_reduce_(%bucket.0/storage, sum, dp)  {group=dp(2) op=sum dtype=f32 bytes=128 members=[b, a]}
    bwd %bucket.0/reduced: f32[32] = _c10d_functional.wait_tensor(%bucket.0/in_place)
    bwd %bucket.0/reduced.b: f32[16] = aten.as_strided(%bucket.0/reduced, [16], [1], 0)
    bwd %bucket.0/reduced.a: f32[16] = aten.as_strided(%bucket.0/reduced, [16], [1], 16)
    return [%/dot.0, %bucket.0/reduced.a, %bucket.0/reduced.b]
"""


@pytest.mark.parametrize("piece", [64, 1024])
def test_a_stretch_that_is_complete_and_large_enough_leaves_before_the_rest(piece: int) -> None:
    """The first bucket of the step is cut even if it is smaller than a piece."""
    check(
        STEP,
        StreamBuckets(piece=piece, first=64),
        """
        in  %a: f32[16] = parameter
        in  %b: f32[16] = parameter
        fwd %/dot.0: f32[] = aten.dot(%a, %b)
        bwd %bucket.0/storage: f32[32] = aten.empty.memory_format([32], dtype=f32, device=cpu)
        bwd %bucket.0/place.b: f32[16] = aten.as_strided(%bucket.0/storage, [16], [1], 0)
        bwd %bucket.0/write.b: f32[16] = aten.mul.out(%a, %/dot.0, out=%bucket.0/place.b)  {sends bucket.0/in_place [0:16]}
        bwd %bucket.0/place.a: f32[16] = aten.as_strided(%bucket.0/storage, [16], [1], 16)
        bwd %bucket.0/write.a: f32[16] = aten.mul.out(%b, %/dot.0, out=%bucket.0/place.a)
        bwd %bucket.0/in_place: f32[32] = _c10d_functional.all_reduce_(%bucket.0/storage, sum, dp)  {group=dp(2) op=sum dtype=f32 bytes=128 members=[b, a]}  {sends the rest: [16:32]}
        bwd %bucket.0/reduced: f32[32] = _c10d_functional.wait_tensor(%bucket.0/in_place)
        bwd %bucket.0/reduced.b: f32[16] = aten.as_strided(%bucket.0/reduced, [16], [1], 0)
        bwd %bucket.0/reduced.a: f32[16] = aten.as_strided(%bucket.0/reduced, [16], [1], 16)
        return [%/dot.0, %bucket.0/reduced.a, %bucket.0/reduced.b]
        """,
    )


def test_small_buckets_and_small_stretches_leave_whole() -> None:
    check(STEP, StreamBuckets(), None)
    check(STEP, StreamBuckets(piece=127, first=127), None)


SCATTER = """
    in  %a: f32[4,8] = parameter
    in  %b: f32[2,8] = parameter
    fwd %/sum.0: f32[] = aten.sum(%a)
    bwd %bucket.0/storage: f32[48] = aten.empty.memory_format([48], dtype=f32, device=cpu)
    bwd %bucket.0/place.b: f32[2,8] = aten.as_strided(%bucket.0/storage, [2, 8], [8, 1], 0)
    bwd %bucket.0/write.b: f32[2,8] = aten.mul.out(%b, %/sum.0, out=%bucket.0/place.b)
    bwd %bucket.0/place.a: f32[4,8] = aten.as_strided(%bucket.0/storage, [4, 8], [8, 1], 16)
    bwd %bucket.0/write.a: f32[4,8] = aten.mul.out(%a, %/sum.0, out=%bucket.0/place.a)
    bwd %bucket.0/reduce_scatter: f32[24] = commfuse.reduce_scatter_members(%bucket.0/storage, sum, 2, dp, [8, 16])  {group=dp(2) op=sum dtype=f32 bytes=192 members=[b, a]}
    bwd %bucket.0/wait: f32[24] = _c10d_functional.wait_tensor(%bucket.0/reduce_scatter)
    bwd %/sum.1: f32[] = aten.sum(%bucket.0/wait)
    return [%/sum.1]
"""
GATHER = """
    in  %a: f32[6] = input
    in  %b: f32[20] = input
    fwd %bucket.0/concat: f32[26] = aten.cat([%a, %b], 0)
    fwd %bucket.0/all_gather: f32[52] = commfuse.all_gather_members(%bucket.0/concat, 2, dp, [6, 20])  {group=dp(2) dtype=f32 bytes=208 members=[a, b]}
    fwd %bucket.0/wait: f32[52] = _c10d_functional.wait_tensor(%bucket.0/all_gather)
    fwd %/sum.0: f32[] = aten.sum(%bucket.0/wait)
    return [%/sum.0]
"""


def test_rows_leave_with_the_gradient_they_are_of_and_large_ones_in_parts() -> None:
    """Stretches count what a rank gets."""
    sent = SCATTER.replace("%bucket.0/place.b)", "%bucket.0/place.b)  {sends bucket.0/reduce_scatter [0:8]}")
    rest = "members=[b, a]}  {sends the rest: [8:16] [16:24]}"
    check(SCATTER, StreamBuckets(first=32, rows=32), sent.replace("members=[b, a]}", rest))


def test_what_is_gathered_on_cpus_is_cut_into_whole_members_and_equal_parts() -> None:
    rest = "members=[a, b]}  {sends the rest: [0:6] [6:12] [12:19] [19:26]}"
    check(GATHER, StreamBuckets(rows=28), GATHER.replace("members=[a, b]}", rest))
    check(GATHER, StreamBuckets(rows=80), None)
    assert_pass(parse_program(GATHER, device="cuda"), StreamBuckets(rows=28), None)
