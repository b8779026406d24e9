"""Sums of gradients become chains of additions whose nodes stand behind what they add."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from commfuse_fx.capture.trace.gradient_sums import GradientSum, spread


@pytest.mark.parametrize("places", [[0, 1, 1, 2], [0, 1, 2, 3], [1, 1, 1, 1], [0, 0, 2, 2, 3]])
@pytest.mark.parametrize("runs", [{}, {1: 7, 2: 7}, {0: 7, 1: 7, 2: 8, 3: 8}])
def test_several_terms_may_come_from_one_run(places: list[int], runs: dict[int, int]) -> None:
    """An op may use one value twice: then both terms are one node, or two of one run."""
    graph = fx.Graph()
    first = graph.placeholder("x")
    nodes = [graph.call_function(torch.neg, (first,)) for _ in range(4)]
    terms = [nodes[place] for place in places]
    total = graph.call_function(torch.ops.aten.add.Tensor, (terms,))
    graph.output((total, total))
    spread([GradientSum(total, terms)], {nodes[place]: run for place, run in runs.items()})
    graph.lint()
    x = torch.arange(3.0)
    found = fx.GraphModule({}, graph)(x)[0]
    assert torch.equal(found, -x * len(terms))
    chain = [node for node in graph.nodes if node.target is torch.ops.aten.add.Tensor]
    assert len(chain) == len(terms) - 1 and chain[-1] is total
