"""Mode "optimal" on whole small models: no other mode simulates faster with the same options."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import nn

import commfuse_fx as cf
from commfuse_fx.config.compile_config import CompileConfig
from commfuse_fx.cost.model import cost_model
from commfuse_fx.ir.core.meta import info
from commfuse_fx.ir.core.program import Program
from commfuse_fx.machine.presets import preset
from commfuse_fx.planning import compile_call
from commfuse_fx.planning.compile_call import plan_step
from commfuse_fx.planning.compile_call import variants as all_variants
from commfuse_fx.simulate.rounds import play
from tests.planning.chains import chain

KINDS = ("allreduce", "allgather", "reducescatter")
OPTIMAL: dict[str, Any] = {kind: {"mode": "optimal", "config": None} for kind in KINDS}
AUTO: dict[str, Any] = {}
OFF: dict[str, Any] = {"openstate": False}
SIZES = {mib: {kind: {"mode": "size", "config": mib} for kind in KINDS} for mib in (1, 4, 25)}
"""MiB -> mode "size". Mode "auto" is that of 64 MiB."""
SCHEDULES: dict[str, Any] = {"overlap": "overlap", "across steps": cf.ScheduleConfig(across_steps=True), "none": "none"}

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer | None]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adamw": torch.optim.AdamW,
    "adagrad": torch.optim.Adagrad,
    "adafactor": torch.optim.Adafactor,
    "none": lambda params: None,
}


class Layers(nn.Module):
    """Linear layers of these widths and dtypes, with collectives of the model's own behind some of them."""

    def __init__(self, widths: list[int], dtypes: list[torch.dtype], own: list[str]) -> None:
        super().__init__()
        self.own = own
        self.layers = nn.ModuleList(
            nn.Linear(i, o, dtype=dtype) for i, o, dtype in zip(widths[:-1], widths[1:], dtypes, strict=True)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, own in zip(self.layers, self.own, strict=True):
            x = layer(x.to(layer.weight.dtype))
            if own == "gather":
                x = x + cf.ops.all_gather(x)[: x.shape[0]]
            elif own == "reduce":
                x = cf.ops.all_reduce(x)
            x = torch.tanh(x)
        return x.float()


@dataclass(frozen=True)
class Case:
    """One captured step, to plan with any options."""

    captured: Program
    cluster: str
    options: dict[str, Any]
    found: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, model: nn.Module, batch: int, optimizer: str, cluster: str, ranks: int, **options: Any) -> Case:
        first, last = model.layers[0], model.layers[-1]  # type: ignore[index]
        options = {**options, "device_num": ranks}
        step = cf.compile(
            model,
            loss_fn=nn.functional.mse_loss,
            optimizer=OPTIMIZERS[optimizer](model.parameters()),
            **options,
        )
        x, target = torch.zeros(batch, first.in_features), torch.zeros(batch, last.out_features)
        captured = step.planner.read(step.planner.take_apart((x, target), {})).captured
        assert captured is not None
        return cls(captured, cluster, options)

    def seconds(self, fusion: dict[str, Any], schedule: Any, by_cost: bool = True) -> float:
        """Of a step; not `by_cost`: planned without knowing the cluster. Tests that ask for the same plan share it."""
        key = f"{fusion} {schedule} {by_cost} {compile_call.variants is all_variants}"
        if key not in self.found:
            cluster = self.cluster if by_cost else None
            options = {**self.options, "comm_fusion": fusion, "schedule": schedule, "cluster": cluster}
            program = replace(self.captured.copy(), config=CompileConfig.resolve(options))
            played = play(plan_step(program, program.config)[0], cost_model(preset(self.cluster)))
            self.found[key] = played.ended - played.began
        return self.found[key]

    @cached_property
    def fixed(self) -> dict[str, dict[str, Any]]:
        """The other modes. Without the sizes that everything fits into, where all make one bucket of a kind."""
        gradients = sum(param.spec.numel * 4 for param in self.captured.params.values())
        own = [info(node).spec for node in self.captured.graph.nodes if "commfuse." in str(node.target)]
        largest = gradients + sum(spec.nbytes * self.options["device_num"] for spec in own)  # type: ignore[union-attr]
        return {"auto": AUTO, "off": OFF, **{f"{mib} MiB": f for mib, f in SIZES.items() if mib << 20 < largest}}

    @property
    def has_ids(self) -> bool:
        return any(param.fusion_id is not None for param in self.captured.params.values())

    def worse(self, schedule: str) -> list[str]:
        """The modes that mode "optimal" is slower than. (Ids hold in mode "optimal", and not without fusion.)"""
        optimal = self.seconds(OPTIMAL, SCHEDULES[schedule])
        found = []
        for name, fusion in self.fixed.items():
            if not (self.has_ids and fusion is OFF):
                fixed = self.seconds(fusion, SCHEDULES[schedule])
                if optimal > fixed * (1 + 1e-6):
                    found.append(f"{name}: {optimal * 1e3:.4f} ms is above {fixed * 1e3:.4f}")
        return found


