"""What `across_steps` makes of a few lines of text, and what it leaves."""

from commfuse_fx.passes.schedule.across_steps import AcrossSteps
from tests.passes.cases import check, priced

STEP = """
    # optimizer: SGD (sgd)
    # schedule: ScheduleConfig(memory_limit=None, across_steps=True)
    # cluster: gloo-1gbit
    in  %a: f32[16] = parameter
    in  %x: f32[16] = input
    in  %update.0.weight_decay: number = hyper-parameter of the optimizer
    in  %update.0.momentum: number = hyper-parameter of the optimizer
    in  %update.0.lr: number = hyper-parameter of the optimizer
    in  %update.0.dampening: number = hyper-parameter of the optimizer
    in  %update.0.is_first_step: number = hyper-parameter of the optimizer
    fwd %/neg.0: f32[16] = aten.neg(%x)
    fwd %/dot.0: f32[] = aten.dot(%a, %/neg.0)
    bwd %reduce/a/storage: f32[16] = aten.empty.memory_format([16], dtype=f32, device=cpu)  {kept between steps}
    bwd %reduce/a/place.a: f32[16] = aten.as_strided(%reduce/a/storage, [16], [1], 0)
    bwd %reduce/a/write.a: f32[16] = aten.mul.out(%/neg.0, %/dot.0, out=%reduce/a/place.a)
    bwd %reduce/a/in_place: f32[16] = _c10d_functional.all_reduce_(%reduce/a/storage, sum, dp)  {group=dp(2) op=sum dtype=f32 bytes=64 members=[a]}
    bwd %reduce/a/reduced: f32[16] = _c10d_functional.wait_tensor(%reduce/a/in_place)
    upd %update.0/sgd: - = aten._fused_sgd_([%a], [%reduce/a/reduced], [], weight_decay=%update.0.weight_decay, momentum=%update.0.momentum, lr=%update.0.lr, dampening=%update.0.dampening, nesterov=False, maximize=False, is_first_step=%update.0.is_first_step)
    return [%/dot.0]
"""


def test_wait_and_update_run_in_the_next_step_before_its_first_reader() -> None:
    check(
        STEP,
        priced(AcrossSteps),
        """
        in  %a: f32[16] = parameter
        in  %x: f32[16] = input
        in  %update.0.weight_decay: number = hyper-parameter of the optimizer
        in  %update.0.momentum: number = hyper-parameter of the optimizer
        in  %update.0.lr: number = hyper-parameter of the optimizer
        in  %update.0.dampening: number = hyper-parameter of the optimizer
        in  %update.0.is_first_step: number = hyper-parameter of the optimizer
        fwd %/neg.0: f32[16] = aten.neg(%x)
        fwd %/dot.0: f32[] = aten.dot(%a, %/neg.0)
        bwd %reduce/a/storage: f32[16] = aten.empty.memory_format([16], dtype=f32, device=cpu)  {kept between steps}
        bwd %reduce/a/place.a: f32[16] = aten.as_strided(%reduce/a/storage, [16], [1], 0)
        bwd %reduce/a/write.a: f32[16] = aten.mul.out(%/neg.0, %/dot.0, out=%reduce/a/place.a)
        bwd %reduce/a/in_place: f32[16] = _c10d_functional.all_reduce_(%reduce/a/storage, sum, dp)  {group=dp(2) op=sum dtype=f32 bytes=64 members=[a]}
        bwd %reduce/a/reduced: f32[16] = _c10d_functional.wait_tensor(%reduce/a/in_place)  {in the next step, before %/dot.0}
        upd %update.0/sgd: - = aten._fused_sgd_([%a], [%reduce/a/reduced], [], weight_decay=%update.0.weight_decay, momentum=%update.0.momentum, lr=%update.0.lr, dampening=%update.0.dampening, nesterov=False, maximize=False, is_first_step=%update.0.is_first_step)  {in the next step, before %/dot.0}
        return [%/dot.0]
        """,
    )


def test_a_gradient_that_the_step_reads_itself_is_waited_for_in_it() -> None:
    norm = "bwd %/grad.norm: f32[] = aten.dot(%reduce/a/reduced, %reduce/a/reduced)"
    check(
        STEP.replace("    upd", f"    {norm}\n    upd").replace("[%/dot.0]", "[%/grad.norm]"), priced(AcrossSteps), None
    )
