"""What `weight_gradients` makes of a few lines of text, and what it leaves."""

from commfuse_fx.passes.kernels.weight_gradients import WeightGradients
from tests.passes.cases import check

STEP = """
    in  %w: f32[32,32,3,3](288,1,96,32) = parameter
    in  %b: f32[32] = parameter
    in  %x: f32[1,32,24,24](18432,1,768,32) = input
    fwd %convolution.0: f32[1,32,22,22](15488,1,704,32) = aten.convolution(%x, %w, %b, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    fwd %sum.0: f32[] = aten.sum(%convolution.0)
    bwd %grad.mul.0: f32[1,32,22,22](15488,1,704,32) = aten.mul.Tensor(%convolution.0, %sum.0)
    bwd %grad.convolution_backward.0: (f32[1,32,24,24](18432,1,768,32), f32[32,32,3,3](288,1,96,32), f32[32]) = aten.convolution_backward(%grad.mul.0, %x, %w, [32], [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True, True, True])
    bwd %grad.getitem.0: f32[1,32,24,24](18432,1,768,32) = getitem(%grad.convolution_backward.0, 0)
    bwd %grad.getitem.1: f32[32,32,3,3](288,1,96,32) = getitem(%grad.convolution_backward.0, 1)
    bwd %grad.getitem.2: f32[32] = getitem(%grad.convolution_backward.0, 2)
    bwd %sum.1: f32[] = aten.sum(%grad.getitem.0)
    bwd %add.0: f32[] = aten.add.Tensor(%sum.0, %sum.1)
    return [%add.0, %grad.getitem.1, %grad.getitem.2]
"""


def test_gradients_of_weight_and_bias_are_ops_of_their_own() -> None:
    check(
        STEP,
        WeightGradients(),
        """
        in  %w: f32[32,32,3,3](288,1,96,32) = parameter
        in  %b: f32[32] = parameter
        in  %x: f32[1,32,24,24](18432,1,768,32) = input
        fwd %convolution.0: f32[1,32,22,22](15488,1,704,32) = aten.convolution(%x, %w, %b, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
        fwd %sum.0: f32[] = aten.sum(%convolution.0)
        bwd %grad.mul.0: f32[1,32,22,22](15488,1,704,32) = aten.mul.Tensor(%convolution.0, %sum.0)
        bwd %grad.convolution_backward.0: (f32[1,32,24,24](18432,1,768,32), -, -) = aten.convolution_backward(%grad.mul.0, %x, %w, [32], [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True, False, False])
        bwd %grad.getitem.0: f32[1,32,24,24](18432,1,768,32) = getitem(%grad.convolution_backward.0, 0)
        bwd %grad.convolution_backward.0/weight: f32[32,32,3,3](288,1,96,32) = commfuse.convolution_weight_gradient(%grad.mul.0, %x, %w, [0, 0], [288, 1, 96, 32])
        bwd %grad.convolution_backward.0/bias: f32[32] = aten.sum.dim_IntList(%grad.mul.0, [0, 2, 3])
        bwd %sum.1: f32[] = aten.sum(%grad.getitem.0)
        bwd %add.0: f32[] = aten.add.Tensor(%sum.0, %sum.1)
        return [%add.0, %grad.convolution_backward.0/weight, %grad.convolution_backward.0/bias]
        """,
    )


def test_few_channels_and_large_kernels_stay_with_onednn() -> None:
    check(STEP, WeightGradients(at_least=33), None)
    check(STEP, WeightGradients(kernel=8), None)
