"""Hand attention masks that are causal over as `is_causal=True`, and those without effect not at all.

Why: docs/decisions.md, "A mask that is found to be causal is handed over as a flag".
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from commfuse_fx.ir.core.bound_arguments import arguments_of, set_argument
from commfuse_fx.ir.core.edit import remove_dead_nodes
from commfuse_fx.ir.core.meta import info, tensor_spec
from commfuse_fx.ir.core.program import Program
from commfuse_fx.ir.ops.fixed_values import FixedValues
from commfuse_fx.passes.declaration import Pass

aten = torch.ops.aten

_BACKWARDS: dict[Any, Any] = {
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: (
        aten._scaled_dot_product_flash_attention_for_cpu.default
    ),
    aten._scaled_dot_product_efficient_attention_backward.default: aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention_backward.default: aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_fused_attention_overrideable_backward.default: (
        aten._scaled_dot_product_fused_attention_overrideable.default
    ),
}
_FORWARDS = tuple(_BACKWARDS.values())

_ANY_LENGTHS = _FORWARDS[:2]
"""Their `is_causal` begins at the top left also where queries and keys differ in number. Of others that is not sure."""

_MASKS = ("attn_mask", "attn_bias")


@dataclass(frozen=True)
class PlainMasks(Pass):
    """Models that are traced build a mask where eager ones look at their data and find that attention is causal.

    Only masks that no step can change count, such as those made of positions. A mask has to be exactly causal: zero on
    the diagonal and below, minus infinity (or what its dtype has for that) above it. Weights of hidden keys are zero
    either way, so results differ by rounding at most, unless a hidden key or value is infinite or not a number.

    `at_most`: masks for which a larger tensor, in bytes, would have to be computed stay as they are.
    """

    name = "plain_masks"
    numerics = "reordered"

    at_most: int = 2**28

    def __call__(self, program: Program) -> bool:
        groups = [calls for calls in _attentions(program) if _mask_of(calls[0]) is not None]
        if not groups:
            return False
        verdicts = _Verdicts(FixedValues(program, "cpu", self.at_most))
        found = [(calls, verdicts.of_all(calls)) for calls in groups]
        plain = [(calls, is_causal) for calls, is_causal in found if is_causal is not None]
        for calls, is_causal in plain:
            for call in calls:
                _drop_mask(call, is_causal)
        for kind, why in ((True, "it is causal, and kernels are told so instead"), (False, "it has no effect")):
            count = sum(is_causal is kind for _, is_causal in plain)
            if count:
                program.note("attention without its mask", f"{count} call{'s' * (count > 1)}", why)
        if plain:
            remove_dead_nodes(program)
        return bool(plain)


def _attentions(program: Program) -> list[list[fx.Node]]:
    """Each call of attention, followed by those of its backward.

    Kinds of attention are left out in which the forward of some backward is not known.
    """
    groups: dict[fx.Node, list[fx.Node]] = {}
    unknown: list[Any] = []
    for node in program.graph.nodes:
        if node.target in _FORWARDS:
            groups[node] = [node]
        elif node.target in _BACKWARDS:
            given = arguments_of(node)
            makers = {_maker(given["out"]), _maker(given["logsumexp"])}
            forward = makers.pop()
            if makers or forward not in groups or forward.target is not _BACKWARDS[node.target]:
                unknown.append(_BACKWARDS[node.target])
            else:
                groups[forward].append(node)
    return [calls for forward, calls in groups.items() if forward.target not in unknown]


def _maker(value: fx.Node) -> fx.Node:
    if value.target is not operator.getitem:
        return value
    (made,) = value.all_input_nodes
    return made


def _mask_name(call: fx.Node) -> str:
    return next(name for name in arguments_of(call) if name in _MASKS)


def _mask_of(call: fx.Node) -> fx.Node | None:
    mask: fx.Node | None = arguments_of(call)[_mask_name(call)]
    return mask


def _drop_mask(call: fx.Node, is_causal: bool) -> None:
    set_argument(call, _mask_name(call), None)
    if is_causal:
        set_argument(call, "is_causal", True)
    details = info(call)
    if "grad_input_mask" in arguments_of(call) and isinstance(details.spec, tuple):
        details.spec = (*details.spec[:-1], None)  # without a mask it has no gradient


class _Verdicts:
    """What masks do, each looked at once."""

    def __init__(self, values: FixedValues) -> None:
        self._values = values
        self._known: dict[tuple[fx.Node, int, int], bool | None] = {}

    def of_all(self, calls: Iterable[fx.Node]) -> bool | None:
        """True where the mask of all these calls is causal, False where it has no effect, None for all others."""
        found = list(dict.fromkeys(map(self._of, calls)))
        return found[0] if len(found) == 1 else None

    def _of(self, call: fx.Node) -> bool | None:
        given, mask = arguments_of(call), _mask_of(call)
        if mask is None or (given.get("grad_input_mask") or [False])[-1]:
            return None
        queries, keys = (tensor_spec(given[name]).shape[-2] for name in ("query", "key"))
        while mask.target is aten.expand.default:
            (mask,) = mask.all_input_nodes
        key = (mask, queries, keys)
        if key not in self._known:
            try:
                value = self._values.of(mask)
            except RuntimeError:  # an op that CPUs do not have, or that fails on each step as well
                value = None
            self._known[key] = None if value is None else _verdict(value, queries, keys)
            self._values.forget(mask)
        found = self._known[key]
        forward = _BACKWARDS.get(call.target, call.target)
        return None if found and queries != keys and forward not in _ANY_LENGTHS else found


def _verdict(mask: torch.Tensor, queries: int, keys: int) -> bool | None:
    """True where queries see keys up to their own position, False where they see all, None for anything else."""
    if not mask.numel() or not (mask.dtype is torch.bool or mask.is_floating_point()):
        return None
    mask = torch.atleast_2d(mask)
    for dim in range(mask.dim() - 2):
        if mask.stride(dim) == 0:
            mask = mask.narrow(dim, 0, 1)
    rows, columns = mask.shape[-2:]
    parts = mask.reshape(-1, rows, columns)
    visible, *hidden = (True, False) if mask.dtype is torch.bool else (0.0, -torch.inf, _lowest(mask.dtype))
    # What the first query sees of the second key tells which mask this would be.
    number = parts[0, 0, min(columns, 2) - 1].item()
    is_causal = number in hidden and (rows, columns) == (queries, keys)
    if not is_causal and number != visible:
        return None
    want = torch.full((rows, columns), visible, dtype=mask.dtype)
    if is_causal:
        want.masked_fill_(torch.ones(rows, columns, dtype=torch.bool).triu(1), number)
    return is_causal if all(torch.equal(part, want) for part in parts) else None


def _lowest(dtype: torch.dtype) -> float:
    """What hides a key where a mask has no infinity. Scores can reach the lowest number of float16."""
    return -torch.inf if dtype is torch.float16 else torch.finfo(dtype).min
