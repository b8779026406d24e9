"""Step profiles: their files, and a measurement that leaves no trace."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import commfuse_fx as cf
from commfuse_fx.cost.model import PER_ELEMENT, PER_VIEW, CostModel, cost_model, profile_key
from commfuse_fx.cost.priced import model_fingerprint
from commfuse_fx.errors import ConfigKeyError, ConfigTypeError, ConfigValueError
from commfuse_fx.ir.core.collectives import is_start, is_wait
from commfuse_fx.ir.core.meta import info
from commfuse_fx.ir.core.naming import op_label
from commfuse_fx.machine.presets import preset
from commfuse_fx.machine.source import resolve_costs
from commfuse_fx.machine.step_profile import StepProfile
from commfuse_fx.measure.profiling import measure_step, profile_step, typical
from commfuse_fx.runtime.execute.executor import Executor
from commfuse_fx.support import documents
from tests import captures
from tests.distributed.models_of_ranks import assert_same

MODEL = "0123456789abcdef" * 4


def profile(**changes: Any) -> StepProfile:
    fields: dict[str, Any] = {
        "cluster": preset("gloo-10gbit"),
        "world": 2,
        "model": MODEL,
        "node_seconds": {"0/addmm.0": 1.5e-4, "update.per_element/_fused_adamw_": 2e-9, "0/relu.0": 0.0},
        "torch": "2.13.0",
        "device": "a core",
    }
    return StepProfile(**{**fields, **changes})


# Files.


def test_json_round_trip(tmp_path: Path) -> None:
    original = profile()
    assert StepProfile.from_json(original.to_json()) == original
    path = tmp_path / "step.json"
    original.save(path)
    assert StepProfile.load(path) == original
    assert documents.load_document(path) == original
    document = json.loads(path.read_text())
    assert (document["kind"], document["schema"], document["cluster"]["kind"]) == ("profile", 1, "cluster")
    assert list(StepProfile.load(path).node_seconds) == list(original.node_seconds)
    assert "plan" not in document and "step_seconds" not in document
    assert "node_roofline" not in document
    chosen = profile(plan="size 4", step_seconds=0.25, node_roofline={"0/addmm.0": 5e-5})
    assert StepProfile.from_json(chosen.to_json()) == chosen


def test_a_profile_stands_for_its_cluster(tmp_path: Path) -> None:
    original = profile()
    original.save(tmp_path / "step.json")
    original.cluster.save(tmp_path / "cluster.json")
    assert resolve_costs(original) == original
    assert resolve_costs(tmp_path / "step.json") == original
    assert resolve_costs(str(tmp_path / "step.json")) == original
    original.save(tmp_path / "step")  # a path by its separator
    assert resolve_costs(str(tmp_path / "step")) == resolve_costs(tmp_path / "step") == original
    assert resolve_costs(tmp_path / "cluster.json") == original.cluster
    assert resolve_costs("gloo-10gbit") == original.cluster
    assert resolve_costs(original.cluster) == original.cluster
    with pytest.raises(ConfigTypeError, match="cluster is 3"):
        resolve_costs(3)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"cluster": "gloo-10gbit"}, ConfigTypeError, "cluster is 'gloo-10gbit'; give a ClusterSpec"),
        ({"world": 0}, ConfigValueError, "world"),
        ({"world": 2.0}, ConfigTypeError, "world"),
        ({"model": "abc"}, ConfigValueError, "model is 'abc'; give the 64 hex digits"),
        ({"model": 3}, ConfigTypeError, "model is 3"),
        ({"node_seconds": [1.0]}, ConfigTypeError, r"node_seconds is \[1.0\]"),
        ({"node_roofline": [1.0]}, ConfigTypeError, r"node_roofline is \[1.0\]"),
        ({"node_roofline": {"a": -1.0}}, ConfigValueError, r"node_roofline\['a'\] is -1.0"),
        ({"node_seconds": {}}, ConfigValueError, "node_seconds is empty"),
        ({"node_seconds": {"a": -1.0}}, ConfigValueError, r"node_seconds\['a'\] is -1.0"),
        ({"node_seconds": {"a": float("nan")}}, ConfigValueError, r"node_seconds\['a'\] is nan"),
        ({"node_seconds": {"a": "1"}}, ConfigTypeError, r"node_seconds\['a'\] is '1'"),
        ({"node_seconds": {1: 1.0}}, ConfigTypeError, "a key of node_seconds is 1"),
        ({"torch": None}, ConfigTypeError, "torch is None"),
        ({"device": 1}, ConfigTypeError, "device is 1"),
    ],
)
def test_bad_fields(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        profile(**changes)


def test_check_names_both_worlds_and_models() -> None:
    profile().check(2, MODEL)
    for world, model in ((4, MODEL), (2, "f" * 64)):
        with pytest.raises(ConfigValueError, match="profile for another world or model") as caught:
            profile().check(world, model)
        for part in ("2 rank(s)", MODEL[:12], f"{world} rank(s)", model[:12]):
            assert part in str(caught.value)


def without(key: str) -> Callable[[dict[str, Any]], Any]:
    return lambda document: document.pop(key)


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (lambda d: d.update(kind="cluster"), ConfigValueError, 'the file: kind is .*give a document of kind "profile"'),
        (lambda d: d.update(schema=2), ConfigValueError, "the file: schema is 2"),
        (lambda d: d.update(extra=1), ConfigKeyError, "the file: key 'extra' is unknown; use cluster, world"),
        *((without(key), ConfigKeyError, f'the file: key "{key}" is missing') for key in ("cluster", "world", "model")),
        *((without(key), ConfigKeyError, f'the file: key "{key}" is missing') for key in ("node_seconds", "torch")),
        (lambda d: d.update(cluster=3), ConfigTypeError, "the file: cluster is 3; give a JSON object"),
        (lambda d: d["cluster"].pop("name"), ConfigKeyError, 'the file: cluster: key "name" is missing'),
        (lambda d: d["cluster"].update(kind="profile"), ConfigValueError, "the file: cluster: kind is 'profile'"),
        (lambda d: d.update(node_seconds=[]), ConfigTypeError, r"the file: node_seconds is \[\]"),
        (lambda d: d.update(world="2"), ConfigTypeError, "the file: world"),
        (lambda d: d["node_seconds"].update(a=-1), ConfigValueError, r"the file: node_seconds\['a'\] is -1"),
    ],
)
def test_damaged_documents(damage: Callable[[Any], Any], error: type[Exception], message: str) -> None:
    document = json.loads(profile().to_json())
    damage(document)
    with pytest.raises(error, match=message):
        StepProfile.from_json(json.dumps(document), "the file")


def test_files_that_are_none(tmp_path: Path) -> None:
    path = tmp_path / "step.json"
    with pytest.raises(ConfigValueError, match=f"there is no file '{path}'"):
        StepProfile.load(path)
    path.write_text(profile().to_json()[:-20])
    with pytest.raises(ConfigValueError, match=f"{path}, line .*: not JSON"):
        StepProfile.load(path)
    with pytest.raises(ConfigValueError, match=r"node_seconds\['.*'\] is nan; give a finite number >= 0"):
        StepProfile.from_json(profile().to_json().replace("0.00015", "NaN"))


def test_the_fingerprint_depends_on_names_shapes_and_dtypes_only() -> None:
    def of(*parts: tuple[str, tuple[int, ...], torch.dtype]) -> str:
        return model_fingerprint({name: torch.randn(shape).to(dtype) for name, shape, dtype in parts})

    f32 = torch.float32
    assert of(("a", (2, 3), f32)) == of(("a", (2, 3), f32))
    others = [of(("a", (2, 3), f32)), of(("b", (2, 3), f32)), of(("a", (3, 2), f32)), of(("a", (2, 3), torch.float64))]
    others.append(of(("a", (2, 3), f32), ("b", (1,), f32)))
    assert len(set(others)) == 5
    assert all(len(text) == 64 for text in others)


# Measuring.


class Noisy(nn.Module):
    """Parameters of several shapes, buffers that change, and random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.drop = nn.Dropout(0.5)
        self.last = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.drop(torch.relu(self.norm(self.first(x)))))
        return out


