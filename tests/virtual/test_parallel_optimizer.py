"""Updates that ranks share among them: parameters and states are those of one device and of plain data parallel."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import commfuse_fx as cf
from commfuse_fx.passes.schedule.stream_buckets import StreamBuckets
from commfuse_fx.virtual.virtual_world import LockstepWorld
from tests import captures
from tests.odd_rows import OddRows

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "plain sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "adam": lambda params: torch.optim.Adam(params, lr=0.01, amsgrad=True),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.05),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.01, momentum=0.5, centered=True),
    "nadam": lambda params: torch.optim.NAdam(params, lr=0.01, weight_decay=0.01),
    "radam": lambda params: torch.optim.RAdam(params, lr=0.01, betas=(0.8, 0.9)),
    "adamax": lambda params: torch.optim.Adamax(params, lr=0.01),
    "adadelta": lambda params: torch.optim.Adadelta(params, lr=0.5),
    "asgd": lambda params: torch.optim.ASGD(params, lr=0.05, t0=1),
    "rprop": lambda params: torch.optim.Rprop(params, lr=0.01),
}
NAMED = ("sgd", "adam", "adamw", "adagrad", "rmsprop", "nadam")
"""On each number of ranks, whose collectives are fused. The others follow the same path."""

APART = {"openstate": False}
CASES = [
    *((optimizer, ranks, None) for optimizer in NAMED for ranks in (1, 2, 3, 4)),
    *((optimizer, 3, None) for optimizer in OPTIMIZERS if optimizer not in NAMED),
    *((optimizer, ranks, APART) for optimizer in ("sgd", "adamw") for ranks in (2, 3)),
]
"""Optimizer, ranks, and comm_fusion."""

STEPS, ROWS = 5, 6
SMALL = {"parallel_optimizer_threshold": 0, "pad": True}
ROWS_ALONE = {**SMALL, "level": 3}
LEVELS = pytest.mark.parametrize("options", [SMALL, ROWS_ALONE], ids=["states", "rows alone"])


def batches(ranks: int, step: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    made = torch.Generator().manual_seed(step)
    x = torch.randn(ranks * ROWS, 12, generator=made, dtype=torch.float64)
    y = torch.randint(0, 13, (ranks * ROWS,), generator=made)
    return list(zip(x.chunk(ranks), y.chunk(ranks), strict=True))


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    params = [param for param in model.parameters() if param.requires_grad]
    return [{"params": params[::2]}, {"params": params[1::2], "lr": 0.02}]


def compiled(ranks: int, optimizer: str, options: dict[str, Any] | None, **others: Any) -> LockstepWorld:
    model = OddRows().double()
    captures.share(model, OddRows, any_mesh=True)
    made = OPTIMIZERS[optimizer](groups_of(model))
    divided = {} if options is None else {"enable_parallel_optimizer": True, "parallel_optimizer_config": options}
    step = cf.compile(
        model, loss_fn=F.cross_entropy, optimizer=made, device_num=ranks, global_rank=0, **divided, **others
    )
    return LockstepWorld(step)


def trained(world: LockstepWorld, drop: Sequence[str] = ()) -> LockstepWorld:
    for step in range(STEPS):
        world(batches(len(world.models), step), drop=drop)
    return world


@LEVELS
@pytest.mark.parametrize("ranks", [2, 3])
def test_gradients_are_clipped_by_the_norm_of_all_rows(ranks: int, options: dict[str, Any]) -> None:
    clipped = trained(compiled(ranks, "sgd", options, clip_grad_norm=0.05))
    model, _ = on_one_device(ranks, "sgd", clip=0.05)
    for each in clipped.models:
        torch.testing.assert_close(list(each.parameters()), list(model.parameters()), rtol=1e-9, atol=1e-12)


def on_one_device(ranks: int, optimizer: str, clip: float | None = None) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = OddRows().double()
    made = OPTIMIZERS[optimizer](groups_of(model))
    for step in range(STEPS):
        made.zero_grad()
        parts = batches(ranks, step)
        sum(F.cross_entropy(model(x), y) for x, y in parts).div(ranks).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        made.step()
    return model, made


def states_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [optimizer.state_dict()["state"][number] for number in sorted(optimizer.state_dict()["state"])]


@pytest.mark.parametrize("options", [SMALL, {**SMALL, "level": 2}, ROWS_ALONE], ids=["states", "early", "rows alone"])
@pytest.mark.parametrize(("optimizer", "ranks", "fusion"), CASES)
def test_training_is_that_of_one_device(optimizer: str, ranks: int, fusion: Any, options: dict[str, Any]) -> None:
    world = trained(compiled(ranks, optimizer, options, comm_fusion=fusion))
    model, eager = on_one_device(ranks, optimizer)
    for each, other in zip(world.models, world.optimizers, strict=True):
        for (name, param), (_, want) in zip(each.named_parameters(), model.named_parameters(), strict=True):
            torch.testing.assert_close(param, want, rtol=1e-9, atol=1e-12, msg=name)
        assert other is not None
        for state, want_state in zip(states_of(other), states_of(eager), strict=True):
            assert list(state) == list(want_state)
            torch.testing.assert_close(state, want_state, rtol=1e-9, atol=1e-12, check_dtype=False)


@pytest.mark.parametrize("options", [{"parallel_optimizer_threshold": 0}, SMALL], ids=["divides", "padded"])
def test_on_two_ranks_every_bit_is_that_of_plain_data_parallel(options: dict[str, Any]) -> None:
    divided, plain = trained(compiled(2, "adamw", options)), trained(compiled(2, "adamw", None))
    for one, other in zip(divided.models, plain.models, strict=True):
        for param, want in zip(one.parameters(), other.parameters(), strict=True):
            # Kernels round the last elements of a tensor, which fill no vector, otherwise than those in its middle.
            torch.testing.assert_close(param, want, rtol=1e-14, atol=1e-16)


@LEVELS
@pytest.mark.parametrize("ranks", [2, 3])
def test_rows_that_leave_in_pieces(ranks: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of a member, of several ones, and of parts of some; and each collective is needed all the same."""
    monkeypatch.setattr(StreamBuckets, "when", lambda situation: StreamBuckets(piece=64, first=32, rows=200))
    world, (model, _) = trained(compiled(ranks, "sgd", options)), on_one_device(ranks, "sgd")
    for each in world.models:
        torch.testing.assert_close(list(each.parameters()), list(model.parameters()), rtol=1e-9, atol=1e-12)
    reports = world.step.lower(*batches(ranks, 0)[0]).explain().collectives
    cut = [each.name for each in reports if each.pieces > 2]
    assert {name.rpartition("/")[2] for name in cut} >= {"reduce_scatter", "all_gather"}
    for name in cut:
        dropped = trained(compiled(ranks, "sgd", options), drop=[name])
        assert not torch.allclose(dropped.models[0].odd.weight, model.odd.weight), name


