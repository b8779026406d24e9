"""What `average_micro_batches` makes of a few lines of text, and what it leaves."""

import pytest

import commfuse_fx as cf
from commfuse_fx.passes.distribute.micro_batches.average_micro_batches import AverageMicroBatches
from tests.passes.cases import check, read

STEP = """
    in  %w: f32[4] = parameter
    fwd %/sum.0: f32[] = aten.sum(%w)
    bwd %/grad.ones_like.0: f32[] = aten.ones_like(%/sum.0)
    bwd %/grad.expand.0: f32[4](0) = aten.expand(%/grad.ones_like.0, [4])
    return [%/sum.0, %/grad.expand.0]
"""


def test_the_backward_begins_with_the_share_of_a_micro_batch() -> None:
    check(
        STEP,
        AverageMicroBatches(count=4),
        """
        in  %w: f32[4] = parameter
        fwd %/sum.0: f32[] = aten.sum(%w)
        bwd %/grad.ones_like.0: f32[] = aten.ones_like(%/sum.0)
        bwd %reduce/share_of_micro_batch: f32[] = aten.div.Scalar(%/grad.ones_like.0, 4)
        bwd %/grad.expand.0: f32[4](0) = aten.expand(%reduce/share_of_micro_batch, [4])
        return [%/sum.0, %/grad.expand.0]
        """,
    )


def test_an_evaluation_has_no_gradients() -> None:
    check(
        """
        # step: eval
        in  %w: f32[4] = parameter
        fwd %/sum.0: f32[] = aten.sum(%w)
        return [%/sum.0]
        """,
        AverageMicroBatches(count=4),
        None,
    )


def test_ones_of_another_value_are_not_the_begin_of_the_backward() -> None:
    with pytest.raises(cf.CaptureError, match="gradients_mean=False"):
        AverageMicroBatches(count=4)(
            read(
                STEP.replace("ones_like(%/sum.0)", "ones_like(%/max.0)").replace(
                    "    bwd %/grad.ones", "    fwd %/max.0: f32[] = aten.max(%w)\n    bwd %/grad.ones"
                )
            )
        )
