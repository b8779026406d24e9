"""The state of a step on one device: by name, complete, and loaded whole or not at all."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import commfuse_fx as cf
from tests.distributed.models_of_ranks import assert_same, snapshot
from tests.models import randomised


class Mixed(nn.Module):
    """Dropout, a batch norm, a tied weight, a scalar and a buffer that is not saved."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first = nn.Linear(6, width)
        self.norm = nn.BatchNorm1d(width)
        self.drop = nn.Dropout(0.3)
        self.tied = nn.Linear(width, 6, bias=False)
        self.tied.weight = nn.Parameter(self.first.weight.detach().t().contiguous())
        self.again = nn.Linear(width, 6, bias=False)
        self.again.weight = self.tied.weight
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("cache", torch.zeros(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.drop(torch.relu(self.norm(self.first(x))))
        out: torch.Tensor = (self.tied(x) + self.again(x)) * self.scale
        return out


OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda model: torch.optim.AdamW(
        [{"params": [*model.first.parameters()]}, {"params": [*model.norm.parameters(), model.scale], "lr": 3e-3}],
        lr=1e-2,
    ),
    "momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
    "adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=0.05),
    "adafactor": lambda model: torch.optim.Adafactor(model.parameters(), lr=0.05),
    "none": lambda model: None,
}


def make(optimizer: str = "adamw", width: int = 8, **options: Any) -> cf.CompiledStep:
    torch.manual_seed(0)
    model = randomised(Mixed(width))
    return cf.compile(model, loss_fn=F.mse_loss, optimizer=OPTIMIZERS[optimizer](model), **options)


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(5, 6, generator=generator), torch.randn(5, 6, generator=generator)


def run(step: cf.CompiledStep, numbers: range) -> list[float]:
    return [float(step(*batch(number))) for number in numbers]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_another_step_goes_on_from_a_state(optimizer: str) -> None:
    step = make(optimizer)
    run(step, range(3))
    file = io.BytesIO()
    torch.save(step.state_dict(), file)
    random = torch.get_rng_state()
    want = run(step, range(3, 6))

    file.seek(0)
    other = make(optimizer)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert other.steps == 3
    torch.set_rng_state(random)
    assert run(other, range(3, 6)) == want and other.steps == 6
    assert_same(other.state_dict(), step.state_dict())
    assert_same(snapshot(other.model, other.optimizer), snapshot(step.model, step.optimizer))


@pytest.mark.parametrize("optimizer", ["adamw", "momentum"])
@pytest.mark.parametrize("steps", [0, 2])
def test_a_step_goes_back_to_a_state(optimizer: str, steps: int) -> None:
    step = make(optimizer)
    run(step, range(steps))
    state, random = copy.deepcopy(step.state_dict()), torch.get_rng_state()
    want = run(step, range(steps, 5))
    for _ in range(2):
        step.load_state_dict(copy.deepcopy(state))
        assert step.steps == steps and bool(step.optimizer.state) == bool(steps)
        torch.set_rng_state(random)
        assert run(step, range(steps, 5)) == want


def test_a_state_is_by_name() -> None:
    step = make()
    run(step, range(2))
    state = step.state_dict()
    assert list(state) == ["model", "optimizer", "step"] and state["step"] == {"count": 2, "seed": None}
    assert_same(state["model"], dict(step.model.state_dict()))
    groups = state["optimizer"]["param_groups"]
    assert [group["params"] for group in groups] == [
        ["first.weight", "first.bias"],
        ["norm.weight", "norm.bias", "scale"],
    ]
    assert [group["lr"] for group in groups] == [1e-2, 3e-3]
    assert set(state["optimizer"]["state"]) == {name for group in groups for name in group["params"]}
    assert set(state["optimizer"]["state"]["scale"]) == {"step", "exp_avg", "exp_avg_sq"}


def test_calls_in_evaluation_and_profiles_are_no_steps() -> None:
    step = make()
    run(step, range(2))
    step.model.eval()
    step(*batch(0))
    step.model.train()
    step.profile(*batch(0), rounds=1)
    assert step.steps == 2 and step.state_dict()["step"]["count"] == 2


def test_states_keep_their_types_and_learning_rates_their_tensors() -> None:
    model = nn.Linear(4, 4).to(torch.bfloat16)
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(1e-2), foreach=False)
    step = cf.compile(model, loss_fn=F.mse_loss, optimizer=optimizer)
    precise = torch.full((4, 4), 1 / 3)
    state = step.state_dict()
    state["optimizer"]["state"] = {"weight": {"step": torch.tensor(3.0), "exp_avg": precise, "exp_avg_sq": precise}}
    state["optimizer"]["param_groups"][0]["lr"] = torch.tensor(0.25)
    step.load_state_dict(state)
    assert optimizer.state[model.weight]["exp_avg"].dtype == torch.float32
    assert torch.equal(optimizer.state[model.weight]["exp_avg"], precise)
    assert optimizer.param_groups[0]["lr"] == torch.tensor(0.25)


