"""A graph that Dynamo has made, as a model of its own, with its parameters under the names that they have in the model.

Dynamo hands over parameters and buffers among the arguments of a graph, and says of each node where it comes from.

Why: docs/decisions.md, "A graph of Dynamo is a model of its own".
"""

from __future__ import annotations

import re
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import fx, nn
from torch.utils.checkpoint import checkpoint

from commfuse_fx.support.user_lines import _location, is_user_file

Names = tuple[str | None, ...]
"""For every argument of a graph the name of the parameter or buffer that it is, or None."""


@dataclass(frozen=True)
class _Body:
    """The graph of one module, and the source of each of its arguments.

    places: the module that holds the argument, and its name there; None for an argument of the call. The references
        are weak: a strong one from here to the module of the graph would keep it alive for ever.
    kept: the positions of the outputs that are returned; None: all.
    """

    graph: fx.GraphModule
    places: Sequence[tuple[weakref.ref[nn.Module], str] | None]
    kept: Sequence[int] | None

    def held(self) -> Iterator[tuple[Any, str] | None]:
        """The places, with the modules themselves."""
        return (None if place is None else (place[0](), place[1]) for place in self.places)


_bodies: weakref.WeakKeyDictionary[nn.Module, _Body] = weakref.WeakKeyDictionary()
"""Beside the modules: what a trace reads of a module is guarded."""


class GraphOfDynamo(nn.Module):
    """A graph as a module. Its forward takes the arguments that are neither parameters nor buffers.

    names: those of the parameters and buffers among `arguments`. The same tensor has one name.
    kept: the positions of the outputs that are returned; None: all.
    """

    def __init__(
        self, graph: fx.GraphModule, arguments: Sequence[Any], names: Names, kept: Sequence[int] | None = None
    ) -> None:
        super().__init__()
        places: list[tuple[weakref.ref[nn.Module], str] | None] = []
        for value, name in zip(arguments, names, strict=True):
            if name is None:
                places.append(None)
                continue
            holder, leaf = register(self, name, value)
            places.append((weakref.ref(holder), leaf))
        _bodies[self] = _Body(graph, places, kept)

    def forward(self, *others: Any) -> Any:
        """What the graph returns."""
        body, rest = _bodies[self], iter(others)
        outputs = body.graph.forward(*(next(rest) if place is None else getattr(*place) for place in body.held()))
        return outputs if body.kept is None else tuple(outputs[place] for place in body.kept)

    def hold(self, arguments: Sequence[Any]) -> None:
        """Take the parameters and buffers among these from now on: some may have been replaced."""
        for place, value in zip(_bodies[self].held(), arguments, strict=True):
            if place is not None and getattr(*place) is not value:
                setattr(*place, value)


def register(module: nn.Module, name: str, tensor: torch.Tensor) -> tuple[nn.Module, str]:
    """Make `tensor` a parameter or buffer of `module` under a dotted name. Returns the part that holds it, and its name
    there."""
    *path, leaf = name.split(".")
    for part in path:
        if part not in module._modules:
            module.add_module(part, nn.Module())
        module = module.get_submodule(part)
    if isinstance(tensor, nn.Parameter):
        module.register_parameter(leaf, tensor)
    else:
        module.register_buffer(leaf, tensor)
    return module, leaf


def with_checkpoints(graph: fx.GraphModule) -> fx.GraphModule:
    """Let activation checkpointing in a graph of Dynamo, in place, do what it does outside: torch 2.13 computes again
    with other random numbers where such a graph runs op by op."""
    for part in [part for part in graph.modules() if isinstance(part, fx.GraphModule)]:
        found = [node for node in part.graph.nodes if node.target is _TAG]
        for node in found:
            node.target = _checkpointed
        if found:
            part.recompile()
    return graph


_TAG = torch.ops.higher_order.tag_activation_checkpoint