def test_a_rank_holds_the_states_of_its_rows_alone() -> None:
    world = trained(compiled(3, "adamw", SMALL))
    held = [
        sum(value.nbytes for each in shards._divided for value in each.state.values() if value.ndim)
        for shards in (ranks.shards for ranks in world._ranks)
        if shards is not None
    ]
    padded = sum(-(-param.shape[0] // 3) * 3 * param[0].numel() for param in world.models[0].parameters() if
                 param.requires_grad and param.ndim)  # fmt: skip
    assert held == [2 * 8 * padded // 3] * 3


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_explain_says_how_many_bytes_a_rank_holds(optimizer: str) -> None:
    world = trained(compiled(3, optimizer, SMALL))
    found = world.step.lower(*batches(1, 0)[0]).explain().memory
    shards = world._ranks[0].shards
    assert shards is not None
    apart = {each.whole: each.state for each in shards._divided}
    with torch._C.DisableTorchFunctionSubclass():
        states = [apart.get(param, state) for param, state in shards._users.state.items()]
        held = sum(value.nbytes for state in states for value in state.values() if isinstance(value, torch.Tensor))
        params = sum(param.nbytes for param in world.models[0].parameters())
    assert [each.per_rank for each in found.held if each.kind == "parameters"] == [params]
    assert [each.per_rank for each in found.held if each.kind == "optimizer state"] == [held]
    assert (held > 0) == (optimizer != "plain sgd") and found.is_divided


def test_explain_says_how_a_reduce_scatter_is_sent_on_a_cpu() -> None:
    said = [
        [note.subject for note in world.step.lower(*batches(1, 0)[0]).explain().notes if note.topic == "on CPU"]
        for world in (compiled(2, "sgd", SMALL), compiled(2, "sgd", {"mode": "broadcast"}), compiled(2, "sgd", None))
    ]
    assert said == [["reduce_scatter"], [], []]


def collectives(world: LockstepWorld) -> list[Any]:
    return world.step.lower(*batches(1, 0)[0]).collectives


def test_one_reduce_scatter_and_one_all_gather_for_each_divided_parameter() -> None:
    world = compiled(2, "adamw", SMALL, comm_fusion={"openstate": False})
    kinds = [each.kind for each in collectives(world)]
    # All that are trained but the scalar.
    assert kinds.count("reduce_scatter") == kinds.count("all_gather") == 8 and kinds.count("all_reduce") == 1
    for each in collectives(world):
        if each.kind != "all_reduce":
            param = dict(world.step.model.named_parameters())[each.members[0]]
            assert each.bytes == param.nbytes and each.phase == ("update" if each.kind == "all_gather" else "backward")


@pytest.mark.parametrize(("options", "count"), [(SMALL, 17), (ROWS_ALONE, 19)], ids=["states", "rows alone"])
def test_every_collective_is_needed(options: dict[str, Any], count: int) -> None:
    want = trained(compiled(3, "adamw", options, comm_fusion={"openstate": False}))
    names = [node.meta["commfuse"].name for node in _starts(want)]
    assert len(names) == count
    for name in names:
        world = trained(compiled(3, "adamw", options, comm_fusion={"openstate": False}), drop=[name])
        same = all(
            torch.allclose(param, other, rtol=1e-7, atol=1e-9)
            for one, two in zip(world.models, want.models, strict=True)
            for param, other in zip(one.parameters(), two.parameters(), strict=True)
        )
        assert not same, name


def _starts(world: LockstepWorld) -> list[Any]:
    lowered = world.step.lower(*batches(1, 0)[0])
    return [node for node in lowered.graph_module.graph.nodes if node.meta["commfuse"].collective is not None]


def tensor_parallel(options: dict[str, Any] | None, optimizer: str) -> tuple[LockstepWorld, nn.Module]:
    """Two layers that a strategy divides over "tp", on 2 x 2 ranks, after some steps; and what one device makes of
    them."""

    def model() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 14)).double()

    net, alone = model(), model()
    cf.shard(net[0], weight=("tp", None))
    cf.shard(net[2], weight=(None, "tp"))
    divided = {} if options is None else {"enable_parallel_optimizer": True, "parallel_optimizer_config": options}
    step = cf.compile(
        net, loss_fn=F.cross_entropy, optimizer=OPTIMIZERS[optimizer](net.parameters()), parallel_mode="semi_auto",
        mesh=(2, 2), device_num=4, clip_grad_norm=0.3, **divided,
    )  # fmt: skip
    world, eager = LockstepWorld(step), OPTIMIZERS[optimizer](alone.parameters())
    for number in range(STEPS):
        given = batches(2, number)
        world([given[0], given[0], given[1], given[1]])
        eager.zero_grad()
        x, y = (torch.cat(each) for each in zip(*given, strict=True))
        F.cross_entropy(alone(x), y).backward()
        nn.utils.clip_grad_norm_(alone.parameters(), 0.3)
        eager.step()
    return world, alone


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "nadam"])
@LEVELS
def test_divided_parameters_are_divided_further_where_they_repeat(options: dict[str, Any], optimizer: str) -> None:
    world, alone = tensor_parallel(options, optimizer)
    for model in world.models:
        torch.testing.assert_close(list(model.parameters()), list(alone.parameters()), rtol=1e-9, atol=1e-12)
    kinds = [each.kind for each in collectives(world) if each.members[0].endswith(("weight", "bias"))]
    assert {"reduce_scatter", "all_gather"} <= {*kinds} and "all_reduce" not in kinds
    assert [each.kind for each in collectives(world) if each.phase == "update"].count("all_reduce") == 1  # the norm's


