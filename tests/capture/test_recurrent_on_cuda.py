"""What is handed to cuDNN for a recurrent module, with torch's CPU kernels in cuDNN's place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

import commfuse_fx as cf
from commfuse_fx.capture.torch_parts import recurrent_on_cuda as traced
from commfuse_fx.kernels import cudnn_recurrent

NAMES = {number: name for name, number in traced._MODES.items()}


def on_cpu(
    input: torch.Tensor,
    weights: Sequence[torch.Tensor],
    per_direction: int,
    buffer: torch.Tensor | None,
    hidden: torch.Tensor,
    cell: torch.Tensor | None,
    mode: int,
    size: int,
    projected: int,
    layers: int,
    batch_first: bool,
    dropout: float,
    train: bool,
    bidirectional: bool,
    sizes: Sequence[int],
    dropout_state: Any,
) -> tuple[Any, ...]:
    """The arguments of aten::_cudnn_rnn, with the checks that it makes."""
    directions = 2 if bidirectional else 1
    assert hidden.is_contiguous() and (cell is None or cell.is_contiguous()) and not dropout and not sizes
    assert len(weights) == per_direction * layers * directions
    assert hidden.shape == (layers * directions, input.shape[0 if batch_first else 1], projected or size)
    call: Any = getattr(torch._VF, NAMES[mode])
    states = hidden if cell is None else (hidden, cell)
    has_bias = per_direction >= 4
    output, *last = call(input, states, weights, has_bias, layers, 0.0, train, bidirectional, batch_first)
    return output, *last, *[None] * (4 - len(last))


@pytest.fixture(autouse=True)
def cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traced, "_cudnn_rnn", on_cpu)


MODULES = {
    "lstm": lambda **settings: nn.LSTM(3, 4, **settings),
    "gru": lambda **settings: nn.GRU(3, 4, **settings),
    "rnn_tanh": lambda **settings: nn.RNN(3, 4, **settings),
    "rnn_relu": lambda **settings: nn.RNN(3, 4, nonlinearity="relu", **settings),
}
SETTINGS: list[dict[str, Any]] = [
    {},
    {"num_layers": 3, "bias": False, "batch_first": True},
    {"num_layers": 2, "bidirectional": True, "dropout": 0.4},
    {"num_layers": 3, "dropout": 0.4, "bias": False},
]


def both(name: str, settings: dict[str, Any], train: bool) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Output and states: of the module, and of what a trace records for it on CUDA."""
    torch.manual_seed(0)
    module = MODULES[name](**settings).double().train(train)
    x = torch.randn(5, 2, 3, dtype=torch.float64)
    rows = module.num_layers * (2 if module.bidirectional else 1)
    batch = x.shape[0] if module.batch_first else x.shape[1]
    hidden = torch.randn(rows, batch, module.proj_size or module.hidden_size, dtype=torch.float64)
    states = (hidden, torch.randn(rows, batch, 4, dtype=torch.float64)) if name == "lstm" else hidden
    torch.manual_seed(1)
    output, last = module(x, states)
    rest = (module.bias, module.num_layers, module.dropout, train, module.bidirectional, module.batch_first)
    torch.manual_seed(1)
    made = traced.by_cudnn(traced._MODES[name], x, states, module._flat_weights, *rest)
    return [output, *(last if isinstance(last, tuple) else (last,))], list(made)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("name", MODULES)
def test_layers_and_dropout_between_them(name: str, settings: dict[str, Any]) -> None:
    torch.testing.assert_close(*both(name, settings, train=True))
    torch.testing.assert_close(*both(name, settings, train=False))


@pytest.mark.parametrize("bias", [True, False])
def test_projections(bias: bool) -> None:
    settings = {"num_layers": 2, "proj_size": 2, "bidirectional": True, "dropout": 0.5, "bias": bias}
    torch.testing.assert_close(*both("lstm", settings, train=True))


class OnCuda(torch.Tensor):
    """A tensor on the CPU that says it is on CUDA."""

    is_cuda = True


@pytest.mark.parametrize("name", MODULES)
def test_what_runs_where_cudnn_is_not_called(name: str) -> None:
    torch.manual_seed(0)
    module = MODULES[name](num_layers=2, bidirectional=True).double()
    x, hidden = torch.randn(5, 2, 3, dtype=torch.float64), torch.randn(4, 2, 4, dtype=torch.float64)
    states: Any = (hidden, hidden.sin()) if name == "lstm" else hidden
    rest = (True, 2, 0.0, True, True, False)
    call = traced._traceable(getattr(torch._VF, name), name)
    output, *last = call(x.as_subclass(OnCuda), states, module._flat_weights, *rest)
    want, wanted = module(x, states)
    have = [each.as_subclass(torch.Tensor) for each in (output, *last)]
    torch.testing.assert_close(have, [want, *(wanted if name == "lstm" else [wanted])])
    sizes = torch.tensor([2, 1])
    with pytest.raises(cf.CaptureError, match="packed sequences"):
        call(x[0].as_subclass(OnCuda), sizes, states, module._flat_weights, *rest[:-1])


def test_autocast_hands_over_half_precision_but_for_float64() -> None:
    single, double = torch.ones(2), torch.ones(2, dtype=torch.float64)
    first, (second, third), rest = traced._in_half(single, (single, double), [double.bfloat16()])
    assert [each.dtype for each in (first, second, third, *rest)] == [
        torch.float16, torch.float16, torch.float64, torch.float16
    ]  # fmt: skip


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.GRU(3, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.inner(nn.utils.rnn.pack_padded_sequence(x, torch.tensor([5, 3])))[0].data.sum()
        return loss


def test_packed_sequences_are_refused() -> None:
    with pytest.raises(cf.CaptureError, match="mask its output"):
        cf.compile(Packed(), form="step").lower(torch.randn(5, 2, 3))


@pytest.mark.parametrize("is_retained", [True, False])
def test_a_retained_backward_of_cudnn_keeps_what_the_forward_has_reserved(
    monkeypatch: pytest.MonkeyPatch, is_retained: bool
) -> None:
    seen = []

    def backward(*args: Any) -> tuple[Any, ...]:
        seen.append(
            dict(zip(cudnn_recurrent._names(cudnn_recurrent._cudnn_rnn_backward), args, strict=True))["reserve"]
        )
        return None, None, None, []

    reserve = torch.zeros(3, dtype=torch.uint8)
    x = torch.zeros(2, 3, 4, requires_grad=True)
    names = cudnn_recurrent._names(cudnn_recurrent._cudnn_rnn_backward)
    given: dict[str, Any] = dict.fromkeys(names, None) | {"input": x, "output": x.detach(), "reserve": reserve}
    monkeypatch.setattr(cudnn_recurrent, "_aten_backward", backward)
    x.register_hook(lambda grad: cudnn_recurrent._backward(*given.values()) and None)
    x.sum().backward(retain_graph=is_retained)
    assert (seen[0] is reserve) != is_retained


def test_traced_weights_are_not_asked_where_they_are_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are stored nowhere, which PyTorch would warn of on CUDA."""
    asked: list[nn.RNNBase] = []
    layer = nn.LSTM(2, 3)
    monkeypatch.setattr(nn.RNNBase, "flatten_parameters", lambda layer: asked.append(layer))
    with traced.recurrent_on_cuda():
        layer.flatten_parameters()
    assert not asked
    layer.flatten_parameters()
    assert asked == [layer]
