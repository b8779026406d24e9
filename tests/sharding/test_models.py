"""Models of many kinds, marked in many ways, train on a mesh as on one device."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import commfuse_fx as cf
from commfuse_fx.ir.core.placement import Shard
from tests.models import CONV, MLP, MLP_CASE, PARTLY, SHARED, STRUCTURED, TIED, Batch, Case
from tests.oracle import ACROSS, OPTIMAL, SLOW, assert_same_tensors, sgd, tensors_of
from tests.sharding.divided_oracle import EXACT, Mark, compare, divided, loss_of, no_marks


def rows_of(*shape: int, classes: int = 5) -> Callable[[int], Batch]:
    return lambda rows: (torch.randn(rows, *shape), torch.randint(classes, (rows,)))


def pair(model: nn.Module) -> None:
    """The first two layers of an MLP: by output features, then by input features."""
    cf.shard(model[0], weight=("tp", None), bias=("tp",))  # type: ignore[index]
    cf.shard(model[2].weight, (None, "tp"))  # type: ignore[index]


PAIR = Case("pair", lambda: MLP(depth=1), rows_of(12))


@pytest.mark.parametrize("mesh", [(8,), (2, 2, 2)])
def test_mlp_without_marks(mesh: tuple[int, ...]) -> None:
    found = compare(MLP_CASE, mesh)
    assert found.layouts() == {}
    assert len(list(found.program.collectives())) == 3


@pytest.mark.parametrize("mesh", [(2, 4), (2, 2, 2)])
def test_mlp_with_a_pair_of_divided_layers(mesh: tuple[int, ...]) -> None:
    found = compare(PAIR, mesh, pair)
    # One sum behind the second layer; nobody needs the gradient of the input.
    assert found.collectives("tp") == {"forward all_reduce": 1}
    assert found.layouts() == {"0.weight": "S(0) on tp", "0.bias": "S(0) on tp", "2.weight": "S(1) on tp"}


class Marked(nn.Module):
    """Marks of functions and tensors in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(12, 16) / 4)
        self.second = nn.Parameter(torch.randn(16, 8) / 4)
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(cf.shard(torch.matmul, in_strategy=((2, 1), (1, 2)))(x, self.first))
        x = cf.shard(x, ("dp", "tp"))
        x = cf.shard(torch.matmul, in_strategy=((2, 2), (2, 1)))(x, self.second)
        return self.head(cf.shard(torch.sigmoid(x), ("dp", None)))


def torch_plan(model: nn.Module) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    cf.shard(model, {"0": ColwiseParallel(), "2": RowwiseParallel()}, axis="tp")


def by(path: str, *args: Any, **marks: Any) -> Mark:
    return lambda model: cf.shard(model.get_submodule(path) if path else model, *args, **marks)


HOW: dict[str, tuple[Case, tuple[int, ...], Mark]] = {
    "functions": (Case("marked", Marked, rows_of(12)), (2, 2), no_marks),
    "torch plan": (PAIR, (2, 2), torch_plan),
    "counts": (PAIR, (2, 2), by("0", weight=(2, 1), bias=(2,))),
    "counts on a part of an axis": (PAIR, (4,), by("0", in_strategy=((2, 1),), weight=(2, 1))),
    "pattern": (PAIR, (2, 2), by("", "2.w*", ("dp", "tp"))),
    "both axes on one dimension": (PAIR, (2, 2), by("2", weight=(("dp", "tp"), None))),
    "output": (PAIR, (2, 2), by("2", out_strategy=(("dp", "tp"),))),
    "tied words": (TIED, (2, 2), by("embed", weight=({"tp": "S(1)"}))),
    "used twice": (TIED, (2, 2), by("mix", weight=(None, "tp"))),
    "frozen and unused": (PARTLY, (2, 2), by("", "*.weight", {"tp": "S(1)"})),
    "one gradient for two": (SHARED, (2, 2), lambda model: cf.shard(model.a, ("tp", None))),
    "dict of inputs": (STRUCTURED, (2, 2), by("left", weight=("tp", None))),
}


