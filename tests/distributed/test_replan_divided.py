"""Divided steps that try plans: the same training, and one plan on all ranks."""

from __future__ import annotations

import pytest
import torch

import commfuse_fx as cf
from tests import captures
from tests.distributed.harness import Ranks
from tests.distributed.quick_trials import MOST_STEPS, quickly
from tests.distributed.test_sharding import batches, made, mark

pytestmark = pytest.mark.dist


def divided(schedule: str) -> tuple[cf.CompiledStep, torch.nn.Module]:
    model = made("gpt2")
    mark(model, "sequence", "tp")
    captures.share(model, "gpt2, sequence")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    options = {"parallel_mode": "semi_auto", "mesh": (2, 2), "full_batch": True, "schedule": schedule}
    return cf.compile(model, optimizer=optimizer, **options), model


def settles(winner: str) -> tuple[list[str], float]:
    """What was tried, and by how much parameters differ from those of the default plan."""
    with quickly(winner):
        step, model = divided("auto")
        plain, twin = divided("overlap")
        after, number = 0, 0
        while after < 3:
            for batch in batches():
                torch.testing.assert_close(step(**batch), plain(**batch), rtol=0, atol=2e-6)
                number += 1
            assert step.session.replan is not None and number < MOST_STEPS
            after += step.session.replan.is_settled
    pairs = zip(model.state_dict().values(), twin.state_dict().values(), strict=True)
    differ = max(float((one - other).abs().max()) for one, other in pairs)
    notes = step.lower(**batches()[0]).explain().notes
    return [f"{each.subject}: {each.reason}"[:9] for each in notes if each.topic == "plans tried"], differ


@pytest.mark.parametrize("winner", ["across steps"])
def test_training_is_the_same_whatever_stays(ranks: Ranks, winner: str) -> None:
    found = ranks.values(settles, winner, size=4)
    assert len({str(tried) for tried, _ in found}) == 1 and len(found[0][0]) > 3
    assert max(differ for _, differ in found) < 5e-5
