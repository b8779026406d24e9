"""Ranks whose batches differ compute gradients of weights in different ways, and communicate them alike."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import commfuse_fx as cf
from commfuse_fx.ir.core.collectives import is_start, is_wait
from commfuse_fx.ir.core.meta import info
from tests import captures
from tests.oracle import sgd

NAME = "commfuse.convolution_weight_gradient("


def lowered(rows: int, bias: bool, comm_fusion: Any) -> cf.Lowered:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for ins, outs in pairwise((3, 64, 256, 256, 512, 512)):
        layers += [nn.Conv2d(ins, outs, 3, padding=1, bias=bias), nn.BatchNorm2d(outs), nn.ReLU()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 5))
    captures.share(model, lowered)
    step = cf.compile(model, comm_fusion, loss_fn=F.cross_entropy, optimizer=sgd(model), device_num=2)
    return step.lower(torch.randn(rows, 3, 24, 24), torch.zeros(rows, dtype=torch.long))


def communication(found: cf.Lowered) -> list[tuple[str, ...]]:
    """Starts, waits and pieces that are sent ahead, in order, with what is sent and how it lies in memory."""
    events: list[tuple[str, ...]] = []
    for node in found._program.graph.nodes:
        if node.op != "call_function":
            continue
        details = info(node)
        events += [("send", info(start).name, str(stretch)) for start, stretch in details.sends]
        if is_start(node):
            segments = [str(stretch) for _, stretch in details.writes]
            what = (details.spec, details.collective, segments, details.rest)
            events.append(("start", details.name, *map(str, what)))
        elif is_wait(node):
            events.append(("wait", details.name))
    return events


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize(
    ("comm_fusion", "pieces"),
    [
        (None, True),
        ({"allreduce": {"mode": "size", "config": 4}}, False),
        ({"allreduce": {"mode": "size", "config": 16}}, True),
        ({"allreduce": {"mode": "index", "config": [5, 10]}}, True),
        ({"openstate": False}, False),
    ],
    ids=["auto", "size 4", "size 16", "index", "off"],
)
def test_another_batch_is_communicated_alike(comm_fusion: Any, pieces: bool, bias: bool) -> None:
    whole, apart = (lowered(rows, bias, comm_fusion) for rows in (1, 33))
    assert NAME not in whole.text() and NAME in apart.text()
    assert communication(whole) == communication(apart)
    assert any(kind == "send" for kind, *_ in communication(apart)) == pieces
