"""Parameters that others hold by another tensor: whoever holds a larger storage still sees them, others are told."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import commfuse_fx as cf
from tests.distributed.harness import Ranks
from tests.distributed.models_of_ranks import adamw, mlp, momentum, xy
from tests.distributed.test_saved_parts import size
from tests.logs import logged
from tests.oracle import ACROSS_STEPS

pytestmark = pytest.mark.dist

OPTIONS: dict[str, dict[str, Any]] = {"default": {}, "across": ACROSS_STEPS}


def _views_of_one_tensor(model: nn.Module) -> torch.Tensor:
    """The parameters become neighbours in one tensor, which is returned."""
    flat = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    nn.utils.vector_to_parameters(flat, model.parameters())
    return flat


def _first_one_is_a_row(model: nn.Module) -> torch.Tensor:
    """One parameter is a part of a larger table; the others are tensors of their own."""
    param = next(model.parameters())
    table = torch.zeros(3, *param.shape, dtype=param.dtype)
    table[1] = param.detach()
    param.data = table[1]
    return table


def _with_a_buffer(model: nn.Module) -> torch.Tensor:
    """Two parameters share a storage with a buffer that nothing reads."""
    first, second = list(model.parameters())[:2]
    storage = torch.zeros(first.numel() + second.numel() + 5, dtype=first.dtype)
    model.register_buffer("rest", storage[-5:])
    for param, place in ((first, storage[: first.numel()]), (second, storage[first.numel() : -5])):
        param.data = place.view_as(param).copy_(param.detach())
    return storage


ALIASES: dict[str, Callable[[nn.Module], torch.Tensor]] = {
    "flat": _views_of_one_tensor,
    "row": _first_one_is_a_row,
    "buffer": _with_a_buffer,
}


def alias_follows(alias: str, optimizer: str, options: dict[str, Any], late: bool) -> list[Any]:
    """A step of this project and one of DDP: the larger tensors are compared, and what files take."""
    make = {"adamw": adamw, "momentum": momentum}[optimizer]
    model, twin = mlp(), mlp()
    held = [] if late else [ALIASES[alias](each) for each in (model, twin)]
    before = size(model.state_dict())
    ours, theirs = make(model), make(twin)
    step = cf.compile(model, loss_fn=F.mse_loss, optimizer=ours, **options)
    ddp = nn.parallel.DistributedDataParallel(twin)
    for number in range(5):
        if number == 2 and late:
            step.synchronize()
            held = [ALIASES[alias](each) for each in (model, twin)]
            before = size(model.state_dict())
        x, y = xy(number)
        step(x, y)
        theirs.zero_grad()
        F.mse_loss(ddp(x), y).backward()
        theirs.step()
    step.synchronize()
    torch.testing.assert_close(held[0], held[1])
    for param, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(param, other)
        assert param.data_ptr() - held[0].data_ptr() == other.data_ptr() - held[1].data_ptr() or alias != "flat"
    assert size(model.state_dict()) == before
    return [segment.is_flat for update in step.lower(*xy(0)).program.updates for segment in update.segments]


@pytest.mark.parametrize("late", [False, True], ids=["from the start", "after two steps"])
@pytest.mark.parametrize("optimizer", ["adamw", "momentum"])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("alias", ALIASES)
def test_a_larger_storage_still_sees_its_parameters(
    ranks: Ranks, alias: str, options: str, optimizer: str, late: bool
) -> None:
    flat = ranks.values(alias_follows, alias, optimizer, OPTIONS[options], late)[0]
    assert any(flat) == (alias != "flat"), flat  # the others still move


def warnings_of_aliases(kept: str, divided: bool) -> list[str]:
    model = mlp()
    optimizer = adamw(model)
    options: dict[str, Any] = {}
    if divided:
        cf.shard(model[0].weight, ("dp", None))
        options = {"parallel_mode": "semi_auto", "mesh": (2,), "full_batch": True}
    step = cf.compile(model, loss_fn=F.mse_loss, optimizer=optimizer, **options)
    aliases: list[Any] = {
        "nothing": [],
        "later": [],
        "larger": [],
        "data": [next(model.parameters()).data],
        "state_dict": [model.state_dict()],
        "view": [next(model.parameters()).detach().view(-1)],
        "numpy": [next(model.parameters()).detach().numpy()],
    }[kept]
    if kept == "larger" and divided:
        aliases.append(_first_one_is_a_row(model))
    with logged(logging.WARNING) as found:
        for _ in range(3):
            step(*xy(0, 0))
            if kept == "later":  # read at once, or thrown away late
                aliases.append(model.state_dict())
    return [text for text in found if "looks at its memory" in text] if aliases else found


@pytest.mark.parametrize("divided", [False, True], ids=["whole", "divided"])
@pytest.mark.parametrize("kept", ["nothing", "data", "state_dict", "view", "numpy", "later", "larger"])
def test_whoever_holds_an_alias_is_told_once(ranks: Ranks, kept: str, divided: bool) -> None:
    told = kept not in ("nothing", "later") and (divided or kept != "larger")
    for found in ranks.values(warnings_of_aliases, kept, divided):
        assert len(found) == told, found


def one_rank_has_views(alias: str, late: bool) -> None:
    model = mlp()
    step = cf.compile(model, loss_fn=F.mse_loss, optimizer=adamw(model))
    for number in range(2):
        if number == late and dist.get_rank() == 1:
            if alias == "overlap":
                model[0].bias.data = model[2].bias.data
            else:
                model.__dict__["held"] = ALIASES[alias](model)
        step(*xy(number))


@pytest.mark.parametrize("late", [False, True], ids=["from the start", "after a step"])
@pytest.mark.parametrize("alias", ["flat", "row", "overlap"])
def test_views_on_one_rank_alone_are_an_error_that_says_so(ranks: Ranks, alias: str, late: bool) -> None:
    reason = "= parameter shared with [2.bias]" if alias == "overlap" else "= parameter in a larger storage"
    for outcome in ranks.run(one_rank_has_views, alias, late):
        assert outcome.error.startswith("PlanMismatchError: "), outcome.details
        assert reason in outcome.error
        assert "optimizer state" not in outcome.error
