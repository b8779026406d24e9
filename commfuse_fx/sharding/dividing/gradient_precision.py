"""Gradients in low precision are summed in float32 over all mesh axes, and cast back once, behind the last sum.

Why: docs/decisions.md, "The order of sums over several axes is mended after all axes are divided".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import fx

from commfuse_fx.ir.core.meta import TensorSpec, dtype_name, info, set_info, tensor_spec
from commfuse_fx.ir.core.program import Program

aten = torch.ops.aten

_LOW_PRECISION = (torch.bfloat16, torch.float16)


def summed_in_float32(spec: TensorSpec, program: Program) -> bool:
    """Whether a gradient of this dtype is cast to float32 for its sum over ranks."""
    return spec.dtype in _LOW_PRECISION and program.config.gradient_fp32_sync


def is_widened(node: fx.Node) -> bool:
    """Whether the node is such a cast. It is exact, so it is divided, or a partial sum, as its input is."""
    return node.target is aten._to_copy.default and bool(info(node).serves)


def in_own_precision(program: Program, names: Mapping[str, str]) -> None:
    """Cast summed gradients back to the dtype of their parameters. names: of the gradients, by parameter."""
    cast: dict[fx.Node, fx.Node] = {}
    for name, grad in program.grads.items():
        spec, dtype = tensor_spec(grad), program.params[name].spec.dtype
        if spec.dtype == dtype or grad in cast:
            continue
        with program.graph.inserting_after(grad):
            made = program.graph.call_function(aten._to_copy.default, (grad,), {"dtype": dtype})
        own = program.names.reserve(f"{names[name]}/{dtype_name(dtype)}")
        cast[grad] = set_info(made, replace(info(grad), spec=spec.with_dtype(dtype), name=own, serves=()))
    program.grads = {name: cast.get(grad, grad) for name, grad in program.grads.items()}
