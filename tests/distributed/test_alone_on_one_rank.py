"""What one rank does alone is named on the other, as far as it can be known."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

import commfuse_fx as cf
from tests.distributed.harness import Ranks, hurry
from tests.distributed.models_of_ranks import adamw, mlp

pytestmark = pytest.mark.dist

ROWS = {"enable_parallel_optimizer": True, "parallel_optimizer_config": {"parallel_optimizer_threshold": 0, "level": 3}}


def alone() -> dict[str, str]:
    """What this rank is told when rank 0 evaluates, saves or reads by itself, and rank 1 trains."""
    torch.manual_seed(0)
    x, y = torch.randn(4, 16), torch.randint(0, 4, (4,))
    said: dict[str, str] = {}
    divided = mlp()
    step = cf.compile(divided, loss_fn=F.cross_entropy, optimizer=adamw(divided), parallel_mode="semi_auto")
    whole = mlp()
    rows = cf.compile(whole, loss_fn=F.cross_entropy, optimizer=adamw(whole), **ROWS)

    def note(name: str, here: object, there: object) -> None:
        call = here if cf.get_rank() == 0 else there
        try:
            assert callable(call)
            call()
            said[name] = "fine"
        except cf.CommFuseError as error:
            said[name] = f"{type(error).__name__}: {error}"
        dist.barrier()

    def evaluates() -> None:
        with torch.no_grad():
            step(x, y)

    step(x, y)
    rows(x, y)
    note("evaluation", evaluates, lambda: step(x, y))
    note("save", lambda: step.save("nowhere"), lambda: step(x, y))
    hurry(8.0)
    note("state", lambda: [param.sum() for param in whole.parameters()], lambda: rows(x, y))
    return said


def test_what_one_rank_does_alone_is_named_on_the_other(ranks: Ranks) -> None:
    evaluating, training = ranks.values(alone)
    for said in (evaluating, training):
        assert "rank 0: an evaluation\n  rank 1: the step" in said["evaluation"], said
        assert "rank 0: step.save('nowhere')\n  rank 1: the step" in said["save"], said
    assert "is done by all ranks together" in evaluating["state"]
    assert "no vote has come from rank 0 within 8 s (the time-out is 8 s)" in training["state"], training
    assert "Rank 0 has come alone to read what is divided among ranks, as state_dict() does it" in training["state"]
