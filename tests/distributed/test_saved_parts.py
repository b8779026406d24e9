"""What users keep of a model that trains in flat storage: files, copies and pickles are as they were before."""

from __future__ import annotations

import copy
import gc
import io
import logging
import multiprocessing
import pickle
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from safetensors import torch as safetensors
from torch import nn

import commfuse_fx as cf
from tests.distributed.harness import Ranks
from tests.distributed.models_of_ranks import adamw, assert_same, compiled, mlp, momentum, xy
from tests.logs import logged
from tests.sharding.elementwise import ONE_AXIS, make_step
from tests.sharding.elementwise import batch as batch_of_parts

pytestmark = pytest.mark.dist


class Kinds(nn.Module):
    """Tied weights, other orders of dimensions, a scalar, another dtype, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(20, 16)
        self.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(3)])
        self.conv = nn.Conv2d(2, 2, 3, padding=1).to(memory_format=torch.channels_last)
        self.columns = nn.Parameter(torch.randn(6, 5).t())
        self.scale = nn.Parameter(torch.ones(()))
        self.low = nn.Parameter(torch.ones(7, dtype=torch.bfloat16))
        self.head = nn.Linear(16, 20, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        images = self.conv(x.reshape(-1, 2, 4, 2)).sum() + self.columns.sum() + self.low.float().sum()
        out: torch.Tensor = self.head(x).mean(1) * self.scale + 1e-3 * images
        return out


def size(value: Any, **options: Any) -> int:
    file = io.BytesIO()
    torch.save(value, file, **options)
    return len(file.getvalue())


def own(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether each tensor is all that its storage holds, and no two share one."""
    found = [(tensor, tensor.untyped_storage()) for tensor in tensors]
    alone = all(storage.nbytes() == tensor.nbytes and not tensor.storage_offset() for tensor, storage in found)
    return alone and len({storage.data_ptr() for _, storage in found}) == len(found)


def facts(model: Kinds) -> dict[str, Any]:
    """What files, copies and tools say of the model and its parts, apart from values."""
    params, folder = list(model.parameters()), Path(tempfile.mkdtemp())
    safetensors.save_model(model, str(folder / "model"))
    safetensors.save_file({"a": model.layers[0].weight, "b": model.scale}, str(folder / "parts"))
    dcp.save(model.layers[1].state_dict(), checkpoint_id=folder / "parts.dcp", no_dist=True)
    written = sum(file.stat().st_size for file in (folder / "parts.dcp").glob("*.distcp"))
    return {
        "model": (size(model.state_dict()), size(model), size(copy.deepcopy(model)), len(pickle.dumps(model))),
        "module": (size(model.layers[1].state_dict()), size(model.layers[1]), len(pickle.dumps(model.layers[1]))),
        "tied": size([model.embed.weight, model.head.weight]),
        "saved": [(size(p), size(p.data), size(p.detach())) for p in params],
        "before zip": [size(p.detach(), _use_new_zipfile_serialization=False) for p in params],
        "pickled": [(len(pickle.dumps(p)), len(pickle.dumps(p.detach()))) for p in params],
        "copied": size({name: copy.deepcopy(p.detach()) for name, p in model.named_parameters()}),
        "copies": own(copy.deepcopy([p.detach() for p in params])),
        "layout": [(p.stride(), p.storage_offset(), p.untyped_storage().nbytes(), p._is_view()) for p in params],
        "own": own(params),
        "shared": sorted(map(sorted, safetensors._find_shared_tensors(model.state_dict()))),
        "safetensors": ((folder / "model").stat().st_size, (folder / "parts").stat().st_size),
        "distributed checkpoint": written,
        "numpy": [p.detach().numpy().shape for p in params if p.dtype != torch.bfloat16],
    }


