"""What users do around a step: evaluate, save, load, schedule, go on in plain PyTorch."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from commfuse_fx.planning.plan_cache import MAX_GRAPHS
from tests.distributed.harness import Ranks
from tests.distributed.models_of_ranks import (
    adamw,
    assert_parameters_close,
    assert_same,
    compiled,
    convnet,
    digest,
    mlp,
    momentum,
    plain_steps,
    snapshot,
    xy,
)
from tests.logs import logged

OPTIMIZERS = {
    "adamw": adamw,
    "momentum": momentum,
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    "nadam": lambda model: torch.optim.NAdam(model.parameters(), lr=0.01),
    "asgd": lambda model: torch.optim.ASGD(model.parameters(), lr=0.05, t0=1),
}


class Masked(nn.Module):
    """The gradient of `weight` is the dropout mask."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(400))
        self.shared = nn.Parameter(torch.ones(1))
        self.weight.layerwise_parallel = True  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = (F.dropout(self.weight * x, 0.5) * self.shared).sum()
        return out


def masks() -> tuple[list[torch.Tensor], torch.Tensor]:
    import commfuse_fx as cf

    model = Masked()
    step = cf.compile(model, parallel_mode="hybrid_parallel", form="step")
    torch.manual_seed(7)
    found = []
    for _ in range(3):
        model.zero_grad()
        step(torch.ones(400))
        assert model.weight.grad is not None
        found.append(model.weight.grad != 0)
    return found, torch.get_rng_state()


def test_dropout_differs_between_steps_and_ranks_and_is_reproducible(ranks: Ranks) -> None:
    (first, state), (second, other_state) = ranks.values(masks)
    seen = [*first, *second]
    for i, mask in enumerate(seen):
        assert 140 < int(mask.sum()) < 260
        for other in seen[:i]:
            assert 100 < int((mask != other).sum()) < 300
    assert torch.equal(state, other_state)
    assert_same(ranks.values(masks), [(first, state), (second, other_state)])


def evaluate() -> str:
    model = nn.Sequential(convnet(), nn.Dropout(0.5))
    optimizer = momentum(model)
    step = compiled(model, optimizer)
    x, y = torch.randn(4, 1, 8, 8), torch.randint(0, 4, (4,))
    step(x, y)
    model.eval()
    assert not step.lower(x, y).collectives
    before = snapshot(model, optimizer)
    if dist.get_rank() == 0:  # nobody else need take part
        torch.testing.assert_close(step(x, y), F.cross_entropy(model(x), y))
        with pytest.raises(RuntimeError):
            step(x[:, :, 0], y)
    assert_same(snapshot(model, optimizer), before)
    model.train()
    step(x, y)
    return digest(model)


def test_evaluation_has_no_collectives_and_changes_nothing(ranks: Ranks) -> None:
    first, second = ranks.values(evaluate)
    assert first == second


def gradients_disabled() -> None:
    """Before the first training step, between steps, and with gradients left to the user."""
    model, reference = mlp(), mlp()
    optimizer, plain = adamw(model), adamw(reference)
    step, grads = compiled(model, optimizer, parameter_broadcast=True), compiled(model)
    for number, disabled in enumerate((torch.no_grad, torch.inference_mode)):
        with disabled():
            x, y = xy(number)
            for each in (step, grads):
                torch.testing.assert_close(each(x, y), F.cross_entropy(reference(x), y))
        assert all(param.grad is None for param in model.parameters())
        step(*xy(number))
        plain_steps(reference, plain, range(number, number + 1))
        assert_parameters_close(model, reference)
        held = (*model.parameters(), *(value for state in optimizer.state.values() for value in state.values()))
        assert not any(tensor.is_inference() for tensor in held)


def test_a_call_with_gradients_disabled_trains_nothing(ranks: Ranks) -> None:
    ranks.values(gradients_disabled)


def resume(kind: str, how: str) -> None:
    """Two steps, save, two steps, load, the same two steps again; then once more from a fresh start."""
    make = OPTIMIZERS[kind]
    model = mlp()
    optimizer = make(model)
    step = compiled(model, optimizer)
    for number in range(2):
        step(*xy(number))
    saved = snapshot(model, optimizer)
    for number in range(2, 4):
        step(*xy(number))
    expected = snapshot(model, optimizer)
    if how == "same objects":
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
    elif how == "fresh objects":
        model = mlp(seed=5)
        model.load_state_dict(saved[0])
        optimizer = make(model)
        optimizer.load_state_dict(saved[1])
        step = compiled(model, optimizer)
    else:
        optimizer.load_state_dict(saved[1])
        for name, param in model.named_parameters():
            param.data = saved[0][name].clone()
    for number in range(2, 4):
        step(*xy(number))
    assert_same(snapshot(model, optimizer), expected)


