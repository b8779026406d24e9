"""What `draw_masks` makes of a few lines of text, and what it leaves."""

from commfuse_fx.passes.kernels.draw_masks import DrawMasks
from tests.passes.cases import check

STEP = """
    in  %x: f32[4,4] = input
    fwd %/empty_like.0: f32[4,4] = aten.empty_like(%x, pin_memory=False)
    fwd %/bernoulli.0: f32[4,4] = aten.bernoulli.p(%/empty_like.0, 0.5)
    fwd %/mul.0: f32[4,4] = aten.mul.Tensor(%x, %/bernoulli.0)
    fwd %/sum.0: f32[] = aten.sum(%/mul.0)
    return [%/sum.0]
"""


def test_a_mask_is_drawn_from_fewer_bits() -> None:
    check(
        STEP,
        DrawMasks(at_least=16),
        """
        in  %x: f32[4,4] = input
        fwd %/empty_like.0: f32[4,4] = aten.empty_like(%x, pin_memory=False)
        fwd %/bernoulli.0: f32[4,4] = commfuse.bernoulli(%/empty_like.0, 0.5)
        fwd %/mul.0: f32[4,4] = aten.mul.Tensor(%x, %/bernoulli.0)
        fwd %/sum.0: f32[] = aten.sum(%/mul.0)
        return [%/sum.0]
        """,
    )


def test_a_small_mask_stays_with_torch() -> None:
    check(STEP, DrawMasks(), None)
    check(STEP, DrawMasks(at_least=17), None)
