"""Updates that run torch.optim's own code: what they cost, numbers per parameter, and the code that CUDA runs."""

from __future__ import annotations

import importlib
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from commfuse_fx.cost.memory import memory_profile
from commfuse_fx.cost.roofline import flops_and_bytes
from commfuse_fx.ir.core.meta import info
from commfuse_fx.ir.updates import whole_updates
from commfuse_fx.ir.updates.updates import is_scalar
from commfuse_fx.ir.updates.whole_updates import WHOLE_UPDATES
from tests.cost.graphs import Graph, f32

SIZE = 64

AFTER_SEVEN = {"step": 7.0, "mu_product": 0.5, "eta": 0.02, "mu": 1.0}
"""Numbers per parameter after seven steps."""

ADAM = {"lr": 0.01, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0, "eps": 1e-8}
NUMBERS: dict[str, dict[str, float]] = {
    "nadam": {**ADAM, "momentum_decay": 0.004},
    "radam": ADAM,
    "adamax": ADAM,
    "adadelta": {"lr": 0.5, "rho": 0.9, "eps": 1e-6, "weight_decay": 0.0},
    "asgd": {"lr": 0.01, "lambd": 1e-4, "t0": 8.0, "alpha": 0.75, "weight_decay": 0.0},
    "rprop": {"etaminus": 0.5, "etaplus": 1.2, "step_size_min": 1e-6, "step_size_max": 50.0},
}


class Count(TorchDispatchMode):
    """Counts how often ops read or write tensors of `SIZE` elements, and how many new ones are there at once."""

    def __init__(self) -> None:
        super().__init__()
        self.passes = 0
        self.scratch = 0
        self._made: list[weakref.ref[torch.Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        read: set[int] = set()
        written: set[int] = set()
        for place, argument in enumerate(func._schema.arguments):
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            writes = argument.alias_info is not None and argument.alias_info.is_write
            if writes:
                written |= _large(value)
            if not writes or (argument.name != "out" and not func._schema.name.endswith("copy_")):
                read |= _large(value)
        fresh = _large(result) - read - written
        self.passes += len(read) + len(written) + len(fresh)
        self._made += [weakref.ref(each) for each in pytree.tree_leaves(result) if fresh & _large(each)]
        self.scratch = max(self.scratch, sum(made() is not None for made in self._made))
        return result


def _large(value: Any) -> set[int]:
    """The memory of tensors with so many elements."""
    tensors = [each for each in pytree.tree_leaves(value) if isinstance(each, torch.Tensor)]
    return {each.untyped_storage()._cdata for each in tensors if each.numel() == SIZE}


def lists_of(name: str, *members: int) -> list[list[torch.Tensor]]:
    """Parameters and gradients, and states after seven steps. There is a tensor each per entry of `members`, which says
    how many parameters lie in it."""
    torch.manual_seed(0)
    lists = [[torch.randn(SIZE, dtype=torch.float64) for _ in members] for _ in range(2)]
    for argument in WHOLE_UPDATES[name].op._schema.arguments[2:]:
        if argument.name.removesuffix("s") in AFTER_SEVEN:
            lists.append([torch.full((count,), AFTER_SEVEN[argument.name.removesuffix("s")]) for count in members])
        elif not argument.kwarg_only:
            lists.append([torch.rand(SIZE, dtype=torch.float64) for _ in members])
    return lists


def settings_of(name: str) -> dict[str, Any]:
    flags = [argument.name for argument in WHOLE_UPDATES[name].op._schema.arguments if str(argument.type) == "bool"]
    return {**NUMBERS[name], **dict.fromkeys(flags, False)}


def run_here(name: str, lists: list[list[torch.Tensor]], **numbers: Any) -> None:
    """What the op runs, where a mode of PyTorch sees it."""
    update = getattr(importlib.import_module(f"torch.optim.{name}"), name)
    names = [argument.name for argument in WHOLE_UPDATES[name].op._schema.arguments]
    with torch.no_grad():
        whole_updates._run(update, None, sum(map(is_scalar, names)), *lists, **{**settings_of(name), **numbers})


@contextmanager
def as_on_cuda(name: str) -> Iterator[None]:
    """PyTorch takes `capturable` for devices such as CUDA only, and runs the code for lists there."""
    fakes = {
        "_get_capturable_supported_devices": lambda supports_xla=True: ["cpu"],
        "_default_to_fused_or_foreach": lambda *args, **kwargs: (False, True),
    }
    with (
        mock.patch.multiple(importlib.import_module(f"torch.optim.{name}"), **fakes),
        mock.patch.object(whole_updates, "_on_cuda", return_value=True),
    ):
        yield


each_update = pytest.mark.parametrize("name", WHOLE_UPDATES)


@each_update
def test_passes_and_scratch_are_those_of_the_code_that_runs(name: str) -> None:
    lists, update = lists_of(name, 1), WHOLE_UPDATES[name]
    with Count() as count:
        run_here(name, lists)
    assert (count.passes, count.scratch) == (update.passes, update.scratch[0])
    with as_on_cuda(name), Count() as count:
        run_here(name, lists)
    assert count.scratch == update.scratch[1]


@each_update
def test_temporary_tensors_count_as_memory_of_the_step(name: str) -> None:
    update = WHOLE_UPDATES[name]
    for device, large in (("cpu", 16), ("cuda:0", 20)):
        g = Graph()
        small, other = (g.input(each, replace(f32(count), device=device)) for each, count in (("a", 4), ("b", 16)))
        loss = g.op("loss", small)
        node = g.op("update", [small, other], [small, other], target=update.op, spec=f32())
        info(node).spec = None
        profile = dict(zip(g.graph.nodes, memory_profile(g.program(loss)), strict=True))
        assert profile[node] - profile[loss] == 4 * large * update.scratch[device != "cpu"]
        assert flops_and_bytes(node) == (0, 4 * 20 * update.passes)


@each_update
def test_parameters_in_one_tensor_keep_their_numbers(name: str) -> None:
    lists = lists_of(name, 3, 1)
    alone = [[each[:1].clone() if each.numel() == 3 else each.clone() for each in held] for held in lists]
    for given in (lists, alone):
        with torch.no_grad():
            WHOLE_UPDATES[name].op(*given, **settings_of(name))
    for have, want in zip(lists, alone, strict=True):
        for one, other in zip(have, want, strict=True):
            assert torch.equal(one, other.expand_as(one))


@each_update
@pytest.mark.parametrize("rate", [0.01, torch.tensor(0.01)], ids=["number", "tensor"])
def test_the_code_that_runs_on_cuda_computes_the_same(name: str, rate: Any) -> None:
    """Numbers stay in tensors, the learning rate, too."""
    here, there = lists_of(name, 3, 1), lists_of(name, 3, 1)
    numbers = {"lr": rate} if "lr" in NUMBERS[name] else {}
    for _ in range(3):
        run_here(name, here, **numbers)
        with as_on_cuda(name):
            run_here(name, there, **numbers)
    for have, want in zip(there, here, strict=True):
        close = 1e-7 if have[0].dtype == torch.float32 else 1e-9  # products of momenta are rounded once, not twice
        torch.testing.assert_close(have, want, rtol=close, atol=close)
