"""Keys of traced nodes that follow from what a node computes, and are the same in every process."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from commfuse_fx.support.objects import memory_of

_DEPTH = 3
"""How many ops above a node its `natural` key covers: enough to tell parts of one tensor apart by their numbers."""


def natural_text(text: str) -> tuple[Any, ...]:
    """A sort key that compares numbers in the text as numbers: "layer.2" comes before "layer.10"."""
    return tuple(int(part) if i % 2 else part for i, part in enumerate(re.split(r"(\d+)", text)))


class NodeKeys:
    """Node keys compute and cache the keys of one graph's nodes.

    names: the names of the inputs. modules: the module path of each op of the forward. constants: the tensors of the
    graph's get_attr nodes, by target.
    """

    def __init__(
        self, names: Mapping[fx.Node, str], modules: Mapping[fx.Node, str], constants: Mapping[str, torch.Tensor]
    ) -> None:
        self._names = names
        self._modules = modules
        self._constants = constants
        self._digests: dict[fx.Node, str] = {}
        self._uses: dict[fx.Node, str] = {}
        self._naturals: dict[tuple[fx.Node, int], tuple[Any, ...]] = {}

    def digest(self, node: fx.Node) -> str:
        """A hash that is equal for nodes that compute the same value, in whatever order they were traced."""
        pending = [node]
        while pending:
            current = pending[-1]
            missing = [value for value in current.all_input_nodes if value not in self._digests]
            if missing and current not in self._digests:
                pending.extend(missing)
                continue
            pending.pop()
            if current not in self._digests:
                text = repr(self._key(current, self._digests.__getitem__))
                self._digests[current] = hashlib.sha256(text.encode()).hexdigest()[:24]
        return self._digests[node]

    def uses(self, node: fx.Node) -> str:
        """A hash that is equal for nodes whose values the forward uses alike."""
        if not self._uses:
            for each in reversed(node.graph.nodes):
                users = sorted((self.digest(user), self._uses[user]) for user in each.users if user in self._modules)
                self._uses[each] = hashlib.sha256(repr(users).encode()).hexdigest()[:24]
        return self._uses[node]

    def natural(self, node: fx.Node, depth: int = _DEPTH) -> tuple[Any, ...]:
        """A sort key that follows from the node and the ops just above it."""
        if (node, depth) not in self._naturals:
            above = (lambda value: self.natural(value, depth - 1)) if depth else (lambda value: ())
            self._naturals[node, depth] = self._key(node, above)
        return self._naturals[node, depth]

    def _key(self, node: fx.Node, above: Any) -> tuple[Any, ...]:
        if node.op == "placeholder":
            return (0, natural_text(self._names.get(node, "")))
        if node.op == "get_attr":
            return (1, _content(self._constants[str(node.target)]))
        arguments = tuple(_value(value, above) for value in (*node.args, *node.kwargs.values()))
        return (2, natural_text(self._modules.get(node, "")), str(node.target), tuple(node.kwargs), arguments)


def _value(value: Any, above: Any) -> tuple[Any, ...]:
    """A sort key for any argument of a node. Its first item is the kind, so that keys of all kinds can be compared."""
    if isinstance(value, fx.Node):
        return (5, above(value))
    if isinstance(value, (list, tuple)):
        return (4, tuple(_value(item, above) for item in value))
    if value is None:
        return (0,)
    if isinstance(value, (bool, int)) or (isinstance(value, float) and value == value):
        return (1, value, type(value).__name__)
    return (2, str(value))


def _content(constant: torch.Tensor) -> str:
    digest = hashlib.sha256(f"{constant.dtype} {tuple(constant.shape)} {constant.device}".encode())
    if constant.numel() and constant.layout == torch.strided and constant.device.type != "meta":
        values = constant.detach().cpu().contiguous().resolve_conj().resolve_neg()
        digest.update(memory_of(values))
    return digest.hexdigest()[:24]