@pytest.mark.parametrize("name", HOW)
def test_ways_to_mark(name: str) -> None:
    case, mesh, mark = HOW[name]
    compare(case, mesh, mark, steps=2)


class Layers(nn.Module):
    """Convolutions, norms, pooling, a jump with cat, and upsampling."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.down = nn.Sequential(
            nn.Conv2d(8, 8, 3, padding=1, groups=2), nn.GroupNorm(4, 8), nn.SiLU(), nn.AvgPool2d(2)
        )
        self.up = nn.Conv2d(16, 4, 1)
        self.head = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        y = F.interpolate(self.down(x), scale_factor=2, mode="bilinear", align_corners=False)
        return self.head(self.up(torch.cat([x, y], 1)).mean((2, 3)))


LAYERS = Case("layers", Layers, rows_of(3, 6, 6))


def channels(model: nn.Module) -> None:
    cf.shard(model, "first.0", weight=("tp", None, None, None), bias=("tp",))
    cf.shard(model, "up", weight=(None, "tp", None, None))


@pytest.mark.parametrize(
    ("case", "mesh", "mark"),
    [(CONV, (8,), no_marks), (LAYERS, (2, 2), no_marks), (LAYERS, (2, 2), channels)],
    ids=["nhwc", "data", "channels"],
)
def test_convolutions_with_statistics_of_the_whole_batch(case: Case, mesh: tuple[int, ...], mark: Mark) -> None:
    compare(case, mesh, mark, tolerance=1e-9)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(checkpoint(self.layer, x, use_reentrant=False).mean(1))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 8, batch_first=True)
        self.gru = nn.GRUCell(8, 8)
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.lstm(x)[0]
        return self.head(self.gru(x[:, -1], x[:, 0]))


class Bags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.EmbeddingBag(24, 8, mode="max")
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 5)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.bags(ids)))


class Losses(nn.Module):
    """A sum of several, a penalty, and a buffer that every step updates."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 16)
        self.last = nn.Linear(16, 5)
        self.back = nn.Linear(16, 12)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("weight", torch.rand(5) + 0.5)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.seen += x.mean()
        hidden = torch.relu(self.first(x))
        scores, again = self.last(hidden), self.back(hidden)
        found = F.cross_entropy(scores, y, weight=self.weight, ignore_index=2, label_smoothing=0.1)
        found = found + F.mse_loss(again, x) + F.smooth_l1_loss(again, x) + hidden.std() + hidden.norm()
        found = found + F.kl_div(scores.log_softmax(-1), scores.detach().softmax(-1).square(), reduction="batchmean")
        return found + 0.01 * self.first.weight.square().sum() + scores.logsumexp(0).mean()


class OddSizes(nn.Sequential):
    """Nothing but the batch divides by the mesh."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(7, 13), nn.ReLU(), nn.Linear(13, 11), nn.LayerNorm(11), nn.PReLU(), nn.Linear(11, 5))


class Fused(nn.Module):
    """Queries, keys and values from one layer, whose plain slices would be other heads than the ranks need."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)
        self.out = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (each.view(*each.shape[:2], 4, 4).transpose(1, 2) for each in self.qkv(x).split(16, -1))
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(found.transpose(1, 2).flatten(2).mean(1))


def encoder_marks(model: nn.Module) -> None:
    cf.shard(model, "layer.self_attn.in_proj_weight", {"tp": "S(0;3)"})
    cf.shard(model, "layer.self_attn.in_proj_bias", {"tp": "S(0;3)"})
    cf.shard(model, "layer.self_attn.out_proj.weight", (None, "tp"))
    cf.shard(model, "layer.linear1", weight=("tp", None), bias=("tp",))
    cf.shard(model, "layer.linear2.weight", (None, "tp"))