class Plain(torch.optim.Optimizer):
    """Unknown to the compiler, so its own step() is called; it makes state, and changes an option."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "count": 0, "scale": torch.ones(1)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["count"] += 1
            group["scale"].mul_(0.5)
            for param in group["params"]:
                state = self.state[param]
                state.setdefault("sum", torch.zeros_like(param)).add_(param.grad)
                state["seen"] = [*state.get("seen", []), 1]
                param.sub_(state["sum"], alpha=group["lr"])


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "dampened": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, dampening=0.5),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.01),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.01),
    "nadam": lambda params: torch.optim.NAdam(params, lr=0.01),
    "asgd": lambda params: torch.optim.ASGD(params, lr=0.01),
    "opaque": Plain,
}


class Ready:
    """A compiled step of one process whose executor can be measured after `steps` steps."""

    def __init__(self, name: str | None, steps: int) -> None:
        self.model = Noisy()
        captures.share(self.model, Noisy)
        self.optimizer = OPTIMIZERS[name](self.model.parameters()) if name else None
        self.step = cf.compile(self.model, loss_fn=F.mse_loss, optimizer=self.optimizer)
        self.batch = (torch.randn(6, 8), torch.randn(6, 4))
        for _ in range(steps):
            self.step(*self.batch)
        call = self.step.planner.take_apart(self.batch, {})
        self.inputs = dict(call.leaves)
        self.executor: Executor = self.step.session.executor(self.step.planner.plan(call), call)

    def everything(self) -> Any:
        """All that belongs to the user, its objects' identities included."""
        state = None if self.optimizer is None else self.optimizer.state_dict()
        held = [] if self.optimizer is None else [id(v) for s in self.optimizer.state.values() for v in s.values()]
        grads = [param.grad for param in self.model.parameters()]
        tensors = [id(tensor) for tensor in self.model.state_dict(keep_vars=True).values()]
        now = (self.model.state_dict(), state, grads, torch.get_rng_state(), self.inputs)
        return copy.deepcopy(now), tensors, held


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("name", [*OPTIMIZERS, None])
def test_measuring_leaves_everything_as_it_was(name: str | None, steps: int) -> None:
    ready = Ready(name, steps)
    (before, tensors, held) = ready.everything()
    measure_step(ready.executor, ready.inputs, rounds=2)
    (after, tensors_after, held_after) = ready.everything()
    assert_same(after, before)
    assert tensors_after == tensors
    if name != "opaque":
        assert held_after == held


