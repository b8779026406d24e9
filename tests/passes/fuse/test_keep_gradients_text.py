"""What `keep_gradients` makes of a few lines of text, and what it leaves."""

from commfuse_fx.passes.fuse.keep_gradients import KeepGradients
from tests.passes.cases import check

STEP = """
    # optimizer: SGD (sgd)
    # world: 1
    in  %w: f32[4,4] = parameter
    in  %x: f32[4,4] = input
    in  %update.0.weight_decay: number = hyper-parameter of the optimizer
    in  %update.0.momentum: number = hyper-parameter of the optimizer
    in  %update.0.lr: number = hyper-parameter of the optimizer
    in  %update.0.dampening: number = hyper-parameter of the optimizer
    in  %update.0.is_first_step: number = hyper-parameter of the optimizer
    fwd %/mm.0: f32[4,4] = aten.mm(%x, %w)
    fwd %/sum.0: f32[] = aten.sum(%/mm.0)
    bwd %/grad.mul.0: f32[4,4] = aten.mul.Tensor(%/mm.0, %/sum.0)
    bwd %/grad.t.0: f32[4,4](1,4) = aten.t(%/mm.0)
    bwd %/grad.mm.0: f32[4,4] = aten.mm(%/grad.t.0, %/grad.mul.0)
    upd %update.0/sgd: - = aten._fused_sgd_([%w], [%/grad.mm.0], [], weight_decay=%update.0.weight_decay, momentum=%update.0.momentum, lr=%update.0.lr, dampening=%update.0.dampening, nesterov=False, maximize=False, is_first_step=%update.0.is_first_step)
    return [%/sum.0]
"""


def test_a_gradient_is_written_into_memory_that_stays_where_the_peak_allows_it() -> None:
    check(
        STEP,
        KeepGradients(at_least=0),
        """
        in  %w: f32[4,4] = parameter
        in  %x: f32[4,4] = input
        in  %update.0.weight_decay: number = hyper-parameter of the optimizer
        in  %update.0.momentum: number = hyper-parameter of the optimizer
        in  %update.0.lr: number = hyper-parameter of the optimizer
        in  %update.0.dampening: number = hyper-parameter of the optimizer
        in  %update.0.is_first_step: number = hyper-parameter of the optimizer
        fwd %/mm.0: f32[4,4] = aten.mm(%x, %w)
        fwd %/sum.0: f32[] = aten.sum(%/mm.0)
        bwd %/grad.mul.0: f32[4,4] = aten.mul.Tensor(%/mm.0, %/sum.0)
        bwd %/grad.t.0: f32[4,4](1,4) = aten.t(%/mm.0)
        bwd %/grad.mm.0.memory: f32[4,4] = aten.empty.memory_format([4, 4], dtype=f32, device=cpu)  {kept between steps}
        bwd %/grad.mm.0.out: f32[4,4] = aten.mm.out(%/grad.t.0, %/grad.mul.0, out=%/grad.mm.0.memory)
        upd %update.0/sgd: - = aten._fused_sgd_([%w], [%/grad.mm.0.out], [], weight_decay=%update.0.weight_decay, momentum=%update.0.momentum, lr=%update.0.lr, dampening=%update.0.dampening, nesterov=False, maximize=False, is_first_step=%update.0.is_first_step)
        return [%/sum.0]
        """,
    )


def test_small_gradients_and_those_that_raise_the_peak_stay() -> None:
    check(STEP, KeepGradients(), None)
    early = STEP.replace("aten.t(%/mm.0)", "aten.t(%x)")
    check(early, KeepGradients(at_least=0), None)
