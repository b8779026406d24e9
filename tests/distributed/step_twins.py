"""A step that tries plans beside one that does not: the same training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F

import commfuse_fx as cf
from tests.distributed.models_of_ranks import adamw, assert_same, snapshot, wide_mlp, xy
from tests.distributed.quick_trials import MOST_STEPS


class Twins:
    """A step that tries plans, and one that does not, of the same model. shared: options of both."""

    def __init__(self, options: dict[str, Any] | None = None, shared: dict[str, Any] | None = None) -> None:
        self.model, self.twin = wide_mlp(), wide_mlp()
        self.optimizer, self.other = adamw(self.model), adamw(self.twin)
        asked = {"schedule": "auto"} if options is None else options
        self.step = cf.compile(self.model, loss_fn=F.cross_entropy, optimizer=self.optimizer, **asked, **(shared or {}))
        self.plain = cf.compile(self.twin, loss_fn=F.cross_entropy, optimizer=self.other, **(shared or {}))
        self.number = 0

    @property
    def is_settled(self) -> bool:
        assert self.step.session.replan is not None
        return self.step.session.replan.is_settled

    def run(self, rows: int = 4) -> None:
        x, y = xy(self.number, rows=rows)
        self.number += 1
        assert torch.equal(self.step(x, y), self.plain(x, y)), self.differences()

    def differences(self) -> str:
        """Where the two have come apart."""
        self.step.synchronize()
        pairs = zip(self.model.named_parameters(), self.twin.parameters(), strict=True)
        found = [f"{name}: {float((one - other).abs().max())}" for (name, one), other in pairs if not one.equal(other)]
        chosen = self.step.session.replan._chosen
        running = chosen.candidate.name if chosen.candidates else "default"
        return f"rank {dist.get_rank()}, step {self.number}, plan {running}: {found}"

    def settle(self, between: Callable[[Twins], None] = lambda twins: None) -> None:
        while not self.is_settled:
            assert self.number < MOST_STEPS
            self.run()
            between(self)

    def check(self) -> None:
        """Parameters and states are the same bits, also after more steps."""
        for _ in range(3):
            self.run()
        session = self.step.session
        while session.micro_batches.count:  # up to the next update
            self.run()
        assert session.replan is not None and session.running is not None
        chosen = session.replan._chosen
        assert not chosen.number or session.running.program is chosen.candidate.compiled.program
        self.step.synchronize()
        assert_same(snapshot(self.model, self.optimizer), snapshot(self.twin, self.other))

    def tried(self, rows: int = 4) -> list[str]:
        """What explain() says of the plans, without times. rows: of a batch, tried or not."""
        notes = [each for each in self.step.lower(*xy(0, rows=rows)).explain().notes if each.topic == "plans tried"]
        return [f"{each.subject} stays" if each.reason == "stays" else each.subject for each in notes]
