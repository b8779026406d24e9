"""What `update_parameters` makes of a few lines of text, and what it leaves."""

from commfuse_fx.passes.rewrite.update_parameters import UpdateParameters
from tests.passes.cases import check

STEP = """
    in  %a: f32[16] = parameter
    in  %b: f32[16] = parameter
    fwd %/dot.0: f32[] = aten.dot(%a, %b)
    bwd %/grad.mul.0: f32[16] = aten.mul.Tensor(%b, %/dot.0)
    bwd %/grad.mul.1: f32[16] = aten.mul.Tensor(%a, %/dot.0)
    return [%/dot.0, %/grad.mul.0, %/grad.mul.1]
"""


def test_one_fused_op_updates_the_parameters_of_a_group_and_no_gradient_is_returned() -> None:
    check(
        f"# optimizer: SGD (sgd)\n{STEP}",
        UpdateParameters(),
        """
        in  %a: f32[16] = parameter
        in  %b: f32[16] = parameter
        in  %update.0.momentum_buffer: (f32[16], f32[16]) = state of 2 tensor(s)
        in  %update.0.weight_decay: number = hyper-parameter of the optimizer
        in  %update.0.momentum: number = hyper-parameter of the optimizer
        in  %update.0.lr: number = hyper-parameter of the optimizer
        in  %update.0.dampening: number = hyper-parameter of the optimizer
        in  %update.0.is_first_step: number = hyper-parameter of the optimizer
        fwd %/dot.0: f32[] = aten.dot(%a, %b)
        bwd %/grad.mul.0: f32[16] = aten.mul.Tensor(%b, %/dot.0)
        bwd %/grad.mul.1: f32[16] = aten.mul.Tensor(%a, %/dot.0)
        upd %update.0/sgd: - = aten._fused_sgd_([%a, %b], [%/grad.mul.0, %/grad.mul.1], %update.0.momentum_buffer, weight_decay=%update.0.weight_decay, momentum=%update.0.momentum, lr=%update.0.lr, dampening=%update.0.dampening, nesterov=False, maximize=False, is_first_step=%update.0.is_first_step)
        return [%/dot.0]
        """,
        flags={"momentum": True},
    )


def test_adam_counts_steps_first() -> None:
    check(
        f"# optimizer: AdamW (adamw)\n{STEP}",
        UpdateParameters(),
        """
        in  %a: f32[16] = parameter
        in  %b: f32[16] = parameter
        in  %update.0.exp_avg: (f32[16], f32[16]) = state of 2 tensor(s)
        in  %update.0.exp_avg_sq: (f32[16], f32[16]) = state of 2 tensor(s)
        in  %update.0.lr: number = hyper-parameter of the optimizer
        in  %update.0.beta1: number = hyper-parameter of the optimizer
        in  %update.0.beta2: number = hyper-parameter of the optimizer
        in  %update.0.weight_decay: number = hyper-parameter of the optimizer
        in  %update.0.eps: number = hyper-parameter of the optimizer
        in  %update.0.steps: (f32[], f32[]) = state of 2 tensor(s)
        in  %update.0.step: (f32[], f32[]) = state of 2 tensor(s)
        fwd %/dot.0: f32[] = aten.dot(%a, %b)
        bwd %/grad.mul.0: f32[16] = aten.mul.Tensor(%b, %/dot.0)
        bwd %/grad.mul.1: f32[16] = aten.mul.Tensor(%a, %/dot.0)
        upd %update.0/step: - = aten._foreach_add_.Scalar(%update.0.steps, 1)
        upd %update.0/adamw: - = aten._fused_adamw_([%a, %b], [%/grad.mul.0, %/grad.mul.1], %update.0.exp_avg, %update.0.exp_avg_sq, [], %update.0.step, lr=%update.0.lr, beta1=%update.0.beta1, beta2=%update.0.beta2, weight_decay=%update.0.weight_decay, eps=%update.0.eps, amsgrad=False, maximize=False)
        return [%/dot.0]
        """,
    )


def test_an_update_without_a_fused_kernel_is_one_op_that_counts_the_step_and_keeps_the_other_numbers() -> None:
    check(
        f"# optimizer: NAdam (nadam)\n{STEP}",
        UpdateParameters(),
        """
        in  %a: f32[16] = parameter
        in  %b: f32[16] = parameter
        in  %update.0.exp_avg: (f32[16], f32[16]) = state of 2 tensor(s)
        in  %update.0.exp_avg_sq: (f32[16], f32[16]) = state of 2 tensor(s)
        in  %update.0.mu_products: (f32[1], f32[1]) = state of 2 tensor(s)
        in  %update.0.steps: (f32[1], f32[1]) = state of 2 tensor(s)
        in  %update.0.lr: number = hyper-parameter of the optimizer
        in  %update.0.beta1: number = hyper-parameter of the optimizer
        in  %update.0.beta2: number = hyper-parameter of the optimizer
        in  %update.0.weight_decay: number = hyper-parameter of the optimizer
        in  %update.0.eps: number = hyper-parameter of the optimizer
        in  %update.0.momentum_decay: number = hyper-parameter of the optimizer
        fwd %/dot.0: f32[] = aten.dot(%a, %b)
        bwd %/grad.mul.0: f32[16] = aten.mul.Tensor(%b, %/dot.0)
        bwd %/grad.mul.1: f32[16] = aten.mul.Tensor(%a, %/dot.0)
        upd %update.0/nadam: - = commfuse.nadam_([%a, %b], [%/grad.mul.0, %/grad.mul.1], %update.0.exp_avg, %update.0.exp_avg_sq, %update.0.mu_products, %update.0.steps, lr=%update.0.lr, beta1=%update.0.beta1, beta2=%update.0.beta2, weight_decay=%update.0.weight_decay, eps=%update.0.eps, momentum_decay=%update.0.momentum_decay, decoupled=False, maximize=False)
        return [%/dot.0]
        """,
    )


def test_an_unknown_optimizer_is_called_on_all_gradients() -> None:
    check(
        f"# optimizer: Adafactor (opaque)\n{STEP}",
        UpdateParameters(),
        """
        in  %a: f32[16] = parameter
        in  %b: f32[16] = parameter
        fwd %/dot.0: f32[] = aten.dot(%a, %b)
        bwd %/grad.mul.0: f32[16] = aten.mul.Tensor(%b, %/dot.0)
        bwd %/grad.mul.1: f32[16] = aten.mul.Tensor(%a, %/dot.0)
        upd %update/Adafactor: - = optimizer_step([%a, %b], [%/grad.mul.0, %/grad.mul.1])
        return [%/dot.0]
        """,
    )


def test_without_an_optimizer_gradients_are_returned() -> None:
    check(STEP, UpdateParameters(), None)
