"""An index of a checkpoint whose checksum is right, and whose content is not: an error by name, and nothing changed."""

from __future__ import annotations

import copy
import json
import random
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import commfuse_fx as cf


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


VALUES: list[Any] = [
    *(None, True, -1, 7, 10**15, 2**63, 1e308, "", "x", [], [[]], [1], {}, {"x": 1}),
    *({"$tensor": "x"}, {"$tensor": []}, {"$float": []}, {"$complex": [1]}, {"$bytes": 3}, {"$dict": [[[], 1]]}),
    *({"$dict": [1]}, {"$set": [[1]]}, {"$counter": [["a", 1], ["b", "x"]]}, {"$none": 1}, {"$tuple": [1], "b": 2}),
    *(nested(100), nested(400)),
]
MISSING = object()


def places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if place:
        yield place
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inner:
        yield from places(each, (*place, key))


def changed(index: dict[str, Any], place: tuple[Any, ...], value: Any) -> str:
    """The text of an index with another value at this place, and with the checksum of what it is now."""
    body = copy.deepcopy(index)
    at: Any = body
    for key in place[:-1]:
        at = at[key]
    if value is MISSING:
        del at[place[-1]]
    else:
        at[place[-1]] = value
    rest = {key: each for key, each in body.items() if key not in ("schema", "kind", "crc32")}
    if place != ("crc32",):
        body["crc32"] = zlib.crc32(json.dumps(rest, sort_keys=True).encode())
    return json.dumps(body)


def plain(value: Any) -> Any:
    """A copy to compare."""
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return list(map(plain, value))
    return value.tolist() if isinstance(value, torch.Tensor) else value


class Training:
    """A step with extras, and all that a load may change of it."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(3, 3)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 0.1)
        self.step = cf.compile(self.model, loss_fn=F.mse_loss, optimizer=self.optimizer)
        self.generator = torch.Generator()
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        self.x = torch.randn(2, 3)
        self.step(self.x, self.x)

    @property
    def extra(self) -> dict[str, Any]:
        return {"generator": self.generator, "plain": {"a": (1, float("inf"))}, "scheduler": self.scheduler}

    def load(self, folder: Path) -> None:
        self.step.load(folder, {"generator": self.generator, "scheduler": self.scheduler})

    def state(self) -> Any:
        generator = (self.generator.get_state(), torch.get_rng_state())
        return plain((self.step.state_dict(), self.scheduler.state_dict(), generator))


def test_no_index_leads_to_another_error_than_those_of_checkpoints(tmp_path: Path) -> None:
    training, folder = Training(), tmp_path / "checkpoint"
    training.step.save(folder, training.extra)
    file = folder / "commfuse.json"
    text = file.read_text()
    index, drawn = json.loads(text), random.Random(0)
    before = training.state()
    refused = 0
    cases = [(place, value) for place in places(index) for value in (MISSING, *drawn.sample(VALUES, 2))]
    # The scheduler's own state is what its load_state_dict makes of it.
    cases = [case for case in cases if "scheduler" not in case[0]]
    for place, value in cases:
        file.write_text(changed(index, place, value))
        try:
            training.load(folder)
        except cf.CommFuseError:
            refused += 1
            assert training.state() == before
        else:
            training.step(training.x, training.x)
            file.write_text(text)
            training.load(folder)
            if place[-1] == "seed":  # the right file has none, so that the step keeps its own
                training = Training()
            assert training.state() == before
    assert refused > 0.9 * len(cases) > 300
    file.write_text(text)
    training.load(folder)


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        (("tensors", "random/cpu/0", "shape"), [10**14], "does not cover it"),
        (("tensors", "model/weight", "boxes"), [], "does not cover it"),
        (
            ("values", "optimizer", "param_groups", 0, "eps"),
            "x",
            "group 0 has eps='x' in the checkpoint, and 1e-08 here",
        ),
        (("values", "optimizer", "param_groups", 0, "params"), [[1]], "lists no names of parameters"),
        (("values", "optimizer", "state", "weight"), 3, "the state of weight is none of an optimizer"),
        (("values", "optimizer", "state", "weight", "exp_avg"), {}, "the state of weight is none of an optimizer"),
        (("values", "extra", "objects"), None, "extras are"),
        (("values", "extra", "objects", "generator"), 3, "the state of a generator is not what a save writes"),
        (("values", "random"), 3, "is not what a save writes: take another checkpoint"),
        (("values", "step"), nested(300), "is nested more than a checkpoint holds"),
    ],
)
def test_what_is_wrong_is_named(place: tuple[Any, ...], value: Any, said: str, tmp_path: Path) -> None:
    training, folder = Training(), tmp_path / "checkpoint"
    training.step.save(folder, training.extra)
    file = folder / "commfuse.json"
    file.write_text(changed(json.loads(file.read_text()), place, value))
    with pytest.raises(cf.CheckpointError, match=said):
        training.load(folder)
