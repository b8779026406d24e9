"""cf.lockstep: all ranks in one process, and the first value that ranks should share and do not."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import commfuse_fx as cf
from commfuse_fx.ir.core.meta import info
from tests.oracle import ACROSS_STEPS
from tests.sharding.elementwise import ONE_AXIS, Elementwise, assert_close, batch, eager_step, make_step, values

WORLD = 4


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def data(rows: int = 8, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 6, dtype=torch.float64, generator=generator)
    return x, torch.randint(0, 3, (rows,), generator=generator)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def compiled(model: nn.Module, optimizer: torch.optim.Optimizer | None, **options: Any) -> cf.CompiledStep:
    return cf.compile(model, loss_fn=F.cross_entropy, optimizer=optimizer, device_num=WORLD, **options)


def one_device(steps: int) -> tuple[nn.Module, list[float], list[dict[str, torch.Tensor]]]:
    """A model after some steps, and losses and gradients of each."""
    model = net()
    optimizer = adam(model)
    losses, grads = [], []
    for step in range(steps):
        x, y = data(seed=step)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        losses.append(float(loss.detach()))
        grads.append({name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None})
        optimizer.step()
    return model, losses, grads


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "unfused": {"comm_fusion": {"openstate": False}},
    "full batch": {"full_batch": True},
    "a mesh": {"mesh": (2, 2)},
    "across steps": ACROSS_STEPS,
}


@pytest.mark.parametrize("options", list(OPTIONS.values()), ids=list(OPTIONS))
def test_ranks_agree_and_give_what_one_device_gives(options: dict[str, Any]) -> None:
    want, losses, grads = one_device(3)
    model = net()
    optimizer = adam(model)
    untouched = copy.deepcopy(values(model, optimizer))
    check = cf.lockstep(compiled(model, optimizer, **options).lower(*data()), world=WORLD)
    for step in range(3):
        result = check(*data(seed=step))
        assert result.disagreement is None and result.compared > 20
        assert float(result.loss) == pytest.approx(losses[step], rel=1e-9)
        assert len(result.losses) == WORLD
        torch.testing.assert_close(dict(result.grads), grads[step], rtol=1e-9, atol=1e-12)
    named = {name: param.detach() for name, param in want.named_parameters()}
    torch.testing.assert_close(result.parameters(), named, rtol=1e-9, atol=1e-10)
    for each in check.models:
        torch.testing.assert_close(dict(each.state_dict()), named, rtol=1e-9, atol=1e-10)
    assert "step 2: all ranks agree" in check.report() == str(check)
    now = values(model, optimizer)
    assert now.keys() == untouched.keys() and all(torch.equal(now[name], untouched[name]) for name in now)


def test_without_optimizer_gradients_are_those_of_the_step() -> None:
    _, _, grads = one_device(1)
    model = net()
    check = cf.lockstep(compiled(model, None).lower(*data()))
    result = check(*data(seed=0))
    torch.testing.assert_close(dict(result.grads), grads[0], rtol=1e-9, atol=1e-12)
    assert all(param.grad is None for param in model.parameters())


def test_the_arguments_of_lower_are_the_default() -> None:
    lowered = compiled(net(), None).lower(*data(seed=5))
    assert float(cf.lockstep(lowered)().loss) == float(cf.lockstep(lowered)(*data(seed=5)).loss)


@pytest.mark.parametrize("options", [{"comm_fusion": {"openstate": False}}, ACROSS_STEPS], ids=["unfused", "across"])
def test_every_dropped_collective_is_found(options: dict[str, Any]) -> None:
    model = net()
    step = compiled(model, adam(model), **options)
    names = [info(node).name for node in step.lower(*data(2)).program.collectives()]
    for name in names:
        check = cf.lockstep(step.lower(*data(2)), drop=[name])
        result = check(*data())
        assert result.disagreement is not None
        assert result.disagreement.node.rsplit("/", 1)[0] == name.rsplit("/", 1)[0]
        assert result.disagreement.ranks == (0, 1) and result.disagreement.difference > 1e-6
        assert result.disagreement.node in check.report() and name in check.report()
        assert check.disagreement is result.disagreement


def test_the_next_step_begins_with_what_the_last_one_left() -> None:
    model = net()
    step = compiled(model, adam(model))
    check = cf.lockstep(step.lower(*data()))
    check(*data())
    with torch.no_grad():
        next(check.models[2].parameters())[0, 0] += 1.0
    result = check(*data())
    assert result.disagreement is not None
    assert result.disagreement.ranks == (0, 2) and result.disagreement.phase == "input"
    assert result.disagreement.difference == pytest.approx(1.0)


def test_a_tolerance() -> None:
    model = net()
    step = compiled(model, adam(model))
    for tolerance, agrees in ((1e-6, True), (1e-12, False)):
        check = cf.lockstep(step.lower(*data()), tolerance=tolerance)
        with torch.no_grad():
            next(check.models[1].parameters())[0, 0] += 1e-8
        assert (check(*data()).disagreement is None) == agrees


class Normed(nn.Module):
    """Its running statistics are those of each rank's own batch, which is as it should be."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.BatchNorm1d(6)
        self.layer = nn.Linear(6, 3)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(F.dropout(self.norm(x), 0.3, self.training))
        return out


def test_what_ranks_need_not_share_is_not_compared() -> None:
    model = Normed()
    check = cf.lockstep(compiled(model, torch.optim.SGD(model.parameters(), lr=0.1)).lower(*data()))
    result = check(*data())
    assert result.disagreement is None
    assert not torch.equal(check.models[0].norm.running_mean, check.models[1].norm.running_mean)
    state = torch.get_rng_state()
    assert set(result.grads) == {name for name, _ in model.named_parameters()}
    assert torch.equal(torch.get_rng_state(), state)


