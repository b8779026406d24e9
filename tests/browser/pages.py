"""Reports for the browser to open."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
from torch import nn

import commfuse_fx as cf
from commfuse_fx.inspect.report.collective_rows import CollectiveRow, Total
from commfuse_fx.inspect.report.data import NodeRow, Prediction, ReportData, StageRow
from commfuse_fx.inspect.report.fusion import Fusion, Unfused
from commfuse_fx.inspect.report.lanes import Bar, Lane
from commfuse_fx.machine.timeline import Span, Timeline

HOSTILE = ("<script>hacked=1</script>", '"><img src=x onerror=hacked=1>', "</script><b>", "a\u2028b & c", "back\\slash")


def train(model: nn.Module, width: int, comm_fusion: Any = None, **options: Any) -> cf.Lowered:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = cf.compile(model, comm_fusion, loss_fn=nn.functional.mse_loss, optimizer=optimizer, **options)
    return step.lower(torch.ones(4, width), torch.ones(4, width))


def exposed() -> cf.Lowered:
    """Three collectives of different size that a slow network cannot hide."""
    layers = [layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.ReLU())]
    fusion = {"allreduce": {"mode": "index", "config": [2, 3]}}
    return train(nn.Sequential(*layers), 64, fusion, device_num=2, cluster="gloo-1gbit")


def alone() -> cf.Lowered:
    """One device: no collectives."""
    return train(nn.Linear(8, 8), 8, device_num=1)


def divided() -> cf.Lowered:
    """Eight layers on a mesh of two axes, four of which are divided, with a buffer of each rank's own."""
    torch.manual_seed(0)
    layers = (nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16)) for _ in range(8))
    model = nn.Sequential(*layers)
    for number in range(4):
        cf.shard(model[number], "0", weight=("tp", None))
        cf.shard(model[number], "2", weight=(None, "tp"))
    return train(model, 16, mesh=(2, 2), device_num=4, parallel_mode="semi_auto")


class Hostile(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name in HOSTILE:
            self.register_parameter(name, nn.Parameter(torch.ones(8)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for parameter in self.parameters():
            x = x * parameter
        return x


def hostile() -> cf.Lowered:
    return train(Hostile(), 8, device_num=2)


def recorded(lowered: cf.Lowered) -> Timeline:
    """Two steps in which everything takes twice and three times as long as predicted."""
    timeline = Timeline()
    for factor in (2.0, 3.0):
        timeline.begin_step()
        for each in lowered.simulate().collectives:
            times = (100.0 + factor * time for time in (each.issued, each.end, each.wait_entered, each.wait_left))
            timeline.steps[-1].append(Span(each.name, each.description, *times))
    return timeline


def large(layers: int = 625, per_layer: int = 8) -> dict[str, Any]:
    """A step of 5,000 nodes with a collective for each layer, made up."""
    nodes = []
    for position in range(layers * per_layer):
        layer, number = divmod(position, per_layer)
        op = "_c10d_functional.all_reduce_" if number == 7 else "aten.mm"
        inputs = (position - 1,) if position else ()
        name = f"blocks.{layer}/{op.partition('.')[2]}.{number}"
        nodes.append(
            NodeRow(name, op, "backward", ("blocks", str(layer)), "f32[8,8]", inputs, 1e-5, 256 * (number == 7), name)
        )
    starts = [layer * per_layer + 7 for layer in range(layers)]
    collectives = [_collective(nodes[start].name, start, i) for i, start in enumerate(starts)]
    compute = [Bar(node.op, "compute", i * 1e-5, (i + 1) * 1e-5, i) for i, node in enumerate(nodes)]
    sent = [Bar(c.name, "communication", c.begin, c.end, c.node, (c.wait_entered, c.wait_left)) for c in collectives]
    data = ReportData(
        header=(("torch", "2"), ("mesh", "dp=2")),
        fingerprint="0" * 64,
        cluster="cluster made-up 0",
        prediction=Prediction(0.06, 0.05, 0.01, 0.05, "compute", 0.2, 2**30),
        totals=(Total("all_reduce", "backward", layers, 256 * layers),),
        layouts=None,
        nodes=tuple(nodes),
        collectives=tuple(collectives),
        lanes=(Lane("compute", tuple(compute)), Lane("group dp", tuple(sent))),
        measured=(),
        fusion=Fusion(
            "before",
            tuple(Unfused("all_reduce", "dp", 256, each.members) for each in collectives),
            tuple((i,) for i in range(layers)),
            (),
        ),
        stages=(StageRow("capture", True, len(nodes), layers),),
        notes=(),
    )
    return asdict(data)


def _collective(name: str, node: int, number: int) -> CollectiveRow:
    begin = node * 1e-5
    return CollectiveRow(
        name=name,
        node=node,
        after=(),
        kind="all_reduce",
        op="sum",
        dtype="f32",
        phase="backward",
        axes="dp",
        ranks="0-1",
        size=2,
        bytes=256,
        members=(f"blocks.{number}.weight",),
        fusion_id=None,
        issued_at=node,
        waited_at=node,
        compute_between=0,
        pieces=1,
        next_step="",
        issued=begin,
        begin=begin,
        end=begin + 2e-5,
        wait_entered=begin + 1e-5,
        wait_left=begin + 2e-5,
        hidden=1e-5,
        exposed=1e-5,
        reason="made up",
    )
