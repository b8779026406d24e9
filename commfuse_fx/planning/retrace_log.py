"""What is said about traces after the first one of a step, and about models that change themselves while traced."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

import torch
from torch import nn

from commfuse_fx.planning.plan_cache import MAX_GRAPHS
from commfuse_fx.support.logs import logger

_RETRACE, _STEP = logger("retrace"), logging.getLogger("commfuse_fx.step")

MANY = 8
"""So many traces of one step are worth a warning."""


class Traces:
    """Counts the traces of one step. `cause`: of the next one, where it is not found by looking at the call."""

    def __init__(self, model: str) -> None:
        self.cause = ""
        self._model = model
        self._count = 0

    def again(self, why: str) -> None:
        """The step is about to be traced because of this; an empty text for the first time."""
        why, self.cause = self.cause or why, ""
        self._count += 1
        if why:
            _RETRACE.info("re-tracing: %s", why)
        if self._count == MANY + 1:
            _RETRACE.warning(
                "a step of %s is being traced for the %dth time, and each time takes as long as its first call; this "
                "time because of: %s. %s The last %d graphs are kept, so values that come back cost nothing; "
                "COMMFUSE_LOGS=retrace shows every cause",
                self._model,
                self._count,
                why or "its first call",
                _advice(why),
                MAX_GRAPHS,
            )


def _advice(why: str) -> str:
    if why.startswith(("input", "target")):
        return (
            "Pad batches to one shape, or to a few, give the DataLoader drop_last=True, and pass numbers that change "
            "from call to call as tensors."
        )
    if why.startswith(("attribute", "class attribute", "variable", "loss_fn")):
        return "Make a value that changes while training a buffer (register_buffer) or a tensor argument of forward."
    return "Change it less often, or use one step for each state."


class Findings:
    """Says once of each thing what a trace has found that a compiled step does only while it is traced."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def report_changes(self, changes: Mapping[str, tuple[str, str]]) -> None:
        """changes: label -> the values before and after, in words."""
        for label, (before, after) in changes.items():
            if label in self._said:
                continue
            self._said.add(label)
            _RETRACE.warning(
                "the model changes %s in forward (%s -> %s), which a compiled step does only when it is traced: make "
                "it a buffer (register_buffer) and a tensor if the model depends on it",
                label,
                before,
                after,
            )

    def report_numbers(self, places: Iterable[str]) -> None:
        """places: whose random numbers are drawn, and where."""
        for place in places:
            if place not in self._said:
                self._said.add(place)
                _RETRACE.warning(
                    "the model uses %s: such a number is drawn when the step is traced, and is the same in every step "
                    "after that; draw it with torch, or pass it to the step as a tensor",
                    place,
                )

    def report_evaluation(self, model: nn.Module, is_first: bool) -> None:
        """A call that trains nothing has to be compiled. is_first: before any other call of the step."""
        if model.training:
            text = (
                "a step of %s was called with gradients disabled (torch.no_grad(), torch.inference_mode() or "
                "set_grad_enabled(False)) while the model is in training mode: such a call evaluates the loss as eager "
                "PyTorch would, dropout and BatchNorm statistics included, and trains nothing; call it with gradients "
                "enabled to train, or after model.eval() to evaluate"
            )
        elif is_first and torch.is_grad_enabled():
            text = (
                "the first call of a step of %s has the model in eval mode: such a call evaluates the loss and trains "
                "nothing; call model.train() before you train (what from_pretrained() returns is in eval mode), and "
                "eval() on those modules that are to stay in it"
            )
        else:
            return
        if text not in self._said:
            self._said.add(text)
            _STEP.warning(text, type(model).__qualname__)