def alternating(count: int, width: int) -> Layers:
    dtypes = [torch.bfloat16 if i % 2 == 0 else torch.float32 for i in range(count)]
    return Layers([width] * (count + 1), dtypes, [""] * count)


def all_bf16(count: int, width: int) -> Layers:
    return Layers([width] * (count + 1), [torch.bfloat16] * count, [""] * count)


def plain(*widths: int) -> Layers:
    return Layers(list(widths), [torch.float32] * (len(widths) - 1), [""] * (len(widths) - 1))


KNOWN: dict[str, Callable[[], Case]] = {
    "two dtypes": lambda: Case.of(alternating(12, 512), 512, "sgd", "gloo-1gbit", 8, gradient_fp32_sync=False),
    "cast back": lambda: Case.of(all_bf16(12, 512), 512, "sgd", "h100-node", 8),
    "half cast back": lambda: Case.of(alternating(24, 256), 64, "sgd", "gloo-10gbit", 8),
    "few bytes": lambda: Case.of(plain(256, 256, 256, 256, 4), 4, "adagrad", "gloo-10gbit", 2),
    "wide": lambda: Case.of(plain(512, 2048, 512, 2048), 4, "sgd", "gloo-1gbit", 8),
}


@cache
def known(name: str) -> Case:
    return KNOWN[name]()