def test_a_step_after_measuring_is_the_step_without_measuring() -> None:
    results = []
    for measures in (False, True):
        torch.manual_seed(0)
        ready = Ready("adamw", 1)
        if measures:
            measure_step(ready.executor, ready.inputs, rounds=1)
        loss = ready.step(*ready.batch)
        results.append((loss, ready.model.state_dict(), ready.optimizer and ready.optimizer.state_dict()))
    assert_same(results[0], results[1])


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("name", [*OPTIMIZERS, None])
def test_training_goes_on_as_without_a_profile(name: str | None, steps: int) -> None:
    results = []
    for profiles in (False, True):
        torch.manual_seed(0)
        ready = Ready(name, steps)
        if profiles:
            before, tensors, held = ready.everything()
            ready.step.profile(*ready.batch, rounds=1)
            after, tensors_after, held_after = ready.everything()
            assert_same(after, before)
            assert tensors_after == tensors
            if name != "opaque":
                assert held_after == held
        losses = [ready.step(*ready.batch) for _ in range(3)]
        results.append((losses, ready.everything()[0]))
    assert_same(results[1], results[0])


def test_loaded_optimizer_state_survives_a_profile() -> None:
    torch.manual_seed(0)
    source = Ready("adamw", 3)
    saved = copy.deepcopy((source.model.state_dict(), source.optimizer and source.optimizer.state_dict()))
    results = []
    for profiles in (False, True):
        ready = Ready("adamw", 0)
        ready.batch = source.batch
        ready.model.load_state_dict(saved[0])
        assert ready.optimizer is not None
        ready.optimizer.load_state_dict(copy.deepcopy(saved[1]))  # type: ignore[arg-type]
        torch.manual_seed(1)
        if profiles:
            ready.step.profile(*ready.batch, rounds=1)
        losses = [ready.step(*ready.batch) for _ in range(2)]
        results.append((losses, ready.model.state_dict(), ready.optimizer.state_dict()))
    assert_same(results[1], results[0])


