"""Saved graphs are read back whole: the same text and JSON, and passes make the same of them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import commfuse_fx as cf
from commfuse_fx.cost.model import cost_model
from commfuse_fx.cost.priced import model_fingerprint
from commfuse_fx.inspect.explain.explanation import explain
from commfuse_fx.ir.core.functions import FUNCTIONS
from commfuse_fx.ir.core.meta import info
from commfuse_fx.ir.core.program import Program
from commfuse_fx.ir.core.verify import verify
from commfuse_fx.ir.json.read import from_json
from commfuse_fx.ir.json.write import to_json
from commfuse_fx.ir.ops.known_ops import OPERATORS, find_target
from commfuse_fx.ir.text.write_text import canonical_text
from commfuse_fx.machine.source import resolve_costs
from commfuse_fx.planning.pipeline.pipeline_json import captured_json, pipeline_of, read_marks
from commfuse_fx.simulate.simulation import simulate
from examples.ci_graph_diff.model import lowered as example
from tests.inspect.steps import Net, train
from tests.models import ConvNet

OPTIMAL = {"allreduce": {"mode": "optimal", "config": "gloo-1gbit"}}
ACROSS = cf.ScheduleConfig(across_steps=True)


class Exchange(nn.Module):
    """User collectives of every kind, a constant, a mask of -inf and a complex number."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        x = x + torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0])
        x = cf.ops.all_reduce(x, fusion=2) + cf.ops.all_reduce(x * 2, fusion=2)
        x = cf.ops.reduce_scatter(cf.ops.all_gather(x)) + cf.ops.broadcast(x, 1) + cf.ops.all_to_all(x)
        x = x.masked_fill(torch.ones(8, 8).triu(1).bool()[: x.shape[0]], -math.inf).softmax(-1)
        return (x * (1 + 2j)).abs()


def tiled() -> cf.Lowered:
    """A first gradient that is computed by rows."""
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 2100))
    step = cf.compile(
        model, loss_fn=F.mse_loss, optimizer=torch.optim.SGD(model.parameters()), device_num=2, cluster="gloo-1gbit"
    )
    lowered = step.lower(torch.ones(1024, 256), torch.ones(1024, 2100))
    assert any(info(node).share < 1 for node in lowered.program.graph.nodes)
    return lowered


def optimized(make: Callable[[Any], torch.optim.Optimizer], dtype: torch.dtype = torch.float32) -> cf.Lowered:
    model = Net(2).to(dtype)
    step = cf.compile(model, loss_fn=F.mse_loss, optimizer=make(model.parameters()), device_num=2)
    return step.lower(torch.ones(4, 8, dtype=dtype), torch.ones(4, 8, dtype=dtype))


def divided(model: nn.Module, inputs: tuple[torch.Tensor, ...], **options: Any) -> cf.Lowered:
    optimizer = torch.optim.AdamW(model.parameters())
    options = {"parallel_mode": "semi_auto", "mesh": (2, 2), "device_num": 4, **options}
    return cf.compile(model, loss_fn=F.mse_loss, optimizer=optimizer, **options).lower(*inputs)


def marked() -> cf.Lowered:
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.ReLU(), nn.Linear(16, 8))
    cf.shard(model[0], in_strategy=((2, 1),), weight=("tp", None), bias=("tp",))
    cf.shard(model[3].weight, (None, "tp"))
    return divided(model, (torch.ones(4, 8), torch.ones(4, 8)), full_batch=True)


EIGHT = torch.ones(4, 8), torch.ones(4, 8)


def accumulating() -> cf.CompiledStep:
    model = Net(2)
    cf.shard(model.layers[0], weight=("tp", None))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"parallel_mode": "semi_auto", "mesh": (2, 2), "device_num": 4, "accumulate_steps": 2}
    return cf.compile(model, loss_fn=F.mse_loss, optimizer=optimizer, **options)


def clipped_parts() -> cf.Lowered:
    model = Net(2)
    cf.shard(model.layers[0], weight=("tp", None))
    return train(model, clip_grad_norm=0.5, parallel_mode="semi_auto", mesh=(1, 2))


def gpt2() -> cf.Lowered:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=8, n_embd=8, n_layer=1, n_head=2))
    cf.shard(model, cf.plans.tensor_parallel(model))
    tokens = torch.zeros(4, 8, dtype=torch.int64)
    step = cf.compile(
        model,
        loss_fn=lambda out, y: F.cross_entropy(out.logits.flatten(0, 1), y.flatten()),
        optimizer=torch.optim.AdamW(model.parameters()),
        parallel_mode="semi_auto",
        mesh=(1, 2),
        device_num=2,
    )
    return step.lower(tokens, tokens)


def evaluated() -> cf.Lowered:
    step = cf.compile(ConvNet().eval(), loss_fn=F.cross_entropy, device_num=2)
    return step.lower(torch.ones(2, 3, 8, 8), torch.zeros(2, dtype=torch.int64))


