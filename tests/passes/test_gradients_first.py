"""A weight's gradient is computed before that of the layer's input, in tiles where it is the first large one, and the
numbers of looked-up rows leave room for the vote."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

import commfuse_fx as cf
from commfuse_fx.cost.model import CostModel, profile_key
from commfuse_fx.ir.core.builder import aten
from commfuse_fx.ir.core.collectives import is_start, wait_of
from commfuse_fx.ir.core.meta import Stretch, info, tensor_spec
from commfuse_fx.ir.core.program import Program
from commfuse_fx.ir.core.verify import verify
from commfuse_fx.machine.presets import preset
from commfuse_fx.passes.declaration import Variant, Variants
from commfuse_fx.passes.schedule.tile_first_gradient import MOST_TILES, UNIT
from commfuse_fx.planning import compile_call
from tests.oracle import ACROSS, OPTIMAL, Batch, Case, assert_same, make_world, sgd, train_world

GBIT = "gloo-1gbit"


class Words(nn.Module):
    """A head of many rows behind some layers, on what is looked up in a table of its own or in the head's."""

    def __init__(self, rows: int = 4160, width: int = 256, tied: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(rows, width)
        self.layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(3)))
        self.head = nn.Linear(width, rows)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.words(words)))


def planned(model: nn.Module, x: torch.Tensor, y: torch.Tensor, **options: Any) -> Program:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given = {"loss_fn": F.cross_entropy, "optimizer": optimizer, "device_num": 2, **options}
    return cf.compile(model, **given, form="step").lower(x, y).program


def words(rows: int = 64, **changes: Any) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    model = Words(**changes)
    return model, torch.randint(0, 50, (rows,)), torch.randint(0, model.head.out_features, (rows,))


def order(program: Program) -> list[str]:
    return [info(node).name for node in program.graph.nodes if node.op == "call_function"]


def named(program: Program, part: str) -> list[fx.Node]:
    return [node for node in program.graph.nodes if node.op == "call_function" and part in info(node).name]


def test_the_weights_gradient_comes_first() -> None:
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))
    x = torch.randn(8, 32)
    plain, first = (planned(model, x, x, loss_fn=F.mse_loss, schedule=each) for each in ("none", "overlap"))
    for layer in range(1, 4):
        for program, expected in ((plain, False), (first, True)):
            names = order(program)
            (weight,) = (
                name for name in names if name.endswith(f"write.{layer}.weight") or name == f"{layer}/grad.mm.1"
            )
            assert (names.index(weight) < names.index(f"{layer}/grad.mm.0")) is expected


