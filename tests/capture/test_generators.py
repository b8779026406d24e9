"""Random generators in a forward: those that live on are drawn from as in eager execution, seeding is refused."""

from __future__ import annotations

import copy
import functools
import logging
import random
import re
from collections.abc import Callable
from random import random as imported
from typing import Any

import numpy as np
import pytest
import torch
from torch import Generator, nn

import commfuse_fx as cf
from commfuse_fx.capture.torch_parts.generators import _FIRST_SEED

OF_THIS_FILE = torch.Generator()


class Fn(nn.Module):
    def __init__(self, run: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.run = run
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * self.run(self, x)).sum()


def _noise(generator: torch.Generator | None) -> torch.Tensor:
    return torch.rand(8, generator=generator)


def _seeded(seed: Callable[[torch.Generator], Any]) -> Callable[..., Any]:
    def run(m: Any, x: torch.Tensor) -> torch.Tensor:
        seed(m.generator)
        return x * _noise(m.generator)

    return run


def _repeated(m: Any, x: torch.Tensor) -> torch.Tensor:
    state = m.generator.get_state()
    noise = _noise(m.generator)
    m.generator.set_state(state)
    return x * noise * _noise(m.generator)


def _seeded_last(m: Any, x: torch.Tensor) -> torch.Tensor:
    noise = _noise(m.generator)
    m.generator.manual_seed(0)
    return x * noise


