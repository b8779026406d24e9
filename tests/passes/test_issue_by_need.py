"""A collective that is needed soon is sent before one that became ready first and has time."""

from __future__ import annotations

import torch
from torch import nn

import commfuse_fx as cf
from commfuse_fx.virtual.virtual_world import LockstepWorld
from tests.models import randomised

WORLD = 2


class Late(nn.Module):
    """A large result is used at the end, a small one at once."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Linear(64, 1024)
        self.small = nn.Linear(64, 64)
        self.body = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        large = cf.ops.all_reduce(self.large(x), fusion=0)
        x = cf.ops.all_reduce(self.small(x), fusion=0)
        x = self.body(x)
        return large.mean(1, keepdim=True) + x


def step(schedule: str = "overlap") -> tuple[cf.CompiledStep, nn.Module]:
    torch.manual_seed(0)
    model = randomised(Late())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled = cf.compile(
        model,
        loss_fn=nn.functional.mse_loss,
        optimizer=optimizer,
        device_num=WORLD,
        cluster="gloo-1gbit",
        schedule=schedule,
    )
    return compiled, model


BATCH = [(torch.randn(256, 64), torch.randn(256, 64)) for _ in range(WORLD)]


def test_what_is_needed_first_goes_first() -> None:
    lowered = step()[0].lower(*BATCH[0])
    forward = [each.bytes for each in lowered.collectives if each.phase == "forward"]
    assert forward == [256 * 64 * 4, 256 * 1024 * 4]
    in_order = step("none")[0].lower(*BATCH[0])
    assert [each.bytes for each in in_order.collectives if each.phase == "forward"] == forward[::-1]
    notes = [(note.subject, note.reason) for note in lowered.program.notes if note.topic == "schedule"]
    chosen = [subject for subject, reason in notes if reason.startswith("chosen")]
    assert chosen == ["overlap, needed first goes first"]


def test_the_order_of_issue_changes_no_bit() -> None:
    losses, models = [], []
    for schedule in ("overlap", "none"):
        compiled, model = step(schedule)
        world = LockstepWorld(compiled)
        losses.append([result.loss for _ in range(3) for result in world(BATCH)])
        models.append(model)
    assert all(torch.equal(one, other) for one, other in zip(*losses, strict=True))
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(one, other)
