"""Hooks of outputs, and of parameters that a backward does not reach, with a compiled module."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

import commfuse_fx as cf


class TwoHeads(nn.Module):
    """Features, an output that is computed from them, and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head, self.side = nn.Linear(4, 3), nn.Linear(3, 2), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        features = torch.tanh(self.body(x))
        return features, self.head(features), self.side(x), self.head(features.detach())


def _halve(grad: torch.Tensor | None) -> torch.Tensor | None:
    return grad / 2 if grad is not None else None


@pytest.mark.parametrize("way", ["hook", "retain_grad"])
@pytest.mark.parametrize("loss_of", [(1,), (0, 1)])
def test_a_hook_that_would_see_a_part_of_the_gradient_is_refused(way: str, loss_of: tuple[int, ...]) -> None:
    outputs = cf.compile(TwoHeads())(torch.ones(5, 4))
    if way == "hook":
        outputs[0].register_hook(_halve)
    else:
        outputs[0].retain_grad()
    loss = torch.stack([outputs[number].square().sum() for number in loss_of]).sum()
    with pytest.raises(cf.CaptureError, match=r"output 0 .* has a hook or retain_grad\(\), and"):
        loss.backward()


def test_hooks_that_see_the_whole_gradient_run() -> None:
    model = TwoHeads()
    twin = TwoHeads()
    found = []
    for call, net in ((cf.compile(model), model), (twin, twin)):
        outputs = call(torch.ones(5, 4))
        outputs[1].register_hook(_halve)
        outputs[1].retain_grad()
        outputs[2].register_hook(_halve)
        (outputs[1].square().sum() + outputs[2].sum() + outputs[3].sum()).backward()
        outputs = call(torch.ones(5, 4))
        outputs[0].register_hook(_halve)  # what comes through a detached tensor is no part of its gradient
        (outputs[0].sum() + outputs[2].sum() + outputs[3].sum()).backward()
        found.append([param.grad for param in net.parameters()])
    torch.testing.assert_close(found[0], found[1])


def test_a_tensor_that_is_two_outputs_has_no_hook_for_both() -> None:
    class Twice(nn.Linear):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            out = super().forward(x)
            return out, out

    first, second = cf.compile(Twice(4, 3))(torch.ones(2, 4))
    first.register_hook(_halve)
    with pytest.raises(cf.CaptureError, match="output 0 of a compiled module has a hook"):
        (first * second).sum().backward()


@pytest.mark.parametrize("find_unused_parameters", [False, True])
def test_a_post_accumulate_grad_hook_runs_for_what_the_backward_reaches(find_unused_parameters: bool) -> None:
    found: list[list[tuple[str, float]]] = []

    def note(seen: list[tuple[str, float]], name: str, param: torch.Tensor) -> None:
        seen.append((name, param.grad.sum().item()))

    for compiled in (True, False):
        model = TwoHeads()
        model.unused = nn.Linear(2, 2)
        seen: list[tuple[str, float]] = []
        for name, param in model.named_parameters():
            param.register_post_accumulate_grad_hook(partial(note, seen, name))
        call = cf.compile(model, find_unused_parameters=find_unused_parameters) if compiled else model
        call(torch.ones(5, 4))[1].square().sum().backward()
        call(torch.ones(5, 4))[2].square().sum().backward()
        found.append(sorted(seen))
    assert [name for name, _ in found[0]] == [name for name, _ in found[1]]
    torch.testing.assert_close([grad for _, grad in found[0]], [grad for _, grad in found[1]])
