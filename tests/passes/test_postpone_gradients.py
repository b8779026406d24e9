"""The last gradient first: what moves behind it, and that nothing else changes."""

from __future__ import annotations

import pytest
import torch

from commfuse_fx.ir.core.collectives import is_start
from commfuse_fx.ir.core.meta import info
from commfuse_fx.ir.core.program import Program
from commfuse_fx.ir.core.verify import verify
from commfuse_fx.passes.declaration import PassContext, Situation, Variant, Variants
from commfuse_fx.passes.schedule.postpone_gradients import PostponeGradients
from commfuse_fx.planning import compile_call
from commfuse_fx.planning.pipeline.recipe import build_pipeline
from tests.models import CONV, DIGITS, GPT2, TIED, Case, shards
from tests.oracle import (
    ACROSS,
    OPTIMAL,
    SLOW,
    assert_same,
    make_world,
    sgd,
    train_reference,
    train_world,
)


def begun(case: Case, variant: Variant) -> tuple[Program, PostponeGradients, PassContext]:
    """A program up to the pass, the pass, and the context of the pipeline."""
    ranks = make_world(case, case.model(torch.float32), 2, sgd, OPTIMAL, cluster=SLOW)
    step = ranks.step
    batch = shards(case.batches(1, dtype=torch.float32)[0], 2)[0]
    captured = step.planner.read(step.planner.take_apart(batch, {})).captured
    assert captured is not None
    program = captured.copy()
    pipeline = build_pipeline(Situation(step.config, step.mesh, variant=variant))
    number = next(i for i, each in enumerate(pipeline.passes) if isinstance(each, PostponeGradients))
    pipeline.run(program, verify, part=slice(number))
    found = pipeline.passes[number]
    assert isinstance(found, PostponeGradients)
    return program, found, pipeline.context


@pytest.mark.parametrize("case", [GPT2, TIED], ids=lambda case: case.name)
def test_compute_moves_behind_a_large_last_gradient(case: Case) -> None:
    program, postpone, context = begun(case, Variant.of(postponed=1.0))
    before = list(program.graph.nodes)
    last = [node for node in before if is_start(node)][-1]
    assert postpone(program, context)
    verify(program, "postpone_gradients")
    after = list(program.graph.nodes)
    assert sorted(after) == sorted(before)
    assert after.index(last) < before.index(last)
    moved = [node for node in after[after.index(last) :] if before.index(node) < before.index(last)]
    assert moved == sorted(moved, key=before.index)
    assert all(info(node).phase == "backward" for node in moved)
    # As much as the collective takes, and the node that made it so much.
    compute = [context.costs.compute_seconds(node) for node in moved if not is_start(node)]
    assert sum(compute) - max(compute) <= context.costs.cost_of(last, mesh=program.mesh).seconds


def test_gradients_of_the_last_layers_have_the_most_time() -> None:
    """They are computed first, needed last by the next forward, and move behind the last gradient."""
    program, postpone, context = begun(GPT2, Variant.of(across_steps=True, postponed=1.0))
    before = list(program.graph.nodes)
    last = [node for node in before if is_start(node)][-1]
    assert postpone(program, context)
    verify(program, "postpone_gradients")
    after = list(program.graph.nodes)
    moved = [node for node in after[after.index(last) :] if before.index(node) < before.index(last)]
    computing = [node for node in moved if context.costs.compute_seconds(node)]
    others = [node for node in before if info(node).phase == "backward" and is_start(node) and node not in moved]
    assert computing and all(before.index(node) < before.index(others[0]) for node in computing)


@pytest.mark.parametrize(
    ("across", "part"), [(False, 1.0), (True, 1.0), (True, 0.5)], ids=["within", "across", "across-less"]
)
@pytest.mark.parametrize("case", [GPT2, TIED, DIGITS, CONV], ids=lambda case: case.name)
def test_parameters_are_those_of_one_device(
    case: Case, across: bool, part: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    only = Variants((Variant.of(across_steps=across, postponed=part),))
    monkeypatch.setattr(compile_call, "variants", lambda *_: only)
    model = case.model()
    batches = case.batches(3)
    want = train_reference(case, model, batches, 2, sgd)
    options = {"schedule": ACROSS} if across else {}
    world = make_world(case, model, 2, sgd, OPTIMAL, cluster=SLOW, **options)
    assert_same(train_world(world, batches), want)
