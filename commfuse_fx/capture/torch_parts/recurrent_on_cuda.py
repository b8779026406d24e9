"""Trace recurrent modules on CUDA as ops of cuDNN.

torch passes cuDNN a buffer that holds all weights, and finds it by their storages, which traced tensors do not have.
Here the op that runs makes such a buffer.

Why: docs/decisions.md, "Dropout between layers of a recurrent module on CUDA is PyTorch's, one cuDNN call per layer".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch._decomp.decompositions import gru_impl, lstm_impl, rnn_relu_input, rnn_tanh_input

from commfuse_fx.capture.torch_parts.this_thread import patched_here
from commfuse_fx.errors import CaptureError

_cudnn_rnn: Callable[..., Any] = torch._cudnn_rnn

_LSTM = 2
_MODES = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": _LSTM, "gru": 3}
"""Name in torch._VF -> number of cuDNN's mode."""

_BY_TIME_STEP: dict[str, Callable[..., Any]] = {
    "rnn_relu": rnn_relu_input,
    "rnn_tanh": rnn_tanh_input,
    "lstm": lstm_impl,
    "gru": gru_impl,
}
"""The same in ops that every device has, several for each time step."""

PACKED = (
    "packed sequences have lengths that depend on values: run the recurrent module on the padded batch and mask its "
    "output"
)


@contextmanager
def recurrent_on_cuda() -> Iterator[None]:
    """Inside the `with` block `nn.RNN`, `nn.LSTM` and `nn.GRU` on CUDA are traced as one op each.

    With dropout between their layers they are one op per layer. Where torch does not call cuDNN, such as for a batch
    without elements, they are several ops per time step. Raises CaptureError for packed sequences.
    """
    with ExitStack() as stack:
        stack.enter_context(patched_here(torch.nn.RNNBase, "flatten_parameters", _nothing))
        for name in _MODES:
            stack.enter_context(patched_here(torch._VF, name, _traceable(getattr(torch._VF, name), name)))
        yield


def _nothing(module: torch.nn.RNNBase) -> None:
    """In place of `flatten_parameters`, which asks where weights are stored, and traced ones are stored nowhere."""


def _traceable(original: Callable[..., Any], name: str) -> Callable[..., Any]:
    def run(input: torch.Tensor, hx: Any, weights: Sequence[torch.Tensor], *rest: Any) -> Any:
        if not input.is_cuda or torch.version.hip is not None:
            return original(input, hx, weights, *rest)
        if isinstance(hx, torch.Tensor) and hx.ndim == 1:  # the sizes of the batch, as for packed sequences
            raise CaptureError(PACKED)
        if not _calls_cudnn(input):
            output, *last = _BY_TIME_STEP[name](input, hx, weights, *rest)
            states = hx if name == "lstm" else (hx,)
            # Of an LSTM, torch 2.11 gives them a dimension too many.
            return (output, *(each.reshape(state.shape) for each, state in zip(last, states, strict=True)))
        with torch.autocast("cuda", enabled=False):
            given = _in_half(input, hx, weights) if torch.is_autocast_enabled("cuda") else (input, hx, weights)
            return by_cudnn(_MODES[name], *given, *rest)

    return run


def _calls_cudnn(input: torch.Tensor) -> bool:
    """Whether torch calls cuDNN for this input (source: `use_cudnn` in aten/src/ATen/native/RNN.cpp)."""
    if not torch.cudnn_is_acceptable(input):
        return False
    if input.dtype is not torch.bfloat16:
        return input.dtype in (torch.float64, torch.float32, torch.float16)
    version = torch.backends.cudnn.version()
    return version is not None and version >= 91300 and torch.cuda.get_device_capability(input.device)[0] >= 8


def _in_half(*given: Any) -> Any:
    """What autocast gives to cuDNN: all but float64 as float16 (source: aten/src/ATen/cudnn/AutocastRNN.cpp)."""
    return tuple(
        _in_half(*each)
        if isinstance(each, (list, tuple))
        else (each if each.dtype is torch.float64 else each.to(torch.float16))
        for each in given
    )


def by_cudnn(
    mode: int,
    input: torch.Tensor,
    hx: Any,
    weights: Sequence[torch.Tensor],
    has_bias: bool,
    layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[torch.Tensor, ...]:
    """The output and the last states of a recurrent module. The arguments are those of torch._VF.

    cuDNN would draw dropout between layers from random numbers of its own. So each layer is then a call of its own,
    with dropout of PyTorch between them.
    """
    settings = (has_bias, train, bidirectional, batch_first)
    states = (hx[0], hx[1]) if mode == _LSTM else (hx,)
    if not (dropout and train and layers > 1):
        return _one_call(mode, input, states, weights, layers, *settings)
    directions, per_layer = 1 + bidirectional, len(weights) // layers
    last: list[tuple[torch.Tensor, ...]] = []
    for layer in range(layers):
        begun = tuple(state[layer * directions : (layer + 1) * directions] for state in states)
        own = weights[layer * per_layer : (layer + 1) * per_layer]
        input = torch.dropout(input, dropout, True) if layer else input
        input, *ended = _one_call(mode, input, begun, own, 1, *settings)
        last.append(tuple(ended))
    return (input, *(torch.cat(each) for each in zip(*last, strict=True)))


def _one_call(
    mode: int,
    input: torch.Tensor,
    states: tuple[torch.Tensor, ...],
    weights: Sequence[torch.Tensor],
    layers: int,
    has_bias: bool,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[torch.Tensor, ...]:
    hidden, *cells = (state.contiguous() for state in states)
    cell = cells[0] if cells else None
    size, projected = hidden.shape[2], 0
    if cell is not None and cell.shape[2] != size:
        size, projected = cell.shape[2], size
    per_direction = (4 if has_bias else 2) + (projected > 0)
    shape: tuple[Any, ...] = (mode, size, projected, layers, batch_first, 0.0, train, bidirectional, [], None)
    output, hy, cy, *_ = _cudnn_rnn(input, list(weights), per_direction, None, hidden, cell, *shape)
    return (output, hy) if cell is None else (output, hy, cy)
