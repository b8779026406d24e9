"""Warns of models that the backend of torch.compile has been named for, and of which no graph holds the parameters.

Then no code of this project runs in their forward and backward, so that it is noticed where an optimizer uses the
gradients: when a model is disabled for Dynamo, begins with a module that Dynamo leaves to Python, or is one of more
modules of a class than Dynamo compiles.

Why: docs/decisions.md, "A model without a graph is noticed by the optimizers that train it".
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from commfuse_fx.frontends.module import CompiledModule
from commfuse_fx.kernels.described_optimizer import observe_steps
from commfuse_fx.support.logs import logger

_RUNTIME = logger("runtime")

_LOOKED_AT = 2
"""How many of the first steps of an optimizer are looked at. Later on, whatever Dynamo gives up has been known."""


class UnreducedModels:
    """Looks at optimizers, from now on, for gradients of such models that nothing has reduced.

    backend: what torch.compile has been given. knows: whether a parameter is one that it reduces.
    """

    def __init__(self, backend: Callable[..., Any], knows: Callable[[nn.Parameter], bool]) -> None:
        self._backend = backend
        self._knows = knows
        self._looks: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
        observe_steps(self._before_step)

    def _before_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if torch.compiler.is_compiling() or self._looks.get(optimizer, 0) >= _LOOKED_AT:
            return
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return
        params = [param for group in optimizer.param_groups for param in group["params"] if param.grad is not None]
        self._looks[optimizer] = self._looks.get(optimizer, 0) + bool(params)
        unknown = {id(param) for param in params if not self._knows(param)}
        if unknown and self._warns_of(unknown):
            self._looks[optimizer] = _LOOKED_AT

    def _warns_of(self, unknown: set[int]) -> bool:
        """Warn of those of these parameters, by their ids, that belong to a model of the backend and to no other
        module that reduces. Returns whether there are such."""
        found: dict[int, str] = {}
        objects = [each for each in gc.get_objects() if type(each) is FunctionType or _is(each, nn.Module)]
        for each in objects:
            if _is(each, (CompiledModule, nn.parallel.DistributedDataParallel)):
                unknown = unknown.difference(map(id, each.parameters()))
        for each in objects:
            for model in self._models_of(each):
                found.update({id(param): name for name, param in model.named_parameters() if id(param) in unknown})
        names = list(found.values())
        if not names:
            return False
        others = f" and {len(names) - 1} other parameters" if len(names) > 1 else ""
        _RUNTIME.warning(
            'the gradients of %s%s are this rank\'s alone: torch.compile(backend="commfuse") has been given a model '
            "that holds them, and Dynamo has made no graph of them (TORCH_LOGS=graph_breaks,recompiles says why). Use "
            'cf.compile(model, capture="dynamo"), which reduces what no graph has reduced',
            names[0],
            others,
        )
        return True

    def _models_of(self, value: Any) -> Iterator[nn.Module]:
        """The models that this compiled module or function has, where the backend is the one that it is compiled
        with."""
        if _is(value, torch._dynamo.OptimizedModule):
            if self._reduces(value.dynamo_ctx):
                yield value._orig_mod
        elif _is(value, nn.Module):
            compiled = value.__dict__.get("_compiled_call_impl")
            if compiled is not None and self._reduces(_context_of(compiled)):
                yield value
        elif type(value) is FunctionType and "_torchdynamo_orig_callable" in value.__dict__:
            original = value.__dict__["_torchdynamo_orig_callable"]
            if self._reduces(_context_of(value)):
                yield from _modules_in(original)

    def _reduces(self, context: Any) -> bool:
        """Whether a context of Dynamo has the backend, and not `parallel_mode="stand_alone"`."""
        chosen: Any = getattr(context, "callback", None)
        while hasattr(chosen, "_torchdynamo_orig_backend"):
            chosen = chosen._torchdynamo_orig_backend
        if chosen is self._backend:
            return True
        options = (getattr(chosen, "kwargs", None) or {}).get("options") or {}
        return getattr(chosen, "compiler_fn", None) is self._backend and options.get("parallel_mode") != "stand_alone"


def _is(value: Any, kind: Any) -> bool:
    """As isinstance, but without asking objects that pretend to be of another class."""
    return issubclass(type(value), kind)


def _context_of(compiled: Any) -> Any:
    """The context of Dynamo that has made a compiled function."""
    inner = getattr(compiled, "get_compiler_config", None)
    cells: Sequence[Any] = getattr(inner, "__closure__", None) or ()
    return next((cell.cell_contents for cell in cells if hasattr(cell.cell_contents, "callback")), None)


def _modules_in(function: Any) -> Iterator[nn.Module]:
    """The modules that a function may call: its own, and those it finds in its cells and among global names."""
    owner = getattr(function, "__self__", None)
    plain = getattr(function, "__func__", function)
    code = getattr(plain, "__code__", None)
    seen = [owner, *(cell.cell_contents for cell in getattr(plain, "__closure__", None) or () if _is_full(cell))]
    if code is not None:
        seen += [plain.__globals__[name] for name in code.co_names if name in plain.__globals__]
    yield from (each for each in seen if _is(each, nn.Module))


def _is_full(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # a variable that has no value yet
        return False
