"""What `divide` makes of a few lines of text, and what it leaves."""

from tests.passes.cases import check, divided

STEP = """
    # parallel_mode: semi_auto
    in  %w: f32[4,6] = parameter
    in  %x: f32[8,4] = input
    fwd %/mm.0: f32[8,6] = aten.mm(%x, %w)
    fwd %/sum.0: f32[] = aten.sum(%/mm.0)
    bwd %/grad.expand.0: f32[8,6](0,0) = aten.expand(%/sum.0, [8, 6])
    bwd %/grad.t.0: f32[4,8](1,4) = aten.t(%x)
    bwd %/grad.mm.0: f32[4,6] = aten.mm(%/grad.t.0, %/grad.expand.0)
    return [%/sum.0, %/grad.mm.0]
"""


def test_ranks_sum_what_they_compute_from_their_part_of_the_batch() -> None:
    check(
        STEP,
        divided(batch=("x",)),
        """
        in  %w: f32[4,6] = parameter
        in  %x: f32[4,4] = input
        fwd %axis_index/dp: - = axis_index(dp)
        fwd %/mm.0: f32[4,6] = aten.mm(%x, %w)
        fwd %/sum.0: f32[] = aten.sum(%/mm.0)
        bwd %/sum.0/sum: f32[] = sum_partial(%/sum.0, dp, sum)
        bwd %/grad.expand.0: f32[8,6](0,0) = aten.expand(%/sum.0/sum, [8, 6])
        bwd %/grad.t.0: f32[4,4](1,4) = aten.t(%x)
        bwd %/grad.expand.0/part: f32[4,6] = own_part(%/grad.expand.0, %axis_index/dp, 2, 0, 1)
        bwd %/grad.mm.0: f32[4,6] = aten.mm(%/grad.t.0, %/grad.expand.0/part)
        bwd %/grad.mm.0/sum: f32[4,6] = sum_partial(%/grad.mm.0, dp, sum)
        return [%/sum.0/sum, %/grad.mm.0/sum]
        """,
    )


def test_columns_of_a_marked_parameter_stay_apart() -> None:
    check(
        f"# mesh: tp=2\n{STEP}",
        divided({"w": (None, "tp")}),
        """
        in  %w: f32[4,6] = parameter
        in  %x: f32[8,4] = input
        fwd %axis_index/tp: - = axis_index(tp)
        fwd %w/part: f32[4,3] = own_part(%w, %axis_index/tp, 2, 1, 1)
        fwd %/mm.0: f32[8,3] = aten.mm(%x, %w/part)
        fwd %/sum.0: f32[] = aten.sum(%/mm.0)
        bwd %/sum.0/sum: f32[] = sum_partial(%/sum.0, tp, sum)
        bwd %/grad.expand.0: f32[8,6](0,0) = aten.expand(%/sum.0/sum, [8, 6])
        bwd %/grad.t.0: f32[4,8](1,4) = aten.t(%x)
        bwd %/grad.mm.0: f32[4,6] = aten.mm(%/grad.t.0, %/grad.expand.0)
        return [%/sum.0/sum, %/grad.mm.0]
        """,
    )


def test_one_rank_has_everything() -> None:
    check(f"# world: 1\n{STEP}", divided(batch=("x",)), None)
