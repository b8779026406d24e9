"""The options of the parallel optimizer: what is taken, what is refused, and how they are written."""

from __future__ import annotations

import re
from typing import Any

import pytest

from commfuse_fx import reset_auto_parallel_context, set_auto_parallel_context
from commfuse_fx.config.compile_config import CompileConfig
from commfuse_fx.config.parallel_optimizer import ParallelOptimizer
from commfuse_fx.errors import CommFuseError

WHERE = "parallel_optimizer_config"


def resolved(options: Any, **others: Any) -> CompileConfig:
    return CompileConfig.resolve({"enable_parallel_optimizer": True, WHERE: options, **others})


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ([], TypeError, f"{WHERE} is []; give a dict"),
        ({1: 2}, TypeError, "every key must be a str, not 1"),
        ({"treshold": 2}, KeyError, "has the key 'treshold', which is unknown"),
        ({"parallel_optimizer_treshold": 2}, KeyError, "did you mean parallel_optimizer_threshold?"),
        (
            {"parallel_optimizer_threshold": -1},
            ValueError,
            f'{WHERE}["parallel_optimizer_threshold"] is -1; give an int >= 0, in KiB',
        ),
        ({"parallel_optimizer_threshold": 1.5}, TypeError, "is 1.5; give an int >= 0"),
        ({"parallel_optimizer_threshold": True}, TypeError, "is True; give an int >= 0"),
        ({"optimizer_weight_shard_size": 0}, ValueError, "is 0; give an int >= 1 that divides"),
        ({"optimizer_weight_shard_size": "2"}, TypeError, "is '2'; give an int >= 1 that divides"),
        ({"gradient_accumulation_shard": 1}, TypeError, "is 1; give True or False"),
        ({"pad": None}, TypeError, "is None; give True or False"),
        ({"mode": "scatter"}, ValueError, 'use one of "reduce_scatter", "broadcast"'),
        ({"mode": "broadcast", "level": 3}, ValueError, '"level"] is 3, which divides the rows'),
        ({"mode": "broadcast", "level": 3}, ValueError, 'leave level out, or use mode="reduce_scatter"'),
        (
            {"mode": "broadcast", "optimizer_weight_shard_size": 2},
            ValueError,
            'leave optimizer_weight_shard_size out, or use mode="reduce_scatter"',
        ),
        ({"level": 4}, ValueError, "is 4; give an int in 1..3"),
        ({"level": False}, TypeError, "is False; give an int in 1..3"),
    ],
)
def test_bad_options_are_refused_whether_it_is_on_or_off(options: Any, error: type, message: str) -> None:
    for enabled in (True, False):
        with pytest.raises(CommFuseError, match=re.escape(message)) as raised:
            CompileConfig.resolve({"enable_parallel_optimizer": enabled, WHERE: options})
        assert isinstance(raised.value, error)


def test_options_are_read_back_from_the_header() -> None:
    given = {"parallel_optimizer_threshold": 24, "optimizer_weight_shard_size": 2, "pad": True, "level": 2}
    config = resolved(given)
    assert ("enable_parallel_optimizer", "True") in config.header()
    text = dict(config.header())[WHERE]
    assert text == "parallel_optimizer_threshold=24, optimizer_weight_shard_size=2, pad=True, level=2"
    assert ParallelOptimizer.dict_of(text) == given
    assert WHERE not in dict(resolved(None).header())
    assert "enable_parallel_optimizer" not in dict(CompileConfig.resolve({WHERE: given}).header())
    with pytest.raises(ValueError, match="no option such as"):
        ParallelOptimizer.dict_of("level")


def test_the_context_holds_both_options() -> None:
    set_auto_parallel_context(
        enable_parallel_optimizer=True, parallel_optimizer_config={"parallel_optimizer_threshold": 1}
    )
    try:
        assert CompileConfig.resolve({}).parallel_optimizer == ParallelOptimizer(parallel_optimizer_threshold=1)
        assert CompileConfig.resolve({"parallel_mode": "stand_alone"}).parallel_optimizer is None
        assert CompileConfig.resolve({"enable_parallel_optimizer": False}).parallel_optimizer is None
    finally:
        reset_auto_parallel_context()
