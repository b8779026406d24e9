"""The backend "commfuse" of torch.compile: `torch.compile(model, backend="commfuse", options={...})`.

torch finds it by an entry point. It knows the graphs that Dynamo hands over, and nothing of the model:
docs/coming-from-ddp.md says what that means.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import fx, nn

from commfuse_fx.capture.dynamo.graph_of_dynamo import Names, modules_of_caller, path_in_source, register
from commfuse_fx.capture.dynamo.shared_graph import SharedGraph
from commfuse_fx.config.compile_config import CompileConfig
from commfuse_fx.config.options import DEFAULTS
from commfuse_fx.config.without_effect import settled, warn_of_options
from commfuse_fx.dynamo.dynamo_graphs import DynamoGraphs, run_graph
from commfuse_fx.errors import ConfigKeyError, ConfigTypeError, NotAvailableError
from commfuse_fx.frontends.arguments_of_ddp import refuse_ddp, refuse_fsdp, refuse_running_ddp
from commfuse_fx.frontends.compile_arguments import check_form_of_module
from commfuse_fx.frontends.module import ModuleCompiler
from commfuse_fx.frontends.unreduced_models import UnreducedModels
from commfuse_fx.support.checks import alternatives, show

_USE_COMPILE: Mapping[str, str] = {
    "find_unused_parameters": "parameters that no graph has",
    "parameter_broadcast": "the parameters of the model before its first forward",
    "device_num": "what a graph would be on other ranks",
    "global_rank": "what a graph would be on other ranks",
}
"""Options that need a model, and what a backend does not see."""


_OF_STEPS = ("capture", "has_aux", "return_loss")


def commfuse(graph: fx.GraphModule, examples: Sequence[Any], **given: Any) -> Callable[..., Any]:
    """Compile one graph of Dynamo. torch calls it.

    options: the options of `cf.compile` for the module form, as a dict.

    Raises ConfigTypeError, ConfigKeyError or ConfigValueError for bad options, and inside of DistributedDataParallel.
    """
    refuse_running_ddp()
    options = given.pop("options", None)
    given.pop("mode", None)
    return _engine({} if options is None else options).backend(graph, examples)


class _Engine:
    """Everything that was compiled with the same options.

    It begins with the first graph that runs, as ranks need process groups for it. Parameters are called what Dynamo
    calls them, with a number behind the name where several modules have one of that name.

    On one rank, what belongs to a module that is gone is let go when a graph runs next. On several it is held until
    `torch._dynamo.reset()`: they would have to collect garbage at the same time.
    """

    def __init__(self, config: CompileConfig) -> None:
        self._config = config
        self._graphs: DynamoGraphs | None = None
        self._world: Any = None
        self._names: dict[int, str] = {}
        self._held: dict[str, torch.Tensor] = {}
        self._numbers: dict[str, int] = {}
        self._owned: dict[int, dict[str, None]] = {}  # by the id of a module, the names of what it holds
        self._gone: list[int] = []  # of these modules, those that are there no longer
        # With which buffers a graph has run beside the same parameters.
        self._ways: weakref.WeakKeyDictionary[SharedGraph, dict[Names, dict[Names, None]]] = weakref.WeakKeyDictionary()

    def backend(self, graph: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        """What runs this graph."""
        made = SharedGraph(graph, examples)

        def run(*values: Any) -> Any:
            refuse_running_ddp()  # a graph may be older than the wrapper
            graphs = self._of(values)
            if self._gone:
                self._let_go(graphs)
            if torch.is_grad_enabled():
                new = [value for value in values if isinstance(value, nn.Parameter) and id(value) not in self._names]
                for module in modules_of_caller(new):
                    if id(module) not in self._owned:
                        refuse_ddp(module)
                    if new:
                        refuse_fsdp(module, new)
                    owned = self._owned_by(module)
                    for name, param in module.named_parameters():
                        owned[self._name(param, name)] = None
            try:
                return run_graph(graphs, made, values)
            except Exception as error:
                if torch.is_grad_enabled():
                    graphs.tell(error)
                raise

        return run

    def holds(self, param: nn.Parameter) -> bool:
        """Whether gradients of this parameter are reduced, by a graph or at the end of a backward."""
        return self._held.get(self._names.get(id(param), "")) is param

    def _owned_by(self, module: nn.Module) -> dict[str, None]:
        if id(module) not in self._owned:
            self._owned[id(module)] = {}
            weakref.finalize(module, self._gone.append, id(module)).atexit = False
        return self._owned[id(module)]

    def _is_owned_beside(self, buffer: str, params: Sequence[str | None]) -> None:
        """A buffer belongs to the modules that have the parameters beside which a graph reads it."""
        for owned in list(self._owned.values()):
            if not owned.keys().isdisjoint(params):
                owned[buffer] = None

    def _let_go(self, graphs: DynamoGraphs) -> None:
        gone = {name: None for _ in range(len(self._gone)) for name in self._owned.pop(self._gone.pop(0))}
        if graphs.owner.mesh.world > 1:
            return
        left = {name for owned in list(self._owned.values()) for name in owned}
        names = [name for name in gone if name not in left and name in self._held]
        graphs.forget(names)
        for name in names:
            del self._names[id(self._held.pop(name))]

    def _of(self, values: Sequence[Any]) -> DynamoGraphs:
        world = dist.group.WORLD if dist.is_initialized() else None
        if self._graphs is None or world is not self._world:
            self._world = world
            self._names, self._held, self._numbers = {}, {}, {}
            model = nn.Module()  # what prices are for: its device, and the sizes of parameters
            for number, value in enumerate(values):
                if isinstance(value, nn.Parameter):
                    like = nn.Parameter(value.detach().new_empty(()).expand(value.shape), value.requires_grad)
                    register(model, f"argument_{number}", like)
            self._graphs = DynamoGraphs(ModuleCompiler(model, None, None, self._config), self._names_of)
        self._graphs.owner._follow_world()
        return self._graphs

    def _names_of(self, graph: SharedGraph, values: Sequence[Any]) -> Names:
        assert self._graphs is not None, "a graph runs"
        found: list[str | None] = [
            self._name(value, source) if isinstance(value, nn.Parameter) else None
            for value, source in zip(values, graph.sources, strict=True)
        ]
        ways = self._ways.setdefault(graph, {}).setdefault(tuple(found), {})
        if len(ways) < _MOST_WAYS:
            for place, (value, source) in enumerate(zip(values, graph.sources, strict=True)):
                if found[place] is None and isinstance(value, torch.Tensor) and "_buffers[" in source:
                    found[place] = self._name(value, source)
                    self._is_owned_beside(str(found[place]), found)
            ways[tuple(found)] = None
        params = {name: held for name, held in self._held.items() if isinstance(held, nn.Parameter)}
        self._graphs.late.watch(params)
        if self._config.broadcast_buffers:
            self._graphs.late.send_buffers({name: held for name, held in self._held.items() if name not in params})
        return tuple(found)

    def _name(self, value: torch.Tensor, source: str) -> str:
        if id(value) not in self._names:
            path = name = path_in_source(source) or source
            while name in self._held:
                self._numbers[path] = self._numbers.get(path, 0) + 1
                name = f"{path}_{self._numbers[path]}"
            self._names[id(value)], self._held[name] = name, value
        return self._names[id(value)]


_MOST_WAYS = 8  # a model may replace a buffer in each step: then it is an argument


_engines: dict[str, _Engine] = {}

commfuse.reset = _engines.clear  # type: ignore[attr-defined]  # torch._dynamo.reset() calls it


def _knows(param: nn.Parameter) -> bool:
    """Whether a graph holds the parameter, or its gradient is looked at all the same."""
    return any(engine.holds(param) for engine in _engines.values())


_unreduced = UnreducedModels(commfuse, _knows)


def _engine(options: Any) -> _Engine:
    if not isinstance(options, Mapping):
        raise ConfigTypeError(f"options is {show(options)}: pass a dict of options of cf.compile")
    for name in options:
        if name in _USE_COMPILE:
            raise NotAvailableError(
                f"options={{{name!r}: ...}} is not available for the backend of torch.compile, which does not see "
                f'{_USE_COMPILE[name]}: use cf.compile(model, capture="dynamo", {name}=...)'
            )
        if name in _OF_STEPS or name not in DEFAULTS:
            known = [each for each in DEFAULTS if each not in (*_USE_COMPILE, *_OF_STEPS)]
            raise ConfigKeyError(f"options has {show(name)}, which is not an option here{alternatives(name, known)}")
    key = json.dumps(options, sort_keys=True, default=repr)
    if key not in _engines:
        given = {**options, "parameter_broadcast": False, "capture": "dynamo"}
        config = settled(CompileConfig.resolve(given, "module"), given, "module", has_optimizer=False)
        check_form_of_module(config)
        warn_of_options(config)
        _engines[key] = _Engine(config.unmeasured)
    return _engines[key]