def convolutions() -> cf.Lowered:
    model = ConvNet()
    step = cf.compile(model, loss_fn=F.cross_entropy, optimizer=torch.optim.Adam(model.parameters()), device_num=2)
    return step.lower(torch.ones(2, 3, 8, 8), torch.zeros(2, dtype=torch.int64))


def profiled() -> cf.Lowered:
    """A plan by a profile, which is saved with it."""
    model = Net(2)
    costs = resolve_costs("gloo-10gbit")
    assert isinstance(costs, cf.ClusterSpec)
    fingerprint = model_fingerprint(dict(model.named_parameters()))
    profile = cf.StepProfile(cluster=costs, world=2, model=fingerprint, node_seconds={"layers.0/addmm.0": 1e-3})
    return train(model, cluster=profile)


PARALLEL: dict[str, Any] = {"enable_parallel_optimizer": True}

KINDS: dict[str, Callable[[], cf.Lowered]] = {
    "fused": lambda: train(Net()),
    "unfused": lambda: train(Net(), {"openstate": False}, schedule="none"),
    "by index": lambda: train(Net(), {"allreduce": {"mode": "index", "config": [2, 6]}}),
    "in pieces": lambda: train(Net(2, width=300_000)),
    "optimal": lambda: train(Net(), OPTIMAL, schedule=ACROSS),
    "tiled": tiled,
    "across steps": lambda: train(Net(8, width=256), OPTIMAL, schedule=ACROSS),
    "within memory": lambda: train(Net(), OPTIMAL, schedule=cf.ScheduleConfig(memory_limit=10**8)),
    "sliced": lambda: train(Net(2), full_batch=True, mesh=(1, 2), gradients_mean=False),
    "user collectives": lambda: train(Exchange()),
    "profiled": profiled,
    "sgd": lambda: optimized(lambda p: torch.optim.SGD(p, momentum=0.9, nesterov=True)),
    "sgd of lists": lambda: optimized(lambda p: torch.optim.SGD(p, momentum=0.9), torch.bfloat16),
    "adagrad": lambda: optimized(torch.optim.Adagrad),
    "amsgrad": lambda: optimized(lambda p: torch.optim.AdamW(p, amsgrad=True)),
    "rmsprop": lambda: optimized(lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.1, weight_decay=0.1)),
    "nadam": lambda: optimized(lambda p: torch.optim.NAdam(p, decoupled_weight_decay=True)),
    "radam": lambda: optimized(torch.optim.RAdam),
    "adamax": lambda: optimized(torch.optim.Adamax),
    "adadelta": lambda: optimized(torch.optim.Adadelta),
    "asgd": lambda: optimized(torch.optim.ASGD),
    "rprop": lambda: optimized(torch.optim.Rprop),
    "opaque": lambda: optimized(torch.optim.Adafactor),
    "accumulated": lambda: accumulating().lower(*EIGHT),
    "micro-batch": lambda: accumulating().lower_micro_batch(*EIGHT),
    "clipped": lambda: train(Net(), clip_grad_norm=0.5),
    "clipped parts": clipped_parts,
    "evaluation": evaluated,
    "convolutions": convolutions,
    "divided": marked,
    "rows": lambda: train(Net(), **PARALLEL, parallel_optimizer_config={"parallel_optimizer_threshold": 0}),
    "owned": lambda: train(
        Net(), **PARALLEL, parallel_optimizer_config={"parallel_optimizer_threshold": 0, "mode": "broadcast"}
    ),
    "gpt2": gpt2,
    "example": example,
}


@cache
def made(kind: str) -> cf.Lowered:
    torch.manual_seed(0)
    return KINDS[kind]()


def read_again(program: Program) -> Program:
    """The program from its JSON, which has to give the same JSON, text and names again."""
    saved = to_json(program)
    again = from_json(saved)
    assert to_json(again) == saved
    assert canonical_text(again) == canonical_text(program)
    assert again.names.state()[0] == program.names.state()[0]
    assert dict.fromkeys(again.names.state()[1]) == dict.fromkeys(program.names.state()[1])
    return again


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_graph(kind: str) -> None:
    lowered = made(kind)
    final, captured, pipeline = lowered.program, lowered.captured, lowered.pipeline
    assert captured is not None and pipeline is not None
    again = read_again(final)
    costs = cost_model(final.config.cluster or resolve_costs("gloo-10gbit"))
    assert simulate(again, costs) == simulate(final, costs)
    assert explain(again, costs, "").text() == explain(final, costs, "").text()
    for old, new in zip(final.graph.nodes, again.graph.nodes, strict=True):
        assert info(new).varies == info(old).varies and info(new).origin == info(old).origin
    # The passes of the compile, as its file names them, on the captured graph as it was read.
    saved = captured_json(captured, pipeline)
    begun = from_json(saved)
    read_marks(json.loads(saved), begun, "the JSON")
    read = pipeline_of(json.loads(saved), begun, "the JSON")
    assert read is not None
    read.run(begun, verify)
    assert canonical_text(begun) == lowered.text()
    assert to_json(begun) == lowered.to_json()


