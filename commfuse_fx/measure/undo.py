"""What it takes to run a step and have changed nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch

from commfuse_fx.ir.core.dependence import is_opaque, written_nodes
from commfuse_fx.runtime.execute.executor import Executor


@contextmanager
def step_undone(executor: Executor, inputs: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Calls of the compiled step inside the block leave no trace, as `undone`: neither in `.grad`, nor in the
    optimizer, to which the first step gives its states."""
    with undone(executor, inputs), _same_gradients(executor), _same_states(executor.optimizer):
        yield


@contextmanager
def _same_gradients(executor: Executor) -> Iterator[None]:
    held = [(param, param.grad) for param in executor.params.values()]
    kept = [(grad, grad.clone()) for _, grad in held if grad is not None]
    try:
        yield
    finally:
        with torch.no_grad():
            for grad, before in kept:
                grad.copy_(before)
        for param, own in held:
            param.grad = own


@contextmanager
def _same_states(optimizer: torch.optim.Optimizer | None) -> Iterator[None]:
    """`optimizer.state` has the same objects under the same keys after the block."""
    if optimizer is None:
        yield
        return
    before = {param: dict(state) for param, state in optimizer.state.items()}
    try:
        yield
    finally:
        _forget_states(optimizer, but=before)
        for param, state in before.items():
            optimizer.state[param].clear()
            optimizer.state[param].update(state)


@contextmanager
def undone(executor: Executor, inputs: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Tensors that a program writes inside the block, and random number generators, are as before after it."""
    program = executor.program
    written = {value: None for node in program.graph.nodes for value in written_nodes(node)}
    shared = program.aliases()
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    for (node, source), value in zip(program.sources.items(), executor.gather(inputs), strict=True):
        # A batch may be a view that cannot be written, and members of flat storage are kept with it.
        if node not in shared and (source.kind != "input" or node in written):
            tensors = value if isinstance(value, (list, tuple)) else [value]
            kept.extend((tensor, tensor.clone()) for tensor in tensors if isinstance(tensor, torch.Tensor))
    calls_optimizer = any(is_opaque(node) for node in program.graph.nodes)
    restore_optimizer = _keep_optimizer(executor.optimizer) if calls_optimizer else None
    random = torch.get_rng_state()
    random_cuda = [torch.cuda.get_rng_state(device) for device in executor.devices]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, before in kept:
                tensor.copy_(before)
        if restore_optimizer is not None:
            restore_optimizer()
        torch.set_rng_state(random)
        for device, state in zip(executor.devices, random_cuda, strict=True):
            torch.cuda.set_rng_state(state, device)


def _keep_optimizer(optimizer: torch.optim.Optimizer | None) -> Callable[[], None]:
    """For an optimizer whose own step() is called: state and options of its groups, with the same tensor objects."""
    assert optimizer is not None
    states = {param: _keep_mapping(state) for param, state in optimizer.state.items()}
    groups = [_keep_mapping({k: v for k, v in group.items() if k != "params"}) for group in optimizer.param_groups]

    def restore() -> None:
        _forget_states(optimizer, but=states)
        for param, before in states.items():
            _restore_mapping(optimizer.state[param], before)
        for group, before in zip(optimizer.param_groups, groups, strict=True):
            _restore_mapping(group, before, keep=("params",))

    return restore


def _forget_states(optimizer: torch.optim.Optimizer, but: Mapping[Any, Any]) -> None:
    for param in [param for param in optimizer.state if param not in but]:
        del optimizer.state[param]


def _keep_mapping(values: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """key -> (the very object, a copy of its content)."""
    return {k: (v, v.clone() if isinstance(v, torch.Tensor) else deepcopy(v)) for k, v in values.items()}


def _restore_mapping(values: dict[str, Any], before: Mapping[str, tuple[Any, Any]], keep: Sequence[str] = ()) -> None:
    for key in [key for key in values if key not in before and key not in keep]:
        del values[key]
    for key, (held, content) in before.items():
        if isinstance(held, torch.Tensor):
            held.copy_(content)
            values[key] = held
        else:
            values[key] = content
