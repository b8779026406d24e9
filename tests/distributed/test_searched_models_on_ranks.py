"""Searched strategies of several models and search modes, from a file, compute on real ranks what one device does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import commfuse_fx as cf
from commfuse_fx.ir.updates.update_sharing import SHARED
from commfuse_fx.passes.declaration import Variant, Variants
from commfuse_fx.planning import compile_call
from commfuse_fx.sharding.dividing.strategies import NOT_APPLIED
from tests.distributed.harness import Ranks
from tests.models import CONV, MLP_CASE, TIED
from tests.oracle import eager_loss
from tests.sharding.test_searched_models import CASES, MARKS, PRICES

pytestmark = pytest.mark.dist

STEPS = 3
MODELS = {case.name: case for case in (*CASES, CONV, MLP_CASE, TIED)}

SEARCHES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "together": ("dynamic_programming", "slow memory", {}),
    "by axis": ("recursive_programming", "slow flops", {}),
    "by marks": ("sharding_propagation", "slow links", {}),
    "little memory": ("recursive_programming", "slow links", {"saving": 1 << 40}),
    "level 1": ("dynamic_programming", "slow flops", {"level": 1}),
    "level 3": ("dynamic_programming", "slow links", {"level": 3, "saving": 1 << 20}),
}
"""The mode, the prices, and what is decided of the plan."""

RUNS = [
    ("mlp", "together"),
    ("experts", "by axis"),
    ("heads", "by marks"),
    ("conv", "little memory"),
    ("tied", "level 1"),
    ("images", "level 3"),
]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


@contextmanager
def compiled(name: str, search: str, **options: Any) -> Iterator[Any]:
    """A step of which one plan is made."""
    case, (mode, prices, choices) = MODELS[name], SEARCHES[search]
    model = case.model()
    if mode == "sharding_propagation":
        MARKS[name](model)
    sharing = {"parallel_optimizer_threshold": 0, "pad": True}
    is_level = search.startswith("level")
    shared: dict[str, Any] = (
        {"enable_parallel_optimizer": True, "parallel_optimizer_config": sharing} if is_level else {}
    )
    only = Variants((Variant.of(**choices),))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compile_call, "variants", lambda situation, program: only)
        yield cf.compile(
            model,
            loss_fn=case.loss_fn,
            optimizer=adamw(model),
            mesh=(2, 2),
            full_batch=True,
            parallel_mode="auto",
            search_mode=mode,
            cluster=PRICES[prices][0],
            **shared,
            **options,
        )


def searched(folder: Path) -> list[str]:
    """Search all strategies once, in this process, and save them. The texts of the steps."""
    found = []
    for number, (name, search) in enumerate(RUNS):
        with compiled(name, search, device_num=4, strategy_ckpt_save_file=folder / f"{number}.json") as step:
            lowered = step.lower(*MODELS[name].batches(1)[0])
        notes = [note.topic for note in lowered.program.notes]
        assert "search" in notes and (SHARED in notes) == search.startswith("level"), (name, search)
        found.append(lowered.text())
    return found


def trained(folder: Path) -> list[tuple[list[float], dict[str, torch.Tensor], str]]:
    """Of each run the losses, what a rank holds after it, and the text of the step."""
    found = []
    for number, (name, search) in enumerate(RUNS):
        batches = MODELS[name].batches(STEPS)
        with compiled(name, search, strategy_ckpt_load_file=folder / f"{number}.json") as step:
            losses = [float(step(*batch)) for batch in batches]
        state = {key: value.clone() for key, value in step.model.state_dict().items()}
        lowered = step.lower(*batches[0])
        assert not [note for note in lowered.program.notes if note.topic == NOT_APPLIED]
        found.append((losses, state, lowered.text()))
    return found


def test_equals_one_device(ranks: Ranks, tmp_path: Path) -> None:
    texts = searched(tmp_path)
    of_ranks = ranks.values(trained, tmp_path, size=4)
    for number, (name, search) in enumerate(RUNS):
        case = MODELS[name]
        model = case.model()
        optimizer, losses = adamw(model), []
        for batch in case.batches(STEPS):
            loss = eager_loss(case, model, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        for have, state, text in (each[number] for each in of_ranks):
            assert text == texts[number], (name, search)
            assert have == pytest.approx(losses, rel=1e-9), (name, search)
            for key, value in model.state_dict().items():
                torch.testing.assert_close(state[key], value, rtol=1e-8, atol=1e-9, msg=f"{name}, {search}: {key}")