def _forked(m: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return x * torch.rand(8)


def _global_seeded(m: Any, x: torch.Tensor) -> torch.Tensor:
    OF_THIS_FILE.manual_seed(3)
    return x * _noise(OF_THIS_FILE)


def _kept_in_forward(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.made = torch.Generator()
    return x * _noise(m.made)


def _then(seed: Callable[[], Any]) -> Callable[..., Any]:
    def run(m: Any, x: torch.Tensor) -> torch.Tensor:
        seed()
        return x * torch.rand(8)

    return run


REFUSED: dict[str, Callable[..., Any]] = {
    "made": lambda m, x: x * _noise(torch.Generator().manual_seed(1)),
    "made without a seed": lambda m, x: x * _noise(torch.Generator()),
    "made by another name": lambda m, x: x * _noise(Generator().manual_seed(1)),
    "made for randperm": lambda m, x: x[torch.randperm(8, generator=torch.Generator())],
    "made for normal_": lambda m, x: x * torch.empty(8).normal_(generator=torch.Generator()),
    "kept": _kept_in_forward,
    "manual_seed": _seeded(lambda generator: generator.manual_seed(1)),
    "the seed it has": _seeded(lambda generator: generator.manual_seed(5)),
    "seed": _seeded(lambda generator: generator.seed()),
    "set_state": _seeded(lambda generator: generator.set_state(OF_THIS_FILE.get_state())),
    "state set again": _repeated,
    "seeded last": _seeded_last,
    "global": _global_seeded,
    "torch.manual_seed": _then(lambda: torch.manual_seed(0)),
    "torch.seed": _then(torch.seed),
    "torch.random.manual_seed": _then(functools.partial(torch.random.manual_seed, 0)),
    "torch.cuda.manual_seed": _then(lambda: torch.cuda.manual_seed(0)),
    "torch.cuda.manual_seed_all": _then(lambda: torch.cuda.manual_seed_all(0)),
    "default_generator.manual_seed": _then(lambda: torch.default_generator.manual_seed(0)),
    "default_generator.seed": _then(lambda: torch.default_generator.seed()),
    "fork_rng": _forked,
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_another_number_in_later_steps_is_refused(name: str) -> None:
    generator = torch.Generator().manual_seed(5)
    inner = Fn(REFUSED[name], generator=generator)
    model = nn.Sequential(nn.Identity(), inner)
    states = [each.get_state() for each in (generator, OF_THIS_FILE, torch.default_generator)]
    with pytest.raises(cf.CaptureError) as raised:
        cf.compile(model, form="step")(torch.ones(8))
    assert re.search(r"cannot trace 1 at .*test_generators\.py:\d+: the model (seeds|draws from a torch\.Generator)",
                     str(raised.value)), raised.value  # fmt: skip
    if name not in ("seed", "default_generator.seed"):
        for before, each in zip(states, (generator, OF_THIS_FILE, torch.default_generator), strict=True):
            assert torch.equal(before, each.get_state())


class Held:
    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator


LIVING: dict[str, Callable[[torch.Generator], Fn]] = {
    "attribute": lambda g: Fn(lambda m, x: x * _noise(m.g), g=g),
    "list": lambda g: Fn(lambda m, x: x * _noise(m.g[0]), g=[g]),
    "dict": lambda g: Fn(lambda m, x: x * _noise(m.g["noise"]), g={"noise": g}),
    "object": lambda g: Fn(lambda m, x: x * _noise(m.g.generator), g=Held(g)),
    "closure": lambda g: Fn(lambda m, x: x * _noise(g)),
    "default argument": lambda g: Fn(lambda m, x, g=g: x * _noise(g)),
    "twice": lambda g: Fn(lambda m, x: x * _noise(m.g) + torch.randn(8, generator=m.g), g=g),
    "beside the default one": lambda g: Fn(lambda m, x: x * _noise(m.g) + _noise(None), g=g),
}


@pytest.mark.parametrize("where", LIVING)
def test_a_generator_that_lives_on_goes_on(where: str) -> None:
    compiled, eager = (LIVING[where](torch.Generator().manual_seed(3)) for _ in range(2))
    step = cf.compile(compiled, form="step")
    for number in range(3):
        torch.manual_seed(number)
        got = step(torch.ones(8))
        torch.manual_seed(number)
        torch.testing.assert_close(got, eager(torch.ones(8)).detach())
    step.retrace()
    if where != "beside the default one":
        torch.testing.assert_close(step(torch.ones(8)), eager(torch.ones(8)).detach())


def test_a_global_generator_goes_on() -> None:
    step = cf.compile(Fn(lambda m, x: x * torch.rand(8, generator=OF_THIS_FILE)), form="step")
    OF_THIS_FILE.manual_seed(2)
    got = [step(torch.ones(8)) for _ in range(3)]
    OF_THIS_FILE.manual_seed(2)
    torch.testing.assert_close(got, [torch.rand(8, generator=OF_THIS_FILE).sum() for _ in range(3)])


def test_seeding_between_steps_works() -> None:
    model = Fn(lambda m, x: x * _noise(m.g), g=torch.Generator())
    step = cf.compile(model, form="step")
    losses = []
    for _ in range(3):
        model.g.manual_seed(1)
        losses.append(step(torch.ones(8)))
    assert losses[0] == losses[1] == losses[2]


def test_a_divided_step_refuses_a_generator_of_its_own() -> None:
    model = Fn(lambda m, x: x * _noise(m.g), g=torch.Generator())
    step = cf.compile(model, parallel_mode="semi_auto", mesh=(2,), device_num=2, form="step")
    with pytest.raises(cf.CaptureError, match=r"generator of its own \(Fn\.g\).*leave generator= out"):
        step.lower(torch.ones(8))


def test_the_initial_seed_is_the_users() -> None:
    torch.manual_seed(11)
    model = Fn(lambda m, x: x * (torch.initial_seed() % 7))
    torch.testing.assert_close(cf.compile(model, form="step")(torch.ones(8)).item(), 8.0 * (11 % 7))
    assert torch.initial_seed() == 11 < _FIRST_SEED


NUMBERS: dict[str, tuple[Callable[..., Any], str]] = {
    "random": (lambda m, x: x * random.random(), "Python's random in 1 at "),
    "uniform": (lambda m, x: x * random.uniform(1, 2), "Python's random in 1 at "),
    "choice": (lambda m, x: x if random.choice([True, False]) else -x, "Python's random in 1 at "),
    "imported by name": (lambda m, x: x * imported(), "Python's random in 1"),
    "seed": (lambda m, x: x if random.seed(0) else -x, "Python's random in 1 at "),
    "numpy": (lambda m, x: x * float(np.random.rand()), "numpy.random in 1 at "),
    "numpy normal": (lambda m, x: x * float(np.random.normal()), "numpy.random in 1 at "),
    "own of numpy": (lambda m, x: x * float(m.rng.random()), "Fn.rng"),
    "own of Python": (lambda m, x: x * m.python.random(), "Fn.python"),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_of_python_and_numpy_are_told_of_once(name: str, caplog: pytest.LogCaptureFixture) -> None:
    run, place = NUMBERS[name]
    inner = Fn(run, rng=np.random.default_rng(0), python=random.Random(0))
    step = cf.compile(nn.Sequential(nn.Identity(), inner), form="step")
    for rows in (8, 8):
        step(torch.ones(rows))
    step.retrace()
    step(torch.ones(8))
    (said,) = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert place.replace("Fn.", "1.") in said and ("test_generators.py:" in said), said
    assert "the same in every step" in said


def test_models_without_such_numbers_are_quiet(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.RReLU())
    step = cf.compile(model, loss_fn=lambda output, target: output.sum())
    before = random.getstate(), copy.deepcopy(np.random.get_state())
    step(torch.ones(2, 8), None)
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING]
    assert random.getstate() == before[0] and np.array_equal(np.random.get_state()[1], before[1][1])
