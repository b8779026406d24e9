"""A step that is copied with its model, as part of a trainer, say."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import commfuse_fx as cf


def test_a_copy_of_a_used_step_trains_its_own_model() -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = cf.compile(model, loss_fn=nn.functional.mse_loss, optimizer=optimizer)
    x, y = torch.randn(3, 4), torch.randn(3, 2)
    step(x, y)
    before = model.weight.detach().clone()
    other = copy.deepcopy(step)
    other(x, y)
    assert torch.equal(model.weight, before)
    step(x, y)
    assert not torch.equal(model.weight, before)
    assert torch.equal(model.weight, other.model.weight)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_step_of_several_ranks_says_why_it_is_not_copied(copied: Callable[[Any], Any]) -> None:
    step = cf.compile(nn.Linear(4, 2), loss_fn=nn.functional.mse_loss)
    step.session.agreement = object()  # type: ignore[assignment]
    with pytest.raises(
        cf.CommFuseError, match="several ranks cannot be copied or pickled.*compile a step for the copy"
    ):
        copied(step)
