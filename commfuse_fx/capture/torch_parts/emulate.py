"""Traceable forms of parts of torch that read the values of tensors in Python."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import nn
from torch.fx.proxy import _create_arg_bypass
from torch.utils._pytree import tree_map_only

from commfuse_fx.capture.torch_parts.generators import SEEDED, Generators
from commfuse_fx.capture.torch_parts.recurrent_on_cuda import PACKED, recurrent_on_cuda
from commfuse_fx.capture.torch_parts.this_thread import ValueHere, patched_here
from commfuse_fx.errors import CaptureError
from commfuse_fx.ir.ops.known_shapes import known_shapes

aten = torch.ops.aten


class Randomness:
    """The random generators of a trace, in which nothing is really drawn.

    A state is the number of draws so far. Activation checkpointing takes the state before a forward and
    sets it before it runs that forward again: the second run then gets the numbers of the first one.
    """

    def __init__(self) -> None:
        self._draws: list[tuple[Any, Any]] = []
        self._position = 0
        self._is_watched = False
        self.generators = Generators()

    def draw(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an op that draws random numbers, or give it the numbers that it got before."""
        self.generators.drawn_from(kwargs.get("generator"))
        position, self._position = self._position, self._position + 1
        if position < len(self._draws):
            drawn_by, numbers = self._draws[position]
            if drawn_by is not func:
                raise CaptureError(f"a checkpointed forward draws {func} where it first drew {drawn_by}")
            if func._schema.is_mutable:
                return args[0].copy_(numbers)
            return tree_map_only(torch.Tensor, torch.clone, numbers)
        out = func(*args, **kwargs)
        self._draws.append((func, tree_map_only(torch.Tensor, torch.clone, out) if self._is_watched else None))
        return out

    def get_state(self, device: Any = None) -> int:
        self._is_watched = True
        return self._position

    def set_state(self, state: Any, device: Any = None) -> None:
        if not isinstance(state, int):
            self.refuse()
        self._position = state

    def refuse(self, *args: Any) -> None:
        raise CaptureError(SEEDED)

    @contextmanager
    def patched(self) -> Iterator[None]:
        functions: dict[str, Callable[..., Any]] = {
            "get_rng_state": self.get_state,
            "set_rng_state": self.set_state,
            "initial_seed": self.generators.initial_seed,
            **dict.fromkeys(("manual_seed", "manual_seed_all", "seed", "seed_all"), self.refuse),
        }
        try:
            self.generators.watch_defaults()
            with ExitStack() as stack:
                for module in (torch, torch.random, torch.cuda, torch.cuda.random):
                    for name in [name for name in functions if name in vars(module)]:
                        stack.enter_context(patched_here(module, name, functions[name]))
                yield
        finally:
            self.generators.restore()


@contextmanager
def traceable_torch() -> Iterator[None]:
    """Inside the `with` block, modules and checks of torch make no decisions that depend on the values of tensors."""
    distribution = torch.distributions.Distribution
    with (
        patch.object(distribution, "_validate_args", ValueHere(False, distribution._validate_args)),
        patched_here(nn.modules.transformer, "_detect_is_causal_mask", _is_declared_causal),
        patched_here(nn.modules.batchnorm._BatchNorm, "forward", _batch_norm_forward),
        known_shapes(),
        patched_here(torch, "ctc_loss", _ctc_loss),
        patched_here(torch._VF, "_pack_padded_sequence", _refuse_packing),
        recurrent_on_cuda(),
        # torch 2.13 lets a graph hold a generator, earlier versions lack this entry.
        patch.dict(_create_arg_bypass, {torch.Generator: lambda tracer, generator: generator}),
    ):
        yield


def _is_declared_causal(mask: Any, is_causal: bool | None = None, size: int | None = None) -> bool:
    """Whether the caller says that the mask is causal. Without that the mask itself is used, with the same result."""
    return is_causal is True


_forward = nn.modules.batchnorm._BatchNorm.forward


def _batch_norm_forward(self: Any, input: torch.Tensor) -> torch.Tensor:
    """The forward of batch norms with momentum=None, for which torch reads the number of batches in Python."""
    if self.momentum is not None or not (self.training and self.track_running_stats):
        return _forward(self, input)
    self._check_input_dim(input)
    mean, var = torch.zeros_like(self.running_mean), torch.zeros_like(self.running_var)
    out = F.batch_norm(input, mean, var, self.weight, self.bias, True, 1.0, self.eps)
    with torch.no_grad():
        self.num_batches_tracked.add_(1)
        share = 1.0 / self.num_batches_tracked.to(mean.dtype)
        self.running_mean.mul_(1 - share).add_(mean * share)
        self.running_var.mul_(1 - share).add_(var * share)
    return out


_torch_ctc_loss = torch.ctc_loss


def _ctc_loss(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: int = 1,
    zero_infinity: bool = False,
) -> torch.Tensor:
    """ctc_loss that reduces outside of the kernel: the kernel makes a tensor of lengths that tracing does not see."""
    if isinstance(input_lengths, torch.Tensor) or isinstance(target_lengths, torch.Tensor):
        raise CaptureError(
            "ctc_loss is given lengths as tensors, whose values decide shapes: pass tuples of int, which may differ "
            "from call to call (each combination is traced once)"
        )
    losses = _torch_ctc_loss(log_probs, targets, input_lengths, target_lengths, blank, 0, zero_infinity)
    if reduction == 1:
        sizes = torch.tensor(target_lengths, dtype=losses.dtype, device=losses.device)
        return (losses / sizes.clamp_min(1)).mean()
    return losses.sum() if reduction == 2 else losses


def _refuse_packing(*args: Any) -> None:
    raise CaptureError(PACKED)
