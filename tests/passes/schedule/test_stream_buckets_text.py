"""What `stream_buckets` makes of a few lines of text, and what it leaves."""

import pytest

from commfuse_fx.passes.schedule.stream_buckets import StreamBuckets
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