@pytest.mark.parametrize("name", [*OPTIMIZERS, None])
def test_every_compute_node_has_its_seconds(name: str | None) -> None:
    ready = Ready(name, 0)
    seconds = measure_step(ready.executor, ready.inputs, rounds=1)
    nodes = [node for node in ready.executor.program.graph.nodes if node.op == "call_function"]
    in_steps = [node for node in nodes if not info(node).once]
    compute = [profile_key(node) for node in in_steps if not is_start(node) and not is_wait(node)]
    assert [key for key in seconds if not key.startswith((PER_ELEMENT, PER_VIEW))] == list(dict.fromkeys(compute))
    assert all(0 <= value < 1 for value in seconds.values())
    assert seconds["first/addmm.0"] > 0


def test_updates_have_a_rate_per_element() -> None:
    ready = Ready("sgd", 0)
    seconds = measure_step(ready.executor, ready.inputs, rounds=1)
    count = sum(param.numel() for param in ready.model.parameters())
    (update,) = [key for key in seconds if key.startswith("update.0/sgd")]
    assert seconds["update.per_element/_fused_sgd_"] == pytest.approx(seconds[update] / count)


def test_views_of_another_plan_have_the_mean_of_their_op() -> None:
    ready = Ready("sgd", 0)
    nodes = [node for node in ready.executor.program.graph.nodes if node.op == "call_function"]
    views = [node for node in nodes if op_label(node.target) == "t"]
    seconds = measure_step(ready.executor, ready.inputs, rounds=1)
    mean = sum(seconds[profile_key(node)] for node in views) / len(views)
    assert len(views) > 1
    assert seconds["view.each/t"] == pytest.approx(mean)
    others = {key: value for key, value in seconds.items() if key != profile_key(views[0])}
    assert CostModel(preset("gloo-10gbit"), seconds).compute_seconds(views[0]) == seconds[profile_key(views[0])]
    assert CostModel(preset("gloo-10gbit"), others).compute_seconds(views[0]) == seconds["view.each/t"] > 0
    product = next(node for node in nodes if op_label(node.target) == "addmm")
    assert not any(key == PER_VIEW + "addmm" for key in seconds)
    assert CostModel(preset("gloo-10gbit"), {"view.each/addmm": 9.0}).compute_seconds(product) < 1.0


def test_a_step_that_fails_is_undone_too() -> None:
    ready = Ready("sgd", 1)
    broken = {**ready.inputs, next(iter(ready.inputs)): torch.randn(6, 9)}
    before = ready.everything()[0]
    with pytest.raises(RuntimeError):
        measure_step(ready.executor, broken, rounds=1)
    assert_same(ready.everything()[0], before)
    ready.step(*ready.batch)


@pytest.mark.parametrize(("rounds", "error"), [(0, ConfigValueError), (1.5, ConfigTypeError)])
def test_bad_rounds(rounds: Any, error: type[Exception]) -> None:
    ready = Ready(None, 0)
    with pytest.raises(error, match="rounds"):
        measure_step(ready.executor, ready.inputs, rounds)


def test_a_profile_of_one_process() -> None:
    ready = Ready("adamw", 0)
    params = dict(ready.model.named_parameters())
    found = profile_step(ready.executor, ready.inputs, preset("gloo-10gbit"), 1, model_fingerprint(params))
    found.check(1, model_fingerprint(params))
    assert found.torch == torch.__version__
    assert found.device == preset("gloo-10gbit").device.name
    assert StepProfile.from_json(found.to_json()) == found
    costs = cost_model(found)
    computing = [node for node in ready.executor.program.graph.nodes if costs.measured(node) is not None]
    assert len(computing) >= 6 and set(found.node_roofline) <= set(found.node_seconds)
    for node in computing:  # on the program that was measured a node takes what it took
        assert costs.compute_seconds(node) == pytest.approx(
            CostModel(found.cluster, found.node_seconds).compute_seconds(node)
        )


def test_a_typical_step_counts_disturbed_ones_and_forgets_a_long_pause() -> None:
    # One step in four takes twice as long: a median of the steps would not see it.
    assert typical([1.0, 1.0, 1.0, 2.0] * 8) == pytest.approx(1.25)
    assert typical([1.0, 1.0, 1.0, 2.0] * 7 + [1.0, 1.0, 1.0, 100.0]) == pytest.approx(1.25)
    assert typical([3.0, 1.0, 2.0]) == 2.0  # fewer steps than blocks: each one is a block
