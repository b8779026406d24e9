"""The batch that a step is traced with: a rank's part of it, or that of all ranks together."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import commfuse_fx as cf
from commfuse_fx.config.compile_config import CompileConfig
from commfuse_fx.ir.core.mesh import Mesh
from commfuse_fx.planning.batches import on_one_part, on_whole_batch
from commfuse_fx.planning.request import Call, CompileRequest, PassRequest, Sharding
from commfuse_fx.sharding.marking.marks import Marks

LEAVES = [
    ("x", torch.ones(6, 3)),
    ("scale", torch.ones(())),
    ("table", torch.ones(5, 2)),
    ("y", torch.zeros(6, dtype=torch.long)),
]


def request(*leaves: tuple[str, torch.Tensor], **options: Any) -> CompileRequest:
    config = CompileConfig.resolve(options)
    call: Any = Call(None, leaves or LEAVES)  # type: ignore[arg-type]
    return CompileRequest(nn.Linear(1, 1), None, call, Mesh.of_sizes((3,)), config, True, None, PassRequest())


def shapes(made: CompileRequest) -> dict[str, tuple[int, ...]]:
    return {path: tuple(leaf.shape) for path, leaf in made.call.leaves}


def test_a_rank_traces_its_part_of_a_full_batch() -> None:
    made = on_one_part(request(full_batch=True))
    assert shapes(made) == {"x": (2, 3), "scale": (), "table": (5, 2), "y": (2,)}
    assert made.passes.sliced_inputs == ["x", "y"]


@pytest.mark.parametrize("options", [{}, {"full_batch": True, "parallel_mode": "stand_alone"}])
def test_what_is_a_ranks_own_batch_stays(options: dict[str, Any]) -> None:
    given = request(**options)
    assert on_one_part(given) is given
    numbers = request(("scale", torch.ones(())), full_batch=True)
    assert on_one_part(numbers) is numbers


def test_a_full_batch_divides_among_the_ranks() -> None:
    with pytest.raises(cf.ConfigValueError, match="batch of 7 does not .*; pad it to 9 rows, or cut it to 6$"):
        on_one_part(request(("x", torch.ones(7)), full_batch=True))


@pytest.mark.parametrize(("ways", "rows"), [(1, 6), (2, 12)])
def test_one_device_is_handed_the_batches_of_all_ranks(ways: int, rows: int) -> None:
    sharding = Sharding(Marks(), batch_ways=ways)
    made = on_whole_batch(request(), sharding)
    assert shapes(made) == {"x": (rows, 3), "scale": (), "table": (5, 2), "y": (rows,)}
    assert made.passes.sliced_inputs == ["x", "y"] and made.passes.sharding is sharding
