"""Updates that are one op each, and run torch.optim's own code on the tensors of the op.

On the CPU that is the code for one tensor after another, on CUDA the one for lists, with `capturable=True`: ops run in
its order. Numbers are in double precision on both, and any strides are right. A list of numbers, such as step counts,
has one tensor per tensor of parameters, with a number for each parameter in it. Parameters in one tensor have equal
numbers.

Why: docs/decisions.md, "An update without a fused kernel can be one op that runs torch.optim's own code".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.optim.adadelta import adadelta
from torch.optim.adamax import adamax
from torch.optim.asgd import asgd
from torch.optim.nadam import nadam
from torch.optim.radam import radam
from torch.optim.rprop import rprop

from commfuse_fx.ir.core.meta import TensorSpec

Tensors = list[torch.Tensor]

_library = torch.library.Library("commfuse", "FRAGMENT")


@dataclass(frozen=True)
class WholeUpdate:
    """The ops of one optimizer, whose lists and numbers have the names of its states and hyper-parameters.

    op: for parameters that are blocks of memory. plain: for others, which may share memory: one after another.
    at_rate: as `op`, with a tensor as learning rate; None where no rate is taken.
    passes: how often the op reads or writes memory of the size of the parameters, on the CPU, without weight decay.
    scratch: how many temporary tensors it has at once: on the CPU, of the size of the tensor that is at work, and on
        CUDA, of the size of all of them.
    """

    op: torch._ops.OpOverload
    plain: torch._ops.OpOverload
    at_rate: torch._ops.OpOverload | None
    passes: int
    scratch: tuple[int, int]

    def scratch_bytes(self, params: Sequence[TensorSpec]) -> int:
        """Memory that the op takes for itself while it updates such tensors."""
        on_cpu, on_cuda = self.scratch
        sizes = [param.nbytes for param in params]
        return on_cpu * max(sizes) if params[0].device == "cpu" else on_cuda * sum(sizes)


def _run(
    update: Callable[..., None],
    foreach: bool | None,
    counts: int,
    self: Tensors,
    grads: Tensors,
    *lists: Tensors,
    **settings: Any,
) -> None:
    """counts: how many of the lists, the last ones, are of numbers. foreach: None leaves the choice to torch.optim."""
    states, numbers = lists[:-counts], lists[-counts:]
    firsts = [[each.view(-1)[0] for each in held] for held in numbers]
    if capturable := _on_cuda(self):
        firsts = [[first.double() for first in held] for held in firsts]
    elif isinstance(settings.get("lr"), torch.Tensor):
        settings["lr"] = float(settings["lr"])
    if "decoupled" in settings:
        settings["decoupled_weight_decay"] = settings.pop("decoupled")
    update(self, grads, *states, *firsts, foreach=foreach, capturable=capturable, **settings)
    for held, found in zip(numbers, firsts, strict=True):
        for each, first in zip(held, found, strict=True):
            if capturable or each.numel() > 1:
                each.fill_(first)


def _on_cuda(params: Tensors) -> bool:
    return any(param.is_cuda for param in params)


def _defined(
    update: Callable[..., None], states: str, numbers: str, settings: str, passes: int, scratch: tuple[int, int]
) -> WholeUpdate:
    """states, numbers: the lists that the function takes behind parameters and gradients, in its order."""
    name = update.__name__
    lists = [*states.split(), *numbers.split()]
    written = ", ".join(f"Tensor({chr(ord('c') + i)}!)[] {each}" for i, each in enumerate(lists))
    signature = f"(Tensor(a!)[] self, Tensor[] grads, {written}, *, {settings}) -> ()"
    kernel = partial(_run, update, None, len(numbers.split()))
    plain = partial(_run, update, False, len(numbers.split()))
    _define(f"{name}_", signature, kernel)
    _define(f"plain_{name}_", signature, plain)
    takes_rate = "float lr" in settings
    if takes_rate:
        _define(f"{name}_.tensor_lr", signature.replace("float lr", "Tensor lr"), kernel)
    op, alone = (getattr(torch.ops.commfuse, each) for each in (f"{name}_", f"plain_{name}_"))
    return WholeUpdate(op.default, alone.default, op.tensor_lr if takes_rate else None, passes, scratch)


def _define(name: str, signature: str, kernel: Callable[..., None]) -> None:
    _library.define(f"{name}{signature}")
    torch.library.impl(f"commfuse::{name}", "CompositeExplicitAutograd", lib=_library)(kernel)


_ADAM = "float lr, float beta1, float beta2, float weight_decay, float eps"
_DECOUPLED = "bool decoupled, bool maximize"

WHOLE_UPDATES: dict[str, WholeUpdate] = {
    "nadam": _defined(
        nadam,
        "exp_avgs exp_avg_sqs",
        "mu_products steps",
        f"{_ADAM}, float momentum_decay, {_DECOUPLED}",
        passes=22,
        scratch=(2, 2),
    ),
    "radam": _defined(radam, "exp_avgs exp_avg_sqs", "steps", f"{_ADAM}, {_DECOUPLED}", passes=28, scratch=(5, 1)),
    "adamax": _defined(adamax, "exp_avgs exp_infs", "steps", f"{_ADAM}, bool maximize", passes=16, scratch=(1, 2)),
    "adadelta": _defined(
        adadelta,
        "square_avgs acc_deltas",
        "steps",
        "float lr, float rho, float eps, float weight_decay, bool maximize",
        passes=27,
        scratch=(2, 2),
    ),
    "asgd": _defined(
        asgd,
        "axs",
        "mus etas steps",
        "float lr, float lambd, float t0, float alpha, float weight_decay, bool maximize",
        passes=7,
        scratch=(0, 1),
    ),
    "rprop": _defined(
        rprop,
        "prevs step_sizes",
        "steps",
        "float etaminus, float etaplus, float step_size_min, float step_size_max, bool maximize",
        passes=40,
        scratch=(3, 3),
    ),
}
"""By the rule of the optimizer."""

BY_OP: dict[Any, WholeUpdate] = {op: update for update in WHOLE_UPDATES.values() for op in (update.op, update.plain)}
