"""Of modules whose parameters real ranks divide among them (level 3) every collective is needed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx

from commfuse_fx.ir.core.collectives import kind_of
from commfuse_fx.ir.core.meta import info
from commfuse_fx.runtime.execute.wire.messages import Flight
from commfuse_fx.runtime.execute.wire.wire import Wire
from tests.distributed.harness import Ranks
from tests.distributed.test_divided_module import CONFIGS, Tensors, differ, divided, loss_of, sharded
from tests.distributed.test_sharded_optimizer import batch

pytestmark = pytest.mark.dist


def dropped(name: str) -> Callable[..., Any]:
    """A `Wire._issuer` by which one collective brings what this rank has, in place of what the ranks have."""
    real = Wire._issuer

    def issuer(wire: Wire, node: fx.Node, issue: Callable[..., Flight]) -> Callable[..., torch.Tensor]:
        def issue_alone(group: Any, ranks: Any, x: torch.Tensor, *args: Any) -> Flight:
            kind, ways = kind_of(node), len(ranks)
            alone = x.repeat(ways, *[1] * (x.ndim - 1)) if kind == "all_gather" else x.clone()
            if kind == "reduce_scatter":
                alone = alone.chunk(ways)[ranks.index(wire.rank)]
            flight = issue(group, ranks, x, *args)

            def finish() -> None:
                flight.finish()
                flight.out.copy_(alone)

            return replace(flight, finish=finish)

        return real(wire, node, issue_alone if info(node).name == name else issue)

    return issuer


def without(name: str) -> Tensors:
    """Parameters after two steps without one collective."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Wire, "_issuer", dropped(name))
        net, model, optimizer = sharded("sgd", CONFIGS["from 2.4 KiB on"], comm_fusion={"openstate": False})
        for number in range(2):
            optimizer.zero_grad()
            loss_of(model, number).backward()
            optimizer.step()
        return [param.detach() for param in net.parameters()]


def each_dropped() -> dict[str, float]:
    _, model = divided(CONFIGS["from 2.4 KiB on"], comm_fusion={"openstate": False})
    names = [info(node).name for node in model.lower(batch(0)[0]).program.collectives()]
    want = without("")
    return {name: differ(without(name), want) for name in names}


def test_each_collective_is_needed(ranks: Ranks) -> None:
    for found in ranks.values(each_dropped):
        assert len(found) == 3 + 2 + 9
        assert min(found.values()) > 1e-6, found