def parts_before_and_after() -> None:
    model = Kinds()
    before = facts(model)
    optimizer = adamw(model)
    step = cf.compile(model, loss_fn=F.mse_loss, optimizer=optimizer)
    ids, target = torch.randint(0, 20, (4, 8)), torch.randn(4, 20)
    for _ in range(2):
        step(ids, target)
    assert any(segment.is_flat for update in step.lower(ids, target).program.updates for segment in update.segments)
    assert facts(model) == before
    states = [value for state in optimizer.state.values() for value in state.values()]
    assert own(states)
    part = optimizer.state_dict()["state"][0]
    assert size(part) == size({name: value.clone() for name, value in part.items()})

    file = io.BytesIO()
    torch.save((model, optimizer.state_dict(), model.layers[0].weight.detach()), file)
    file.seek(0)
    loaded, state, weight = torch.load(file, weights_only=False)
    assert_same(loaded.state_dict(), model.state_dict())
    assert loaded.head.weight is loaded.embed.weight
    assert torch.equal(weight, model.layers[0].weight)
    assert_same(state["state"], optimizer.state_dict()["state"])

    copied, its_optimizer = copy.deepcopy((model, optimizer))
    assert own(copied.parameters()) and copied.head.weight is copied.embed.weight
    kept = copy.deepcopy(model.state_dict())
    eager = F.mse_loss(copied(ids), target)
    eager.backward()  # type: ignore[no-untyped-call]
    its_optimizer.step()
    assert_same(dict(model.state_dict()), dict(kept))


def test_parts_of_a_model_are_saved_and_copied_as_before_the_first_step(ranks: Ranks) -> None:
    ranks.values(parts_before_and_after)


def gradients_alone(options: dict[str, Any]) -> None:
    model = mlp()
    step = compiled(model, **options)
    for _ in range(2):  # a first gradient, and one that is added to it
        step(*xy(0))
        grads = [param.grad for param in model.parameters() if param.grad is not None]
        assert own(grads)
        assert [size(grad) for grad in grads] == [size(grad.clone()) for grad in grads]
        assert own(copy.deepcopy(grads))


@pytest.mark.parametrize("options", [{}, {"schedule": "none"}, {"comm_fusion": {"openstate": False}}], ids=str)
def test_gradients_share_no_storage(ranks: Ranks, options: dict[str, Any]) -> None:
    ranks.values(gradients_alone, options)


def aliases_alone() -> None:
    model = mlp()
    step = compiled(model, adamw(model))
    step(*xy(0))
    kept = [param.detach() for param in model.parameters()]
    want = [tensor.clone() for tensor in kept]
    del model, step
    gc.collect()
    filler = [torch.full_like(tensor, 7.0) for tensor in want for _ in range(20)]
    assert all(torch.equal(tensor, value) for tensor, value in zip(kept, want, strict=True))
    del filler


def test_an_alias_keeps_its_memory_when_everything_else_is_gone(ranks: Ranks) -> None:
    ranks.values(aliases_alone)


def moved_by_the_user(move: str) -> list[str]:
    """Parameters and states whose memory is taken elsewhere between steps train on like those of another model."""
    model, other = mlp(), mlp()
    optimizer, others = momentum(model), momentum(other)
    step, plain = compiled(model, optimizer), compiled(other, others)
    with logged(logging.WARNING) as messages:
        for number in range(4):
            step(*xy(number))
            plain(*xy(number))
            states = [state["momentum_buffer"] for state in optimizer.state.values()]
            if move == "share":
                model.share_memory()
                states[1].share_memory_()
                assert all(param.is_shared() for param in model.parameters())
            elif move == "queue":
                queue = multiprocessing.get_context("fork").Queue()
                queue.put((model.state_dict(), optimizer.state_dict()))
                sent, sent_state = queue.get(timeout=30)
                assert_same(dict(sent), dict(model.state_dict()))
                assert_same(sent_state["state"], optimizer.state_dict()["state"])
            else:
                with torch.no_grad():
                    model[0].weight.set_(model[0].weight.detach().clone())
                    states[2].data = states[2].clone()
    assert_same(dict(model.state_dict()), dict(other.state_dict()))
    assert_same(optimizer.state_dict(), others.state_dict())
    return messages


@pytest.mark.parametrize("move", ["share", "queue", "set"])
def test_tensors_that_are_moved_between_steps_train_on(ranks: Ranks, move: str) -> None:
    for messages in ranks.values(moved_by_the_user, move):
        assert len(messages) == (move != "set")
        assert all("shared with other processes" in message for message in messages)


def parts_of_a_divided_model() -> None:
    step = make_step(ONE_AXIS, (1, 2), "adamw", virtual=False)
    model = step.model
    before = [(size(param), size(param.data), param.stride()) for param in model.parameters()]
    for number in range(2):
        step(batch_of_parts(number, 0))
        assert [(size(param), size(param.data), param.stride()) for param in model.parameters()] == before
        assert own(model.parameters()) and own(copy.deepcopy([param.detach() for param in model.parameters()]))


def test_parts_of_a_divided_model(ranks: Ranks) -> None:
    ranks.values(parts_of_a_divided_model)
