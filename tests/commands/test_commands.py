"""The commands on a tiny target: what they print, what they write, and their exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

import commfuse_fx as cf
from commfuse_fx.cli import main
from commfuse_fx.cost.priced import model_fingerprint
from commfuse_fx.machine.presets import preset

TARGET = """
import torch
from torch import nn

def make():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    loss_fn = nn.functional.mse_loss
    return model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1), (torch.ones(4, 8), torch.ones(4, 4))

class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x):
        print("tracing")
        return (x * self.weight).sum() if x.sum() > 0 else x.sum()

def branches():
    return {"model": Branches(), "inputs": {"x": torch.ones(8)}}

def fails():
    raise ValueError("no data")
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a target, target.py, and what it saves, saved/."""
    folder = tmp_path_factory.mktemp("commands")
    (folder / "target.py").write_text(TARGET)
    assert main(["lower", str(folder / "target.py:make"), "--dump", str(folder / "saved")]) == 0
    return folder


@pytest.fixture(autouse=True)
def here(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    monkeypatch.delenv("RANK", raising=False)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    capsys.readouterr()
    code = main(arguments)
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def lowered(**options: Any) -> cf.Lowered:
    namespace: dict[str, Any] = {}
    exec(TARGET, namespace)
    model, loss_fn, optimizer, inputs = namespace["make"]()
    return cf.compile(model, loss_fn=loss_fn, optimizer=optimizer, **{"device_num": 2, **options}, form="step").lower(
        *inputs
    )


# lower


def test_lower_prints_the_graph(capsys: pytest.CaptureFixture[str]) -> None:
    expected = lowered()
    assert run(capsys, "lower", "target.py:make") == (0, expected.text(), "")
    found, own = (json.loads(text) for text in (run(capsys, "lower", "target:make", "--json")[1], expected.to_json()))
    assert [each.get("name") for each in found["nodes"]] == [each.get("name") for each in own["nodes"]]
    stage = expected.stages["reduce_gradients"].text()
    assert run(capsys, "lower", "target.py:make", "--stage", "reduce_gradients") == (0, stage, "")


def test_a_target_of_a_model_and_inputs_is_a_module(capsys: pytest.CaptureFixture[str], place: Path) -> None:
    (place / "alone.py").write_text(
        "from target import make as parts\n"
        "def make():\n    model, *_, inputs = parts()\n    return model, inputs[:1]\n"
        "class Loss(type(make()[0])):\n    def forward(self, x):\n        return super().forward(x).square().mean()\n"
        "def loss():\n    model, inputs = make()\n    return Loss(*model), inputs\n"
    )
    code, text, _ = run(capsys, "lower", "alone:make")
    assert code == 0 and "# form: module\n" in text and " = hand_over([" in text
    code, explained, _ = run(capsys, "explain", "alone:make", "--devices", "4")
    assert code == 0 and "all_reduce" in explained
    code, text, _ = run(capsys, "lower", "alone:loss", "--set", 'form="step"')
    assert code == 0 and "form: module" not in text and "\nbwd " in text


def test_lower_takes_the_options_of_compile(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--mesh", "2x4", "--rank", "3", "--fusion", "index=1", "--gradients-sum", "--parallel-mode")
    code, text, _ = run(
        capsys, "lower", "target:make", *options, "hybrid_parallel", "--schedule", "none", "--set", "full_batch=false"
    )
    cut = {"allreduce": {"mode": "index", "config": [1]}}
    same = {"mesh": (2, 4), "device_num": 8, "global_rank": 3, "schedule": "none", "parallel_mode": "hybrid_parallel"}
    assert (code, text) == (0, lowered(comm_fusion=cut, gradients_mean=False, **same).text())


@pytest.mark.parametrize(
    "arguments, options",
    [
        (("--fusion", "off"), {"comm_fusion": {"openstate": False}}),
        (
            ("--fusion", "size=25"),
            {"comm_fusion": {k: {"mode": "size", "config": 25} for k in ("allreduce", "allgather", "reducescatter")}},
        ),
        (
            ("--devices", "4", "--schedule", "across-steps", "--memory-limit", "512", "--cluster", "gloo-1gbit"),
            {
                "device_num": 4,
                "schedule": cf.ScheduleConfig(across_steps=True, memory_limit=2**29),
                "cluster": "gloo-1gbit",
            },
        ),
        (
            ("--set", 'comm_fusion={"allreduce": {"mode": "optimal", "config": null}}'),
            {"comm_fusion": {"allreduce": {"mode": "optimal", "config": None}}},
        ),
    ],
)
def test_ways_to_plan(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], options: Any) -> None:
    assert run(capsys, "lower", "target.py:make", *arguments)[:2] == (0, lowered(**options).text())


def test_the_table_of_collectives(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "lower", "target.py:make", "--collectives", "--fusion", "index=1,3")
    head, *rows, last = out.splitlines()
    assert head.split() == ["name", "kind", "op", "dtype", "group", "bytes", "id", "phase", "members"]
    assert [row.split("backward  ")[1] for row in rows] == ["2.bias", "0.weight", "2.weight and 1 more"]
    total = sum(each.bytes for each in lowered().collectives)
    assert last == f"{len(rows)} collective(s), {total} bytes"
    assert run(capsys, "lower", "target.py:make", "--collectives", "--devices", "1")[1] == "no collectives\n"


def test_lower_dumps(capsys: pytest.CaptureFixture[str], place: Path, tmp_path: Path) -> None:
    code, out, _ = run(capsys, "lower", "target.py:make", "--dump", str(tmp_path), "--devices", "4", "--rank", "2")
    assert (code, out) == (0, f"{tmp_path / 'rank2'}\n")
    code, out, _ = run(capsys, "lower", "target.py:make", "--dump", str(tmp_path), "--collectives", "--devices", "4")
    assert code == 0 and out.endswith(" bytes\n") and (tmp_path / "rank0" / "index.json").exists()
    assert not cf.diff(tmp_path, place / "saved").is_same
    assert main(["diff", str(tmp_path), str(place / "saved")]) == 1


# explain, simulate, report


def test_a_saved_graph_is_explained_like_its_target(capsys: pytest.CaptureFixture[str]) -> None:
    expected = lowered().explain()
    for source in ("target.py:make", "saved", "saved/rank0", "saved/rank0/graph.json"):
        assert run(capsys, "explain", source) == (0, expected.text(), ""), source
    found = json.loads(run(capsys, "explain", "saved", "--json")[1])
    assert found["collectives"][0]["name"] == expected.collectives[0].name
    first = run(capsys, "explain", "saved", "--cluster", "gloo-1gbit")[1].splitlines()[0]
    assert " on cluster gloo-1gbit " in first and first != expected.text().splitlines()[0]


def test_what_ranks_hold_is_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    settings = ("--set", "enable_parallel_optimizer=true")
    small = ("--set", 'parallel_optimizer_config={"parallel_optimizer_threshold": 0}')
    code, text, _ = run(capsys, "explain", "target.py:make", "--devices", "4", "--memory", *settings, *small)
    assert code == 0 and text.splitlines()[0].startswith("memory per rank on dp=4, in bytes")
    params = 4 * (16 * 8 + 16 + 4 * 16 + 4)
    assert [line.split() for line in text.splitlines()[2:5]] == [
        ["parameters", str(params), str(params)],
        ["gradients", str(params), str(params // 4)],
        ["optimizer", "state", "0", "0"],
    ]
    found = json.loads(run(capsys, "explain", "saved", "--memory", "--json")[1])
    assert found["mesh"] == "dp=2" and found["held"][1] == {"kind": "gradients", "whole": params, "per_rank": params}
    assert found == json.loads(run(capsys, "explain", "saved", "--json")[1])["memory"]


def test_a_profile_of_a_step_is_read(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    namespace: dict[str, Any] = {}
    exec(TARGET, namespace)
    fingerprint = model_fingerprint(dict(namespace["make"]()[0].named_parameters()))
    seconds = {"0/addmm.0": 1.0}
    profile = cf.StepProfile(
        cluster=preset("gloo-1gbit"), world=2, model=fingerprint, node_seconds=seconds, plan="optimal"
    )
    profile.save(tmp_path / "profile.json")
    for source in ("saved", "target.py:make"):
        first = run(capsys, "explain", source, "--cluster", str(tmp_path / "profile.json"))[1].splitlines()[0]
        assert first.startswith("predicted step: 1000.") and " on profile gloo-1gbit " in first, source
    chosen = ("--schedule", "auto", "--cluster", str(tmp_path / "profile.json"))
    optimal = {"allreduce": {"mode": "optimal", "config": None}}
    stayed = lowered(comm_fusion=optimal, cluster=profile)
    said, _, idle = run(capsys, "explain", "target.py:make", *chosen)[1].partition("options without effect\n")
    assert said == stayed.explain().text() and "schedule='auto'" in idle
    limited = lowered(comm_fusion=optimal, cluster=profile, schedule=cf.ScheduleConfig(memory_limit=2**29))
    assert run(capsys, "lower", "target.py:make", *chosen, "--memory-limit", "512")[1] == limited.text()


def test_simulate(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    expected = lowered().simulate()
    assert run(capsys, "simulate", "saved") == (0, expected.text(), "")
    found = json.loads(run(capsys, "simulate", "target.py:make", "--json")[1])
    assert found["step_seconds"] == expected.step_seconds and "gap" in found
    trace = tmp_path / "step.json"
    assert run(capsys, "simulate", "saved", "--trace", str(trace)) == (0, expected.text(), "")
    assert trace.read_text() == expected.chrome_trace()
    both = ("--compare", "gloo-1gbit", "--compare", "gloo-10gbit")
    head, *rows = run(capsys, "simulate", "saved", *both)[1].splitlines()
    assert head.split()[0] == "cluster" and [row.split()[0] for row in rows] == ["gloo-1gbit", "gloo-10gbit"]
    for row in rows:
        name, step = row.split()[:2]
        assert step == f"{lowered().simulate(name).step_seconds * 1e3:.3f}"
    assert list(json.loads(run(capsys, "simulate", "saved", *both, "--json")[1])) == ["gloo-1gbit", "gloo-10gbit"]


def test_report_replaces_only_reports(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "mine.html"
    path.write_text("<!DOCTYPE html><title>holidays</title>")
    code, out, err = run(capsys, "report", "saved", "--out", str(path))
    assert (code, out) == (2, "") and "is no report of commfuse: give another name, or --force" in err
    assert "holidays" in path.read_text()
    assert run(capsys, "report", "saved", "--out", str(path), "--force") == (0, f"{path}\n", "")
    first = path.read_text()
    assert "bucket.0/in_place" in first
    assert run(capsys, "report", "target.py:make", "--devices", "4", "--out", str(path))[:2] == (0, f"{path}\n")
    assert path.read_text() != first


# demo


def test_demo(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "demo", "--steps", "12", "--json", "--devices", "4")
    found = json.loads(out)
    assert code == 0 and len(found["losses"]) == 12 and found["losses"][-1] < found["losses"][0]
    assert [len(each["members"]) for each in found["collectives"]] == [4, 4, 4, 1, 1]
    code, out, _ = run(capsys, "demo", "--steps", "2")
    assert code == 0 and out.startswith("step 0: loss 2.") and "for a virtual world of 2:\n" in out
    assert "torchrun --standalone" in out.splitlines()[-1]


def test_demo_without_its_data_or_with_bad_numbers(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(capsys, "demo", "--steps", "0")[::2] == (2, "commfuse: --steps 0: give at least 1\n")
    code, _, err = run(capsys, "demo", "--steps", "1", "--devices", "0")
    assert code == 2 and "device_num is 0; give an int in 1..4096" in err
    assert not torch.distributed.is_initialized()
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    code, _, err = run(capsys, "demo")
    assert code == 1 and 'pip install "commfuse-fx[examples]"' in err and "Traceback" not in err


# Errors and exit codes.


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("lower", "target.py:mak"), "target.py has no function 'mak'; did you mean make?"),
        (("lower", "target.py:make", "--devices", "0"), "device_num is 0; give an int in 1..4096"),
        (("lower", "target.py:make", "--rank", "2"), "global_rank is 2; give an int in 0..1"),
        (("lower", "target.py:make", "--mesh", "2x"), "--mesh '2x': give the sizes of the axes"),
        (("lower", "target.py:make", "--mesh", "2x4", "--devices", "2"), "which holds 8 devices"),
        (("lower", "target.py:make", "--fusion", "sise=3"), "sise"),
        (("lower", "target.py:make", "--fusion", "size=big"), "big"),
        (("lower", "target.py:make", "--fusion", "off=3"), "off takes nothing"),
        (("lower", "target.py:make", "--cluster", "gloo-2gbit"), "gloo-2gbit"),
        (("lower", "target.py:make", "--schedule", "none", "--memory-limit", "3"), "--memory-limit needs a schedule"),
        (("lower", "target.py:make", "--set", "full_batch"), "give NAME=JSON"),
        (("lower", "target.py:make", "--set", "full_batch=yes"), "'yes' is not JSON"),
        (("lower", "target.py:make", "--set", "ful_batch=true"), "(did you mean full_batch?); use one of comm_fusion"),
        (("lower", "target.py:make", "--set", "full_batch=3"), "full_batch is 3; give True or False"),
        (("lower", "target.py:make", "--set", 'form="modul"'), "form is 'modul', which is unknown"),
        (("lower", "target.py:make", "--stage", "fuse"), "there is no such stage"),
        (("lower", "target.py:make", "--dump", "target.py"), "the dump cannot be written to 'target.py/rank0'"),
        (("lower", "target.py:make", "--json", "--collectives"), "not allowed with argument"),
        (("lower",), "required: TARGET"),
        (
            ("explain", "saved", "--devices", "4"),
            "--devices says how to compile a target, and 'saved' is a saved graph",
        ),
        (("explain", "saved", "--set", "full_batch=true"), "--set says how to compile a target"),
        (("explain", "nothing"), "there is no 'nothing': give a folder that lowered.dump() wrote, or a target"),
        (("explain", "target.py"), "'target.py' names no function: give target.py:factory"),
        (("simulate", "saved", "--trace", "no/where.json"), "--trace no/where.json: there is no folder no"),
        (("report", "saved", "--out", "saved"), "--out saved is a folder"),
        (("optimise",), "invalid choice: 'optimise'"),
        (("--print-completion", "fish"), "invalid choice: 'fish'"),
    ],
)
def test_bad_usage(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str) -> None:
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert message in err and "Traceback" not in err


def test_failures_of_the_users_code(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "lower", "target.py:fails")
    expected = "commfuse: TargetError: target.py:fails raised ValueError at target.py, line 24: no data"
    assert (code, out, err) == (1, "", f"{expected} (--traceback shows where)\n")
    code, _, err = run(capsys, "lower", "target.py:fails", "--traceback")
    assert code == 1 and "Traceback" in err and 'raise ValueError("no data")' in err

    code, out, err = run(capsys, "lower", "target.py:branches")
    assert (code, out) == (1, "") and err.startswith("tracing\n"), "what the model prints is no result"
    assert "commfuse: CaptureError: " in err and "target.py" in err and "torch.where" in err, "the whole message"


def test_help_is_there_without_torch() -> None:
    script = "import sys; from commfuse_fx.cli import main; main(sys.argv[1:]); assert 'torch' not in sys.modules"
    for words in (["--help"], ["--version"], []):
        subprocess.run([sys.executable, "-c", script, *words], check=True, capture_output=True)


def test_help_version_and_no_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys)
    assert code == 0 and out == run(capsys, "--help")[1]
    commands = ("lower", "explain", "simulate", "auto", "report", "diff", "opt", "calibrate", "demo")
    places = [out.index(f"\n    {name} ") for name in commands]
    assert places == sorted(places)
    for name in commands:
        code, out, _ = run(capsys, name, "--help")
        assert code == 0 and "example" in out and "exit codes: " in out and "--traceback" in out, name
    assert run(capsys, "--version") == (0, f"commfuse {cf.__version__} (torch {version('torch')})\n", "")


def test_other_ranks_leave_a_command_to_rank_0(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    assert run(capsys, "lower", "target.py:fails") == (0, "", "")


@pytest.mark.parametrize(
    "words, expected", [("commfuse re", "report"), ("commfuse simulate --tra", "--trace --traceback")]
)
def test_completion(capsys: pytest.CaptureFixture[str], words: str, expected: str) -> None:
    code, script, _ = run(capsys, "--print-completion", "bash")
    assert (
        code == 0
        and run(capsys, "--print-completion", "zsh")[1] == f"autoload -U +X bashcompinit && bashcompinit\n{script}"
    )
    ask = f"{script}COMP_WORDS=({words}) COMP_CWORD={words.count(' ')}; _commfuse; echo ${{COMPREPLY[@]}}"
    done = subprocess.run(["bash", "-c", ask], capture_output=True, text=True, check=True)
    assert done.stdout.split() == expected.split()


def test_a_reader_that_has_gone_ends_it_quietly(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as gone:
        monkeypatch.setattr(sys, "stdout", gone)
        assert main(["lower", "target.py:make", "--json"]) == 1
        monkeypatch.undo()
    assert capsys.readouterr().err == ""


def test_an_interrupt_has_its_own_code(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("commfuse_fx.commands.lower.compiled_target", interrupted)
    assert run(capsys, "lower", "target.py:make") == (130, "", "commfuse: interrupted\n")