def test_what_serves_several_gradients_stays() -> None:
    """The chain of the backward, and what a layer that is used twice sums."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.last = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(torch.tanh(self.layer(torch.tanh(self.layer(x)))))

    x = torch.randn(4, 16)
    program = planned(Twice(), x, x, loss_fn=F.mse_loss)
    verify(program, "gradients_first")
    names = order(program)
    chain = [name for name in names if "tanh_backward" in name]
    assert len(chain) == 2 and names.index("last/grad.mm.0") < names.index(chain[0])


def test_the_first_large_gradient_is_computed_in_tiles() -> None:
    torch.manual_seed(0)
    program = planned(*words(512), comm_fusion=OPTIMAL, cluster=GBIT, schedule=ACROSS)
    verify(program, "tiles")
    tiles = [node for node in named(program, ".rows.") if node.target is aten.mm.out]
    assert 2 <= len(tiles) <= MOST_TILES
    sizes = [tensor_spec(node).shape[0] for node in tiles]
    taken = [tensor_spec(node.all_input_nodes[0]).shape[0] for node in tiles]
    assert taken == sizes
    assert sum(sizes) == 4160 and all(size % UNIT == 0 for size in sizes[:-1]) and sizes[-1] >= sizes[0]
    assert sum(info(node).share for node in tiles) == pytest.approx(1)
    assert {profile_key(node) for node in tiles} == {"head/grad.mm.1"}
    (start,) = [node for node in program.collectives() if any(w is tiles[0] for w, _ in info(node).writes)]
    stretches = [stretch for write, stretch in info(start).writes if write in tiles]
    assert [each.begin for each in stretches[1:]] == [each.end for each in stretches[:-1]]
    assert sum(each.size for each in stretches) >= 4160 * 256
    sent = [node for node in program.graph.nodes if any(each is start for each, _ in info(node).sends)]
    assert sent, "the first tiles leave before the last one is there"
    assert isinstance(info(sent[0]).sends[0][1], Stretch)


@pytest.mark.parametrize(
    ("case", "options"),
    [
        ({"rows": 1}, {}),  # takes no time
        ({"rows": 512, "width": 16}, {}),  # has few bytes
        ({"rows": 512}, {"cluster": None}),  # nobody knows what it takes
        ({"rows": 512}, {"schedule": "none"}),
    ],
)
def test_others_are_computed_whole(case: dict[str, Any], options: dict[str, Any]) -> None:
    program = planned(*words(**case), **{"cluster": GBIT, **options})
    assert not named(program, ".rows.")


def test_a_tile_costs_its_part_of_the_whole() -> None:
    torch.manual_seed(0)
    batch = words(512)
    whole, tiled = (planned(*batch, cluster=GBIT, schedule=each) for each in ("none", "overlap"))
    measured = {"head/grad.mm.1": 0.5}
    costs = CostModel(preset(GBIT), measured)
    for program in (whole, tiled):
        products = [node for node in program.graph.nodes if profile_key(node) == "head/grad.mm.1"]
        assert sum(costs.compute_seconds(node) for node in products) == pytest.approx(0.5)
    assert len(named(tiled, ".rows.")) > 0


def world_batch(rows: int) -> Batch:
    return torch.randint(50, (rows,)), torch.randint(4160, (rows,))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("schedule", ["overlap", ACROSS], ids=["within", "across"])
def test_no_bit_changes(tied: bool, schedule: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two ranks' parameters after two steps, against one product in the order of the capture."""
    case = Case("words", lambda: Words(tied=tied), world_batch, F.cross_entropy)
    model, batches = case.model(), [world_batch(1024) for _ in range(2)]
    plain = train_world(make_world(case, copy.deepcopy(model), 2, sgd, schedule="none"), batches)
    if tied:  # what is looked up is sent again: those rows are read behind the last tile
        monkeypatch.setattr(compile_call, "variants", lambda *_: Variants((Variant.of(resent=True),)))
    world = make_world(case, copy.deepcopy(model), 2, sgd, OPTIMAL, cluster=GBIT, schedule=schedule)
    trained = train_world(world, batches)
    (plan,) = world.step.planner.plans.values()
    made = [info(node).name for node in plan.compiled.program.graph.nodes]
    assert any(".rows." in name and name.endswith("/mm") is tied for name in made)
    if not tied:
        assert_same(trained, plain, tolerance=0.0)
        return
    # Rows that are sent again are summed in another order.
    assert_same(trained, plain)


@pytest.mark.parametrize("across", [False, True])
def test_numbers_of_rows_leave_half_of_their_time_to_the_vote(across: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_call, "variants", lambda *_: Variants((Variant.of(resent=True),)))
    schedule = ACROSS if across else "overlap"
    program = planned(*words(512, tied=True), comm_fusion=OPTIMAL, cluster=GBIT, schedule=schedule)
    verify(program, "vote_first")
    costs = CostModel(preset(GBIT))
    nodes = list(program.graph.nodes)
    first = next(node for node in nodes if is_start(node) or info(node).sends)
    assert info(first).collective is not None and info(first).collective.role == "rows"
    before = sum(costs.compute_seconds(node) for node in nodes[: nodes.index(first)])
    until = sum(costs.compute_seconds(node) for node in nodes[: nodes.index(wait_of(first))])
    assert before > 0 and before == pytest.approx(until / 2, rel=0.3)
