"""Recurrent layers of cuDNN as two ops that a graph can hold.

aten::_cudnn_rnn makes the buffer of all weights that its backward needs, where it is given none; a description of the
op without data (torch 2.13) makes none. The backward op returns a list within a tuple, which becomes one list here.

Why: docs/decisions.md, "Dropout between layers of a recurrent module on CUDA is PyTorch's, one cuDNN call per layer".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

aten = torch.ops.aten

_library = torch.library.Library("commfuse", "FRAGMENT")
_FORWARD = str(aten._cudnn_rnn.default._schema).removeprefix("aten::_cudnn_rnn")
_BACKWARD = str(aten._cudnn_rnn_backward.default._schema).removeprefix("aten::_cudnn_rnn_backward")
_library.define(f"cudnn_rnn{_FORWARD}")
_library.define(f"cudnn_rnn_backward{_BACKWARD.partition(' -> ')[0]} -> Tensor[]")

_Tensors = tuple[torch.Tensor, ...]

_cudnn_rnn, _cudnn_rnn_backward = aten._cudnn_rnn.default, aten._cudnn_rnn_backward.default
_aten_backward: Any = _cudnn_rnn_backward


def _names(op: Any) -> list[str]:
    return [argument.name for argument in op._schema.arguments]


def _forward(*args: Any) -> _Tensors:
    """Without a buffer of all weights the op would make the same one, and warn in each call that the weights do not lie
    in one. What makes it turns the tensors that it is given into parts of it, so it is given others."""
    given = dict(zip(_names(_cudnn_rnn), args, strict=True))
    if given["weight_buf"] is None:
        weights = [weight.view(weight.shape) for weight in given["weight"]]
        shape = [given[name] for name in ("mode", "hidden_size", "proj_size", "num_layers", "batch_first")]
        given["weight_buf"] = aten._cudnn_rnn_flatten_weight.default(
            weights, given["weight_stride0"], given["input"].shape[-1], *shape, given["bidirectional"]
        )
    made: _Tensors = aten._cudnn_rnn.default(*given.values())
    return made


def _forward_shapes(*args: Any) -> _Tensors:
    output, hy, cy, reserve, _ = aten._cudnn_rnn.default(*args)
    if args[_names(_cudnn_rnn).index("batch_first")]:  # it lies in the order of time all the same
        output = output.new_empty((output.shape[1], output.shape[0], output.shape[2])).transpose(0, 1)
    return output, hy, cy, reserve, args[0].new_empty(sum(weight.numel() for weight in args[1]))


def _backward(*args: Any) -> list[torch.Tensor]:
    """Gradients of the input, both states and the weights; what is not asked for has no elements.

    cuDNN reads the memory of the output in the order of time, whatever its strides say. It writes to what the forward
    has reserved, which another run of a retained backward needs as it was.
    """
    names = _names(_cudnn_rnn_backward)
    given = list(args)
    if torch._C._current_graph_task_id() != -1 and torch._C._autograd._get_current_graph_task_keep_graph():
        given[names.index("reserve")] = given[names.index("reserve")].clone()
    place = names.index("output")
    if given[names.index("batch_first")]:
        given[place] = given[place].transpose(0, 1).contiguous().transpose(0, 1)
    else:
        given[place] = given[place].contiguous()
    *others, weights = _aten_backward(*given)
    empty = args[0].new_empty(0)
    return [empty if grad is None else grad for grad in (*others, *weights)]


def _backward_shapes(*args: Any) -> list[torch.Tensor]:
    given, weights, hidden, cell = args[0], args[1], args[4], args[5]
    like = (given, hidden, given.new_empty(0) if cell is None else cell, *weights)
    return [each.new_empty(each.shape) for each in like]


torch.library.impl("commfuse::cudnn_rnn", "CUDA", lib=_library)(_forward)
torch.library.impl("commfuse::cudnn_rnn_backward", "CUDA", lib=_library)(_backward)
torch.library.register_fake("commfuse::cudnn_rnn", _forward_shapes, lib=_library)
torch.library.register_fake("commfuse::cudnn_rnn_backward", _backward_shapes, lib=_library)


def _recorded_backward(*args: Any) -> tuple[Any, ...]:
    *given, mask = args
    everything = [True, True, given[5] is not None, True]
    found = torch.ops.commfuse.cudnn_rnn_backward.default(*given, everything)
    return (*(grad if wanted else None for grad, wanted in zip(found[:3], mask[:3], strict=True)), found[3:])


CUDNN: Mapping[Any, Callable[..., Any]] = {
    aten._cudnn_rnn.default: torch.ops.commfuse.cudnn_rnn.default,
    aten._cudnn_rnn_backward.default: _recorded_backward,
}
"""Decompositions for a graph."""
