"""Values that depend on nothing but shapes and constants are computed in the first step, and nobody writes to them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import commfuse_fx as cf
from commfuse_fx.cost import cost_model
from commfuse_fx.cost.memory import peak_memory
from commfuse_fx.ir import canonical_text, from_json, info
from commfuse_fx.ir.core.halves import crossing
from commfuse_fx.ir.json.write import to_json
from commfuse_fx.ir.ops.fixed_values import held_values
from commfuse_fx.testing import parse_program


class Masked(nn.Module):
    """A causal mask and positions, in a layer that may be computed again in the backward; handed out if asked for."""

    def __init__(self, again: bool = False, shown: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.places, self.layers = nn.Embedding(6, 4), nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])
        self.again, self.shown = again, shown

    def block(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        places = torch.arange(x.shape[0])
        mask = torch.where(places[:, None] >= places, 0.0, -torch.inf)
        attention = torch.softmax(x @ x.t() + mask, -1)
        return torch.tanh(layer(attention @ x)) * (torch.ones(4) + torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> Any:
        places = torch.arange(x.shape[0])
        x = x + self.places(places)
        for layer in self.layers:
            x = checkpoint(self.block, layer, x, use_reentrant=False) if self.again else self.block(layer, x)
        return (x, places) if self.shown else x


class Ops(TorchDispatchMode):
    """Notes the ops that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


FIXED = ("aten::arange", "aten::where.self", "aten::lift_fresh_copy", "aten::ones", "aten::ge.Tensor")


def loss_of(out: Any) -> torch.Tensor:
    return (out[0] if isinstance(out, tuple) else out).square().sum()


def ops_of(call: Any) -> list[str]:
    with Ops() as seen:
        call()
    assert "aten::_softmax.out" in seen.names
    return [name for name in seen.names if name in FIXED]


@pytest.mark.parametrize("again", [False, True], ids=["kept", "checkpointed"])
def test_a_step_computes_them_once_and_trains_as_eager_pytorch_does(again: bool) -> None:
    model = Masked(again)
    twin = copy.deepcopy(model)
    ours, theirs = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, twin))
    step = cf.compile(model, loss_fn=lambda out, target: loss_of(out - target), optimizer=ours)
    for seed in range(3):
        x, y = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(seed))
        loss = step(x, y)
        theirs.zero_grad()
        expected = loss_of(twin(x) - y)
        expected.backward()
        theirs.step()
        torch.testing.assert_close(loss, expected.detach())
    for param, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(param, other)
    assert ops_of(lambda: step(x, y)) == []


@pytest.mark.parametrize("again", [False, True], ids=["kept", "checkpointed"])
def test_a_module_saves_none_of_them_for_its_backward(again: bool) -> None:
    model = Masked(again)
    twin, compiled = copy.deepcopy(model), cf.compile(model)
    x = torch.randn(6, 4)
    for _ in range(3):
        for each in (compiled, twin):
            each.zero_grad()
            loss_of(each(x)).backward()
        for param, other in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(param.grad, other.grad)
    assert ops_of(lambda: loss_of(compiled(x)).backward()) == []
    program = compiled.lower(x).program
    assert not any("arange" in info(node).name or "where" in info(node).name for node in crossing(program))


def test_what_is_handed_out_is_the_users_own() -> None:
    compiled = cf.compile(Masked(shown=True))
    x = torch.randn(6, 4)
    (first, places), expected = compiled(x), torch.arange(6)
    places.zero_()
    second, again = compiled(x)
    torch.testing.assert_close(second, first)
    assert torch.equal(again, expected)


def test_a_tensor_of_the_users_that_is_no_buffer_is_read_in_every_step() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.scale = nn.Linear(2, 2), torch.ones(2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.layer(x) * (self.scale + 1)
            return out

    model = Scaled()
    compiled, x = cf.compile(model), torch.ones(1, 2)
    before = compiled(x).detach()
    model.scale.mul_(3)
    torch.testing.assert_close(compiled(x).detach(), before * 2)


def test_text_json_prices_and_memory_know_them() -> None:
    text = """
    in  %w: f32[4] = parameter
    fwd %/arange.0: f32[4] = aten.arange(4, dtype=f32, device=cpu, pin_memory=False)  {computed once}
    fwd %/neg.0: f32[4] = aten.neg(%/arange.0)  {computed once}
    fwd %/dot.0: f32[] = aten.dot(%w, %/neg.0)
    return [%/dot.0]
    """
    program = parse_program(text)
    arange, neg = (node for node in program.graph.nodes if info(node).once)
    assert canonical_text(from_json(to_json(program))) == canonical_text(program)
    assert canonical_text(program).count("{computed once}") == 2
    assert held_values(program) == [neg]
    assert peak_memory(program) == 4 * 4 + 4 * 4 + 4
    costs = cost_model(cf.resolve_cluster("gloo-10gbit"))
    assert costs.compute_seconds(arange) == 0 < costs.compute_seconds(neg.next)


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ("aten.neg(%/arange.0)", "aten.neg(%w)", "is computed once, but needs w, which is not"),
        ("aten.mul.Tensor(%w, %/neg.0)", "aten.mul_.Tensor(%/neg.0, %w)", "writes to /neg.0, which is computed once"),
        ("return [%/sum.0]", "return [%/neg.0]", "is computed once, and must not be handed out"),
    ],
)
def test_verification_refuses_marks_that_cannot_be_right(old: str, new: str, what: str) -> None:
    text = """
    in  %w: f32[] = parameter
    fwd %/arange.0: f32[] = aten.scalar_tensor(4, dtype=f32, device=cpu)  {computed once}
    fwd %/neg.0: f32[] = aten.neg(%/arange.0)  {computed once}
    fwd %/mul.0: f32[] = aten.mul.Tensor(%w, %/neg.0)
    fwd %/sum.0: f32[] = aten.sum(%/mul.0)
    return [%/sum.0]
    """
    parse_program(text)
    with pytest.raises(cf.ConfigValueError, match=what):
        parse_program(text.replace(old, new))
