"""The structure of a model, on which its graphs depend: its modules and hooks, and the specs of its tensors."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from commfuse_fx.capture.guards.frozen import Itself
from commfuse_fx.config.fusion_marks import read_fusion_id, read_layerwise_parallel, read_parallel_optimizer
from commfuse_fx.ir.core.meta import TensorSpec
from commfuse_fx.sharding.marking.marks import marks_of

_Named = Mapping[str, Hashable]

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
"""Attributes of a module that hold the hooks which run in a step."""

TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
"""Attributes of a parameter that hold its hooks; None until there is one."""

GLOBAL_HOOKS: tuple[dict[int, Any], ...] = tuple(getattr(nn.modules.module, f"_global{name}") for name in HOOKS)
"""The global hooks, which run for all modules."""

PARAMETER_MARKS = ("comm_fusion", "layerwise_parallel", "parallel_optimizer")
"""Attributes of a parameter that hold marks, which users may set by hand."""


@dataclass(frozen=True)
class ModelStructure:
    """The modules, parameters, buffers, hooks and marks of a model, as hashable values by name.

    Modules and hooks are compared by identity: two modules of one class can differ in a number that is a constant of
    the graph. Parameters and buffers are compared by shape, dtype and strides, because a graph takes any such tensor.
    """

    modules: tuple[tuple[str, Hashable], ...]
    parameters: tuple[tuple[str, Hashable], ...]
    buffers: tuple[tuple[str, Hashable], ...]
    hooks: tuple[tuple[str, Hashable], ...]
    marks: tuple[tuple[str, Hashable], ...]
    _hash: int = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        held = (self.modules, self.parameters, self.buffers, self.hooks, self.marks)
        object.__setattr__(self, "_hash", hash(held))

    def __hash__(self) -> int:
        return self._hash  # hashing every name at every step takes longer than comparing them

    @classmethod
    def of(cls, model: nn.Module) -> ModelStructure:
        """The present structure of a model. Raises ConfigTypeError or ConfigValueError for a bad mark."""
        modules = [(path, weakref.ref(module)) for path, module in model.named_modules(remove_duplicate=False)]
        first: dict[int, str] = {}
        parameters = [
            (name, (first.setdefault(id(param), name), *_looks(param)))
            for name, param in model.named_parameters(remove_duplicate=False)
        ]
        buffers = [
            (name, (first.setdefault(id(buffer), name), *_looks(buffer)))
            for name, buffer in model.named_buffers(remove_duplicate=False)
        ]
        return cls(tuple(modules), tuple(parameters), tuple(buffers), tuple(_hooks(model)), tuple(marks_in(model)))

    def difference(self, other: ModelStructure) -> str:
        """The first change from `other` to this structure, as text."""
        for kind in ("module", "parameter", "buffer", "hook", "mark"):
            new: _Named = dict(getattr(self, f"{kind}s"))
            old: _Named = dict(getattr(other, f"{kind}s"))
            for name in new:
                if name not in old:
                    return f"{kind} {name} was added"
                if new[name] != old[name]:
                    return f"{kind} {name} was replaced"
            for name in old:
                if name not in new:
                    return f"{kind} {name} was removed"
            if list(new) != list(old):
                return f"the order of {kind}s changed"
        return "nothing changed"


def _hooks(model: nn.Module) -> Iterator[tuple[str, Hashable]]:
    """All hooks that run in a step. Their names tell the kind of the hook and its module or parameter."""
    places: list[tuple[str, Sequence[str], Sequence[Any], Mapping[str, Any]]]
    places = [("of all modules", HOOKS, GLOBAL_HOOKS, {})]
    for path, module in model.named_modules():
        where, held = f"of module {path or type(module).__name__}", vars(module)
        places.append((where, HOOKS, [held.get(kind) for kind in HOOKS], held))
    for path, param in model.named_parameters():
        places.append((f"of parameter {path}", TENSOR_HOOKS, [getattr(param, kind) for kind in TENSOR_HOOKS], {}))
    for where, kinds, all_hooks, held in places:
        for kind, hooks in zip(kinds, all_hooks, strict=True):
            for number, (key, hook) in enumerate((hooks or {}).items()):
                what = getattr(hook, "__qualname__", type(hook).__qualname__)
                name = f"{number} {where} ({kind.strip('_').removesuffix('_hooks')}, {what})"
                yield name, (Itself(hook), *_how_called(held, kind, key))


def _how_called(module: Mapping[str, Any], kind: str, key: int) -> tuple[bool, bool]:
    """Whether a hook is given keyword arguments, and whether a backward hook is a full one. module: its attributes."""
    is_full = kind == "_backward_hooks" and bool(module.get("_is_full_backward_hook"))
    return key in module.get(f"{kind}_with_kwargs", ()), is_full


def _looks(tensor: torch.Tensor) -> tuple[Hashable, ...]:
    if isinstance(tensor, (nn.UninitializedParameter, nn.UninitializedBuffer)):
        return ()
    return (TensorSpec.of(tensor), tensor.layout)


def marks_in(model: nn.Module) -> Iterator[tuple[str, Hashable]]:
    """All marks of modules and parameters. Raises ConfigTypeError or ConfigValueError for a bad one."""
    for path, module in model.named_modules():
        if found := marks_of(module):
            yield f"of module {path or type(module).__name__}", found
    for name, param in model.named_parameters():
        may_divide = read_parallel_optimizer(param, name)
        marks = read_fusion_id(param, name), read_layerwise_parallel(param, name), may_divide, marks_of(param)
        if marks != (None, False, True, ()):
            yield f"of parameter {name}", marks
    for name, buffer in model.named_buffers():
        if read_layerwise_parallel(buffer, name):
            yield f"of buffer {name}", True
