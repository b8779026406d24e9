"""COMMFUSE_DUMP on real ranks: each has its own folder, of the same graph."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from torch import nn

import commfuse_fx as cf
from tests.distributed.harness import Ranks

pytestmark = pytest.mark.dist


def run_with(directory: str) -> int:
    """A training step and an evaluation; returns this rank."""
    os.environ["COMMFUSE_DUMP"] = directory
    try:
        model = nn.Linear(8, 8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = cf.compile(model, loss_fn=nn.functional.mse_loss, optimizer=optimizer, parameter_broadcast=True)
        step(torch.ones(4, 8), torch.ones(4, 8))
        model.eval()
        step(torch.ones(4, 8), torch.ones(4, 8))
    finally:
        del os.environ["COMMFUSE_DUMP"]
    return cf.get_rank()


def test_every_rank_dumps_what_it_compiles(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.values(run_with, str(tmp_path)) == [0, 1]
    kinds = [folder.name.split("-")[1] for folder in sorted(tmp_path.iterdir())]
    assert kinds == ["train", "eval"]
    for folder in tmp_path.iterdir():
        indexes = [json.loads((folder / f"rank{rank}" / "index.json").read_text()) for rank in range(2)]
        assert [index["rank"] for index in indexes] == [0, 1]
        assert indexes[0]["fingerprint"] == indexes[1]["fingerprint"]
        assert cf.diff(folder / "rank0", folder / "rank1").is_same
