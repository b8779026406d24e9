"""Communication that runs on into the next step: the same numbers as the plain order, whoever looks, and whenever."""

from __future__ import annotations

import copy
import io
import math
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import commfuse_fx as cf
from tests import captures
from tests.distributed.harness import Ranks, run_soon
from tests.distributed.models_of_ranks import assert_same

pytestmark = pytest.mark.dist

OPTIMAL = {"allreduce": {"mode": "optimal", "config": None}}
ACROSS = cf.ScheduleConfig(across_steps=True)

OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, nesterov=True),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.01, momentum=0.5),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.05),
    "nadam": lambda params: torch.optim.NAdam(params, lr=0.01),
    "asgd": lambda params: torch.optim.ASGD(params, lr=0.05, t0=1),
}


class Net(nn.Module):
    """Wide enough that buckets differ, with BatchNorm: its statistics change in their own step."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 96, bias=False)  # the normalisation would cancel it
        self.norm = nn.BatchNorm1d(96)
        self.blocks = nn.ModuleList([nn.Linear(96, 96) for _ in range(4)])
        self.head = nn.Linear(96, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.first(x))
        for block in self.blocks:
            x = x + torch.relu(block(x))
        return self.head(x)


def slow_cluster() -> cf.ClusterSpec:
    """So slow a network that every bucket is worth deferring."""
    level = cf.Level(name="tcp", alpha=1e-5, bandwidth=2e7)
    device = cf.Device(
        name="cpu", flops={"f32": 5e9, "f64": 5e9}, memory_bandwidth=1e10, memory_bytes=2**34, op_overhead=5e-6
    )
    return cf.ClusterSpec(name="slow", device=device, levels=(level,))


def batches(rank: int, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(100 + rank)
    return [
        (torch.randn(8, 16, dtype=torch.float64, generator=generator), torch.randint(0, 4, (8,), generator=generator))
        for _ in range(count)
    ]


def make(schedule: Any, fusion: Any, optimizer: str = "adamw") -> tuple[nn.Module, Any, cf.CompiledStep]:
    torch.manual_seed(0)
    model = Net().double()
    captures.share(model, Net)
    made = OPTIMIZERS[optimizer](model.parameters())
    step = cf.compile(
        model, fusion, loss_fn=nn.functional.cross_entropy, optimizer=made, schedule=schedule, cluster=slow_cluster()
    )
    return model, made, step


def values(model: nn.Module, optimizer: Any) -> dict[str, torch.Tensor]:
    found = {name: value.detach().clone() for name, value in model.state_dict().items()}
    for index, state in optimizer.state_dict()["state"].items():
        found.update({f"{index}.{name}": torch.as_tensor(value).clone() for name, value in state.items()})
    return found


def is_deferred(step: cf.CompiledStep) -> bool:
    return step.session.running is not None and step.session.running.tail.is_pending


def train(schedule: Any, fusion: Any, optimizer: str) -> tuple[dict[str, torch.Tensor], list[float], bool]:
    model, made, step = make(schedule, fusion, optimizer)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(made, 0.9)
    losses = []
    deferred = False
    for x, y in batches(cf.get_rank(), 6):
        made.zero_grad()
        losses.append(float(step(x, y)))
        deferred = deferred or is_deferred(step)
        scheduler.step()  # the update that is still to come uses the rate of its own step
    return values(model, made), losses, deferred


def train_both(fusion: Any, optimizer: str) -> list[Any]:
    return [train(schedule, fusion, optimizer) for schedule in ("overlap", ACROSS)]


# Every pair of a fusion, an optimizer and a number of ranks.
COMPARED = [
    *(("auto", optimizer, 2) for optimizer in OPTIMIZERS),
    ("optimal", "adamw", 4),
    ("optimal", "sgd", 4),
    ("optimal", "rmsprop", 4),
    ("optimal", "adagrad", 2),
    ("auto", "adagrad", 4),
]


@pytest.mark.parametrize(("mode", "optimizer", "size"), COMPARED)
def test_equals_the_plain_order_bitwise(ranks: Ranks, mode: str, optimizer: str, size: int):
    fusion = OPTIMAL if mode == "optimal" else None
    for plain, across in ranks.values(train_both, fusion, optimizer, size=size):
        (want, want_losses, _), (have, losses, deferred) = plain, across
        assert deferred
        assert have.keys() == want.keys()
        for name in want:
            if size == 2 and fusion is None:
                assert torch.equal(have[name], want[name]), name
            torch.testing.assert_close(have[name], want[name], rtol=1e-9, atol=1e-11, msg=name)
        assert losses == pytest.approx(want_losses, rel=1e-9)


READS: dict[str, Any] = {
    "a parameter": lambda model, optimizer: model.blocks[0].weight.sum(),
    "state_dict": lambda model, optimizer: {k: v.clone() for k, v in model.state_dict().items()},
    "optimizer state": lambda model, optimizer: optimizer.state_dict()["state"][0]["exp_avg"].sum(),
    "a copy": lambda model, optimizer: copy.deepcopy(model),
    "saving": lambda model, optimizer: torch.save(model.state_dict(), io.BytesIO()),
    "saving parameters": lambda model, optimizer: torch.save(list(model.parameters()), io.BytesIO()),
    "an eager forward": lambda model, optimizer: model(torch.ones(2, 16, dtype=torch.float64)),
    "printing": lambda model, optimizer: repr(model.head.bias),
    "numpy": lambda model, optimizer: model.head.bias.detach().numpy().copy(),
    "writing": lambda model, optimizer: model.head.bias.data.mul_(1.0),
}


def train_reading() -> tuple[list[str], list[str], bool]:
    """A step for each way to read, then each of them again: which reads did not finish the step before, which left
    other values than an explicit wait, and whether training ends as it does without any read."""
    names = list(READS) * 2
    data = batches(cf.get_rank(), len(names))
    waited, ends = [], []
    unfinished, wrong = [], []
    for how in ("wait", "read", "run on"):
        model, made, step = make(ACROSS, OPTIMAL)
        for number, (name, batch) in enumerate(zip(names, data, strict=True)):
            step(*batch)
            assert is_deferred(step)
            if how == "wait":
                step.synchronize()
                waited.append(values(model, made))
            elif how == "read":
                if name == "an eager forward":
                    model.eval()
                READS[name](model, made)
                model.train()
                if is_deferred(step):
                    unfinished.append(name)
                assert all(type(param) is nn.Parameter for param in model.parameters())
                have, want = values(model, made), waited[number]
                if not all(torch.equal(have[key], want[key]) for key in want):
                    wrong.append(name)
        ends.append(values(model, made))
    same = all(torch.equal(end[key], ends[0][key]) for end in ends for key in ends[0])
    return unfinished, wrong, same


def test_reading_waits_for_the_tail(ranks: Ranks):
    for unfinished, wrong, same in ranks.values(train_reading):
        assert unfinished == []
        assert wrong == []
        assert same


def looks_that_cost_nothing() -> list[bool]:
    model, made, step = make(ACROSS, OPTIMAL)
    pending = []
    for x, y in batches(cf.get_rank(), 3):
        made.zero_grad(set_to_none=True)
        step(x, y)
        made.zero_grad(set_to_none=False)
        assert sum(param.numel() for param in model.parameters()) > 0
        assert {param.device.type for param in model.parameters()} == {"cpu"}
        pending.append(is_deferred(step))
    step.synchronize()
    return pending


def test_zero_grad_and_shapes_do_not_wait(ranks: Ranks):
    assert ranks.values(looks_that_cost_nothing) == [[True] * 3] * 2


def change_of_shape_and_mode() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    results = []
    for schedule in (ACROSS, "overlap"):
        model, made, step = make(schedule, OPTIMAL)
        for rows in (8, 8, 4, 8):
            x, y = batches(cf.get_rank(), 1)[0]
            step(x[:rows], y[:rows])
        model.eval()
        step(x, y)
        model.train()
        step(x, y)
        results.append(values(model, made))
    return results[0], results[1]


def test_other_shapes_and_evaluation_finish_the_tail_first(ranks: Ranks):
    for have, want in ranks.values(change_of_shape_and_mode):
        for name in want:
            torch.testing.assert_close(have[name], want[name], rtol=1e-9, atol=1e-11, msg=name)


def replaced_modules() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], bool, str]:
    """A new head, and later one more block, while updates of the modules before are still to come."""
    results: list[dict[str, torch.Tensor]] = []
    deferred = False
    for schedule in (ACROSS, "overlap"):
        model, made, step = make(schedule, OPTIMAL)
        group = made.param_groups[0]
        old = model.head
        for number, (x, y) in enumerate(batches(cf.get_rank(), 6)):
            deferred = deferred or (number in (2, 4) and is_deferred(step))
            if number == 2:
                model.head = nn.Linear(96, 4).double()
                group["params"] = list(model.parameters())
                for param in old.parameters():
                    del made.state[param]
            if number == 4:
                model.blocks.append(nn.Linear(96, 96).double())
                made.add_param_group({"params": model.blocks[-1].parameters()})
            step(x, y)
        results.append({**values(model, made), "old": old.weight.detach().clone()})
    try:
        model.head = nn.Linear(96, 4).double()
        step(x, y)
    except cf.ConfigValueError as error:
        return results[0], results[1], deferred, str(error)
    return results[0], results[1], deferred, ""


def test_replaced_modules_finish_the_tail_first(ranks: Ranks):
    for have, want, deferred, error in ranks.values(replaced_modules):
        assert deferred
        assert "is not a parameter of the model" in error
        for name in want:
            torch.testing.assert_close(have[name], want[name], rtol=1e-9, atol=1e-11, msg=name)


def failing_step() -> tuple[str, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    model, made, step = make(ACROSS, OPTIMAL)
    data = batches(cf.get_rank(), 3)
    step(*data[0])
    step(*data[1])
    bad = data[2][1].clone()
    bad[0] = 17  # no such class
    message = ""
    try:
        step(data[2][0], bad)
    except (IndexError, RuntimeError) as error:
        message = type(error).__name__
    after = values(model, made)
    other, optimizer, plain = make(ACROSS, OPTIMAL)
    plain(*data[0])
    plain(*data[1])
    want = values(other, optimizer)
    step(*data[2])  # goes on from there
    return message, after, want


def test_a_step_that_fails_leaves_the_one_before_complete(ranks: Ranks):
    for message, after, want in ranks.values(failing_step):
        assert message
        for name in want:
            if "running" not in name and "num_batches" not in name:
                assert torch.equal(after[name], want[name]), name


def peer_dies_between_steps() -> tuple[list[str], bool]:
    """Rank 1 leaves without a word while gradients are on the wire, or just before."""
    model, made, step = make(ACROSS, OPTIMAL)
    data = batches(cf.get_rank(), 4)
    step(*data[0])
    step(*data[1])
    if cf.get_rank() == 1:
        os._exit(3)
    errors = []
    for _ in range(2):
        try:
            step(*data[2])
        except cf.CollectiveError as error:
            errors.append(str(error))
    readable = all(torch.isfinite(value).all() for value in values(model, made).values())
    return errors, bool(readable)


def test_a_peer_that_dies_between_steps_is_noticed(ranks: Ranks):
    first, second = run_soon(ranks, peer_dies_between_steps)
    assert second.died == 3
    assert first.ok, first.details
    errors, readable = first.value
    assert len(errors) == 2 and readable
    # The second call refuses at once: the ranks are no longer at the same place.
    assert "checkpoint" in errors[1]


def destroyed(peer_dies: bool) -> tuple[bool, bool, dict[str, torch.Tensor]]:
    """The process group is destroyed while updates are still to come."""
    model, made, step = make(ACROSS, OPTIMAL)
    first, second, third = batches(cf.get_rank(), 3)
    step(*first)
    messages = 0
    with pytest.MonkeyPatch.context() as patch:
        send = dist.all_reduce

        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal messages
            messages += 1
            if peer_dies and cf.get_rank() == 1 and messages == 2 * in_step:
                os._exit(3)  # without the last message of the third step
            return send(*args, **kwargs)

        in_step = math.inf
        patch.setattr(dist, "all_reduce", counted)
        step(*second)
        in_step = messages
        step(*third)
    before = is_deferred(step)
    dist.destroy_process_group()
    return before, is_deferred(step), values(model, made)


def without_across_steps() -> dict[str, torch.Tensor]:
    model, made, step = make("overlap", OPTIMAL)
    for x, y in batches(cf.get_rank(), 3):
        step(x, y)
    return values(model, made)


def test_destroying_the_process_group_completes_the_last_step(ranks: Ranks):
    found = ranks.values(destroyed, False)
    for (before, after, params), want in zip(found, ranks.values(without_across_steps), strict=True):
        assert before and not after
        assert_same(dict(sorted(params.items())), dict(sorted(want.items())))


def test_updates_that_are_lost_at_the_end_are_an_error(ranks: Ranks):
    first, second = run_soon(ranks, destroyed, True)
    assert second.died == 3
    assert "CollectiveError" in first.details and "This was the rest of the previous step" in first.details


def interrupted_between_parts() -> tuple[bool, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Ctrl-C while the next step waits for the tail: that step has not happened, the one before has."""
    results = []
    for interrupt in (True, False):
        model, made, step = make(ACROSS, OPTIMAL)
        data = batches(cf.get_rank(), 2)
        step(*data[0])
        if interrupt:
            assert step.session.running is not None
            tail = step.session.running.tail
            run = tail.advance

            def once(until: int, run: Any = run, tail: Any = tail) -> None:
                run(1)
                tail.advance = run
                raise KeyboardInterrupt

            tail.advance = once
            try:
                step(*data[1])
            except KeyboardInterrupt:
                results.append(values(model, made))
        else:
            results.append(values(model, made))
    return len(results) == 2, results[0], results[1]


def test_an_interrupted_step_completes_the_one_before(ranks: Ranks):
    for interrupted, have, want in ranks.values(interrupted_between_parts):
        assert interrupted
        for name in want:
            if "running" not in name and "num_batches" not in name:
                assert torch.equal(have[name], want[name]), name


def two_models() -> bool:
    """Tensors of two steps in one op: both are finished before it."""
    found = [make(ACROSS, OPTIMAL) for _ in range(2)]
    for x, y in batches(cf.get_rank(), 2):
        for _, _, step in found:
            step(x, y)
    assert all(is_deferred(step) for _, _, step in found)
    (one, *_), (other, *_) = found
    same = torch.equal(one.head.weight, other.head.weight)
    return same and not any(is_deferred(step) for _, _, step in found)


def test_one_op_on_tensors_of_two_steps(ranks: Ranks):
    assert ranks.values(two_models) == [True, True]
