"""What a compiled step and module say of themselves: repr, `explain()` of the graph that runs, and whose attributes."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import commfuse_fx as cf
from commfuse_fx.errors import ConfigValueError, NotThereError
from commfuse_fx.virtual.virtual_world import LockstepWorld
from tests.models import MLP_CASE


def step_of(**options: Any) -> cf.CompiledStep:
    model = MLP_CASE.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return cf.compile(model, loss_fn=MLP_CASE.loss_fn, optimizer=optimizer, **options)


def test_repr_says_what_was_compiled() -> None:
    step, batch = step_of(), MLP_CASE.batches(1)[0]
    assert repr(step) == "<compiled step of MLP, data_parallel on dp=1: nothing has run>"
    step(*batch)
    nodes = len(step.lower(*batch).program.graph.nodes)
    assert repr(step) == f"<compiled step of MLP, data_parallel on dp=1: {nodes} nodes, no collectives, 0 bytes>"
    shape = "data_parallel on dp=2 x tp=2: nothing has run"
    assert shape in repr(step_of(mesh=(2, 2), device_num=4))


def test_explain_is_of_the_graph_that_runs() -> None:
    step = step_of()
    with pytest.raises(ConfigValueError, match=r"no step has run yet: call it first, or use lower\(\.\.\.\)\.explain"):
        step.explain()
    for rows in (8, 4):
        batch = MLP_CASE.batches(1, rows)[0]
        step(*batch)
        assert step.explain().text() == step.lower(*batch).explain().text()
    assert [each.name for each in step.explain(timings=True).passes]


def test_a_module_explains_its_last_backward() -> None:
    model = MLP_CASE.model()
    module = cf.compile(model)
    first = repr(module).splitlines()[0]
    assert first == "CompiledModule(  # module of MLP, data_parallel on dp=1: nothing has run"
    assert repr(module).splitlines()[1:] == [*repr_of_parts(model), ")"]
    x, y = MLP_CASE.batches(1)[0]
    with pytest.raises(ConfigValueError, match="no module has run yet"):
        module.explain()
    F.cross_entropy(module(x), y).backward()
    assert module.explain().text() == module.lower(x).explain().text()
    assert "nodes, no collectives, 0 bytes" in repr(module)


def repr_of_parts(model: nn.Module) -> list[str]:
    return [f"  {line}" for line in f"(module): {model!r}".splitlines()]


@pytest.mark.parametrize(
    "name", ["parameters", "named_parameters", "train", "eval", "zero_grad", "to", "register_buffer"]
)
def test_what_is_the_models_is_asked_of_the_model(name: str) -> None:
    with pytest.raises(NotThereError, match=rf"a compiled step has no {name}: ask the model, .* step\.model\.{name}"):
        getattr(step_of(), name)


def test_other_names_are_plain_attribute_errors() -> None:
    step = step_of()
    assert not hasattr(step, "no_such_thing")
    assert not hasattr(step, "_parameters")
    step(*MLP_CASE.batches(1)[0])
    for other in (copy.deepcopy(step), pickle.loads(pickle.dumps(step_of(device_num=2)))):
        assert repr(other).startswith("<compiled step of MLP, ")


def test_bytes_and_collectives_of_ranks() -> None:
    step = step_of(device_num=2)
    LockstepWorld(step)(MLP_CASE.batches(2))
    lowered = step.lower(*MLP_CASE.batches(1)[0])
    assert lowered.collectives
    assert sum(each.bytes for each in lowered.collectives) == 8 * sum(p.numel() for p in step.model.parameters())
