"""What ops of updates cost where one rank alone updates each parameter: what each rank does on the average."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn

import commfuse_fx as cf
from commfuse_fx.cost.model import update_elements
from commfuse_fx.cost.roofline import flops_and_bytes
from commfuse_fx.ir.core.collectives import is_start
from commfuse_fx.ir.core.meta import info
from tests.work import calls

RANKS, WIDTH = 4, 64
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "rmsprop": lambda params: torch.optim.RMSprop(params, momentum=0.5, centered=True, weight_decay=0.1),
    "plain rmsprop": lambda params: torch.optim.RMSprop(params),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params),
    "nadam": lambda params: torch.optim.NAdam(params),
}


def lowered(optimizer: str, options: dict[str, Any], **others: Any) -> cf.Lowered:
    """Of as many weights as ranks, each of which owns one."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(RANKS)))
    divided = {"enable_parallel_optimizer": True, "parallel_optimizer_config": options} if options else {}
    made = OPTIMIZERS[optimizer](model.parameters())
    step = cf.compile(
        model,
        {"openstate": False},
        loss_fn=nn.functional.mse_loss,
        optimizer=made,
        device_num=RANKS,
        **divided,
        **others,
    )
    return step.lower(torch.ones(2, WIDTH), torch.ones(2, WIDTH))


def work(found: cf.Lowered) -> dict[str, tuple[float, float]]:
    """Bytes and elements of each op that works on tensors of the size of parameters, by name."""
    nodes = [node for node in found.graph_module.graph.nodes if node.op == "call_function" and not is_start(node)]
    found = {info(node).name: (flops_and_bytes(node)[1], update_elements(node)) for node in nodes if is_of_update(node)}
    return {name.replace(".dp", ""): each for name, each in found.items() if each[0] > WIDTH * WIDTH}


def is_of_update(node: fx.Node) -> bool:
    return info(node).name.startswith(("update.", "update/")) and info(node).phase == "update"


OWNED = {"mode": "broadcast", "parallel_optimizer_threshold": 0}


@pytest.mark.parametrize("others", [{}, {"clip_grad_norm": 1.0}], ids=["", "clipped"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_op_of_an_update_costs_its_part(optimizer: str, others: dict[str, Any]) -> None:
    owned, whole = work(lowered(optimizer, OWNED, **others)), work(lowered(optimizer, {}, **others))
    assert owned.keys() == whole.keys() and owned
    for name, (nbytes, elements) in owned.items():
        assert nbytes == pytest.approx(whole[name][0] / RANKS, rel=1e-2), name
        assert elements == whole[name][1] / RANKS, name


def test_what_all_ranks_update_costs_all_of_it() -> None:
    """Of two owned weights and two that are whole, a rank of four has half a weight and two on the average."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)))
    for layer in (model[0], model[1]):
        layer.weight.parallel_optimizer = False
    step = cf.compile(
        model, loss_fn=nn.functional.mse_loss, optimizer=OPTIMIZERS["plain rmsprop"](model.parameters()),
        device_num=RANKS, enable_parallel_optimizer=True, parallel_optimizer_config=OWNED,
    )  # fmt: skip
    found = work(step.lower(torch.ones(2, WIDTH), torch.ones(2, WIDTH)))
    assert {elements for _, elements in found.values()} == {2.5 * WIDTH * WIDTH}


def test_temporary_tensors_of_owners_take_their_part() -> None:
    """RMSprop's denominators are there at the end of the step, when gradients are, too."""
    peaks = [lowered("plain rmsprop", options).explain().memory.peak for options in (OWNED, {})]
    weight = 4 * WIDTH * WIDTH
    # The state of three other ranks, their gradients and denominators, are not there.
    assert peaks[0] < peaks[1] - 6 * weight


def test_steps_without_owners_are_priced_without_a_search() -> None:
    node = next(node for node in lowered("rmsprop", {}).graph_module.graph.nodes if is_of_update(node))
    assert calls(lambda: update_elements(node)) < 60
