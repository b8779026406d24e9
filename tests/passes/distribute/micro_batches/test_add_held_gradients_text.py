"""What `add_held_gradients` makes of a few lines of text, and what it leaves."""

from commfuse_fx.passes.distribute.micro_batches.add_held_gradients import AddHeldGradients
from commfuse_fx.testing import assert_pass


def test_what_grad_holds_comes_first_in_the_sum() -> None:
    assert_pass(
        """
        in  %w: f32[2,2] = parameter
        in  %x: f32[2,2] = input
        fwd %/mm.0: f32[2,2] = aten.mm(%x, %w)
        fwd %outputs: (f32[2,2]) = hand_over([%/mm.0])
        bwd %output.grad: f32[2,2] = getitem(%outputs, 0)
        bwd %/grad.mm.0: f32[2,2] = aten.mm(%x, %output.grad)
        return [%outputs, %/grad.mm.0]
        """,
        AddHeldGradients(),
        """
        in  %w: f32[2,2] = parameter
        in  %x: f32[2,2] = input
        in  %w.grad: f32[2,2] = gradient
        fwd %/mm.0: f32[2,2] = aten.mm(%x, %w)
        fwd %outputs: (f32[2,2]) = hand_over([%/mm.0])
        bwd %output.grad: f32[2,2] = getitem(%outputs, 0)
        bwd %/grad.mm.0: f32[2,2] = aten.mm(%x, %output.grad)
        bwd %reduce/w/sum: f32[2,2] = aten.add.Tensor(%w.grad, %/grad.mm.0)
        return [%outputs, %reduce/w/sum]
        """,
    )


def test_an_evaluation_has_no_gradients() -> None:
    assert_pass(
        """
        # step: eval
        in  %w: f32[2,2] = parameter
        fwd %/sum.0: f32[] = aten.sum(%w)
        return [%/sum.0]
        """,
        AddHeldGradients(),
        None,
    )