def test_layers_that_every_rank_trains_by_itself() -> None:
    model = net()
    model[2].weight.layerwise_parallel = True  # type: ignore[assignment]
    step = compiled(model, adam(model), parallel_mode="hybrid_parallel")
    check = cf.lockstep(step.lower(*data()))
    assert check(*data()).disagreement is None and check(*data()).disagreement is None
    assert not torch.equal(check.models[0][2].weight, check.models[1][2].weight)


def test_nodes_say_themselves_what_varies() -> None:
    """`NodeInfo.varies` names mesh axes: here a value of each rank's own batch claims to be the same along tp."""
    model = net()
    step = compiled(model, adam(model), mesh=(2, 2))
    check = cf.lockstep(step.lower(*data()))
    check(*data())
    (program,) = (plan.compiled.program for plan in step.planner.plans.values() if plan.compiled.captured is None)
    node = next(node for node in program.graph.nodes if info(node).phase == "forward" and "tanh" in info(node).name)
    info(node).varies = "dp,tp"
    assert check(*data()).disagreement is None
    info(node).varies = "dp"
    result = check(*data())
    assert result.disagreement is not None
    assert (result.disagreement.node, result.disagreement.ranks) == (info(node).name, (0, 1))
    assert result.disagreement.module and ".py:" in result.disagreement.source
    assert result.disagreement.source in str(result)
    info(node).varies = "tp"
    assert (again := check(*data()).disagreement) is not None and again.ranks == (0, 2)


def test_divided_parameters() -> None:
    step = make_step(ONE_AXIS, (2, 2), "sgd")
    model = Elementwise()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    check = cf.lockstep(step.lower(batch(0, 0)), drop=[])
    for number in range(2):
        x = torch.cat([batch(number, rank) for rank in (0, 1)])
        # The made-up step divides its batch among the ranks of dp alone.
        calls = [step.planner.take_apart((batch(number, step.mesh.index("dp", rank)),), {}) for rank in range(4)]
        check._divide = lambda call, calls=calls: calls  # type: ignore[method-assign]
        result = check(x)
        assert result.disagreement is None
        eager_step(model, optimizer, [batch(number, rank) for rank in (0, 1)])
    assert_close(result.parameters(), {name: param.detach() for name, param in model.named_parameters()})


@pytest.mark.parametrize("full_batch", [False, True])
def test_a_divided_step(full_batch: bool) -> None:
    want, losses, _ = one_device(2)
    model = net()
    cf.shard(model[0], weight=("tp", None), bias=("tp",))
    cf.shard(model[2], weight=(None, "tp"))
    step = compiled(model, adam(model), parallel_mode="semi_auto", mesh=(2, 2), full_batch=full_batch)
    lowered = step.lower(*data(8 if full_batch else 4))
    check = cf.lockstep(lowered, world=WORLD)
    for number in range(2):
        result = check(*data(seed=number))
        assert result.disagreement is None and result.compared > 20
        assert [float(loss) for loss in result.losses] == pytest.approx([losses[number]] * WORLD, rel=1e-9)
    named = {name: param.detach() for name, param in want.named_parameters()}
    torch.testing.assert_close(result.parameters(), named, rtol=1e-9, atol=1e-10)
    right = float(cf.lockstep(lowered)(*data()).loss)
    agree_on_a_wrong_loss = []
    for node in lowered.program.collectives():
        name = info(node).name
        result = cf.lockstep(lowered, drop=[name])(*data())
        if result.disagreement is None:
            assert float(result.loss) != pytest.approx(right, rel=1e-3)
            agree_on_a_wrong_loss.append(name)
        else:
            assert result.disagreement.node.rsplit("/", 1)[0] == name.rsplit("/", 1)[0]
    # The number of rows in the loss: every rank has as many.
    assert len(agree_on_a_wrong_loss) == 1 < len(list(lowered.program.collectives()))


def test_bad_arguments() -> None:
    lowered = compiled(net(), None, full_batch=False).lower(*data())
    with pytest.raises(cf.ConfigValueError, match="world=8.*4 ranks"):
        cf.lockstep(lowered, world=8)
    with pytest.raises(cf.ConfigTypeError, match="lower"):
        cf.lockstep(net())  # type: ignore[arg-type]
    with pytest.raises(cf.ConfigTypeError, match="list of names"):
        cf.lockstep(lowered, drop="reduce")
    with pytest.raises(cf.ConfigValueError, match="6 rows.*4"):
        cf.lockstep(lowered)(*data(6))
    with pytest.raises(cf.ConfigValueError, match="not a collective"):
        cf.lockstep(lowered, drop=["no such"])(*data())
    assert "no step has run yet" in cf.lockstep(lowered).report()


def test_rows_of_parameters_of_a_divided_step_are_not_replicas() -> None:
    rows = {"level": 3, "parallel_optimizer_threshold": 0, "pad": True}
    options = {"enable_parallel_optimizer": True, "parallel_optimizer_config": rows, "parallel_mode": "semi_auto"}
    model = net()
    lowered = compiled(model, adam(model), **options).lower(*data(2))
    assert any(param.rows_alone for param in lowered.program.params.values())
    check = cf.lockstep(lowered)
    for _ in range(2):
        check(*data())
    assert check.disagreement is None, check.report()
