"""What `channels_last` makes of a few lines of text, and what it leaves."""

from commfuse_fx.passes.kernels.channels_last import ChannelsLast
from tests.passes.cases import check

STEP = """
    in  %v: f32[4,4,3,3] = parameter
    in  %w: f32[4,4,3,3] = parameter
    in  %x: f32[2,4,8,8] = input
    fwd %0/convolution.0: f32[2,4,8,8] = aten.convolution(%x, %v, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    fwd %1/relu.0: f32[2,4,8,8] = aten.relu(%0/convolution.0)
    fwd %2/convolution.0: f32[2,4,8,8] = aten.convolution(%1/relu.0, %w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    fwd %/sum.0: f32[] = aten.sum(%2/convolution.0)
    bwd %/grad.expand.0: f32[2,4,8,8](0,0,0,0) = aten.expand(%/sum.0, [2, 4, 8, 8])
    bwd %2/grad.convolution_backward.0: (f32[2,4,8,8], f32[4,4,3,3], -) = aten.convolution_backward(%/grad.expand.0, %1/relu.0, %w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, False])
    bwd %2/grad.getitem.0: f32[2,4,8,8] = getitem(%2/grad.convolution_backward.0, 0)
    bwd %2/grad.getitem.1: f32[4,4,3,3] = getitem(%2/grad.convolution_backward.0, 1)
    bwd %1/grad.threshold_backward.0: f32[2,4,8,8] = aten.threshold_backward(%2/grad.getitem.0, %1/relu.0, 0)
    bwd %0/grad.convolution_backward.0: (-, f32[4,4,3,3], -) = aten.convolution_backward(%1/grad.threshold_backward.0, %x, %v, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [False, True, False])
    bwd %0/grad.getitem.1: f32[4,4,3,3] = getitem(%0/grad.convolution_backward.0, 1)
    return [%/sum.0, %0/grad.getitem.1, %2/grad.getitem.1]
"""


def test_activations_lie_channels_last_from_the_first_convolution_on() -> None:
    check(
        STEP,
        ChannelsLast(at_most=1.0),
        """
        in  %v: f32[4,4,3,3] = parameter
        in  %w: f32[4,4,3,3] = parameter
        in  %x: f32[2,4,8,8] = input
        fwd %x/channels_last: f32[2,4,8,8](256,1,32,4) = aten.clone(%x, memory_format=channels_last)
        fwd %0/convolution.0: f32[2,4,8,8](256,1,32,4) = aten.convolution(%x/channels_last, %v, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
        fwd %1/relu.0: f32[2,4,8,8](256,1,32,4) = aten.relu(%0/convolution.0)
        fwd %2/convolution.0: f32[2,4,8,8](256,1,32,4) = aten.convolution(%1/relu.0, %w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
        fwd %2/convolution.0/contiguous_format: f32[2,4,8,8] = aten.clone(%2/convolution.0, memory_format=contiguous_format)
        fwd %/sum.0: f32[] = aten.sum(%2/convolution.0/contiguous_format)
        bwd %/grad.expand.0: f32[2,4,8,8](0,0,0,0) = aten.expand(%/sum.0, [2, 4, 8, 8])
        bwd %/grad.expand.0/channels_last: f32[2,4,8,8](256,1,32,4) = aten.clone(%/grad.expand.0, memory_format=channels_last)
        bwd %2/grad.convolution_backward.0: (f32[2,4,8,8](256,1,32,4), f32[4,4,3,3](36,1,12,4), -) = aten.convolution_backward(%/grad.expand.0/channels_last, %1/relu.0, %w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, False])
        bwd %2/grad.getitem.0: f32[2,4,8,8](256,1,32,4) = getitem(%2/grad.convolution_backward.0, 0)
        bwd %2/grad.getitem.1: f32[4,4,3,3](36,1,12,4) = getitem(%2/grad.convolution_backward.0, 1)
        bwd %2/grad.getitem.1/contiguous_format: f32[4,4,3,3] = aten.clone(%2/grad.getitem.1, memory_format=contiguous_format)
        bwd %1/grad.threshold_backward.0: f32[2,4,8,8](256,1,32,4) = aten.threshold_backward(%2/grad.getitem.0, %1/relu.0, 0)
        bwd %0/grad.convolution_backward.0: (-, f32[4,4,3,3](36,1,12,4), -) = aten.convolution_backward(%1/grad.threshold_backward.0, %x/channels_last, %v, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [False, True, False])
        bwd %0/grad.getitem.1: f32[4,4,3,3](36,1,12,4) = getitem(%0/grad.convolution_backward.0, 1)
        bwd %0/grad.getitem.1/contiguous_format: f32[4,4,3,3] = aten.clone(%0/grad.getitem.1, memory_format=contiguous_format)
        return [%/sum.0, %0/grad.getitem.1/contiguous_format, %2/grad.getitem.1/contiguous_format]
        """,
    )


def test_an_evaluation_large_weights_and_too_many_copies_leave_the_layout() -> None:
    check(f"# step: eval\n{STEP}", ChannelsLast(), None)
    check(STEP, ChannelsLast(large_weight=0.001, at_most=1.0), None)
    check(STEP, ChannelsLast(), None)