KINDS: dict[str, tuple[Case, Mark]] = {
    "encoder": (Case("encoder", Encoder, rows_of(6, 16)), encoder_marks),
    "recurrent": (Case("recurrent", Recurrent, rows_of(4, 6)), by("lstm", weight_ih_l0=(None, "tp"))),
    "bags": (Case("bags", Bags, lambda n: (torch.randint(24, (n, 5)), torch.randint(5, (n,)))), no_marks),
    "losses": (Case("losses", Losses, rows_of(12), None), by("first", weight=("tp", None))),
    "odd sizes": (Case("odd", OddSizes, rows_of(7)), no_marks),
}


@pytest.mark.parametrize("name", KINDS)
def test_kinds_of_models(name: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "commfuse_fx")
    case, mark = KINDS[name]
    compare(case, (2, 2), mark, steps=2)
    assert "sharding rule" not in caplog.text


def test_a_fused_projection_is_divided_inside_of_its_sections() -> None:
    case = Case("fused", Fused, rows_of(6, 16))
    found = compare(case, (2, 2), by("qkv", weight=("tp", None)), steps=2)
    assert found.layouts()["qkv.weight"] == "S(0;3) on tp"
    assert found.collectives("tp") == {"forward all_reduce": 1}


@pytest.mark.parametrize("mesh", [(4,), (2, 2)])
def test_no_parameter_is_divided_where_the_batch_is(mesh: tuple[int, ...]) -> None:
    """Even where less would be sent: here the batch is smaller than the layers are wide."""
    case = Case(
        "narrow batch",
        lambda: nn.Sequential(
            nn.Linear(4, 64), nn.BatchNorm1d(64), nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 5)
        ),
        rows_of(4),
    )
    assert compare(case, mesh, steps=2, rows=4, tolerance=1e-8, gradients=False).layouts() == {}