@pytest.mark.parametrize("how", ["same objects", "fresh objects", "param.data"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_training_resumes_bitwise_after_loading(ranks: Ranks, kind: str, how: str) -> None:
    ranks.values(resume, kind, how)


def leave_for_eager(kind: str, fresh: bool) -> None:
    make = OPTIMIZERS[kind]
    reference = mlp()
    reference_optimizer = make(reference)
    plain_steps(reference, reference_optimizer, range(4))
    model = mlp()
    optimizer = make(model)
    step = compiled(model, optimizer)
    for number in range(2):
        step(*xy(number))
    if fresh:
        states = snapshot(model, optimizer)
        model = mlp(seed=5)
        model.load_state_dict(states[0])
        optimizer = make(model)
        optimizer.load_state_dict(states[1])
    plain_steps(model, optimizer, range(2, 4))
    assert_parameters_close(model, reference)
    found, expected = optimizer.state_dict(), reference_optimizer.state_dict()
    assert found["param_groups"] == expected["param_groups"]
    torch.testing.assert_close(found["state"], expected["state"], rtol=1e-4, atol=1e-6)
    if not fresh:  # and back
        plain_steps(reference, reference_optimizer, range(4, 6))
        optimizer.zero_grad()
        for number in range(4, 6):
            step(*xy(number))
        assert_parameters_close(model, reference)


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_plain_pytorch_goes_on_from_a_compiled_step(ranks: Ranks, kind: str, fresh: bool) -> None:
    ranks.values(leave_for_eager, kind, fresh)


def schedule() -> list[float]:
    model, reference = mlp(), mlp()
    optimizer, plain = momentum(model), momentum(reference)
    rates = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step = compiled(model, optimizer)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        for number in range(3):
            step(*xy(number))
            scheduler.step()
            rates.append(optimizer.param_groups[0]["lr"])
    expected = torch.optim.lr_scheduler.StepLR(plain, 1, gamma=0.5)
    for number in range(3):
        plain_steps(reference, plain, range(number, number + 1))
        expected.step()
    assert_parameters_close(model, reference)
    return rates


def test_a_learning_rate_scheduler_works_and_is_quiet(ranks: Ranks) -> None:
    assert ranks.values(schedule) == [[0.025, 0.0125, 0.00625]] * 2


def retrace() -> list[str]:
    model, reference = mlp(), mlp()
    step = compiled(model, momentum(model))
    plain = momentum(reference)
    with logged() as messages:
        for number, rows in enumerate((4, 3, 4, 3)):
            step(*xy(number, rows=rows))
            plain_steps(reference, plain, range(number, number + 1), rows=rows)
        assert_parameters_close(model, reference)
        assert len(messages) == 1
        model.eval()
        step(*xy(0))
        model.train()
        model[0].bias.requires_grad_(False)
        step(*xy(0))
        model.double()
        with pytest.raises(RuntimeError):
            step(*xy(0))
    for rows in range(1, MAX_GRAPHS + 3):
        model.eval()
        step(xy(0, rows=rows)[0].double(), xy(0, rows=rows)[1])
    assert len(step.planner.plans) == MAX_GRAPHS
    return messages


def test_new_shapes_and_modes_are_traced_again_and_say_why(ranks: Ranks) -> None:
    for messages in ranks.values(retrace):
        assert "input.0 (input): f32[4,16] -> f32[3,16]" in messages[0]
        assert "mode of the model: train -> eval" in messages[1]
        assert "requires_grad of parameter 0.bias: True -> False" in messages[2]


def replaced() -> None:
    """A new head before the first step and after two, another activation, and a layer more."""
    model, reference = mlp(), mlp()
    optimizer, plain = adamw(model), adamw(reference)
    step = compiled(model, optimizer)
    edits = [lambda: (4, nn.Linear(32, 4)), lambda: (1, nn.Tanh()), lambda: (4, nn.Linear(32, 4))]
    for number, edit in enumerate(edits):
        for each, its in ((model, optimizer), (reference, plain)):
            torch.manual_seed(number)
            index, module = edit()
            each[index] = module
            its.param_groups[0]["params"] = list(each.parameters())
        for rows in (4, 3):
            step(*xy(number, rows=rows))
            plain_steps(reference, plain, range(number, number + 1), rows=rows)
        assert_parameters_close(model, reference)
    for each, its in ((model, optimizer), (reference, plain)):
        torch.manual_seed(5)
        each.append(nn.Linear(4, 4))
        its.add_param_group({"params": each[5].parameters()})
    step(*xy(9))
    plain_steps(reference, plain, range(9, 10))
    assert_parameters_close(model, reference)


def test_replaced_and_added_modules_are_trained(ranks: Ranks) -> None:
    ranks.values(replaced)


def replaced_on_one_rank() -> str:
    model = mlp()
    step = compiled(model, momentum(model))
    step(*xy(0))
    if dist.get_rank() == 1:
        model[1] = nn.Tanh()
    with pytest.raises(RuntimeError) as caught:
        step(*xy(1))
    return type(caught.value).__name__


def test_a_module_that_only_one_rank_replaces_is_a_mismatch(ranks: Ranks) -> None:
    assert ranks.values(replaced_on_one_rank) == ["PlanMismatchError"] * 2


def own_gradients_kept() -> None:
    """Whole steps leave `.grad` alone, and deep copies (as for EMA) are copies."""
    model = mlp()
    step = compiled(model, adamw(model))
    average = copy.deepcopy(model)
    before = snapshot(average)
    step(*xy(0))
    assert all(param.grad is None for param in model.parameters())
    average_later = copy.deepcopy(model)
    later = snapshot(average_later)
    step(*xy(1))
    assert_same(snapshot(average), before)
    assert_same(snapshot(average_later), later)


def test_copies_of_the_model_stay_as_they_are(ranks: Ranks) -> None:
    ranks.values(own_gradients_kept)


def unused(find: Any = None) -> None:
    """A parameter that no rank uses takes no part and is not touched."""
    model = mlp()
    model.register_parameter("unused", nn.Parameter(torch.ones(3)))
    optimizer = adamw(model)
    compiled(model, optimizer)(*xy(0))
    assert torch.equal(model.unused, torch.ones(3))
    assert model.unused not in optimizer.state


def test_unused_parameters_are_left_alone(ranks: Ranks) -> None:
    ranks.values(unused)
