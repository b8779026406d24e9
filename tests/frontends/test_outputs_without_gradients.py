"""A module whose outputs lead to no parameter runs as its model does: such an output has no gradient."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import commfuse_fx as cf


class Classes(nn.Module):
    """In evaluation it returns classes, in training what `returns` says."""

    def __init__(self, returns: str) -> None:
        super().__init__()
        self.layers, self.returns = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout(0.5)), returns

    def forward(self, x: torch.Tensor) -> Any:
        out = self.layers(x)
        if not self.training:
            return {"classes": out.argmax(-1), "of": 3}
        return {"scores": out, "detached": out.detach(), "nothing": None, "text": "done"}[self.returns]


@pytest.mark.parametrize("returns", ["scores", "detached", "nothing", "text"])
def test_outputs_without_gradients(returns: str) -> None:
    model = Classes(returns)
    twin = copy.deepcopy(model)
    compiled = cf.compile(model, cpu_kernels=False)
    x = torch.randn(5, 4)
    for _ in range(2):
        found = []
        for each in (compiled, twin):
            torch.manual_seed(0)
            found.append((each.train()(x), each.eval()(x)))
            if returns == "scores":
                found[-1][0].sum().backward()
        (out, evaluated), (wanted, wanted_evaluated) = found
        torch.testing.assert_close(evaluated, wanted_evaluated, rtol=0, atol=0)
        if isinstance(wanted, torch.Tensor):
            torch.testing.assert_close(out, wanted, rtol=0, atol=0)
            assert out.requires_grad == wanted.requires_grad
        else:
            assert out == wanted
    torch.testing.assert_close([*model.buffers()], [*twin.buffers()], rtol=0, atol=0)


def test_its_graph_can_be_read(tmp_path: Any) -> None:
    compiled = cf.compile(Classes("nothing"), device_num=4, broadcast_buffers=True, find_unused_parameters=True)
    lowered = compiled.lower(torch.randn(5, 4))
    assert not lowered.collectives and "hand_over([])" in lowered.text()
    lowered.dump(tmp_path)


class Skips(nn.Module):
    """It returns what does not depend on its parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


@pytest.mark.parametrize("finds", [False, True])
def test_an_output_may_have_a_gradient_for_the_input_alone(finds: bool) -> None:
    compiled = cf.compile(Skips(), device_num=4, find_unused_parameters=finds)
    lowered = compiled.lower(torch.ones(2, requires_grad=True))
    assert ["weight" in each.members for each in lowered.collectives] == ([False, True] if finds else [])