class Custom(torch.optim.Optimizer):
    """Steps along the sign of the gradient: nothing the compiler knows."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(torch.tanh(param.grad * 10), alpha=group["lr"])


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "adam": lambda m: torch.optim.Adam(m.parameters(), lr=0.01, amsgrad=True),
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01),
    "adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr=0.05),
    "rmsprop": lambda m: torch.optim.RMSprop(m.parameters(), lr=0.01, momentum=0.9, centered=True),
    "nadam": lambda m: torch.optim.NAdam(m.parameters(), lr=0.01),
    "adadelta": lambda m: torch.optim.Adadelta(m.parameters()),
    "asgd": lambda m: torch.optim.ASGD(m.parameters(), t0=1),
    "rprop": lambda m: torch.optim.Rprop(m.parameters(), lr=1e-3),
    "adafactor": lambda m: torch.optim.Adafactor(m.parameters()),
    "custom": lambda m: Custom(m.parameters()),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name: str) -> None:
    compare(PAIR, (2, 2), pair, OPTIMIZERS[name], tolerance=1e-7, gradients=False)


OPTIONS: dict[str, dict[str, Any]] = {
    "off": {"comm_fusion": {"openstate": False}},
    "index": {"comm_fusion": {"allreduce": {"mode": "index", "config": [2, 4]}}},
    "optimal": {"comm_fusion": OPTIMAL, "cluster": SLOW},
    "no schedule": {"schedule": "none"},
    "across steps": {"comm_fusion": OPTIMAL, "cluster": SLOW, "schedule": ACROSS},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_fusion_and_schedule(name: str) -> None:
    compare(PAIR, (2, 2), pair, gradients=name == "off", **OPTIONS[name])


@pytest.mark.parametrize(
    ("case", "mesh", "mark", "ways"),
    [(PAIR, (2, 4), pair, 2), (MLP_CASE, (2, 2, 2), no_marks, 8), (LAYERS, (4,), no_marks, 4)],
    ids=["pair", "data", "layers"],
)
def test_ranks_that_are_handed_their_part_of_the_batch(
    case: Case, mesh: tuple[int, ...], mark: Mark, ways: int
) -> None:
    compare(case, mesh, mark, ways=ways, tolerance=1e-9)


class Keywords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 16)
        self.table = nn.Embedding(10, 16)
        self.last = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor, *, ids: torch.Tensor, scale: torch.Tensor, more: dict[str, Any]) -> torch.Tensor:
        x = torch.relu(self.first(x) * scale + self.table(ids))
        return self.last(x) * more["factors"][0].mean() / more["by"]


def test_keywords_scalars_and_integers() -> None:
    generator = torch.Generator().manual_seed(3)
    named = [
        {
            "ids": torch.randint(10, (8,), generator=generator),
            "scale": torch.rand((), generator=generator, dtype=torch.float64),
            "more": {"factors": [torch.rand(3, generator=generator, dtype=torch.float64)], "by": 2},
        }
        for _ in range(2)
    ]
    mark = by("", {"first.weight": ("tp", None), "table.weight": (None, "tp")})
    compare(Case("keywords", Keywords, rows_of(12)), (2, 2), mark, steps=2, named=named)


def test_evaluation_and_other_shapes_keep_the_layouts() -> None:
    model = PAIR.model()
    found = divided(PAIR, model, (2, 2), pair)
    optimizer = sgd(model)
    for rows in (8, 16, 4, 8):
        batch = PAIR.batches(1, rows)[0]
        optimizer.zero_grad()
        loss = loss_of(PAIR, model, batch, {})
        loss.backward()
        optimizer.step()
        for other in found.run(batch):
            torch.testing.assert_close(other, loss.detach(), rtol=EXACT, atol=EXACT)
    plans = [plan.compiled.program.params for plan in found.world.step.planner.plans.values()]
    layouts = [{name: param.layout for name, param in params.items()} for params in plans]
    assert len(layouts) == 3
    assert layouts[0] == layouts[1] == layouts[2]
    assert any(isinstance(placement, Shard) for layout in layouts[0].values() for _, placement in layout)
    for each in (model, *found.world.models):
        each.eval()
    batch = PAIR.batches(1)[0]
    with torch.no_grad():
        expected = loss_of(PAIR, model, batch, {})
    for other in found.run(batch):
        torch.testing.assert_close(other, expected, rtol=EXACT, atol=EXACT)
    for mine in found.world.models:
        assert_same_tensors(tensors_of(mine), tensors_of(model), EXACT)


def test_autocast() -> None:
    class Mixed(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                found: torch.Tensor = super().forward(x.float()).float()
            return found

    case = Case("mixed", lambda: Mixed(*MLP(depth=1)), rows_of(12))
    model = case.model(torch.float32)
    batch = case.batches(1, dtype=torch.float32)[0]
    found = divided(case, model, (2, 2), pair, None)
    found.run(batch)
    loss_of(case, model, batch, {}).backward()
    for mine in found.world.models:
        assert_same_tensors(tensors_of(mine, gradients=True), tensors_of(model, gradients=True), 2e-2)


@pytest.mark.parametrize("mark", [no_marks, pair], ids=["data", "pair"])
def test_dropout_does_not_depend_on_the_mesh(mark: Mark) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(12, 16), nn.Dropout(0.4), nn.Linear(16, 16), nn.Dropout(0.3), nn.Linear(16, 5))

    case = Case("dropout", build, rows_of(12))
    model, batches = case.model(), case.batches(2)
    losses: list[torch.Tensor] = []
    for mesh in ((1, 1), (2, 2), (1, 4), (4, 1)):
        torch.manual_seed(7)
        found = divided(case, model, mesh, mark)
        losses.append(torch.stack([loss for batch in batches for loss in found.run(batch)[:1]]))
    for other in losses[1:]:
        torch.testing.assert_close(other, losses[0], rtol=EXACT, atol=EXACT)
    model.eval()
    with torch.no_grad():
        assert not torch.allclose(losses[0][0], loss_of(case, model, batches[0], {}))


def test_a_sum_that_is_left_out_shows() -> None:
    """The comparison would see a wrong step."""
    model = PAIR.model()
    found = divided(PAIR, model, (2, 2), pair)
    batch = PAIR.batches(1)[0]
    expected = loss_of(PAIR, model, batch, {}).detach()
    names = found.world.collectives(batch)
    call = found.world.step.planner.take_apart(batch, {})
    results = found.world.run([call] * 4, drop=names[:1])
    assert not torch.allclose(results[0].loss, expected, rtol=1e-3)
