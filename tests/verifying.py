"""All steps that a function compiles verify themselves."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

import commfuse_fx as cf
from commfuse_fx.calls.verified_steps import VerifiedSteps
from commfuse_fx.ir.core.program import Program
from commfuse_fx.passes.declaration import Pass
from commfuse_fx.planning import compile_call, planner
from commfuse_fx.runtime.execute.executor import Executor
from commfuse_fx.runtime.execute.replayed_step import ReplayedStep
from tests.plans import make_plan


@contextmanager
def each_step_verified() -> Iterator[list[cf.VerifiedStep]]:
    """Inside of the block each training step of real ranks is verified that can be. Yields the reports."""
    make: Any = cf.CompiledStep.__init__
    check: Any = VerifiedSteps.check
    reports: list[cf.VerifiedStep] = []

    def init(step: cf.CompiledStep, *args: Any) -> None:
        make(step, *args)
        if not step.virtual:
            try:
                step.verify(every=1)
            except cf.NotAvailableError:
                return

    def checked(steps: VerifiedSteps) -> None:
        if steps.last is not None and not any(each is steps.last for each in reports):
            reports.append(steps.last)
        check(steps)

    with patch.object(cf.CompiledStep, "__init__", init), patch.object(VerifiedSteps, "check", checked):
        yield reports


def verified(function: Callable[..., Any], *args: Any) -> tuple[Any, list[cf.VerifiedStep]]:
    """What the function returns, and the reports on its steps."""
    with each_step_verified() as reports:
        return function(*args), reports


def asked_for(function: Callable[..., Any], *args: Any) -> Any:
    """What the function returns, with its steps verified."""
    return verified(function, *args)[0]


@contextmanager
def broken(made: type[Pass], damage: Callable[[Program], None]) -> Iterator[None]:
    """Inside of the block this pass also does some damage to what it makes."""
    apply: Any = made.__call__

    def apply_and_damage(self: Pass, program: Program, *context: Any) -> bool:
        modified: bool = apply(self, program, *context)
        damage(program)
        return modified

    with (
        patch.object(made, "__call__", apply_and_damage),
        patch.object(compile_call, "plan_step", make_plan),
        patch.object(planner, "plan_step", make_plan),
        patch.dict(os.environ, {"COMMFUSE_VERIFY": "0"}),
    ):
        yield


def flip_high_bit(tensor: torch.Tensor) -> None:
    """The highest bit of the exponent of the first element."""
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        bits = tensor.detach().view(-1).view(torch.int64 if tensor.dtype == torch.float64 else torch.int32)
        bits[0] ^= 1 << (62 if tensor.dtype == torch.float64 else 30)


@contextmanager
def damaged_after_snapshot(damage: Callable[[Executor], None]) -> Iterator[None]:
    """Inside of the block something happens between the copies that a replay works on, and the step."""
    make: Any = ReplayedStep.__init__

    def init(replay: ReplayedStep, executor: Executor, *args: Any) -> None:
        make(replay, executor, *args)
        damage(executor)

    with patch.object(ReplayedStep, "__init__", init):
        yield
