"""After a refusal the process is what it was before: other models run, and so does the same model once it is mended."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import commfuse_fx as cf
from tests.distributed.harness import Ranks

pytestmark = pytest.mark.dist


class Model(nn.Module):
    """Does what is refused, as long as `fault` says so."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fault, self.mask = fault, torch.zeros(4)
        self.table, self.lin = nn.Embedding(20, 4, sparse="sparse" in fault), nn.Linear(4, 4)
        if fault == "hook":
            self.handle = self.lin.weight.register_post_accumulate_grad_hook(lambda param: None)

    def forward(self, x: torch.Tensor, other: Any = None) -> torch.Tensor:
        y: torch.Tensor = self.lin(self.table(x))
        if "values" in self.fault:
            y = y[y.sum(-1) > -100]
        if self.fault == "generator":
            y = y + torch.rand(4, generator=torch.Generator().manual_seed(1))
        if self.fault == "collective":
            dist.all_reduce(self.mask.clone())
        if self.fault == "attribute":
            self.mask.add_(1)
        if self.fault == "model's own":
            with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
                raise KeyError("of the model")
        return y.mean()

    def mend(self) -> None:
        if self.fault == "hook":
            self.handle.remove()
        self.fault, self.table.sparse = "", False


FAULTS = {
    "sparse": ("module", "step", "dynamo", "backend"),
    "sparse, and values": ("dynamo", "backend"),
    "values": ("module", "step"),
    "generator": ("step",),
    "collective": ("module",),
    "attribute": ("step",),
    "hook": ("step",),
    "argument": ("module", "step"),
    "model's own": ("module", "step", "dynamo", "backend"),
}
"""What is refused, and in which forms."""

X = torch.arange(6)


def _calls(form: str, model: nn.Module) -> Callable[..., Any]:
    if form == "step":
        step = cf.compile(model, loss_fn=lambda output, target: output)
        return lambda *args: step(*args, X)
    if form == "backend":
        compiled: Any = torch.compile(model, backend="commfuse")
    else:
        compiled = cf.compile(model, capture="dynamo" if form == "dynamo" else "trace")
    return lambda *args: compiled(*args).backward()


def _state(model: Model) -> dict[str, Any]:
    """What a refusal leaves as it is."""
    return {
        "modes": (len(_get_current_dispatch_mode_stack()), torch._C._len_torch_function_stack()),
        "gradients": (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")),
        "kernels": (torch.are_deterministic_algorithms_enabled(), torch.get_default_dtype(), torch.get_num_threads()),
        "random": torch.get_rng_state().sum().item(),
        "patched": (nn.Module.__setattr__, nn.Module.__getattribute__, nn.Module.__delattr__, torch.Tensor.item),
        "python": (gc.isenabled(), len(warnings.filters)),
        "hooks of modules": [len(held) for held in vars(nn.modules.module).values() if isinstance(held, dict)],
        "mask": model.mask.sum().item(),
        "gradients of parameters": [param.grad is None for param in model.parameters()],
        "values": [param.sum().item() for param in model.parameters()],
    }


def _gradients(model: Model) -> list[torch.Tensor]:
    return [param.grad for param in model.parameters() if param.grad is not None]


def refused_then_mended(faults: dict[str, tuple[str, ...]]) -> list[str]:
    """What is wrong after each refusal. One rank sends nothing, and so refuses less."""
    wrong: list[str] = []
    torch._dynamo.reset()  # ranks may have run other tests
    want = Model("")
    want(X).backward()
    _calls("dynamo", Model(""))(X)  # what the first compile of a process imports changes warnings
    for fault, forms in faults.items():
        for form in forms:
            model = Model(fault)
            before = _state(model)
            call = _calls(form, model)
            try:
                call(X, *([object()] if fault == "argument" else ()))
            except (cf.CommFuseError, KeyError):
                now = _state(model)
                wrong += [f"{fault}, {form}: {name}" for name in before if before[name] != now[name]]
            else:
                wrong.append(f"{fault}, {form}: not refused")
            model.mend()
            model.zero_grad()
            for after, again in (("module", Model("")), ("step" if form != "step" else "dynamo", model)):
                try:
                    _calls(after, again)(X)
                    torch.testing.assert_close(_gradients(again), _gradients(want))
                except Exception as error:
                    wrong.append(f"{fault}, {form}, then a {after}: {type(error).__name__}: {error}"[:300])
            del call
    return wrong


@pytest.mark.parametrize("size", [1, 2])
def test_a_refusal_leaves_the_process_as_it_was(ranks: Ranks, size: int) -> None:
    """In any form; also while what was refused is still there."""
    faults = FAULTS if size == 2 else {"sparse": ("module", "step"), "model's own": ("dynamo",)}
    for outcome in ranks.run(refused_then_mended, faults, size=size):
        assert outcome.ok, outcome.details
        assert outcome.value == []
