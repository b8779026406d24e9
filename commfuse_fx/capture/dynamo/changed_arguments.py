"""Which arguments a graph of Dynamo changes in place."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import fx
from torch._guards import detect_fake_mode


def changed_arguments(graph: fx.GraphModule) -> Collection[fx.Node]:
    """The arguments that the graph changes in place.

    The examples of Dynamo count changes. For one that is a part of a storage, which a leaf of autograd may be, torch
    2.13 has counted one before the graph begins: where an example shows any, the graph runs once more, with others.
    """
    nodes = [node for node in graph.graph.nodes if node.op == "placeholder"]
    examples = [node.meta.get("example_value") for node in nodes]
    if not any(isinstance(value, torch.Tensor) and value._version > 0 for value in examples):
        return ()
    mode = detect_fake_mode(examples)
    assert mode is not None, "Dynamo's examples are fake tensors"
    unknown_sizes = nullcontext() if mode.shape_env is None else mode.shape_env.ignore_fresh_unbacked_symbols()
    with mode, patch.object(mode, "allow_non_fake_inputs", True), unknown_sizes, torch.no_grad():
        fresh = [_new_like(value) for value in examples]
        graph(*fresh)
    return {n for n, value in zip(nodes, fresh, strict=True) if isinstance(value, torch.Tensor) and value._version > 0}


def _new_like(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