def test_every_stage_goes_on_from_its_file() -> None:
    lowered = made("across steps")
    assert "in the next step" in lowered.text()
    captured, pipeline = lowered.captured, lowered.pipeline
    assert captured is not None and pipeline is not None
    current = read_again(captured)
    for number, stage in enumerate(pipeline.passes):
        pipeline.run(current, verify, part=slice(number, number + 1))
        assert canonical_text(current) == lowered.stages[stage.name].text()
        current = read_again(current)
    assert to_json(current) == lowered.to_json()


def test_a_new_node_gets_the_name_it_would_have_got() -> None:
    program = made("fused").program
    again = from_json(to_json(program))
    for name in ("layers.0/addmm.0", "bucket.0/storage", "update.0/sgd", "new"):
        assert again.names.reserve(name) == program.names.reserve(name)
    assert again.names.numbered("layers.0/addmm") == program.names.numbered("layers.0/addmm")


def test_constants_are_specs_only() -> None:
    captured = made("user collectives").captured
    assert captured is not None and captured.constants
    again = from_json(to_json(captured))
    assert {name: (value.shape, value.dtype) for name, value in again.constants.items()} == {
        name: (value.shape, value.dtype) for name, value in captured.constants.items()
    }
    assert all(value.is_meta for value in again.constants.values())


def test_what_json_has_no_number_for_is_written_all_the_same() -> None:
    text = made("user collectives").to_json()
    json.loads(text, parse_constant=pytest.fail)
    assert '{"number": "-inf"}' in text and '{"complex": [1.0, 2.0]}' in text
    assert cf.diff(text, made("user collectives").text()).is_same


def test_files_name_no_folder_and_no_rank() -> None:
    text = made("fused").to_json()
    assert "steps.py:" in text and "/steps.py" not in text
    assert train(Net(), rank=1).to_json() == text
    other = from_json(text.replace('"torch": "', '"torch": "1.', 1))
    assert "# torch: 1.2." in canonical_text(other), "the graph is one of the torch that made it"


def test_every_function_of_graphs_is_found_by_its_name() -> None:
    for known in (FUNCTIONS, OPERATORS):
        assert all(find_target(name) is function for name, function in known.items())
    assert find_target("aten.mm") is torch.ops.aten.mm.default
    assert find_target("aten.mm.out") is torch.ops.aten.mm.out


@pytest.mark.parametrize("kind", ["fused", "optimal", "across steps", "divided"])
def test_load(kind: str, tmp_path: Path) -> None:
    lowered = made(kind)
    folder = lowered.dump(tmp_path / "first")
    for source in (tmp_path / "first", folder, str(folder)):
        loaded = cf.load(source)
        assert loaded.text() == lowered.text() and loaded.to_json() == lowered.to_json()
        assert loaded.stages == lowered.stages
        assert loaded.collectives == lowered.collectives
        assert loaded.simulate() == lowered.simulate()
        assert loaded.explain().text() == lowered.explain().text()
    again = loaded.dump(tmp_path / "second")
    for file in ("index.json", "graph.json", "captured.json", "graph.txt", "explain.txt"):
        assert (again / file).read_bytes() == (folder / file).read_bytes(), file
    alone = cf.load(folder / "graph.json")
    assert {name: stage.text() for name, stage in alone.stages.items()} == {"graph": lowered.text()}
    with pytest.raises(cf.ConfigValueError, match="cf.load read.*pass step.lower"):
        cf.lockstep(loaded)


def test_stages_of_a_dump_without_its_captured_graph(tmp_path: Path) -> None:
    lowered = made("optimal")
    index = lowered.dump(tmp_path) / "index.json"
    kept = {key: value for key, value in json.loads(index.read_text()).items() if key != "captured"}
    index.write_text(json.dumps(kept))
    assert cf.load(tmp_path).stages == lowered.stages
    kept["stages"][1]["file"] = "../../secret.txt"
    index.write_text(json.dumps(kept))
    with pytest.raises(cf.ConfigValueError, match="is no file of stages/"):
        assert cf.load(tmp_path).stages


def test_stages_are_those_of_the_dump_where_the_passes_make_another_graph(tmp_path: Path) -> None:
    lowered = made("fused")
    captured = lowered.dump(tmp_path) / "captured.json"
    text = captured.read_text()
    for old, new in (('"mean": true', '"mean": false'), ('"piece": 8388608', '"piece": 0')):
        assert text.count(old) == 1
        captured.write_text(text.replace(old, new))
        assert cf.load(tmp_path).stages == lowered.stages
