"""A part of the checks of two ranks that machines with a GPU run (tests/gpu), over Gloo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.two_ranks import FUSIONS, compared
from tests.distributed.harness import Ranks
from tests.gpu import ending_ranks
from tests.gpu.two_rank_checks import CASES

pytestmark = pytest.mark.dist

CPU = torch.device("cpu")


def run(names: list[str]) -> None:
    for name in names:
        CASES[name](CPU)


@pytest.mark.parametrize(
    "names",
    [
        ["step mlp", "equal bits by optimal"],
        ["equal bits by across steps", "equal bits by index"],
        ["module lstm", "module, unused", "parallel optimizer, level 3", "sharded optimizer"],
        ["tensor parallel", "masks", "streams", "other streams", "recorded communication", "profile", "trials"],
    ],
    ids=lambda names: names[0],
)
def test_checks(ranks: Ranks, names: list[str]) -> None:
    ranks.values(run, names)


def test_what_the_benchmark_compares(ranks: Ranks) -> None:
    rows: list[dict[str, Any]]
    for rows in ranks.values(compared, CPU, {"size": FUSIONS["size"]}):
        assert rows[0] == {"case": "size", "equal": True, "worst": 0.0, "why": None}
        assert rows[1]["case"] == "size, CUDA graph" and "no parameter of the model is on a CUDA" in rows[1]["why"]


def test_how_programs_end(tmp_path: Path) -> None:
    for way, ended in ending_ranks.run(CPU, tmp_path, ending_ranks.WAYS).items():
        ending_ranks.check(way, ended)
