"""A step of one rank that verifies itself: what it compares, what it notices, and that it changes nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import commfuse_fx as cf
from commfuse_fx.ir.core.meta import info, tensor_spec
from commfuse_fx.ir.core.program import Program
from commfuse_fx.passes.fuse.reinplace import Reinplace
from commfuse_fx.runtime.execute.wire.wire import Wire
from tests.distributed.models_of_ranks import assert_same
from tests.recorders import recorded
from tests.verifying import broken, damaged_after_snapshot, flip_high_bit


def model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Tanh(), nn.Linear(16, 16), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(16, 4))


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(number)
    return torch.randn(8, 16, generator=made), torch.randint(0, 4, (8,), generator=made)


def compiled(net: nn.Module, **options: Any) -> cf.CompiledStep:
    return cf.compile(net, loss_fn=F.cross_entropy, **{"optimizer": adamw(net), **options})


def adamw(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=0.01)


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer | None]] = {
    "adamw": adamw,
    "momentum": lambda net: torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9),
    "nadam": lambda net: torch.optim.NAdam(net.parameters()),
    "rprop": lambda net: torch.optim.Rprop(net.parameters()),
    "gradients": lambda net: None,
}


def train(every: int | None, steps: int, **options: Any) -> tuple[list[Any], list[cf.VerifiedStep], Any]:
    """The losses, the reports, and all that steps leave."""
    net = model()
    optimizer = options.pop("optimizer", adamw)(net)
    step = compiled(net, optimizer=optimizer, **options)
    step.verify(every)
    losses, reports = [], []
    torch.manual_seed(1)
    for number in range(steps):
        losses.append(step(*batch(number)))
        if step.verified is not None and (not reports or reports[-1] is not step.verified):
            reports.append(step.verified)
    gradients = [None if param.grad is None else param.grad.clone() for param in net.parameters()]
    state = {} if optimizer is None else optimizer.state_dict()
    return losses, reports, [dict(net.state_dict()), state, gradients, torch.get_rng_state(), step.steps]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_training_goes_on_as_without(optimizer: str) -> None:
    options = {"optimizer": OPTIMIZERS[optimizer]}
    (losses, reports, state), (want, none, left) = train(2, 5, **options), train(None, 5, **options)
    assert_same([losses, state], [want, left])
    assert [report.step for report in reports] == [2, 4]
    assert not none
    for report in reports:
        assert report.bitwise and not report.differences and not report.between_ranks
        assert report.copied_bytes > 4 * sum(param.numel() for param in model().parameters())
        assert report.replay_bytes > 0 < report.seconds
        assert report.text().startswith(f"step {report.step}: no difference in {report.compared} tensors")


def test_all_micro_batches_of_a_step_are_verified() -> None:
    options = {"accumulate_steps": 3, "clip_grad_norm": 0.1}
    (losses, reports, state), (want, _, left) = train(2, 13, **options), train(None, 13, **options)
    assert_same([losses, state], [want, left])
    single = train(1, 1)[1][0].compared
    assert [report.step for report in reports] == [2, 4]
    assert reports[0].compared > 2 * single


def test_auxiliary_outputs_and_steps_without_a_loss() -> None:
    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> Any:
        return F.cross_entropy(output, target), {"output": output}

    net = model()
    step = cf.compile(net, loss_fn=loss_fn, optimizer=adamw(net), has_aux=True)
    step.verify(1)
    step(*batch(0))
    silent = compiled(model(), return_loss=False)
    silent.verify(1)
    assert silent(*batch(0)) is None
    assert step.verified is not None and silent.verified is not None
    assert step.verified.compared == silent.verified.compared + 1


def test_evaluations_do_not_count() -> None:
    net = model()
    step = compiled(net)
    step.verify(every=2)
    step(*batch(0))
    net.eval()
    step(*batch(1))
    step(*batch(2))
    assert step.verified is None
    net.train()
    step(*batch(3))
    assert step.verified is not None and step.verified.step == 2
    step.verify(every=None)
    step(*batch(4))
    step(*batch(5))
    assert step.verified.step == 2


def test_a_profile_is_not_verified() -> None:
    step = compiled(model())
    step(*batch(0))
    step.verify(every=1)
    step.profile(*batch(0), rounds=1)
    assert step.verified is None


def test_a_captured_step_is_compared_with_what_it_was_captured_from() -> None:
    step, twin = compiled(model()), compiled(model())
    recorder = recorded(step)
    step.verify(every=1)
    for number in range(6):
        torch.manual_seed(number)
        loss = step(*batch(number))
        torch.manual_seed(number)
        assert torch.equal(loss, twin(*batch(number)))
    assert recorder.replays and recorder.replays[0] > 1
    assert step.verified is not None and step.verified.step == 6


def first_parameter(executor: Any) -> None:
    flip_high_bit(executor.params["0.weight"])


def first_state(executor: Any) -> None:
    flip_high_bit(executor.optimizer.state[executor.params["4.bias"]]["exp_avg"])


def first_buffer(executor: Any) -> None:
    flip_high_bit(executor.buffers["1.running_mean"])


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (first_parameter, "parameter 0.weight on rank 0: at [0, "),
        (first_state, "exp_avg of 4.bias on rank 0: at [0] "),
        (first_buffer, "buffer 1.running_mean on rank 0: at [0] "),
    ],
)
def test_a_flipped_bit_is_noticed(damage: Callable[[Any], None], what: str) -> None:
    net = model()
    step = compiled(net)
    step.verify(every=2)
    step(*batch(0))
    with damaged_after_snapshot(damage), pytest.raises(cf.VerificationError) as raised:
        step(*batch(1))
    assert what in str(raised.value)
    assert step.steps == 2
    found = step.verified
    assert found is not None and found.differences
    assert all(each.ranks == (0,) and not each.between_ranks for each in found.differences)
    assert len(found.text().splitlines()) == 1 + len(found.differences)
    net.load_state_dict(model().state_dict())
    step(*batch(2))
    step(*batch(3))  # the user may go on
    assert step.verified is not None and step.verified.step == 4 and not step.verified.differences


def share_memory_of_live_values(program: Program) -> None:
    """An op of the backward writes where a value lies that is read later on."""
    order = {node: place for place, node in enumerate(program.graph.nodes)}
    for node in program.graph.nodes:
        for name in ("grad_input", "out"):
            if info(node).phase != "backward" or name not in node.kwargs:
                continue
            for other in program.graph.nodes:
                is_live = any(order[user] > order[node] for user in other.users) and order[other] < order[node]
                if other.op == "call_function" and info(other).phase == "forward" and is_live:
                    if isinstance(info(other).spec, type(tensor_spec(node))) and info(other).spec == info(node).spec:
                        node.kwargs = {**node.kwargs, name: other}
                        return
    raise AssertionError("there is nothing to damage")


def test_a_memory_plan_that_overwrites_live_values_is_noticed() -> None:
    step = compiled(model())
    step.verify(every=1)
    with broken(Reinplace, share_memory_of_live_values), pytest.raises(cf.VerificationError, match=r"exp_avg of "):
        step(*batch(0))


def test_what_is_refused() -> None:
    class Own(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    net = model()
    own = compiled(net, optimizer=Own(net.parameters(), lr=0.1))
    with pytest.raises(cf.NotAvailableError, match="that of Own is its own Python code"):
        own.verify(every=10)
    own.verify(every=None)
    step = compiled(model())
    for wrong, error in ((0, cf.ConfigValueError), (True, cf.ConfigTypeError), (2.0, cf.ConfigTypeError)):
        with pytest.raises(error, match=r"every is .*; give an int >= 1"):
            step.verify(every=wrong)  # type: ignore[arg-type]
    with pytest.raises(cf.VirtualWorldError, match=r"verify\(\) is for real ranks"):
        compiled(model(), device_num=2).verify(every=1)


def test_a_copied_step_verifies_nothing_until_it_is_asked_to() -> None:
    step = compiled(model())
    step.verify(every=1)
    step(*batch(0))
    other = copy.deepcopy(step)
    other(*batch(1))
    assert other.verified is None


def test_a_rank_that_is_lost_in_a_replay_leaves_a_step_that_is_done() -> None:
    program = compiled(model(), device_num=2).lower(*batch(0)).program
    (start, *_), wire = program.collectives(), Wire(program, None, 0)
    assert "are as before this step" in str(wire._failure(start, RuntimeError("gone")))
    wire.is_of_replay = True
    assert "The step itself is complete on this rank" in str(wire._failure(start, RuntimeError("gone")))
