"""Trace recurrent modules on CUDA as one cuDNN op.

torch passes cuDNN a buffer that holds all weights, and finds it by their storages, which traced tensors do not have.
Without such a buffer cuDNN copies the weights into one of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from commfuse_fx.capture.this_thread import patched_here
from commfuse_fx.errors import CaptureError

_cudnn_rnn: Callable[..., Any] = torch._cudnn_rnn

_MODES = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}
"""Name in torch._VF -> number of cuDNN's mode."""


@contextmanager
def recurrent_on_cuda() -> Iterator[None]:
    """Inside the `with` block `nn.RNN`, `nn.LSTM` and `nn.GRU` on CUDA are traced as one op each.

    Raises CaptureError for dropout between layers, whose random numbers cuDNN draws itself.
    """
    with ExitStack() as stack:
        for name, mode in _MODES.items():
            stack.enter_context(patched_here(torch._VF, name, _traceable(getattr(torch._VF, name), mode)))
        yield


def _traceable(original: Callable[..., Any], mode: int) -> Callable[..., Any]:
    def run(input: torch.Tensor, hx: Any, weights: Sequence[torch.Tensor], *rest: Any) -> Any:
        if not input.is_cuda or not isinstance(weights, (list, tuple)) or not torch.backends.cudnn.is_acceptable(input):
            return original(input, hx, weights, *rest)
        has_bias, layers, dropout, train, bidirectional, batch_first = rest
        if dropout and train and layers > 1:
            raise CaptureError(
                f"dropout={dropout} between the layers of a recurrent module on CUDA is drawn inside of cuDNN: pass "
                "dropout=0, and put nn.Dropout between modules of one layer"
            )
        hidden, cell = hx if mode == 2 else (hx, None)
        size, projected = hidden.shape[2], 0
        if cell is not None and cell.shape[2] != size:
            size, projected = cell.shape[2], size
        per_layer = (4 if has_bias else 2) + (projected > 0)
        states = (hidden.contiguous(), None if cell is None else cell.contiguous())
        shape: tuple[Any, ...] = (mode, size, projected, layers, batch_first, 0.0, train, bidirectional, [], None)
        output, hy, cy, *_ = _cudnn_rnn(input, list(weights), per_layer, None, *states, *shape)
        return (output, hy) if cell is None else (output, hy, cy)

    return run
