"""Plain values of a checkpoint come back as they were, through JSON."""

from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict
from typing import Any

import numpy as np
import pytest
import torch

from commfuse_fx.checkpoints.plain_values import decoded, encoded, is_plain, replaced
from commfuse_fx.errors import CheckpointError
from tests.distributed.models_of_ranks import assert_same

VALUES: list[Any] = [
    None,
    True,
    -(2**70),
    0.1,
    -0.0,
    "text \u00e4 \U0001f600",
    [1, [2.5, None], ()],
    (1, (2,), [3]),
    {"a": 1, "$b": 2},
    {1: "x", (2, 3): {None: 4}},
    {"$tuple": [1]},
    {1, 2},
    frozenset({1, 2}),
    b"\x00\xff",
    1 - 2j,
    Counter({3: 2}),
    OrderedDict([("z", 1), ("a", 2)]),
    math.inf,
    -math.inf,
]


def there_and_back(value: Any) -> Any:
    tensors: dict[str, torch.Tensor] = {}

    def leaf(path: str, each: Any) -> str | None:
        if isinstance(each, torch.Tensor):
            tensors[path] = each
            return path
        return None

    text = json.dumps(encoded(value, "top", leaf), allow_nan=False)
    return decoded(json.loads(text), lambda name: tensors[name])


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_a_value_comes_back(value: Any) -> None:
    found = there_and_back(value)
    assert found == value and type(found) is type(value) and repr(found) == repr(value)


def test_other_numbers_and_tensors() -> None:
    assert math.isnan(there_and_back(math.nan))
    assert there_and_back([np.float32(0.5), np.int64(3)]) == [0.5, 3]
    tensors = {"a": [torch.arange(3), (torch.ones(()),)], "b": {0: torch.zeros(2)}}
    assert_same(there_and_back(tensors), tensors)


@pytest.mark.parametrize("value", [object(), np.zeros(2), torch.float32, lambda: 0, {"a": [object()]}, "\ud800"])
def test_what_is_no_plain_value(value: Any) -> None:
    assert not is_plain(value)
    with pytest.raises(CheckpointError, match="^top.* which a checkpoint cannot hold: give numbers, texts, tensors"):
        there_and_back(value)


def test_the_place_of_what_is_no_plain_value() -> None:
    with pytest.raises(CheckpointError, match="^top/a/1 is <object"):
        there_and_back({"a": (1, object())})


@pytest.mark.parametrize(
    "text",
    [
        '{"$tuple": 3}',
        '{"$float": "x"}',
        '{"$bytes": "%"}',
        '{"$dict": [[1]]}',
        '{"$dict": [[[1], 2]]}',
        '{"$set": [[]]}',
        '{"$complex": [1, 2, 3]}',
        '{"$other": 1}',
        '{"$tuple": [], "a": 1}',
        '{"$float": [1]}',
    ],
)
def test_what_nobody_has_encoded(text: str) -> None:
    with pytest.raises(CheckpointError, match="stands for no value that a checkpoint holds"):
        decoded(json.loads(text), lambda name: name)


def test_leaves_are_replaced_in_place() -> None:
    value = {"a": [1, (2, 3)], "b": Counter({4: 5})}
    seen: list[str] = []

    def leaf(path: str, each: Any) -> Any:
        seen.append(path)
        return each + 1

    assert replaced(value, leaf) == {"a": [2, (3, 4)], "b": Counter({4: 6})}
    assert seen == ["a/0", "a/1/0", "a/1/1", "b/4"]
