"""The graphs that reduce gradients and send buffers at the end of a backward, one for each set of these."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from commfuse_fx.calls.compiled_call import CompiledCall
from commfuse_fx.calls.graph_session import GraphCalls
from commfuse_fx.capture.outputs.gradients_as_model import GradientsAsModel
from commfuse_fx.errors import NotAvailableError
from commfuse_fx.gradients.gradient_parts import GradientParts
from commfuse_fx.gradients.parameter_hooks import LateHook
from commfuse_fx.inspect.explain_graphs import COUNTS
from commfuse_fx.inspect.lowered import Lowered

_MOST = 8

_Key = tuple[tuple[str, ...], tuple[str, ...]]
"""Names of the buffers that are sent and of the parameters whose gradients are reduced."""


class LateGraphs:
    """Graphs that do nothing but reduce, of one model. parts: what of each gradient has been reduced."""

    def __init__(self, owner: CompiledCall, parts: GradientParts) -> None:
        self._owner = owner
        self._parts = parts
        self._made: dict[_Key, tuple[GradientsAsModel, GraphCalls]] = {}

    def reduce(
        self, params: Mapping[str, nn.Parameter], buffers: Mapping[str, torch.Tensor], reached: torch.Tensor | None
    ) -> dict[str, torch.Tensor]:
        """Reduce the gradients of these parameters and the counts, and send the buffers. Returns what is reduced, the
        counts under `COUNTS`."""
        calls = self._calls_for(params, buffers, reached)
        held = self._parts.unreduced(params)
        with torch._C.DisableTorchFunctionSubclass():
            grads = {name: torch.zeros_like(params[name]) if grad is None else grad for name, grad in held.items()}
        return calls.reduce(grads if reached is None else {**grads, COUNTS: reached})

    def reduce_held(self, params: Mapping[str, nn.Parameter], buffers: Mapping[str, torch.Tensor]) -> None:
        """Reduce `.grad` of these parameters, in place where there is one, and send the buffers.

        Raises NotAvailableError for a gradient that cannot be reduced.
        """
        refuse_held(params)
        if not params:  # buffers alone: gradients of nothing go with them
            self.reduce({}, buffers, torch.zeros(1, device=next(iter(buffers.values())).device))
            return
        self.write(params, self.reduce(params, buffers, None))
        self._parts.was_reduced(list(params), params)

    def write(self, params: Mapping[str, nn.Parameter], found: Mapping[str, torch.Tensor]) -> None:
        """Let `.grad` of these parameters hold what has been reduced."""
        with torch.no_grad():
            for name, param in params.items():
                if param.grad is None:
                    param.grad = found[name]
                elif self._parts.goes_again(name, param):
                    param.grad.copy_(found[name])
                else:
                    param.grad.add_(found[name])

    def lower(
        self,
        reached: Iterable[str],
        sent: Iterable[str],
        params: Mapping[str, nn.Parameter],
        buffers: Mapping[str, torch.Tensor],
    ) -> list[Lowered]:
        """What would be reduced at the end of a backward, to read; empty if nothing is.

        reached: names of the parameters that autograd adds to by itself. sent: names of buffers that graphs send.
        params, buffers: those of the model; buffers only if they are sent at all.
        """
        config = self._owner.config
        if self._owner.mesh.world == 1 or config.parallel_mode == "stand_alone":
            return []
        of_all = config.find_unused_parameters
        open_names, sent_names = dict.fromkeys(reached), dict.fromkeys(() if of_all else sent)
        chosen = {n: p for n, p in params.items() if p.requires_grad and (of_all or n in open_names)}
        rest = {n: b for n, b in buffers.items() if n not in sent_names and b.numel()}
        if not chosen and not rest:
            return []
        device = next(iter((*chosen.values(), *rest.values()))).device
        counts = torch.zeros(len(chosen) or 1, device=device) if of_all or not chosen else None
        return [self._calls_for(chosen, rest, counts).read(())]

    def _calls_for(
        self, params: Mapping[str, nn.Parameter], buffers: Mapping[str, torch.Tensor], reached: torch.Tensor | None
    ) -> GraphCalls:
        key = tuple(buffers), tuple(params)
        if key not in self._made:
            if len(self._made) >= _MOST:
                self._made.clear()
            counts = {} if reached is None else {COUNTS: nn.Parameter(torch.zeros_like(reached))}
            made = GradientsAsModel({**params, **buffers, **counts}, shares=self._parts.rows is None)
            self._made[key] = made, GraphCalls(made, self._owner)
        model, calls = self._made[key]
        model.hold({**params, **buffers})
        return calls

    def forget(self) -> None:
        """Drop what has been compiled."""
        self._made.clear()

    def made(self) -> list[GraphCalls]:
        """What has been compiled."""
        return [calls for _, calls in self._made.values()]


def refuse_held(params: Mapping[str, nn.Parameter]) -> None:
    """Raise NotAvailableError for gradients that cannot be reduced at the end of a backward."""
    for name, param in params.items():
        if param.grad is not None and param.grad.layout is not torch.strided:
            raise NotAvailableError(
                f"parameter {name} has a gradient of layout {param.grad.layout}, which is not reduced: make the "
                "embedding with sparse=False"
            )
        if not all(isinstance(hook, LateHook) for hook in (param._post_accumulate_grad_hooks or {}).values()):
            raise NotAvailableError(
                f"parameter {name} has a hook of register_post_accumulate_grad_hook, and its gradient is reduced at "
                "the end of the backward, after such hooks have run: take the hook away and do its work after "
                'backward(), or let capture="trace" compile the whole model'
            )
