"""DOT: every node and edge is there, names are text, and large graphs stay small."""

from __future__ import annotations

import re
from functools import cache

import torch
from torch import nn

import commfuse_fx as cf
from commfuse_fx.inspect.explain.dot import quoted, to_dot
from commfuse_fx.ir.core.collectives import collective_of
from commfuse_fx.ir.core.meta import info
from tests.inspect.steps import Net, train

_STRING = r'"(?:[^"\\\n]|\\.)*"'
_NODE = re.compile(rf" *(n\d+) \[((?:[a-z]+=(?:{_STRING}|[a-z0-9]+)(?:, )?)+)\];")
_EDGE = re.compile(r" *(n\d+) -> (n\d+)( \[style=dashed\])?;")
_OTHER = re.compile(
    rf" *(digraph step \{{|subgraph cluster_[0-9_]+ \{{|\}}|label={_STRING};|(graph|node|edge) \[.*\];|rankdir=.*;)"
)


@cache
def step() -> cf.Lowered:
    return train(Net(), {"allreduce": {"mode": "index", "config": [2, 6]}})


def parsed(dot: str) -> tuple[dict[str, str], list[tuple[str, str]], list[tuple[str, str]]]:
    """Attributes by node, edges of data and of memory; every line must be one of those that DOT has."""
    nodes: dict[str, str] = {}
    edges: list[tuple[str, str]] = []
    dashed: list[tuple[str, str]] = []
    for line in dot.splitlines():
        if node := _NODE.fullmatch(line):
            assert nodes.setdefault(node[1], node[2]) == node[2]
        elif edge := _EDGE.fullmatch(line):
            (dashed if edge[3] else edges).append((edge[1], edge[2]))
        else:
            assert _OTHER.fullmatch(line), line
    assert dot.count("{\n") == dot.count("}\n")
    assert {end for edge in (*edges, *dashed) for end in edge} <= set(nodes)
    return nodes, edges, dashed


def test_a_small_graph_is_drawn_whole() -> None:
    program = step().program
    nodes, edges, dashed = parsed(to_dot(program))
    order = {node: f"n{i}" for i, node in enumerate(program.graph.nodes)}
    assert set(nodes) == set(order.values())
    assert set(edges) == {(order[value], order[node]) for node in order for value in node.all_input_nodes}
    for start in program.collectives():
        details = collective_of(start)
        attributes = nodes[order[start]]
        assert "shape=hexagon" in attributes and f"{details.nbytes} bytes" in attributes
        assert all(member in attributes for member in details.members)
        writers = {value for value, node in dashed if node == order[start]}
        # A bucket is written by its members' nodes; a gradient that travels alone is its own memory.
        assert len(writers) >= len(details.members) if len(details.members) > 1 else len(writers) <= 1
    assert to_dot(train(Net(), {"allreduce": {"mode": "index", "config": [2, 6]}}, rank=1).program) == to_dot(program)


def test_a_large_graph_is_folded_and_keeps_its_collectives() -> None:
    layers = [layer for _ in range(60) for layer in (nn.Linear(8, 8), nn.Tanh())]
    program = train(
        nn.Sequential(nn.Sequential(*layers), nn.Linear(8, 8)), {"allreduce": {"mode": "size", "config": 1}}
    ).program
    nodes, edges, _ = parsed(to_dot(program))
    assert len(program.graph.nodes) > 600 and len(nodes) < 20
    hexagons = [attributes for attributes in nodes.values() if "hexagon" in attributes]
    assert len(hexagons) == sum(1 for _ in program.collectives())
    counts = [int(found) for attributes in nodes.values() for found in re.findall(r"\\n(\d+) nodes: ", attributes)]
    single = len(nodes) - len(counts)
    inputs = sum(1 for node in program.graph.nodes if info(node).phase == "input")
    assert sum(counts) + single + inputs == len(program.graph.nodes), "no node is lost"
    assert edges and all(a != b for a, b in edges)


def test_names_are_escaped() -> None:
    class Hostile(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name in ('"];x[label="', "a\\", "<b>&lt;", "new\nline"):
                self.register_parameter(name, nn.Parameter(torch.ones(8)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for parameter in self.parameters():
                x = x * parameter
            return x

    nodes, _, _ = parsed(to_dot(train(Hostile()).program))
    assert any(r"\"];x[label=\"" in attributes for attributes in nodes.values())
    assert quoted('a\\"&\n') == r'"a\\\"&amp;\n"'