class Counting(nn.Module):
    """A module with state that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.notes = {"seen": 1}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.linear(x)
        return out

    def get_extra_state(self) -> Any:
        return dict(self.notes)

    def set_extra_state(self, state: Any) -> None:
        if "seen" not in state:
            raise ValueError("nothing seen")
        self.notes = dict(state)


def test_extra_state_of_modules() -> None:
    model = Counting()
    step = cf.compile(model, loss_fn=F.mse_loss, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    state = copy.deepcopy(step.state_dict())
    model.notes = {"seen": 7}
    bias = model.linear.bias.detach().clone()
    bad = copy.deepcopy(state)
    bad["model"]["_extra_state"] = {}
    bad["model"]["linear.bias"] = bias + 1
    with pytest.raises(ValueError, match="nothing seen"):
        step.load_state_dict(bad)
    assert model.notes == {"seen": 7} and torch.equal(model.linear.bias, bias)
    step.load_state_dict(state)
    assert model.notes == {"seen": 1}


def damaged(state: dict[str, Any], what: str) -> Any:
    model, optimizer = state["model"], state["optimizer"]
    if what == "missing":
        del model["first.weight"], model["norm.running_mean"]
    elif what == "unexpected":
        model.update({f"other.{number}": torch.zeros(1) for number in range(8)})
    elif what == "shape":
        model["first.weight"] = torch.zeros(3, 6)
    elif what == "no tensor":
        model["scale"] = 1.0
    elif what == "groups":
        optimizer["param_groups"].pop()
    elif what == "members":
        optimizer["param_groups"][0]["params"] = ["first.weight", "last.bias"]
    elif what == "state":
        optimizer["state"]["last.bias"] = {}
    elif what == "kind":
        optimizer.update(make("momentum").state_dict()["optimizer"])
    elif what == "no optimizer":
        del state["optimizer"]
    elif what == "hyper":
        for group in optimizer["param_groups"]:
            del group["betas"], group["eps"]
            group["momentum"] = 0.9
    elif what == "step":
        state["step"] = {"count": "3"}
    elif what == "other":
        state["scheduler"] = {}
    else:
        return [state]
    return state


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("missing", "parameter or buffer missing in the checkpoint: first.weight, norm.running_mean"),
        ("unexpected", "does not have: other.0, other.1, other.2, other.3, other.4, and 3 more"),
        ("shape", r"first.weight is \[3, 6\] in the checkpoint, and \[8, 6\] here"),
        ("no tensor", "scale is no tensor but 1.0 in the checkpoint"),
        ("groups", "the optimizer has 1 param groups in the checkpoint, and 2 here"),
        ("members", "group 0 missing in the checkpoint: first.bias"),
        ("state", "state of a parameter that the optimizer does not have: last.bias"),
        ("hyper", "group 0 has momentum in the checkpoint, and betas, eps here: it is another optimizer than AdamW"),
        ("kind", "param groups"),
        ("no optimizer", "a dict of the dicts model, step, optimizer"),
        ("step", "'count': '3'.; give .\"count\": an int"),
        ("other", "the state has scheduler, and this step has none"),
        ("list", "the state of this step is a dict"),
    ],
)
def test_what_does_not_fit_changes_nothing(what: str, said: str) -> None:
    step = make()
    run(step, range(2))
    state = copy.deepcopy(step.state_dict())
    run(step, range(2, 4))
    before = snapshot(step.model, step.optimizer)
    with pytest.raises(cf.CheckpointError, match=said):
        step.load_state_dict(damaged(state, what))
    assert_same(snapshot(step.model, step.optimizer), before)
    assert step.steps == 4
    other = make()
    run(other, range(4))
    assert_same(snapshot(other.model, other.optimizer), before)
    torch.manual_seed(1)
    want = run(other, range(4, 6))
    torch.manual_seed(1)
    assert run(step, range(4, 6)) == want


def test_a_step_that_is_closed_or_copied() -> None:
    step = make()
    run(step, range(2))
    copied = copy.deepcopy(step)
    copied.load_state_dict(step.state_dict())
    assert copied.steps == 2
    step.close()
    with pytest.raises(cf.CommFuseError, match="closed"):
        step.load_state_dict(copied.state_dict())
