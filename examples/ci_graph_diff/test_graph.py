"""The graph is the one that was reviewed, and what it communicates stays within budgets."""

from __future__ import annotations

import pytest
from model import CLASSES, FEATURES, HIDDEN, lowered

import commfuse_fx as cf
from commfuse_fx.testing import GraphSnapshot, assert_budget, assert_collectives

PARAMETER_BYTES = 4 * (FEATURES * HIDDEN + HIDDEN + HIDDEN * CLASSES + CLASSES)


@pytest.fixture(scope="module")
def graph() -> cf.Lowered:
    return lowered()


def test_graph(graph: cf.Lowered, graph_snapshot: GraphSnapshot) -> None:
    graph_snapshot.check(graph)


def test_gradients_travel_once(graph: cf.Lowered) -> None:
    assert_collectives(graph, all_reduce=1, total=1, max_bytes=PARAMETER_BYTES)


def test_step_keeps_its_budgets(graph: cf.Lowered) -> None:
    assert_budget(graph, "gloo-10gbit", max_step_seconds=1e-3, max_wire_bytes=PARAMETER_BYTES)