def _checkpointed(body: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
    contexts = body.meta.get("_checkpoint_context_fn")
    return checkpoint(
        body,
        *args,
        use_reentrant=False,
        preserve_rng_state=kwargs.get("preserve_rng_state", True),
        **({} if contexts is None else {"context_fn": contexts}),
    )


def is_dynamic(arguments: Sequence[Any]) -> bool:
    """Whether a graph is for any size, given Dynamo's examples of its arguments."""
    for value in arguments:
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return True
        if isinstance(value, torch.Tensor) and any(isinstance(size, torch.SymInt) for size in value.shape):
            return True
    return False


def sources_of(graph: fx.GraphModule) -> list[str]:
    """For every argument the expression that it comes from, such as `L['self']._modules['fc']._parameters['weight']`;
    its name in the graph where that is not known."""
    found = []
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            source = getattr(node, "_dynamo_source", None)
            name = getattr(source, "name", None)
            found.append(str(name() if callable(name) else name or node.name))
    return found


def modules_of_caller(new: Sequence[nn.Parameter]) -> list[nn.Module]:
    """The modules that may read further parameters, in code without a graph. Call it in what Dynamo calls.

    They are the variables of the frame that runs a graph of Dynamo now. With parameters that are new, the frames around
    it count as well: their modules that hold one of those call what has become a graph.
    """
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_DYNAMO):
        frame = frame.f_back
    found = {id(value): value for value in list(frame.f_locals.values()) if isinstance(value, nn.Module)}
    wanted = set(map(id, new))
    around = frame.f_back if new else None
    while around is not None:
        for value in list(around.f_locals.values()):
            if isinstance(value, nn.Module) and id(value) not in found:
                if not wanted.isdisjoint(map(id, value.parameters())):
                    found[id(value)] = value
        around = around.f_back
    return list(found.values())


_DYNAMO = str(Path(torch.__file__).parent / "_dynamo")


def path_in_source(source: str) -> str:
    """The path below the first object of an expression: "fc.weight" of the example above."""
    return ".".join(_taken_apart(source)[1])


_ROOT = re.compile(r"^[LG]\['[^']*'\]")
_PART = re.compile(r"\.(\w+)|\['([^']*)'\]|\[(\d+)\]")
_HOLDERS = ("_modules", "_parameters", "_buffers")
_FILE_LINE = re.compile(r'File "([^"]+)", line (\d+)')


def _taken_apart(source: str) -> tuple[str, list[str]]:
    """The first object of an expression, and the path from there; ("", []) for what is no such expression."""
    root = _ROOT.match(source)
    if root is None:
        return "", []
    parts = ("".join(part) for part in _PART.findall(source[root.end() :]))
    return root.group(), [part for part in parts if part not in _HOLDERS]


class Locator:
    """Says of a line of a graph's code which module of the model and which source line it comes from."""

    def __init__(self, module: GraphOfDynamo) -> None:
        body = _bodies[module]
        graph = body.graph
        lines = graph.code.splitlines()  # asked for first: it makes a lazy graph generate its code
        self._code: CodeType = type(graph).forward.__code__
        self._roots = dict(_roots(graph, _names_of(module, body)))
        nodes = {node.name: node for node in graph.graph.nodes}
        self._places: dict[int, tuple[str, str]] = {}
        for number, line in enumerate(lines, 1):
            name = line.strip().partition(" ")[0].partition(":")[0]
            if name in nodes and "=" in line:
                self._places[number] = self._place(nodes[name])

    def find(self, frame: FrameType | None) -> tuple[str, str] | None:
        """Module path and source line of the op that this frame, or one that has called it, runs."""
        while frame is not None:
            if frame.f_code is self._code:
                return self._places.get(frame.f_lineno)
            frame = frame.f_back
        return None

    def _place(self, node: fx.Node) -> tuple[str, str]:
        lines = [found for found in _FILE_LINE.findall(node.meta.get("stack_trace") or "") if is_user_file(found[0])]
        line = _location(lines[-1][0], int(lines[-1][1])) if lines else ""
        stack = list((node.meta.get("nn_module_stack") or {}).values())
        return self._module(str(stack[-1][0]) if stack else next(iter(self._roots), "")), line

    def _module(self, expression: str) -> str:
        """The path in the model of `L['self'].blocks[0].fc`."""
        root, parts = _taken_apart(expression)
        return ".".join(part for part in (self._roots.get(root, ""), *parts) if part)


def locator_of(model: nn.Module) -> Locator | None:
    """None for a model that is no graph of Dynamo."""
    return Locator(model) if isinstance(model, GraphOfDynamo) else None


def _names_of(module: GraphOfDynamo, body: _Body) -> Names:
    paths: Mapping[nn.Module, str] = {each: path for path, each in module.named_modules()}
    return tuple(
        None if place is None else ".".join(part for part in (paths[place[0]], place[1]) if part)
        for place in body.held()
    )


def _roots(graph: fx.GraphModule, names: Names) -> Iterator[tuple[str, str]]:
    """What the first objects of expressions are called in the model, as far as parameters tell: `L['self']` in a
    frame of a block is "blocks.0"."""
    for source, name in zip(sources_of(graph), names, strict=True):
        root, path = _taken_apart(source)[0], path_in_source(source)
        if path and name is not None and (name == path or name.endswith("." + path)):
            yield root, name[: -len(path)].rstrip(".")
