"""What a search costs and what no choice costs less than, worked out again from its proof."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import commfuse_fx as cf
from commfuse_fx.sharding.search.search_proof import SearchProof
from commfuse_fx.sharding.search.searched import SEARCH
from tests.sharding.test_search import lowered, mlp
from tests.solvers.integer_program import by_integer_program


def cost_of(proof: SearchProof) -> float:
    graph, states = proof.graph, proof.states
    found = sum(float(costs[state]) for costs, state in zip(graph.unary, states, strict=True))
    found += sum(float(table[states[one], states[other]]) for (one, other), table in graph.pairs.items())
    for key, costs in graph.once.items():
        if any(np.frombuffer(needs, dtype=np.bool_)[states[reader]] for reader, needs in key.needs):
            found += float(costs[states[key.payer]])
    return found


def search_notes(found: Any) -> dict[str, str]:
    return {note.subject: note.reason for note in found.program.notes if note.topic == SEARCH}


@pytest.mark.parametrize("mode", ["dynamic_programming", "recursive_programming"])
@pytest.mark.parametrize("mesh", [(8,), (2, 4)], ids=str)
def test_what_is_said_follows_from_the_proof(mesh: tuple[int, ...], mode: str) -> None:
    x = torch.empty(32, 512)
    found = lowered(mlp(512, 1), F.mse_loss, x, x, mesh=mesh, search_mode=mode)
    proof = found.search_proof()
    assert len(proof.axes) == len(mesh)  # the plan of a search on all of them is the fastest
    said = search_notes(found)[", ".join(proof.axes)]
    assert f"{cost_of(proof) * 1e3:.3f} ms by the prices" in said and proof.cost == pytest.approx(cost_of(proof))
    assert proof.cost == found.program.search_seconds
    least = by_integer_program(proof.graph, whole=False).bound
    assert proof.bound <= least * (1 + 1e-6) and least <= proof.cost * (1 + 1e-9)
    assert proof.gap == pytest.approx(1 - proof.bound / proof.cost, abs=1e-12)
    promised = re.search(r"no choice takes less than (\S+) ms", said)
    assert (promised is None) == (mode == "recursive_programming" and len(mesh) > 1) == ("nothing proven" in said)
    if promised is not None:
        assert proof.bound * 1e3 <= float(promised[1]) + 5e-4 and float(promised[1]) <= proof.cost * 1e3 + 5e-4


def test_no_choice_of_few_ops_costs_less() -> None:
    x = torch.empty(8, 4)
    proof = lowered(torch.nn.Linear(4, 4, bias=False), F.mse_loss, x, x, mesh=(2,), device_num=2).search_proof()
    free = [number for number, costs in enumerate(proof.graph.unary) if len(costs) > 1][-8:]
    states, numbers = list(proof.states), np.random.default_rng(0)
    for choice in product(*(range(len(proof.graph.unary[each])) for each in free)):
        if numbers.random() < 0.05:
            for number, state in zip(free, choice, strict=True):
                states[number] = state
            assert proof.graph.cost(states) >= proof.bound * (1 - 1e-9)


def test_without_a_search_or_what_it_began_with(tmp_path: Path) -> None:
    x = torch.empty(8, 64)
    found = lowered(mlp(64, 1), F.mse_loss, x, x, parallel_mode="semi_auto")
    assert found.search_proof() is None
    with pytest.raises(cf.ConfigValueError, match="lower the step again"):
        cf.load(found.dump(tmp_path) / "graph.json").search_proof()
