"""One layer of an LSTM on CPUs (oneDNN), as two ops that a graph can hold.

What torch calls for float32 and bfloat16, aten::mkldnn_rnn_layer, hands a workspace from the forward to the backward
pass, but only where gradients are enabled when it runs, which is never so in a compiled step. `lstm_layer` always makes
the workspace. Its size is oneDNN's affair and differs between CPUs; a graph records what is usual.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

aten = torch.ops.aten

_library = torch.library.Library("commfuse", "FRAGMENT")
_FORWARD = str(aten.mkldnn_rnn_layer.default._schema).removeprefix("aten::mkldnn_rnn_layer")
_BACKWARD = str(aten.mkldnn_rnn_layer_backward.default._schema).removeprefix("aten::mkldnn_rnn_layer_backward")
_library.define(f"lstm_layer{_FORWARD}")
_library.define(f"lstm_layer_backward{_BACKWARD.replace('Tensor workspace)', 'Tensor? workspace)')}")

_Tensors = tuple[torch.Tensor, ...]
_FLOATS_PER_STATE = 16  # of a workspace, for each element of the output: gates, states and their padding


def _forward(*args: Any) -> _Tensors:
    """The workspace of a training pass comes with it, whatever mode this runs in."""
    with torch.enable_grad(), torch._C._AutoDispatchBelowAutograd():
        made: _Tensors = aten.mkldnn_rnn_layer.default(*args)
    return made


def _backward(*args: Any) -> _Tensors:
    *given, workspace = args
    if workspace is None:
        named = dict(zip(_names(lstm_layer_backward), args, strict=True))
        workspace = _forward(*(named[_THE_SAME.get(name, name)] for name in _names(lstm_layer)))[3]
    grads: list[torch.Tensor] = list(aten.mkldnn_rnn_layer_backward.default(*given, workspace))
    if grads[3].data_ptr() == grads[4].data_ptr():  # both biases have the same gradient, but each owns its own
        grads[4] = grads[3].clone()
    return tuple(grads)


def _names(op: Any) -> list[str]:
    return [argument.name for argument in op._schema.arguments]


# Arguments of the forward op that the backward op has under another name.
_THE_SAME: Mapping[str, str] = {
    "weight0": "weight1",
    "weight1": "weight2",
    "weight2": "weight3",
    "weight3": "weight4",
    "cx_": "cx_tmp",
}


def _forward_shapes(*args: Any) -> _Tensors:
    output, hy, cy, workspace = aten.mkldnn_rnn_layer.default(*args)
    return output, hy, cy, workspace.new_empty(4 * _FLOATS_PER_STATE * output.numel())


def _backward_shapes(*args: Any) -> _Tensors:
    """The kernel makes gradients in float32, of biases even where the layer has none; torch 2.11 says otherwise."""
    named = dict(zip(_names(lstm_layer_backward), args, strict=True))
    shapes = [named[name].shape for name in ("input", "weight1", "weight2")]
    bias = named["weight3"].shape[:1]
    states = [named[name].shape for name in ("hx_", "cx_tmp")]
    return tuple(args[0].new_empty(shape, dtype=torch.float32) for shape in (*shapes, bias, bias, *states))


torch.library.impl("commfuse::lstm_layer", "CPU", lib=_library)(_forward)
torch.library.impl("commfuse::lstm_layer_backward", "CPU", lib=_library)(_backward)
torch.library.register_fake("commfuse::lstm_layer", _forward_shapes, lib=_library)
torch.library.register_fake("commfuse::lstm_layer_backward", _backward_shapes, lib=_library)

lstm_layer = torch.ops.commfuse.lstm_layer.default
"""The arguments and results of aten::mkldnn_rnn_layer."""
lstm_layer_backward = torch.ops.commfuse.lstm_layer_backward.default
"""Those of aten::mkldnn_rnn_layer_backward. workspace: that of the forward pass; None: that pass is run again."""


def _with_workspace(*args: Any) -> Any:
    # Where gradients are not enabled, nobody asks for the workspace.
    return lstm_layer(*args) if torch.is_grad_enabled() else NotImplemented


def _without_workspace(*args: Any) -> Any:
    return lstm_layer_backward(*args[:-1], None)


WITH_WORKSPACE: Mapping[Any, Callable[..., Any]] = {
    aten.mkldnn_rnn_layer.default: _with_workspace,
    aten.mkldnn_rnn_layer_backward.default: lstm_layer_backward,
}
"""Decompositions for a graph in which every rank runs the op on the tensors that were traced."""

WITHOUT_WORKSPACE: Mapping[Any, Callable[..., Any]] = {
    aten.mkldnn_rnn_layer_backward.default: _without_workspace,
}
"""Decompositions for a graph that is divided: a workspace is no tensor that could be cut into parts or gathered."""
