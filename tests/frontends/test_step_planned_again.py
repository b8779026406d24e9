"""A step that is planned again draws the numbers that it would have drawn the first time."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from commfuse_fx.calls.session import Session
from commfuse_fx.errors import PlanMismatchError
from commfuse_fx.ir.core.meta import info, tensor_spec
from commfuse_fx.runtime.execute.random_states import RandomStates, generators_of
from commfuse_fx.testing import parse_program

DROPOUT = """
    in  %x: f32[4] = input
    fwd %/bernoulli.0: f32[4] = aten.bernoulli(%x)
    return [%/bernoulli.0]
"""


def test_generators_of_devices_and_of_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    program = parse_program(DROPOUT)
    assert generators_of(program) == [torch.default_generator]
    of_devices, own = (torch.Generator(), torch.Generator()), torch.Generator()
    monkeypatch.setattr(torch.cuda, "default_generators", of_devices)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    inputs = [node for node in program.graph.nodes if node.op == "placeholder"]
    dropout = next(node for node in program.graph.nodes if node.op == "call_function")
    info(inputs[0]).spec = replace(tensor_spec(inputs[0]), device="cuda:1")
    dropout.kwargs = {"generator": own}
    assert generators_of(program) == [torch.default_generator, own, of_devices[1]]
    info(inputs[0]).spec = replace(tensor_spec(inputs[0]), device="cuda")
    assert generators_of(program) == [torch.default_generator, own, of_devices[0]]


def test_states_are_restored() -> None:
    generators = [torch.Generator().manual_seed(number) for number in range(2)]
    states = RandomStates(generators)
    first = [torch.rand(3, generator=generator) for generator in generators]
    states.restore()
    assert all(torch.equal(a, torch.rand(3, generator=g)) for a, g in zip(first, generators, strict=True))


class PlannedAgain(Session):
    """Its first run draws, and then finds that plans differ."""

    def __init__(self, generators: list[torch.Generator]) -> None:
        self.drawn: list[list[float]] = []
        self.generators = generators
        self.rank, self.timeline, self.graphs, self._random, self.replan = 0, None, None, None, None
        self.planner: Any = SimpleNamespace(
            config=SimpleNamespace(plans_by_cost=True, return_loss=True),
            take_apart=lambda args, kwargs: SimpleNamespace(leaves=[]),
        )
        self.agreement: Any = SimpleNamespace(end_step=lambda: None)
        self.running: Any = SimpleNamespace(
            tail=SimpleNamespace(check=lambda: None),
            needs_seed=False,
            generators=generators,
            optimizer=None,
            program=SimpleNamespace(grads={}, training=False),
            held=None,
            run=self._draw,
        )
        self.runners: Any = SimpleNamespace(of=lambda plan: SimpleNamespace(executor=self.running))
        self.voting: Any = SimpleNamespace(is_started=True)
        self.micro_batches: Any = SimpleNamespace(
            is_early=False, check=lambda program: None, begin=lambda held: None, done=lambda program: False
        )
        self.steps = 0
        self.verified: Any = SimpleNamespace(
            run=lambda plan, call, runner, number, launch: launch(), check=lambda: None, is_verifying=False
        )

    def _draw(self, inputs: Any) -> list[torch.Tensor]:
        self.drawn.append([float(torch.rand((), generator=generator)) for generator in self.generators])
        if len(self.drawn) == 1:
            error = PlanMismatchError("plans differ")
            error.may_agree = True
            raise error
        return [torch.zeros(())]

    def _plan_that_runs(self, call: Any) -> Any:
        return SimpleNamespace(compiled=SimpleNamespace(outputs=None))

    def _watch_wire(self, executor: Any) -> None:
        pass


def test_a_step_that_runs_again_draws_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    session = PlannedAgain([torch.Generator().manual_seed(number) for number in range(2)])

    def draw(*args: Any) -> None:
        for generator in session.generators:
            torch.rand((), generator=generator)

    monkeypatch.setattr("commfuse_fx.calls.session.plan_in_common", draw)
    session._run((), {})
    assert session.drawn[0] == session.drawn[1]
    session._run((), {})
    assert session.drawn[2] != session.drawn[1]
