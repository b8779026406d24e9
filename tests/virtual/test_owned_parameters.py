"""Parameters that one rank each updates (mode "broadcast"): training is that of one device."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import commfuse_fx as cf
from commfuse_fx.ir.core.collectives import group_of, is_start, kind_of, root_of
from commfuse_fx.virtual.virtual_world import LockstepWorld
from tests.virtual.test_parallel_optimizer import (
    APART,
    CASES,
    SMALL,
    STEPS,
    batches,
    compiled,
    on_one_device,
    states_of,
    trained,
)

OWNED = {"parallel_optimizer_threshold": 0, "mode": "broadcast"}


@pytest.mark.parametrize(("optimizer", "ranks", "fusion"), CASES)
def test_training_is_that_of_one_device(optimizer: str, ranks: int, fusion: Any) -> None:
    world = trained(compiled(ranks, optimizer, OWNED, comm_fusion=fusion))
    model, eager = on_one_device(ranks, optimizer)
    for each, other in zip(world.models, world.optimizers, strict=True):
        for (name, param), (_, want) in zip(each.named_parameters(), model.named_parameters(), strict=True):
            torch.testing.assert_close(param, want, rtol=1e-9, atol=1e-12, msg=name)
        assert other is not None
        for state, want_state in zip(states_of(other), states_of(eager), strict=True):
            assert list(state) == list(want_state)
            torch.testing.assert_close(state, want_state, rtol=1e-9, atol=1e-12, check_dtype=False)


def held(world: LockstepWorld) -> list[dict[str, int]]:
    """Bytes of states of each parameter, by rank, but for counts of steps."""
    return [
        {each.name: sum(value.nbytes for value in each.state.values() if value.ndim) for each in ranks.shards._divided}
        for ranks in world._ranks
        if ranks.shards is not None
    ]


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_the_owner_alone_has_state_and_all_own_about_as_many_bytes(ranks: int) -> None:
    world = trained(compiled(ranks, "adamw", OWNED))
    found = held(world)
    params = {name: param for name, param in world.models[0].named_parameters() if param.requires_grad and param.ndim}
    for name, param in params.items():
        assert sorted(each[name] for each in found) == [0] * (ranks - 1) + [2 * param.nbytes]
    whole, largest = sum(2 * each.nbytes for each in params.values()), max(2 * each.nbytes for each in params.values())
    assert max(sum(each.values()) for each in found) <= max(4 / 3 * whole / ranks, largest)


def starts(world: LockstepWorld) -> list[Any]:
    lowered = world.step.lower(*batches(1, 0)[0])
    return [node for node in lowered.graph_module.graph.nodes if is_start(node)]


def test_one_reduce_and_one_broadcast_of_each_parameter_by_its_owner() -> None:
    world = compiled(3, "adamw", OWNED, comm_fusion=APART)
    found: dict[str, Counter[str]] = {}
    roots: dict[str, set[Any]] = {}
    for node in starts(world):
        details = node.meta["commfuse"].collective
        (name,) = details.members
        found.setdefault(kind_of(node), Counter())[name] += 1
        if kind_of(node) != "all_reduce":
            roots.setdefault(name, set()).add((root_of(node), group_of(node)))
            assert details.nbytes == dict(world.step.model.named_parameters())[name].nbytes
    assert set(found["all_reduce"]) == {"scale"}  # whose state could be a count of steps
    assert found["reduce"] == found["broadcast"] and len(found["reduce"]) == 8 == found["reduce"].total()
    assert all(len(each) == 1 for each in roots.values())
    assert {root for each in roots.values() for root, _ in each} == {0, 1, 2}


def test_every_collective_is_needed() -> None:
    want = trained(compiled(3, "adamw", OWNED, comm_fusion=APART))
    names = [node.meta["commfuse"].name for node in starts(want)]
    assert len(names) == 17
    for name in names:
        world = trained(compiled(3, "adamw", OWNED, comm_fusion=APART), drop=[name])
        same = all(
            torch.allclose(param, other, rtol=1e-7, atol=1e-9)
            for one, two in zip(world.models, want.models, strict=True)
            for param, other in zip(one.parameters(), two.parameters(), strict=True)
        )
        assert not same, name


def linears(ids: Sequence[int] = (), **options: Any) -> cf.Lowered:
    """Of 6 weights of 1 MiB on 3 ranks, each of which owns two. ids: fusion ids of the first ones."""
    model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(6)))
    for layer, number in zip(model, ids, strict=False):
        cf.set_comm_fusion(layer, number)
    optimizer = torch.optim.AdamW(model.parameters())
    step = cf.compile(
        model, loss_fn=F.mse_loss, optimizer=optimizer, device_num=3,
        **{"enable_parallel_optimizer": True, "parallel_optimizer_config": {"mode": "broadcast"}, **options},
    )  # fmt: skip
    x = torch.randn(2, 512)
    return step.lower(x, x)


def test_buckets_are_those_of_an_owner_and_follow_the_options_of_rows() -> None:
    def buckets(fusion: Any, ids: Sequence[int] = ()) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for each in linears(ids, comm_fusion=fusion).collectives:
            found.setdefault(each.kind, []).append(len(each.members))
        return found

    size = {"mode": "size", "config": 1}
    assert buckets(None) == {"reduce": [2] * 3, "broadcast": [2] * 3}
    assert buckets(APART) == {"reduce": [1] * 6, "broadcast": [1] * 6}
    assert buckets({"reducescatter": size}) == {"reduce": [1] * 6, "broadcast": [2] * 3}
    assert buckets({"allgather": size}) == {"reduce": [2] * 3, "broadcast": [1] * 6}
    # Parameters of one id have one owner and go together, those of id 0 go alone, and so does the last one.
    apart = buckets(None, ids=[7, 7, 7, 0, 0])
    assert {kind: sorted(found) for kind, found in apart.items()} == {"reduce": [1, 1, 1, 3], "broadcast": [1, 1, 1, 3]}
    optimal = {"mode": "optimal", "config": None}
    found = linears(comm_fusion={"reducescatter": optimal, "allgather": optimal}, cluster="gloo-1gbit").collectives
    for kind in ("reduce", "broadcast"):
        members = [name for each in found if each.kind == kind for name in each.members]
        assert sorted(members) == [f"{number}.weight" for number in range(6)]


def test_explain_says_who_updates_what_and_how_much_the_fullest_rank_holds() -> None:
    explanation = linears(parallel_optimizer_config={"mode": "broadcast"}).explain()
    said = {note.subject: note.reason for note in explanation.notes if note.topic == "sharded updates"}
    assert said["0.weight"] == "rank 0 over dp updates it" and said["5.weight"] == "rank 2 over dp updates it"
    weight = 4 * 512 * 512
    held = {each.kind: (each.whole, each.per_rank) for each in explanation.memory.held}
    assert held["parameters"] == (6 * weight, 6 * weight) and held["gradients"] == (6 * weight, 2 * weight)
    assert held["optimizer state"] == (12 * weight + 24, 4 * weight + 24)
    whole = linears(enable_parallel_optimizer=False, comm_fusion=APART).explain()
    apart = linears(comm_fusion=APART).explain()
    assert apart.memory.peak < whole.memory.peak - 7 * weight
    assert apart.simulation.compute_seconds < whole.simulation.compute_seconds


def test_the_text_is_that_of_every_rank() -> None:
    texts = []
    for rank in range(3):
        world = compiled(3, "adamw", OWNED)
        model = world.step.model
        step = cf.compile(
            model, loss_fn=F.cross_entropy, optimizer=torch.optim.AdamW(model.parameters()), device_num=3,
            global_rank=rank, enable_parallel_optimizer=True, parallel_optimizer_config=OWNED,
        )  # fmt: skip
        texts.append(step.lower(*batches(1, 0)[0]).text())
    assert texts[0] == texts[1] == texts[2]


def test_parameters_of_another_memory_format_are_owned() -> None:
    def trained_on(options: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 16, 4)).to(
            memory_format=torch.channels_last
        )
        step = cf.compile(
            model.double(), loss_fn=F.cross_entropy, optimizer=torch.optim.RMSprop(model.parameters(), lr=0.01),
            device_num=3, **options,
        )  # fmt: skip
        world = LockstepWorld(step)
        made = torch.Generator().manual_seed(0)
        for _ in range(STEPS):
            x = torch.randn(6, 3, 6, 6, generator=made, dtype=torch.float64)
            y = torch.randint(0, 4, (6,), generator=made)
            world(list(zip(x.chunk(3), y.chunk(3), strict=True)))
        assert all(model[0].weight.is_contiguous(memory_format=torch.channels_last) for model in world.models)
        return [param.detach() for model in world.models for param in model.parameters()]

    owned = trained_on({"enable_parallel_optimizer": True, "parallel_optimizer_config": OWNED})
    for param, want in zip(owned, trained_on({}), strict=True):
        torch.testing.assert_close(param, want, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("fusion", [None, APART], ids=["fused", "apart"])
def test_gradients_are_clipped_by_the_norm_of_all(fusion: Any) -> None:
    owned, plain = (
        trained(compiled(3, "adamw", options, comm_fusion=fusion, clip_grad_norm=0.05)) for options in (OWNED, None)
    )
    for one, other in zip(owned.models, plain.models, strict=True):
        for param, want in zip(one.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(param, want, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("options", [OWNED, SMALL], ids=["owned", "rows"])
def test_updates_that_run_in_the_next_step_are_sent_behind_them(options: Any) -> None:
    """Each parameter has an update of its own."""

    def trained_on(options: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(12, 26), nn.Tanh(), nn.Linear(26, 13)).double()
        step = cf.compile(
            model, loss_fn=F.cross_entropy, optimizer=torch.optim.AdamW(model.parameters(), lr=0.01), device_num=3,
            schedule=cf.ScheduleConfig(across_steps=True), cluster="gloo-1gbit", comm_fusion=APART,
            enable_parallel_optimizer=options is not None, parallel_optimizer_config=options,
        )  # fmt: skip
        world = LockstepWorld(step)
        for number in range(STEPS):
            world(batches(3, number))
        return [param.clone() for model in world.models for param in model.parameters()]

    for param, want in zip(trained_on(options), trained_on(None), strict=True):
        torch.testing.assert_close(param, want, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("options", [OWNED, SMALL], ids=["owned", "rows"])
def test_ranks_hold_different_states_and_agree_on_the_rest(options: Any) -> None:
    (x, y), *_ = batches(1, 0)
    found = cf.lockstep(compiled(3, "adamw", options).step.lower(x, y), tolerance=1e-12)
    for _ in range(2):
        found(x, y)
    assert found.disagreement is None


def test_parts_of_a_strategy_are_owned() -> None:
    """On a mesh of 2 x 2 ranks, each part of the first weight has an owner among the two ranks that hold it."""

    def trained_on(options: Any) -> LockstepWorld:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 4)).double()
        cf.shard(model[0], weight=("tp", None), bias=("tp",))
        world = LockstepWorld(
            cf.compile(
                model, loss_fn=F.cross_entropy, optimizer=torch.optim.AdamW(model.parameters(), lr=0.01),
                parallel_mode="semi_auto", mesh=(2, 2), device_num=4, **options,
            )
        )  # fmt: skip
        made = torch.Generator().manual_seed(0)
        for _ in range(STEPS):
            x = torch.randn(2, 6, 12, generator=made, dtype=torch.float64)
            y = torch.randint(0, 4, (2, 6), generator=made)
            world([(x[rank // 2], y[rank // 2]) for rank in range(4)])
        return world

    world = trained_on({"enable_parallel_optimizer": True, "parallel_optimizer_config": OWNED})
    weight = 12 * 8 * 8
    assert sorted(each["0.weight"] for each in held(world)) == [0, 0, weight, weight]
    # The bias of the last layer alone is the same on all four ranks: of each pair one owns it.
    assert sum(sum(each.values()) for each in held(world)) == 2 * 8 * (12 * 8 + 8 + 8 * 4 + 2 * 4)
    plain = trained_on({})
    for one, other in zip(world.models, plain.models, strict=True):
        for param, want in zip(one.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(param.clone(), want.clone(), rtol=1e-9, atol=1e-12)
    for one, other in zip(world.optimizers, plain.optimizers, strict=True):
        assert one is not None and other is not None
        torch.testing.assert_close(states_of(one), states_of(other), rtol=1e-9, atol=1e-12)


def test_states_that_are_loaded_go_to_their_owners() -> None:
    world, again = trained(compiled(2, "adamw", OWNED)), compiled(2, "adamw", OWNED)
    for model, optimizer, source, other in zip(
        again.models, again.optimizers, world.models, world.optimizers, strict=True
    ):
        assert optimizer is not None and other is not None
        model.load_state_dict(source.state_dict())
        optimizer.load_state_dict(copy.deepcopy(other.state_dict()))
    trained(world)
    trained(again)
    assert held(again) == held(world)
    for one, two in zip(world.models, again.models, strict=True):
        for param, want in zip(one.parameters(), two.parameters(), strict=True):
            assert torch.equal(param, want)


@pytest.mark.parametrize(
    "others",
    [{}, {"comm_fusion": APART}, {"clip_grad_norm": 0.05}, {"accumulate_steps": 2}],
    ids=["fused", "apart", "clipped", "micro-batches"],
)
def test_level_2_trains_as_level_1(others: dict[str, Any]) -> None:
    one, two = (trained(compiled(3, "nadam", {**OWNED, "level": level}, **others)) for level in (1, 2))
    for first, second in zip(one.models, two.models, strict=True):
        assert all(map(torch.equal, first.parameters(), second.parameters()))


@pytest.mark.parametrize("cluster", [None, "gloo-1gbit"])
def test_at_level_2_few_gradients_are_there_at_once(cluster: str | None) -> None:
    peaks = []
    for level in (1, 2):
        model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(12)))
        step = cf.compile(
            model, APART, loss_fn=F.mse_loss, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), device_num=4,
            enable_parallel_optimizer=True, parallel_optimizer_config={**OWNED, "level": level}, cluster=cluster,
        )  # fmt: skip
        x = torch.randn(2, 256)
        peaks.append(step.lower(x, x).simulate("gloo-1gbit").peak_memory)
    weight = 256 * 256 * 4
    # All parameters and gradients; all parameters, a quarter of the gradients, and two that are on their way.
    assert [round(peak / weight, 1) for peak in peaks] == [24.0, 16.5]


def test_at_level_2_gradients_in_bf16_are_freed_when_the_owner_has_cast_them() -> None:
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(12))).bfloat16()
    step = cf.compile(
        model, APART, loss_fn=F.mse_loss, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), device_num=4,
        enable_parallel_optimizer=True, parallel_optimizer_config={**OWNED, "level": 2},
    )  # fmt: skip
    x = torch.randn(2, 256, dtype=torch.bfloat16)
    lowered = step.lower(x, x)
    order = list(lowered.graph_module.graph.nodes)
    place = {node.meta["commfuse"].name: at for at, node in enumerate(order)}
    sent = [node.meta["commfuse"].name.split("/")[1] for node in order if is_start(node) and kind_of(node) == "reduce"]
    assert len(sent) == 12
    for name, later in pairwise(sent):
        assert place[f"shard/{name}/gradient"] < place[f"reduce/{later}/reduce"]


@pytest.mark.parametrize("options", [SMALL, {**SMALL, "level": 3}, OWNED], ids=["rows", "rows alone", "owners"])
def test_gradients_are_clipped_where_they_lie_in_their_bucket(options: dict[str, Any]) -> None:
    world = compiled(3, "adamw", options, clip_grad_norm=0.05)
    lowered = world.step.lower(*batches(1, 0)[0])
    nodes = [node for node in lowered.graph_module.graph.nodes if "/clipped." in node.meta["commfuse"].name]
    assert len(nodes) > 8 and all(node.target is torch.ops.aten.mul_.Tensor for node in nodes)