class Weights(nn.Module):
    """Two weights of 72 and 56 KiB, and one that is marked."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Parameter(torch.randn(72, 256))
        self.small = nn.Parameter(torch.randn(56, 256))
        self.kept = nn.Parameter(torch.randn(72, 256))
        self.kept.parallel_optimizer = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ((x @ self.large.t()).sum() + (x @ self.small.t()).sum() * (x @ self.kept.t()).sum()) / 1e3


@pytest.mark.parametrize(
    ("threshold", "divided"),
    [(None, ["large"]), (100, []), (57, ["large"]), (56, ["small", "large"])],
)
def test_the_threshold_is_a_minimum_in_kib(threshold: int | None, divided: list[str]) -> None:
    model = Weights()
    options = None if threshold is None else {"parallel_optimizer_threshold": threshold}
    step = cf.compile(
        model, form="step", optimizer=torch.optim.SGD(model.parameters(), lr=0.1), device_num=4, global_rank=1,
        enable_parallel_optimizer=True, parallel_optimizer_config=options, comm_fusion={"openstate": False},
    )  # fmt: skip
    lowered = step.lower(torch.randn(3, 256))
    found = [each.members[0] for each in lowered.collectives if each.kind == "all_gather"]
    assert sorted(found) == sorted(divided)
    text = lowered.explain().text()
    assert "kept: it is marked with parallel_optimizer = False" in text
    if threshold == 100:
        assert "large: it has 72 KiB, less than parallel_optimizer_threshold=100" in text


SIZE = {"mode": "size", "config": 1}
IDS = (1, 1, 2, 2, 0, 0)
BUCKETS: dict[str, list[Any]] = {  # comm_fusion, fusion ids, reduce_scatters, all_gathers, and all_gathers of level 3
    "default": [None, (), "6", "6", "6 5"],
    "off": [{"openstate": False}, (), "1 1 1 1 1 1", "1 1 1 1 1 1", "1 1 1 1 1 1 1 1 1 1 1"],
    "sizes": [{"allgather": SIZE, "reducescatter": SIZE}, (), "4 2", "4 2", "4 2 4 1"],
    "size of gathers": [{"allgather": SIZE}, (), "6", "4 2", "4 2 4 1"],
    "ids": [None, IDS, "1 1 2 2", "2 1 2 1", "2 2 1 1 1 1 2 1"],
    "ids and sizes": [{"allgather": SIZE, "reducescatter": SIZE}, IDS, "1 1 2 2", "2 1 2 1", "2 2 1 1 1 1 2 1"],
    "ids and off": [{"openstate": False}, IDS, "1 1 1 1 1 1", "1 1 1 1 1 1", "1 1 1 1 1 1 1 1 1 1 1"],
}


@pytest.mark.parametrize("case", BUCKETS)
def test_fusion_ids_sizes_and_modes_hold_for_both_kinds(case: str) -> None:
    """Of six weights of 0.25 MiB. At level 3 the backward gathers all but the first one again."""
    fusion, ids, scattered, gathered, gathered_before_use = BUCKETS[case]
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(6)))
    for layer, number in zip(model, ids, strict=False):
        cf.set_comm_fusion(layer, number)
    for options in ({}, {"level": 2}, {"level": 3}, {"optimizer_weight_shard_size": 2}):
        step = cf.compile(
            model, fusion, loss_fn=F.mse_loss, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), device_num=4,
            enable_parallel_optimizer=True, parallel_optimizer_config=options,
        )  # fmt: skip
        x = torch.randn(2, 256)
        found: dict[str, list[str]] = {}
        for each in step.lower(x, x).collectives:
            found.setdefault(each.kind, []).append(str(len(each.members)))
        want = {
            "reduce_scatter": scattered,
            "all_gather": gathered_before_use if options.get("level") == 3 else gathered,
        }
        for kind, sizes in want.items():  # in which order they are sent is up to the schedule
            assert sorted(found[kind]) == sorted(sizes.split())


OPTIMAL = {"mode": "optimal", "config": None}


@pytest.mark.parametrize(
    ("cluster", "level", "buckets"),  # of reduce_scatters and of all_gathers
    [("h100-ib-8", 1, (1, 1)), ("h100-ib-8", 3, (1, 2)), ("gloo-1gbit", 1, (2, 6)), ("gloo-1gbit", 3, (2, 4))],
)
def test_optimal_buckets_of_both_kinds_are_the_fastest(cluster: str, level: int, buckets: tuple[int, int]) -> None:
    """Where starting a collective takes longest they are few, and several where bytes do."""
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(6)))
    x = torch.randn(64, 256)
    both = {"allgather": SIZE, "reducescatter": SIZE}, {"allgather": OPTIMAL, "reducescatter": OPTIMAL}
    seconds, found = [], [""]
    for fusion in (None, APART, *both):
        step = cf.compile(
            model, fusion, loss_fn=F.mse_loss, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), device_num=4,
            cluster=cluster, enable_parallel_optimizer=True, parallel_optimizer_config={"level": level},
        )  # fmt: skip
        lowered = step.lower(x, x)
        seconds.append(lowered.simulate().step_seconds)
        found = [each.kind for each in lowered.collectives]
    assert seconds[-1] == min(seconds)
    assert (found.count("reduce_scatter"), found.count("all_gather")) == buckets


def test_parameters_are_gathered_for_the_forward_and_again_for_the_backward() -> None:
    found: dict[str, list[str]] = {}
    for each in collectives(compiled(2, "adamw", ROWS_ALONE, comm_fusion={"openstate": False})):
        found.setdefault(f"{each.kind} {each.phase}", []).append(*each.members)
    assert len(found["all_gather forward"]) == len(found["reduce_scatter backward"]) == 8
    # The backward needs no biases, and not the first weight.
    assert sorted(found["all_gather backward"]) == ["back.weight", "odd.weight"]
    assert "all_gather update" not in found


def test_between_steps_a_rank_holds_its_rows_alone() -> None:
    world = trained(compiled(3, "adamw", ROWS_ALONE))
    shards = world._ranks[0].shards
    assert shards is not None and shards.is_divided
    with torch._C.DisableTorchFunctionSubclass():
        held = [param.untyped_storage().nbytes() for param in world.models[0].parameters() if param.requires_grad]
    assert sum(held) == 8  # the scalar is whole
    parts = sum(each.part.nbytes for each in shards._divided)
    whole = sum(-(-each.whole.shape[0] // 3) * 3 * each.whole[0].numel() * 8 for each in shards._divided)
    assert parts * 3 == whole


def test_few_parameters_are_whole_at_once() -> None:
    """Each is gathered while the one before is used, and is gone after its use."""
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(12)))
    peaks = []
    for level in (1, 2, 3):
        step = cf.compile(
            model, {"openstate": False}, loss_fn=F.mse_loss, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            device_num=8, enable_parallel_optimizer=True, parallel_optimizer_config={"level": level},
        )  # fmt: skip
        x = torch.randn(2, 256)
        peaks.append(step.lower(x, x).simulate("gloo-1gbit").peak_memory)
    weight = 256 * 256 * 4
    # All parameters and gradients; all parameters, and two or three gradients; rows, and two or three of both.
    assert [round(peak / weight, 1) for peak in peaks] == [25.5, 15.4, 5.8]


@LEVELS
def test_evaluation_in_between(options: dict[str, Any]) -> None:
    world, plain = compiled(2, "adamw", options), compiled(2, "adamw", None)
    losses = []
    for each in (world, plain):
        trained(each)
        for model in each.models:
            model.eval()
        losses.append([result.loss for result in each(batches(2, 0))])
        for model in each.models:
            model.train()
        trained(each)
    torch.testing.assert_close(losses[0], losses[1])
    for one, two in zip(world.models, plain.models, strict=True):
        torch.testing.assert_close(list(one.parameters()), list(two.parameters()), rtol=1e-12, atol=1e-14)


def test_evaluation_leaves_the_states_divided() -> None:
    world = trained(compiled(2, "adamw", SMALL))
    shards = world._ranks[0].shards
    assert shards is not None and shards.is_divided
    for model in world.models:
        model.eval()
    world(batches(2, 0))
    for model in world.models:
        model.train()
    trained(world)
    assert world._ranks[0].shards is shards and shards.is_divided


@LEVELS
def test_states_that_are_loaded_are_divided_again(options: dict[str, Any]) -> None:
    world, again = trained(compiled(2, "adamw", options)), compiled(2, "adamw", options)
    for model, optimizer, source, other in zip(
        again.models, again.optimizers, world.models, world.optimizers, strict=True
    ):
        assert optimizer is not None and other is not None
        model.load_state_dict(source.state_dict())
        optimizer.load_state_dict(copy.deepcopy(other.state_dict()))
    trained(world)
    trained(again)
    for one, two in zip(world.models, again.models, strict=True):
        for param, want in zip(one.parameters(), two.parameters(), strict=True):
            assert torch.equal(param, want)


def test_states_that_two_steps_share_are_gathered_before_the_other_one_takes_them() -> None:
    """`load_state_dict` copies no tensor that has the right type and device."""
    world, again = trained(compiled(2, "adamw", SMALL)), compiled(2, "adamw", SMALL)
    trained(again)
    for optimizer, other in zip(again.optimizers, world.optimizers, strict=True):
        assert optimizer is not None and other is not None
        optimizer.load_state_dict(other.state_dict())
    want = [copy.deepcopy(states_of(other)) for other in world.optimizers if other is not None]
    trained(world)  # which divides its states again
    for optimizer, state in zip(again.optimizers, want, strict=True):
        assert optimizer is not None and [each["exp_avg"].shape for each in states_of(optimizer)] == [
            each["exp_avg"].shape for each in state
        ]
    trained(again)


@LEVELS
def test_parameters_that_the_user_writes_are_used(options: dict[str, Any]) -> None:
    world, plain = compiled(2, "sgd", options), compiled(2, "sgd", None)
    for each in (world, plain):
        trained(each)
        for model in each.models:
            with torch.no_grad():
                model.into.weight.mul_(0.5)
                model.odd.bias.data = torch.ones(13, dtype=torch.float64)
        trained(each)
    for one, two in zip(world.models, plain.models, strict=True):
        for param, want in zip(one.parameters(), two.parameters(), strict=True):
            torch.testing.assert_close(param, want, rtol=1e-12, atol=1e-14)


def test_marks_may_come_and_go(caplog: pytest.LogCaptureFixture) -> None:
    world, plain = (trained(compiled(2, "adamw", options)) for options in ({"parallel_optimizer_threshold": 0}, None))
    for mark in (False, True):
        for model in (*world.models, *plain.models):
            model.into.weight.parallel_optimizer = mark
        trained(world)
        trained(plain)
        said = world.step.lower(*batches(1, 0)[0]).explain().text()
        assert ("into.weight: it is marked with parallel_optimizer = False" in said) != mark
    for one, two in zip(world.models, plain.models, strict=True):
        torch.testing.assert_close(list(one.parameters()), list(two.parameters()), rtol=1e-12, atol=1e-14)
    assert not caplog.records  # as if somebody else looked at the memory of the parameter
