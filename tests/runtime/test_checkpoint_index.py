"""The index of a checkpoint is read strictly: what it names lies in its folder, and what has changed is noticed."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from commfuse_fx.checkpoints.checkpoint_index import CheckpointIndex, StoredBox, StoredTensor
from commfuse_fx.errors import CommFuseError

INDEX = CheckpointIndex(
    torch="2.13.0",
    world=2,
    tensors={"x": StoredTensor((4, 2), torch.bfloat16, (StoredBox((2, 0), (2, 2), "a", 10, 20),))},
    files={"a": (30, 7)},
    values={"step": {"count": 3, "lr": 1e-3, "name": "\u00e4"}},
    ranks=[{"values": None, "tensors": {}}, {"values": [1], "tensors": {"y": "x"}}],
)


def test_an_index_comes_back() -> None:
    found = CheckpointIndex.from_json(INDEX.to_json())
    assert found == INDEX and found.to_json() == INDEX.to_json()
    assert found.of_rank(1, 2) == ([1], {"y": "x"})
    assert found.of_rank(0, 2) == found.of_rank(1, 3) == (INDEX.values, {})


def changed(change: Callable[[dict[str, Any]], Any]) -> str:
    """The text of an index with a change, and with the checksum of what it is now."""
    body = json.loads(INDEX.to_json())
    change(body)
    rest = {key: value for key, value in body.items() if key not in ("schema", "kind", "crc32")}
    return json.dumps({**body, "crc32": zlib.crc32(json.dumps(rest, sort_keys=True).encode())})


CHANGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "is no name of a file in this folder": lambda body: body["files"].update({"../a": [1, 2]}),
    "is none of its files": lambda body: body["tensors"]["x"]["boxes"][0].__setitem__(4, "/etc/passwd"),
    "is no type of PyTorch": lambda body: body["tensors"]["x"].update(dtype="load"),
    "is not within": lambda body: body["tensors"]["x"]["boxes"][0].__setitem__(0, 3),
    "give a list of 7": lambda body: body["tensors"]["x"]["boxes"][0].pop(),
    "give an int >= 0": lambda body: body["tensors"]["x"].update(shape=[-4, 2]),
    "give a list of 2": lambda body: body["ranks"].pop(),
    "is none of the tensors": lambda body: body["ranks"][1]["tensors"].update(y="z"),
    'key "values" is missing': lambda body: body.pop("values"),
    "schema is 9": lambda body: body.update(schema=9),
    'give a document of kind "checkpoint"': lambda body: body.update(kind="cluster"),
    "give a JSON object": lambda body: body.update(files=[]),
}


@pytest.mark.parametrize("said", CHANGES)
def test_a_wrong_index(said: str) -> None:
    with pytest.raises(CommFuseError, match=said):
        CheckpointIndex.from_json(changed(CHANGES[said]), "commfuse.json")


def test_a_damaged_index() -> None:
    text = INDEX.to_json()
    assert changed(lambda body: None)
    for damaged in (text.replace("0.001", "0.002"), text.replace('"count": 3', '"count": 4'), text.replace("30", "31")):
        assert damaged != text
        with pytest.raises(CommFuseError, match="has changed since it was written: copy it again"):
            CheckpointIndex.from_json(damaged, "commfuse.json")
    with pytest.raises(CommFuseError, match="not JSON"):
        CheckpointIndex.from_json(text[:-20])
