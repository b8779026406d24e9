"""broadcast_buffers=True: every training step of every rank begins with rank 0's buffers."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import commfuse_fx as cf
from commfuse_fx.virtual.virtual_world import LockstepWorld
from tests.oracle import ACROSS_STEPS, OPTIMAL, cluster

OFF = {"openstate": False}
PLANS: dict[str, dict[str, Any]] = {
    "default": {},
    "unfused": {"comm_fusion": OFF},
    "unscheduled": {"schedule": "none"},
    "optimal": {"comm_fusion": OPTIMAL, "cluster": cluster("slow", 1e-4, 1e8)},
    "across steps": ACROSS_STEPS,
}


class Normed(nn.Module):
    """BatchNorm, and a running scale that the loss depends on."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.frozen = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 3)
        self.register_buffer("scale", torch.ones(8))
        self.frozen.eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.frozen(self.norm(self.first(x)))
        with torch.no_grad():
            self.scale.mul_(0.9).add_(x.abs().mean(0), alpha=0.1)
        out: torch.Tensor = self.last(x * self.scale)
        return out


class Odd(nn.Module):
    """Buffers of all kinds; each counts in the loss, but for `unread`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.ones(3))
        kinds: dict[str, torch.Tensor] = {
            "single": torch.randn(()),
            "wide": torch.randn(2, dtype=torch.float64),
            "low": torch.randn(5).to(torch.bfloat16),
            "int16": torch.arange(3, dtype=torch.int16),
            "uint8": torch.arange(5, dtype=torch.uint8),
            "flag": torch.tensor([True, False, True]),
            "pair": torch.randn(2, dtype=torch.complex64),
            "quarter": torch.randn(3).to(torch.float8_e4m3fn),
            "columns": torch.randn(3, 2).t(),
            "channels_last": torch.randn(2, 3, 2, 2).to(memory_format=torch.channels_last),
            "gaps": torch.randn(3, 4)[:, ::2],
            "expanded": torch.randn(3).expand(2, 3),
            "overlapping": torch.randn(4).as_strided((3, 2), (1, 1)),
            "none": torch.zeros(0),
        }
        for name, value in kinds.items():
            self.register_buffer(name, value, persistent=name != "low")
        self.register_buffer("tied", self.wide)
        self.register_buffer("unread", torch.randn(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = x.sum()
        for name, value in self.named_buffers():
            if name != "unread":
                total = total + torch.view_as_real(value).sum() if value.is_complex() else total + value.float().sum()
        return (self.weight * total).sum()


def compiled(model: nn.Module, world: int = 2, **options: Any) -> cf.CompiledStep:
    options = {"broadcast_buffers": True, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), **options}
    if world > 1:
        options["device_num"] = world
    return cf.compile(model, loss_fn=F.mse_loss, **options)


def batch(rank: int, number: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * number + rank)
    return torch.randn(4, 6, generator=generator), torch.randn(4, 3, generator=generator)


def lowered(world: int = 4, **options: Any) -> cf.Lowered:
    return compiled(Normed(), world, **options).lower(*batch(0))


def broadcasts(lowered: cf.Lowered) -> list[cf.Collective]:
    return [each for each in lowered.collectives if each.kind == "broadcast"]


FLOATS = ["scale", "norm.running_mean", "norm.running_var", "frozen.running_mean", "frozen.running_var"]
COUNTS = ["norm.num_batches_tracked", "frozen.num_batches_tracked"]


@pytest.mark.parametrize("plan", [name for name in PLANS if name != "unfused"])
def test_one_broadcast_per_dtype_stands_at_the_top(plan: str) -> None:
    made = lowered(**PLANS[plan])
    floats, counts = broadcasts(made)
    assert (floats.members, floats.dtype, floats.bytes) == (FLOATS, torch.float32, 5 * 8 * 4)
    assert (counts.members, counts.dtype, counts.bytes) == (COUNTS, torch.int64, 16)
    for each in (floats, counts):
        assert (each.group, each.phase, each.fused, each.reduce_op) == ((0, 1, 2, 3), "forward", True, None)
    assert "# broadcast_buffers: True" in made.text()
    lines = [line for line in made.text().splitlines() if line.startswith(("fwd", "bwd", "upd"))]
    first_compute = next(i for i, line in enumerate(lines) if "first/" in line)
    sent = [i for i, line in enumerate(lines) if "broadcast" in line and "{group" in line]
    awaited = next(i for i, line in enumerate(lines) if "wait_tensor(" in line)
    read = next(i for i, line in enumerate(lines) if "norm/_native_batch_norm" in line)
    assert sent[-1] < first_compute < awaited < read
    assert "broadcast: broadcast group=dp(4) dtype=f32 bytes=160" in made.explain().text()


def test_without_it_and_where_nobody_listens_nothing_is_sent() -> None:
    assert not broadcasts(lowered(broadcast_buffers=False)) and not broadcasts(lowered(broadcast_buffers=None))
    assert "broadcast_buffers" not in lowered(broadcast_buffers=False).text()
    assert not broadcasts(lowered(world=1))
    model = Normed().eval()
    assert not compiled(model, 4).lower(*batch(0)).collectives
    model.train()
    with torch.no_grad():
        assert not broadcasts(compiled(model, 4).lower(*batch(0)))
    plain = nn.Linear(6, 3)
    assert len(compiled(plain, 4).lower(*batch(0)).collectives) == 1


def test_unfused_and_hybrid() -> None:
    assert sorted(each.members[0] for each in broadcasts(lowered(comm_fusion=OFF))) == sorted(FLOATS + COUNTS)
    assert len(broadcasts(lowered(parallel_mode="hybrid_parallel"))) == 2


def test_bad_values() -> None:
    model = Normed()
    with pytest.raises(cf.CommFuseError, match="broadcast_buffers is 1; give True or False"):
        compiled(model, broadcast_buffers=1)
    with pytest.raises(ValueError, match="broadcast_buffers=True with parallel_mode"):
        compiled(model, parallel_mode="semi_auto")
    with pytest.raises(ValueError, match="broadcast_buffers=True with parallel_mode=.stand_alone.: no rank sends"):
        compiled(model, 4, parallel_mode="stand_alone")


def test_a_saved_graph_is_planned_again_with_its_buffers(tmp_path: Any) -> None:
    made = lowered()
    made.dump(tmp_path)
    again = cf.load(tmp_path)
    assert again.text() == made.text() and len(broadcasts(again)) == 2


def disturb(models: list[nn.Module]) -> None:
    """Other buffers on every rank but the first."""
    with torch.no_grad():
        for rank, model in enumerate(models):
            for buffer in dict.fromkeys(model.buffers()):
                if rank and buffer.numel() and 0 not in buffer.stride() and buffer.stride() != (1, 1):
                    buffer.copy_(buffer.to(torch.float32).add(rank).to(buffer.dtype) if not buffer.is_complex() else 5)
            for name in ("expanded",):
                if rank and hasattr(model, name):
                    model.register_buffer(name, torch.full((3,), 7.0).expand(2, 3))


def as_ddp(models: list[nn.Module], batches: list[Any], lr: float = 0.1) -> list[torch.Tensor]:
    """A step as DistributedDataParallel takes it."""
    buffers = [dict(model.named_buffers()) for model in models]
    with torch.no_grad():
        for mine in buffers[1:]:
            for name, value in buffers[0].items():
                mine[name].copy_(value)
    losses = [F.mse_loss(model(x), y) for model, (x, y) in zip(models, batches, strict=True)]
    for loss in losses:
        loss.backward()  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for params in zip(*(model.parameters() for model in models), strict=True):
            grad = torch.stack([param.grad for param in params if param.grad is not None]).mean(0)
            for param in params:
                param.sub_(lr * grad)
                param.grad = None
    return losses


@pytest.mark.parametrize("plan", PLANS)
def test_steps_are_those_of_rank_0s_buffers(plan: str) -> None:
    step = compiled(Normed(), 3, **PLANS[plan])
    world = LockstepWorld(step)
    disturb(world.models)
    models = copy.deepcopy(world.models)
    for number in range(3):
        batches = [batch(rank, number) for rank in range(3)]
        results = world(batches)
        losses = as_ddp(models, batches)
        torch.testing.assert_close([each.loss for each in results], [loss.detach() for loss in losses])
    for have, want in zip(world.models, models, strict=True):
        torch.testing.assert_close(dict(have.state_dict()), dict(want.state_dict()), rtol=1e-5, atol=1e-6)
    assert not torch.equal(world.models[0].norm.running_mean, world.models[1].norm.running_mean)


@pytest.mark.parametrize("plan", ["default", "unfused"])
def test_buffers_of_all_kinds(plan: str) -> None:
    model = Odd()
    step = cf.compile(model, device_num=2, broadcast_buffers=True, **PLANS[plan], form="step")
    world = LockstepWorld(step)
    disturb(world.models)
    before = copy.deepcopy(dict(world.models[0].named_buffers()))
    losses = [each.loss for each in world([(torch.zeros(2),)] * 2)]
    assert torch.equal(*losses)
    for model in world.models:
        for name, value in model.named_buffers():
            assert torch.equal(value.to(torch.complex64), before[name].to(torch.complex64)), name
            assert value.stride() == before[name].stride()
    made = step.lower(torch.zeros(2))
    members = list(itertools.chain.from_iterable(each.members for each in broadcasts(made)))
    assert sorted(members) == sorted(name for name in before if name not in ("none", "overlapping"))
    assert "tied" not in members
    assert "not broadcast\n  overlapping: its elements overlap" in made.explain().text()


def test_a_collective_left_out_is_noticed() -> None:
    step = compiled(Normed(), 2, comm_fusion=OFF)
    made = step.lower(*batch(0))
    names = [line.split("%")[1].split(":")[0] for line in made.text().splitlines() if "members=" in line]
    sent = [name for name in names if name.startswith("buffers/")]
    assert len(sent) == len(FLOATS + COUNTS)
    x, y = (torch.cat(parts) for parts in zip(batch(0), batch(1), strict=True))
    for name in sent:
        check = cf.lockstep(made, drop=[name])
        disturb(check.models)
        result = check(x, y)
        assert result.disagreement is not None and name.rpartition("/")[0] in result.disagreement.node
    check = cf.lockstep(made)
    disturb(check.models)
    assert check(x, y).disagreement is None
