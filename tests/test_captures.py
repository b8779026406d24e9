"""The capture that tests share is what each compilation would have captured."""

from __future__ import annotations

import pytest

import commfuse_fx as cf
from commfuse_fx.capture.build import capture as trace
from commfuse_fx.capture.joint import capture_joint as trace_joint
from commfuse_fx.planning import compile_call
from tests import captures
from tests.models import CONTRASTIVE, CONV, DIGITS, PARTLY, TIED, Case, shards
from tests.oracle import collectives, make_world, sgd


def text(case: Case, *, training: bool = True, rows: int = 8) -> str:
    model = case.model().train(training)
    world = make_world(case, model, 2, sgd)
    lowered = world.step.lower(*shards(case.batches(1, rows)[0], 2)[0])
    return lowered.stages["capture"].text() + lowered.text()


@pytest.mark.parametrize("case", [CONV, CONTRASTIVE, PARTLY, TIED], ids=lambda case: case.name)
def test_a_shared_capture_gives_the_same_plan(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = text(case), text(case)
    monkeypatch.setattr(compile_call, "capture", trace)
    assert first == second == text(case)


def test_a_capture_for_any_mesh_gives_the_plan_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    def texts() -> list[str]:
        found = []
        for world in (1, 2, 4):
            model, (batch,) = CONV.model(), CONV.batches(1)
            captures.share(model, "any mesh", any_mesh=True)
            step = cf.compile(model, loss_fn=CONV.loss_fn, device_num=world, global_rank=0)
            found.append(step.lower(*shards(batch, 4)[0]).text())
        return found

    shared = texts()
    assert len(set(shared)) == 3
    monkeypatch.setattr(captures, "capture", trace)
    assert shared == texts()
    captures.forget("any mesh")
    assert not [key for key in captures._captured if key[0] == "any mesh"]


def test_modes_shapes_and_frozen_parameters_have_captures_of_their_own() -> None:
    assert len({text(CONV), text(CONV, training=False), text(CONV, rows=16)}) == 3
    model, (batch,) = DIGITS.model(), DIGITS.batches(1)
    counts = []
    for _ in range(2):
        counts.append(sum(len(each.members) for each in collectives(make_world(DIGITS, model, 2, sgd), batch)))
        model.get_parameter("head.weight").requires_grad_(False)
    assert counts == [14, 13]


def test_marks_are_those_of_each_compilation() -> None:
    (batch,) = DIGITS.batches(1)
    found = []
    for number in (1, 2):
        model = DIGITS.model()
        for place, module in enumerate(each for each in model.modules() if list(each.parameters(recurse=False))):
            cf.set_comm_fusion(module, place % number + 1)
        found.append(len(collectives(make_world(DIGITS, model, 2, sgd), batch)))
    assert found[0] < found[1]


def test_a_shared_capture_of_a_module_gives_the_same_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    def texts() -> list[str]:
        found = []
        for world, broadcasts in ((1, True), (2, True), (2, False)):
            model, (batch,) = CONV.model(), CONV.batches(1)
            captures.share(model, "module", any_mesh=True)
            module = cf.compile(model, device_num=world, global_rank=0, broadcast_buffers=broadcasts)
            found.append(module.lower(batch[0]).text())
        return found

    shared = texts()
    assert len(set(shared)) == 3
    monkeypatch.setattr(captures, "capture_joint", trace_joint)
    assert shared == texts()
