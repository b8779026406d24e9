"""What `tile_first_gradient` makes of a few lines of text, and what it leaves."""

from commfuse_fx.passes.schedule.tile_first_gradient import TileFirstGradient
from tests.passes.cases import check, priced

STEP = """
    in  %w: f32[512,1024] = parameter
    in  %x: f32[512,512] = input
    fwd %/mm.0: f32[512,1024] = aten.mm(%x, %w)
    fwd %/sum.0: f32[] = aten.sum(%/mm.0)
    bwd %/grad.t.0: f32[512,512](1,512) = aten.t(%x)
    bwd %reduce/w/storage: f32[524288] = aten.empty.memory_format([524288], dtype=f32, device=cpu)
    bwd %reduce/w/place.w: f32[512,1024] = aten.as_strided(%reduce/w/storage, [512, 1024], [1024, 1], 0)
    bwd %reduce/w/write.w: f32[512,1024] = aten.mm.out(%/grad.t.0, %/mm.0, out=%reduce/w/place.w)
    bwd %reduce/w/in_place: f32[524288] = _c10d_functional.all_reduce_(%reduce/w/storage, sum, dp)  {group=dp(2) op=sum dtype=f32 bytes=2097152 members=[w]}
    bwd %reduce/w/reduced: f32[524288] = _c10d_functional.wait_tensor(%reduce/w/in_place)
    bwd %reduce/w/reduced.w: f32[512,1024] = aten.as_strided(%reduce/w/reduced, [512, 1024], [1024, 1], 0)
    return [%/sum.0, %reduce/w/reduced.w]
"""


def test_the_first_large_gradient_is_computed_in_tiles_of_its_rows() -> None:
    check(
        STEP,
        priced(TileFirstGradient),
        """
        in  %w: f32[512,1024] = parameter
        in  %x: f32[512,512] = input
        fwd %/mm.0: f32[512,1024] = aten.mm(%x, %w)
        fwd %/sum.0: f32[] = aten.sum(%/mm.0)
        bwd %/grad.t.0: f32[512,512](1,512) = aten.t(%x)
        bwd %reduce/w/storage: f32[524288] = aten.empty.memory_format([524288], dtype=f32, device=cpu)
        bwd %reduce/w/write.w.rows.0/of: f32[256,512](1,512) = aten.slice.Tensor(%/grad.t.0, 0, 0, 256)
        bwd %reduce/w/write.w.rows.0/out: f32[256,1024] = aten.as_strided(%reduce/w/storage, [256, 1024], [1024, 1], 0)
        bwd %reduce/w/write.w.rows.0: f32[256,1024] = aten.mm.out(%reduce/w/write.w.rows.0/of, %/mm.0, out=%reduce/w/write.w.rows.0/out)
        bwd %reduce/w/write.w.rows.256/of: f32[256,512](1,512) = aten.slice.Tensor(%/grad.t.0, 0, 256, 512)
        bwd %reduce/w/write.w.rows.256/out: f32[256,1024] = aten.as_strided(%reduce/w/storage, [256, 1024], [1024, 1], 262144)
        bwd %reduce/w/write.w.rows.256: f32[256,1024] = aten.mm.out(%reduce/w/write.w.rows.256/of, %/mm.0, out=%reduce/w/write.w.rows.256/out)
        bwd %reduce/w/in_place: f32[524288] = _c10d_functional.all_reduce_(%reduce/w/storage, sum, dp)  {group=dp(2) op=sum dtype=f32 bytes=2097152 members=[w]}
        bwd %reduce/w/reduced: f32[524288] = _c10d_functional.wait_tensor(%reduce/w/in_place)
        bwd %reduce/w/reduced.w: f32[512,1024] = aten.as_strided(%reduce/w/reduced, [512, 1024], [1024, 1], 0)
        return [%/sum.0, %reduce/w/reduced.w]
        """,
    )


def test_a_gradient_that_is_no_product_and_a_small_one_stay_whole() -> None:
    check(
        STEP.replace("aten.mm.out(%/grad.t.0, %/mm.0,", "aten.mul.out(%/mm.0, %/sum.0,"),
        priced(TileFirstGradient),
        None,
    )
    small = STEP.replace("1024", "64").replace("524288", "32768").replace("2097152", "131072")
    check(small, priced(TileFirstGradient), None)
