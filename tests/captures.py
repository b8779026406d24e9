"""One capture for all compilations of equal models: tracing is most of what a compilation of a small model takes.

What a plan is made from besides the graph (configuration, marks of parameters, optimizer) is each compilation's own.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from commfuse_fx.capture.build import capture as trace
from commfuse_fx.capture.build import describe_parameters
from commfuse_fx.capture.guards.model_structure import GLOBAL_HOOKS, HOOKS, TENSOR_HOOKS
from commfuse_fx.capture.joint import Outputs
from commfuse_fx.capture.joint import capture_joint as trace_joint
from commfuse_fx.config.compile_config import CompileConfig
from commfuse_fx.ir.core.mesh import Mesh
from commfuse_fx.ir.core.program import Program
from commfuse_fx.planning import compile_call
from commfuse_fx.sharding.marking.marks import collect

_made_as: WeakKeyDictionary[nn.Module, tuple[Hashable, bool]] = WeakKeyDictionary()
_captured: dict[tuple[Hashable, ...], tuple[Program, Outputs | None]] = {}


def share(model: nn.Module, made_as: Hashable, any_mesh: bool = False) -> None:
    """Models with the same `made_as` run the same code, apart from what `_state` tells of them. With hooks a model is
    traced all the same.

    any_mesh: that code asks nowhere how many ranks there are, so all meshes share one capture.

    Until the end of the test `compile` looks here first.
    """
    _made_as[model] = made_as, any_mesh
    compile_call.capture = capture
    compile_call.capture_joint = capture_joint


def forget(made_as: Hashable) -> None:
    """Give back the memory of captures that nobody needs again."""
    for key in [key for key in _captured if key[0] == made_as]:
        del _captured[key]


def capture(model: nn.Module, *arguments: Any) -> Program:
    """In place of `commfuse_fx.planning.compile_call.capture`, with its arguments."""
    if not _is_shared(model):
        return trace(model, *arguments)
    loss_fn, structure, leaves, mesh, config, training, optimizer, _, batch = arguments
    marks = (config.has_aux, collect(model), mesh) if config.divides_graphs else config.has_aux
    key = (*_key(model, structure, leaves, mesh), loss_fn, training, marks, batch and (batch.rows, batch.parts))
    if key not in _captured:
        _captured[key] = trace(model, *arguments), None
    program, _ = _captured[key]
    return replace(_own(program, model, mesh, config), optimizer=optimizer if training else None)


def capture_joint(model: nn.Module, *arguments: Any) -> tuple[Program, Outputs]:
    """In place of `commfuse_fx.planning.compile_call.capture_joint`, with its arguments."""
    if not _is_shared(model):
        return trace_joint(model, *arguments)
    structure, leaves, mesh, config, _, training = arguments
    key = (*_key(model, structure, leaves, mesh), config.broadcast_buffers, training, "joint")
    if key not in _captured:
        _captured[key] = trace_joint(model, *arguments)
    program, outputs = _captured[key]
    assert outputs is not None
    return _own(program, model, mesh, config), outputs


def _is_shared(model: nn.Module) -> bool:
    return model in _made_as and not (
        any(vars(module)[kind] for module in model.modules() for kind in HOOKS)
        or any(getattr(param, kind) for param in model.parameters() for kind in TENSOR_HOOKS)
        or any(GLOBAL_HOOKS)
    )


def _key(model: nn.Module, structure: Any, leaves: Any, mesh: Mesh) -> tuple[Hashable, ...]:
    inputs = tuple((path, *_spec(tensor)) for path, tensor in leaves)
    made_as, any_mesh = _made_as[model]
    return made_as, _state(model), structure, inputs, None if any_mesh else mesh


def _own(captured: Program, model: nn.Module, mesh: Mesh, config: CompileConfig) -> Program:
    return replace(captured.copy(), mesh=mesh, config=config, params=describe_parameters(model))


def _state(model: nn.Module) -> Hashable:
    modules = tuple((name, type(module), module.training) for name, module in model.named_modules())
    tensors = (*model.named_parameters(), *model.named_buffers())
    return modules, tuple((name, *_spec(tensor)) for name, tensor in tensors)


def _spec(tensor: torch.Tensor) -> tuple[Hashable, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad
