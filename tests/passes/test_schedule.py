"""The cost-based schedule: what it picks, what it keeps to, and that all ranks pick alike."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import commfuse_fx as cf
from commfuse_fx.capture.build import capture as trace
from commfuse_fx.cost.memory import peak_memory
from commfuse_fx.cost.model import CostModel
from commfuse_fx.errors import ConfigValueError
from commfuse_fx.ir.core.collectives import is_start, is_wait, wait_of
from commfuse_fx.ir.core.meta import info
from commfuse_fx.ir.core.program import Program
from commfuse_fx.ir.text.write_text import canonical_text
from commfuse_fx.machine.presets import preset
from commfuse_fx.planning import compile_call
from commfuse_fx.simulate.rounds import play
from commfuse_fx.solvers.buckets.pieces import PIECE
from tests.distributed.harness import Ranks
from tests.models import CONTRASTIVE, CONV, DIGITS, GPT2, MLP_CASE, TIED, WIDE, Case, shards
from tests.oracle import (
    ACROSS,
    ACROSS_STEPS,
    FAST,
    OPTIMAL,
    SLOW,
    MakeOptimizer,
    assert_same,
    make_world,
    sgd,
    train_reference,
    train_world,
)
from tests.oracle import cluster as make_cluster

CLUSTERS = {"slow": SLOW, "fast": FAST}
one_plan = pytest.mark.usefixtures("no_other_plan")
each_cluster = pytest.mark.parametrize("cluster", CLUSTERS.values(), ids=CLUSTERS.keys())


def lower(case: Case, make_optimizer: MakeOptimizer | None = sgd, world: int = 4, **options: Any) -> cf.Lowered:
    options = {"comm_fusion": OPTIMAL, "cluster": SLOW, **options}
    ranks = make_world(case, case.model(torch.float32), world, make_optimizer, **options)
    return ranks.step.lower(*shards(case.batches(1, dtype=torch.float32)[0], world)[0])


def seconds(program: Program, cluster: cf.ClusterSpec) -> float:
    """Of one step in its steady state, by simulation."""
    played = play(program, CostModel(cluster))
    return played.ended - played.began


def notes(program: Program, topic: str) -> dict[str, str]:
    return {note.subject: note.reason for note in program.notes if note.topic == topic}


# What is picked.


@one_plan
@each_cluster
@pytest.mark.parametrize("across", [False, True], ids=["within", "across"])
@pytest.mark.parametrize("case", [DIGITS, WIDE, CONV, CONTRASTIVE, GPT2], ids=lambda case: case.name)
def test_the_fastest_by_simulation_is_picked(case: Case, across: bool, cluster: cf.ClusterSpec) -> None:
    program = lower(case, cluster=cluster, schedule=cf.ScheduleConfig(across_steps=across)).program
    tried = notes(program, "schedule")
    times = {name: float(reason.split(": ")[1].split(" ms")[0]) for name, reason in tried.items()}
    (chosen,) = [name for name, reason in tried.items() if reason.startswith("chosen")]
    assert {"overlap", "unscheduled"} <= tried.keys()
    assert times[chosen] == min(times.values())
    assert seconds(program, cluster) * 1e3 == pytest.approx(times[chosen], abs=2e-3)


FUSIONS: dict[str, Any] = {"auto": None, "off": {"openstate": False}, "optimal": OPTIMAL}
# Every case with every fusion, within a step and across steps, on one of the clusters in turn.
COMPARED = [
    pytest.param(case, fusion, across, SLOW if (row + column + across) % 2 else FAST, id=f"{case.name}-{name}-{across}")
    for row, case in enumerate((DIGITS, WIDE, TIED, CONTRASTIVE))
    for column, (name, fusion) in enumerate(FUSIONS.items())
    for across in (False, True)
]


@pytest.mark.parametrize(("case", "fusion", "across", "cluster"), COMPARED)
def test_never_slower_than_unscheduled(case: Case, fusion: Any, across: bool, cluster: cf.ClusterSpec) -> None:
    schedule = cf.ScheduleConfig(across_steps=across)
    step = make_world(case, case.model(), 4, sgd, fusion, cluster=cluster, schedule=schedule).step
    compiled = step.planner.read(step.planner.take_apart(shards(case.batches(1)[0], 4)[0], {}))
    assert compiled.captured is not None
    program = compiled.captured.copy()
    number = [each.name for each in compiled.pipeline.passes].index("schedule")
    compiled.pipeline.run(program, part=slice(number))
    before = seconds(program, cluster)
    compiled.pipeline.run(program, part=slice(number, number + 1))
    assert seconds(program, cluster) <= before * (1 + 1e-6)


def test_communication_runs_on_into_the_next_step_where_that_pays() -> None:
    even = make_cluster("even", 1e-5, 1e9)  # communication takes about as long as compute
    across, within = (
        lower(
            WIDE, comm_fusion={"openstate": False}, cluster=even, schedule=cf.ScheduleConfig(across_steps=each)
        ).program
        for each in (True, False)
    )
    assert seconds(across, even) < 0.9 * seconds(within, even)
    assert any(info(node).next_step is not None for node in across.graph.nodes)
    assert all(info(node).next_step is None for node in within.graph.nodes)


@one_plan
def test_large_buckets_leave_in_pieces_of_the_size_that_simulates_fastest() -> None:
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(10)))
    step = cf.compile(model, loss_fn=F.mse_loss, optimizer=sgd(model), device_num=2, cluster=preset("gloo-1gbit"))
    x = torch.empty(512, 512)
    program = step.lower(x, x).program
    pieces = {name: text for name, text in notes(program, "schedule").items() if "pieces" in name}
    assert pieces["overlap, large buckets in small pieces"].startswith("chosen: ")
    assert pieces["overlap, large buckets in pieces"].startswith("not chosen: ")
    (start,) = (node for node in program.collectives() if info(node).writes)
    sent = [stretch for node in program.graph.nodes for _, stretch in info(node).sends] + [*info(start).rest]
    assert len(sent) > 4 and max(stretch.size for stretch in sent) < PIECE // 4


def test_explain_says_what_was_tried_and_what_was_chosen() -> None:
    text = lower(WIDE, schedule=ACROSS).explain().text()
    for name in ("across steps", "overlap", "unscheduled"):
        assert name in text
    assert "chosen: " in text and "not chosen: " in text and "ms simulated" in text


@one_plan
def test_explain_says_why_optimal_fusion_cut_as_it_did() -> None:
    assert "all_reduce -> " in lower(WIDE).explain().text()
    assert "arrives" in "".join(notes(lower(WIDE).program, "fusion").values())
    assert "across steps" in "".join(notes(lower(WIDE, schedule=ACROSS).program, "fusion").values())


# What cannot wait for the next step.


@one_plan
@pytest.mark.parametrize(
    "make_optimizer",
    [
        None,
        lambda model: torch.optim.Adafactor(model.parameters(), lr=1e-2),
    ],
    ids=["no optimizer", "adafactor"],
)
@pytest.mark.parametrize("fusion", [None, OPTIMAL], ids=["auto", "optimal"])
def test_without_updates_of_its_own_a_step_is_complete_when_it_returns(
    make_optimizer: MakeOptimizer | None, fusion: Any
) -> None:
    program = lower(DIGITS, make_optimizer, comm_fusion=fusion, schedule=ACROSS).program
    assert all(info(node).next_step is None for node in program.graph.nodes)
    said = {"the step": "no update can wait for the next step: nothing is deferred"}
    assert notes(program, "across_steps") == ({} if make_optimizer is None else said)
    assert "across steps" not in notes(program, "schedule")
    model, batches = DIGITS.model(), DIGITS.batches(2)
    want = train_reference(DIGITS, model, batches, 2, make_optimizer)
    world = make_world(DIGITS, model, 2, make_optimizer, comm_fusion=fusion, cluster=SLOW, schedule=ACROSS)
    train_world(world, batches)
    assert not world.is_pending
    assert_same(world.models, want, gradients=make_optimizer is None)


@one_plan
def test_an_evaluation_is_complete_when_it_returns() -> None:
    ranks = make_world(CONTRASTIVE, CONTRASTIVE.model(), 2, sgd, **ACROSS_STEPS)
    ranks.step.model.eval()
    program = ranks.step.lower(*shards(CONTRASTIVE.batches(1)[0], 2)[0]).program
    assert len(list(program.collectives())) == 2
    assert all(info(node).next_step is None for node in program.graph.nodes)


# Memory.


def peaks(case: Case, **options: Any) -> int:
    return peak_memory(lower(case, **options).program)


@pytest.mark.parametrize("across", [False, True], ids=["within", "across"])
def test_the_peak_stays_below_the_limit(across: bool) -> None:
    check_limits(WIDE, across)


@one_plan
@pytest.mark.parametrize(
    ("case", "across"),
    [
        *(pytest.param(case, True, id=f"{case.name}-across") for case in (DIGITS, CONV, CONTRASTIVE, GPT2)),
        *(pytest.param(case, False, id=f"{case.name}-within") for case in (DIGITS, CONTRASTIVE)),
    ],
)
def test_the_peak_of_one_plan_stays_below_the_limit(case: Case, across: bool) -> None:
    check_limits(case, across)


def check_limits(case: Case, across: bool) -> None:
    """The least that is possible, what the fastest plan takes, and one between them; below the least is an error."""
    free = peaks(case, schedule=cf.ScheduleConfig(across_steps=across))
    least = least_memory(case, across)
    assert least <= free
    for limit in sorted({least, (least + free) // 2, free}):
        schedule = cf.ScheduleConfig(memory_limit=limit, across_steps=across)
        assert peaks(case, schedule=schedule) <= limit
    if least > 1:
        with pytest.raises(ConfigValueError, match=str(least - 1)):
            lower(case, schedule=cf.ScheduleConfig(memory_limit=least - 1, across_steps=across))


def least_memory(case: Case, across: bool) -> int:
    """What the error for an impossible limit says is needed."""
    with pytest.raises(ConfigValueError) as caught:
        lower(case, schedule=cf.ScheduleConfig(memory_limit=1, across_steps=across))
    message = str(caught.value)
    assert message.startswith("memory_limit=1 is below what the step needs: ")
    assert "raise the limit" in message
    return int(message.split("needs: ")[1].split(" bytes")[0])


def test_kept_memory_is_given_up_first_and_only_as_far_as_it_takes() -> None:
    def kept(limit: int | None) -> int:
        program = lower(WIDE, comm_fusion={"openstate": False}, schedule=cf.ScheduleConfig(memory_limit=limit)).program
        assert limit is None or peak_memory(program) <= limit
        given_up = notes(program, "memory cap")
        names = [info(node).name for node in program.graph.nodes if info(node).kept]
        assert not given_up.keys() & set(names)
        assert all("is not kept between steps" in reason for reason in given_up.values())
        assert len(names) + len(given_up) == 9  # of 10: the last bias would have to be padded
        return len(names)

    free = peaks(WIDE, comm_fusion={"openstate": False})
    assert kept(None) == kept(free) == 9
    assert 0 < kept(free - 1) < 9


@pytest.mark.parametrize("across", [False, True])
def test_a_limit_that_the_fastest_plan_meets_changes_nothing(across: bool) -> None:
    def planned(limit: int | None) -> cf.Lowered:
        return lower(WIDE, schedule=cf.ScheduleConfig(memory_limit=limit, across_steps=across), cluster=SLOW)

    def steps_of(lowered: cf.Lowered) -> list[str]:
        return [line for line in lowered.text().splitlines() if not line.startswith("#")]

    free = planned(None)
    limited = planned(peak_memory(free.program))
    assert steps_of(limited) == steps_of(free)
    tried = [notes(each.program, "schedule") for each in (limited, free)]
    assert tried[0] == tried[1], "slower arrangements are listed, though nobody looked at their memory"
    assert len(tried[0]) >= 2


@one_plan
def test_a_limit_costs_no_bits() -> None:
    batches = WIDE.batches(3)
    free = make_world(WIDE, WIDE.model(), 2, sgd, **ACROSS_STEPS)
    part = shards(batches[0], 2)[0]
    peak = peak_memory(free.step.lower(*part).program)
    schedule = replace(ACROSS, memory_limit=peak - 1)
    tight = make_world(WIDE, WIDE.model(), 2, sgd, **{**ACROSS_STEPS, "schedule": schedule})
    program = tight.step.lower(*part).program
    assert peak_memory(program) < peak
    models = [train_world(world, batches) for world in (tight, free)]
    tight.synchronize()
    free.synchronize()
    assert_same(*models, tolerance=1e-13)


class Gathering(nn.Module):
    """Gathers all that it needs at the beginning, and uses it piece by piece."""

    def __init__(self, count: int = 4, width: int = 64) -> None:
        super().__init__()
        self.shared = nn.ParameterList([nn.Parameter(torch.randn(width, width)) for _ in range(count)])
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(count)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gathered = [cf.ops.all_gather(shared * 0.1, fusion=0) for shared in self.shared]
        for whole, layer in zip(gathered, self.layers, strict=True):
            x = torch.tanh(layer(x))
            x = torch.tanh(x @ whole[: x.shape[1]])
        return x


GATHERING = Case("gathering", Gathering, lambda rows: (torch.randn(rows, 64), torch.randint(5, (rows,))))


def leads(program: Program) -> list[int]:
    """For each all_gather of the forward the ops between its start and its wait."""
    nodes = list(program.graph.nodes)
    starts = [n for n in program.collectives() if info(n).collective.kind == "all_gather"]  # type: ignore[union-attr]
    return [
        sum(not is_start(n) and not is_wait(n) for n in nodes[nodes.index(start) : nodes.index(wait_of(start))])
        for start in starts
        if info(start).phase == "forward"
    ]


@one_plan
def test_gathers_start_later_under_a_limit() -> None:
    free = lower(GATHERING, schedule="overlap").program
    peak = peak_memory(free)
    with pytest.raises(ConfigValueError) as caught:
        lower(GATHERING, schedule=cf.ScheduleConfig(memory_limit=1))
    least = int(str(caught.value).split("needs: ")[1].split(" bytes")[0])
    tight = lower(GATHERING, schedule=cf.ScheduleConfig(memory_limit=least)).program
    assert peak_memory(tight) <= least < peak
    assert len(leads(tight)) == len(leads(free)) == 4
    assert sum(leads(tight)) < sum(leads(free))


class PeakBehindBroadcast(nn.Module):
    """Needs most memory just behind a broadcast: what is started later is still in flight there."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, 4)
        self.wide = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8)).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, width = x.shape
        x = torch.tanh(cf.ops.broadcast(self.first(x), src=0))
        x = torch.tanh(x + self.wide(x.view(rows, 1, 1, width)).mean(1).view(rows, width))
        y = self.second(x)
        gathered = cf.ops.all_gather(y)[:rows] + cf.ops.all_gather(x)[:rows]
        return self.last(torch.tanh(y + gathered))


PEAKED = Case("peaked", PeakBehindBroadcast, lambda rows: (torch.randn(rows, 16), torch.randint(4, (rows,))))


@one_plan
def test_the_figure_of_the_error_is_never_above_the_peak_without_a_limit() -> None:
    free = peaks(PEAKED, schedule="overlap")
    least = least_memory(PEAKED, across=False)
    assert least <= free
    assert peaks(PEAKED, schedule=cf.ScheduleConfig(memory_limit=least)) == least
    with pytest.raises(ConfigValueError, match=f"needs: {least} bytes"):
        lower(PEAKED, schedule=cf.ScheduleConfig(memory_limit=least - 1))


# Determinism.


def test_all_ranks_and_runs_compile_the_same_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_call, "capture", trace)  # every run traces
    for case in (WIDE, CONTRASTIVE):
        texts = [lower(case, schedule=ACROSS, global_rank=rank).text() for rank in (0, 1, 2, 3, 0)]
        assert len(dict.fromkeys(texts)) == 1
        assert "in the next step, before" in texts[0]


def digest() -> str:
    """Of the texts and notes of some plans."""
    found = hashlib.sha256()
    for case, fusion in product((WIDE, CONTRASTIVE), (OPTIMAL, None)):
        lowered = lower(case, comm_fusion=fusion, schedule=ACROSS)
        found.update(lowered.text().encode())
        found.update(repr(lowered.program.notes).encode())
    return found.hexdigest()


@pytest.mark.dist
def test_hash_seeds_change_nothing(ranks: Ranks) -> None:
    assert ranks.values_of_other_seeds(digest) == [digest()] * 2


# The header, and limits that say more than it takes.


@one_plan
def test_what_stands_in_the_text_tells_plans_apart() -> None:
    """Ranks compare the text: other limits, clusters and schedules are other plans."""
    options: list[dict[str, Any]] = [
        {},
        {"cluster": FAST},
        {"schedule": ACROSS},
        {"schedule": cf.ScheduleConfig(memory_limit=2**30)},
        {"comm_fusion": None},
    ]
    texts = [lower(MLP_CASE, **each).text() for each in options]
    assert len(dict.fromkeys(texts)) == len(texts)
    assert canonical_text(lower(MLP_CASE).program) == texts[0]


@one_plan
def test_the_limit_is_checked_against_the_device(caplog: pytest.LogCaptureFixture) -> None:
    small = replace(SLOW, device=replace(SLOW.device, memory_bytes=2**20))
    with caplog.at_level("WARNING", logger="commfuse_fx"):
        lower(MLP_CASE, cluster=small, schedule=cf.ScheduleConfig(memory_limit=2**30))
    assert "memory_limit=1073741824 is more than the 1048576 bytes of the cluster's device (core)" in caplog.text


def test_a_limit_without_collectives_is_kept_too() -> None:
    step = cf.compile(nn.Linear(64, 64), loss_fn=F.mse_loss, device_num=1, schedule=cf.ScheduleConfig(memory_limit=100))
    with pytest.raises(ConfigValueError, match="memory_limit=100 is below what the step needs"):
        step.lower(torch.ones(8, 64), torch.ones(8, 64))
