"""What `slice_full_batch` makes of a few lines of text, and what it leaves."""

from commfuse_fx.ir.core.program import Program
from commfuse_fx.passes.distribute.slice_full_batch import SliceFullBatch
from tests.passes.cases import Applied, check

STEP = """
    in  %w: f32[4] = parameter
    in  %x: f32[2,4] = input
    in  %scale: f32[] = input
    fwd %/mv.0: f32[2] = aten.mv(%x, %w)
    fwd %/mul.0: f32[2] = aten.mul.Tensor(%/mv.0, %scale)
    fwd %/sum.0: f32[] = aten.sum(%/mul.0)
    return [%/sum.0]
"""


def with_batch(program: Program) -> bool:
    program.batch_inputs = ("x",)
    return CUT(program)


CUT = SliceFullBatch("dp")
CUT_X = Applied(CUT, with_batch)


def test_a_rank_takes_its_rows_of_the_whole_batch() -> None:
    check(
        STEP,
        CUT_X,
        """
        in  %w: f32[4] = parameter
        in  %x: f32[4,4] = input
        in  %scale: f32[] = input
        fwd %axis_index/dp: - = axis_index(dp)
        fwd %slice/start.x: - = mul(%axis_index/dp, 2)
        fwd %slice/x: f32[2,4] = aten.narrow(%x, 0, %slice/start.x, 2)
        fwd %/mv.0: f32[2] = aten.mv(%slice/x, %w)
        fwd %/mul.0: f32[2] = aten.mul.Tensor(%/mv.0, %scale)
        fwd %/sum.0: f32[] = aten.sum(%/mul.0)
        return [%/sum.0]
        """,
    )


def test_one_rank_and_a_call_without_a_batch_have_nothing_to_cut() -> None:
    check(f"# world: 1\n{STEP}", CUT_X, None)
    check(STEP, SliceFullBatch("dp"), None)
