"""Warn of leaves that are neither parameters of the model nor inputs, such as the parameters of a loss module."""

from __future__ import annotations

import logging
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

log = logging.getLogger("commfuse_fx.trace")


@contextmanager
def other_gradients_kept(results: Sequence[torch.Tensor], own: Container[int]) -> Iterator[None]:
    """Inside the `with` block a traced backward does not change the `.grad` of other leaves. Warns if there are any.

    own: ids of the leaves that belong to the trace.
    """
    # Traced leaves were made in the forward, and nobody sees them after it.
    others = [leaf for leaf in _leaves(results) if id(leaf) not in own and not isinstance(leaf, FakeTensor)]
    kept = [leaf.grad for leaf in others]
    if others:
        log.warning(
            "the result depends on tensors that require a gradient and are no parameters of the model (shapes: %s): a "
            "compiled step computes none for them. If they are trained, compile a module that holds the model and them "
            "and returns the loss; else call requires_grad_(False) on them",
            ", ".join(str(list(leaf.shape)) for leaf in others[:4]) + (", ..." if len(others) > 4 else ""),
        )
    for leaf in others:
        leaf.grad = None
    try:
        yield
    finally:
        for leaf, grad in zip(others, kept, strict=True):
            leaf.grad = grad


def _leaves(results: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The leaves that a backward from these results reaches, in the order of a walk through the autograd graph."""
    seen: dict[Any, None] = {}
    waiting: list[Any] = [result.grad_fn for result in results]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen[node] = None
        waiting.extend(parent for parent, _ in node.next_functions)
    return [node.variable for node in seen if hasattr(node, "variable")]