@pytest.fixture(autouse=True)
def unverified(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of plans, made of graphs that other tests verify."""
    monkeypatch.delenv("COMMFUSE_VERIFY")


@pytest.mark.parametrize("name", KNOWN)
def test_no_mode_is_faster_in_known_cases(name: str) -> None:
    case = known(name)
    assert {schedule: case.worse(schedule) for schedule in SCHEDULES} == {schedule: [] for schedule in SCHEDULES}


@cache
def random_case(seed: int) -> Case:
    rng = random.Random(seed)
    depth, width = rng.randint(2, 9), rng.choice([32, 256, 768])
    widths = [rng.choice([width // 4, width, width, 2 * width]) for _ in range(depth + 1)]
    half = rng.choice([0.0, 0.0, 0.5, 1.0])
    dtypes = [torch.bfloat16 if rng.random() < half else torch.float32 for _ in range(depth)]
    own = [rng.choice(["", "", "", "gather", "reduce"]) if seed % 3 == 0 else "" for _ in range(depth)]
    model = Layers(widths, dtypes, own)
    if seed % 4 == 1:
        for layer in model.layers:
            cf.set_comm_fusion(layer, rng.choice([0, 1, 2])) if rng.random() < 0.4 else None
    cluster, ranks = rng.choice(
        [("gloo-1gbit", 8), ("gloo-10gbit", 3), ("gloo-25gbit", 16), ("h100-node", 4), ("h100-ib-2", 16)]
    )
    options = {"gradient_fp32_sync": rng.random() < 0.5, "gradients_mean": rng.random() < 0.7}
    return Case.of(model, rng.choice([4, 64, 512]), rng.choice(list(OPTIMIZERS)), cluster, ranks, **options)


@pytest.mark.parametrize("part", range(3))
def test_no_mode_is_faster_for_random_models(part: int) -> None:
    for case in map(random_case, range(3 * part, 3 * part + 3)):
        assert {schedule: case.worse(schedule) for schedule in SCHEDULES} == {schedule: [] for schedule in SCHEDULES}


def slower_with_a_cluster(case: Case) -> list[str]:
    """The modes in which a plan for the cluster is slower than one without moves, or for no cluster at all."""
    found = []
    for name, fusion in case.fixed.items():
        others = case.seconds(fusion, "none"), case.seconds(fusion, "overlap", by_cost=False)
        if case.seconds(fusion, "overlap") > min(others) * (1 + 1e-6):
            found.append(name)
    return found


@pytest.mark.parametrize("optimizer", ["none", "sgd", "adafactor"])
def test_a_cluster_makes_no_small_plan_slower(optimizer: str) -> None:
    assert slower_with_a_cluster(Case.of(plain(64, 64, 64, 64), 32, optimizer, "h100-node", 2)) == []


def test_a_cluster_makes_no_plan_of_large_gradients_slower() -> None:
    """More than 8 MiB that are written by a copy, with and without something to hide behind."""
    for widths in ((1600, 1600, 1600), (64, 1600, 1600, 64)):
        for cluster in ("gloo-10gbit", "h100-node"):
            assert slower_with_a_cluster(Case.of(plain(*widths), 8, "none", cluster, 8)) == []


def test_a_cluster_makes_no_random_plan_slower() -> None:
    assert [seed for seed in range(10) if slower_with_a_cluster(random_case(seed))] == []


@pytest.mark.usefixtures("no_other_plan")
@pytest.mark.parametrize("name", ["cast back", "half cast back"])
def test_what_is_cast_back_is_cut_for_the_end_of_the_step(name: str) -> None:
    """A cast of the result stands where that is used, and one serves a whole bucket."""
    case = known(name)
    optimal = case.seconds(OPTIMAL, "overlap")
    assert optimal < min(case.seconds(fusion, "overlap") for fusion in case.fixed.values()) * 0.993


def with_ids(count: int, width: int, *biases: int) -> Layers:
    model = plain(*[width] * (count + 1))
    for number in biases:
        model.layers[number].bias.comm_fusion = 1  # type: ignore[assignment]
    return model


@pytest.mark.usefixtures("no_other_plan")
def test_buckets_are_cut_beside_those_of_other_dtypes_and_ids() -> None:
    """All of them share one stream; alone, the first takes 348.26 ms, the second 3.356."""
    assert known("two dtypes").seconds(OPTIMAL, "overlap") < 340.5e-3
    assert Case.of(with_ids(5, 64, 1, 3, 4), 512, "sgd", "gloo-1gbit", 8).seconds(OPTIMAL, "overlap") < 3.3e-3


@pytest.mark.usefixtures("no_other_plan")
def test_many_small_gradients_are_merged_to_a_mebibyte_across_steps() -> None:
    case = Case(chain((128,) * 121, batch=32, ranks=8), "gloo-1gbit", {"device_num": 8})
    schedule = SCHEDULES["across steps"]
    assert case.seconds(OPTIMAL, schedule) < case.seconds(SIZES[1], schedule) * 1.003


def test_across_steps_no_cut_of_few_gradients_is_faster() -> None:
    """Against every cut of neighbours: the best closes the first buckets early, and the last, urgent one late."""
    case, schedule = known("wide"), SCHEDULES["across steps"]
    cuts = [list(cut) for count in range(1, 6) for cut in combinations(range(1, 6), count)]
    fixed = [case.seconds({"allreduce": {"mode": "index", "config": cut}}, schedule) for cut in cuts]
    assert len(fixed) == 31
    assert case.seconds(OPTIMAL, schedule) <= min(fixed) * (1 + 1e-9)
