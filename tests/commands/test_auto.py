"""`commfuse auto`: the table of plans, what-ifs, and what is said of bad input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import commfuse_fx as cf
from commfuse_fx.cli import main
from commfuse_fx.commands import plan_cases
from commfuse_fx.commands.what_if import Case, cases
from commfuse_fx.inspect.explain.parameter_groups import parameter_groups
from commfuse_fx.ir.core.meta import TensorSpec
from commfuse_fx.ir.core.placement import S
from commfuse_fx.ir.core.program import Parameter
from commfuse_fx.machine.presets import preset
from commfuse_fx.passes.distribute.divide import Divide
from commfuse_fx.planning.variants.plan_names import DATA_PARALLEL

TARGET = """
import torch
from torch import nn

import commfuse_fx as cf

traced = []

class Blocks(nn.Sequential):
    def forward(self, x):
        traced.append(tuple(x.shape))
        return super().forward(x)

def make(rows=8, width=512):
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width)) for _ in range(2))
    model = Blocks(*blocks)
    x = torch.empty(rows, width)
    return model, nn.functional.mse_loss, torch.optim.AdamW(model.parameters()), (x, x)

def wide():
    return make(width=1024)

def small():
    return make(width=16)

def four_rows():
    return make(rows=4)

def normed(rows=8):
    model, loss_fn, _, (x, y) = make(rows=rows, width=64)
    model.append(cf.shard(nn.BatchNorm1d(64), cross_batch=True))
    return model, loss_fn, torch.optim.SGD(model.parameters()), (x, y)

def normed_four_rows():
    return normed(rows=4)
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "target.py").write_text(TARGET)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)


def run(capsys: pytest.CaptureFixture[str], *arguments: str, factory: str = "make") -> tuple[int, str, str]:
    capsys.readouterr()
    code = main(["auto", f"target.py:{factory}", *arguments])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def planned(capsys: pytest.CaptureFixture[str], *arguments: str, factory: str = "make") -> list[Any]:
    code, out, err = run(capsys, *arguments, "--json", factory=factory)
    assert code in (0, 1), err
    found: list[Any] = json.loads(out)["cases"]
    return found


def chosen(case: Any) -> Any:
    (row,) = (row for row in case["table"]["rows"] if row["chosen"])
    return row


def made(factory: str) -> tuple[Any, ...]:
    namespace: dict[str, Any] = {}
    exec(TARGET, namespace)
    parts: tuple[Any, ...] = namespace[factory]()
    return parts


def lowered(factory: str = "make", **options: Any) -> cf.Lowered:
    model, loss_fn, optimizer, inputs = made(factory)
    return cf.compile(model, loss_fn=loss_fn, optimizer=optimizer, parallel_mode="auto", **options).lower(*inputs)


def test_the_chosen_plan_is_that_of_compile(capsys: pytest.CaptureFixture[str]) -> None:
    (case,) = planned(capsys, "--mesh", "8", "--cluster", "h100-node", factory="wide")
    own = lowered("wide", mesh=(8,), device_num=8, cluster="h100-node")
    simulated, row = own.simulate(), chosen(case)
    assert (row["step_seconds"], row["exposed_seconds"], row["peak_memory"]) == (
        pytest.approx(simulated.step_seconds),
        pytest.approx(simulated.exposed_seconds),
        simulated.peak_memory,
    )
    sent: dict[str, int] = {}
    for each in own.collectives:
        sent[each.kind] = sent.get(each.kind, 0) + each.bytes
    assert row["sent"] == sent and row["mesh"] == str(own.program.mesh)
    seconds = [each["step_seconds"] for each in case["table"]["rows"]]
    assert seconds == sorted(seconds) and row["step_seconds"] == seconds[0]
    assert {each["plan"] for each in case["table"]["rows"]} >= {DATA_PARALLEL, row["plan"]}
    layouts = {each["name"]: (each["count"], each["layout"]) for each in case["table"]["layouts"]}
    assert layouts["*.0.weight"] == (2, "S(0) on dp") and layouts["*.2.weight"] == (2, "S(1) on dp")


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "--mesh", "8", "--cluster", "h100-node", factory="wide")
    lines = out.splitlines()
    assert (code, err) == (0, "") and lines[0] == "8 devices, cluster h100-node"
    assert lines[1].split() == ["mesh", "priced", "ms", "step", "ms", "exposed", "ms", "peak", "sent", "plan"]
    starred = [line for line in lines if line.startswith("*")]
    assert starred == [lines[2]] and lines[2].startswith("*  dp=8 ") and "  search" in lines[2]
    assert sum(line.startswith("   dp=8 ") and line.endswith("  data parallel") for line in lines) == 1
    at = lines.index("parameters of the chosen plan")
    assert lines[at - 2].startswith("search: dp: ") and lines[at - 1].startswith("search: the whole step: ")
    assert [tuple(line.split("  ")[1:]) for line in lines[at + 1 :]] == [
        ("*.0.weight (2)", "S(0) on dp"),
        ("*.0.bias (2)", "", "S(0) on dp"),
        ("*.2.weight (2)", "S(1) on dp"),
        ("all others (2)", "whole"),
    ]


def test_data_parallel_is_compared_where_no_search_made_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    offered = Divide.candidates

    def searches_once(cls: Any, situation: Any, program: Any, found: Any) -> Any:
        return found if program.strategies is None else offered(situation, program, found)

    monkeypatch.setattr(Divide, "candidates", classmethod(searches_once))
    (case,) = planned(capsys, "--devices", "4", "--cluster", "h100-node")
    rows = {row["plan"]: row for row in case["table"]["rows"]}
    assert len(rows) == 2 and not rows[DATA_PARALLEL]["chosen"]
    assert list(rows[DATA_PARALLEL]["sent"]) == ["all_reduce"]


def test_strategies_of_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    lowered(device_num=4, cluster="h100-node", strategy_ckpt_save_file="found.json")
    (case,) = planned(
        capsys, "--devices", "4", "--cluster", "h100-node", "--set", 'strategy_ckpt_load_file="found.json"'
    )
    assert [row["plan"] for row in case["table"]["rows"]] == ["strategy file", DATA_PARALLEL]
    assert chosen(case)["plan"] == "strategy file"


def test_a_report_of_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--mesh", "8", "--cluster", "h100-node", "--report", "plan.html")
    code, out, err = run(capsys, *arguments, "--bandwidth", "x2", factory="wide")
    page = Path("plan.html").read_text()
    assert (code, err) == (0, "") and '"name":"0-1.0.weight","kind":"parameter","count":2' in page
    options = {"mesh": (8,), "device_num": 8}
    plain = lowered("wide", cluster="h100-node", **options)
    faster = Case(8, bandwidth=2.0).config(plain.program.config).cluster
    assert f'"fingerprint":"{plain.fingerprint}"' in page
    assert (
        f'"fingerprint":"{lowered("wide", cluster=faster, **options).fingerprint}"' in Path("plan-2.html").read_text()
    )
    assert "report: plan.html\n" in out and out.endswith("report: plan-2.html\n")
    assert run(capsys, *arguments, factory="wide")[0] == 0
    Path("plan.html").write_text("something else")
    code, _, err = run(capsys, *arguments, factory="wide")
    assert code == 2 and "--report plan.html exists and is no report of commfuse" in err
    code, _, err = run(capsys, *arguments[:-1], "other.html", "--memory", "1MiB", "--json", factory="wide")
    assert code == 1 and Path("other.html").exists() and not Path("other-2.html").exists()


def test_what_ifs_do_not_trace_again(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    traces: list[int] = []
    trace = plan_cases.Cases._trace
    monkeypatch.setattr(plan_cases.Cases, "_trace", lambda *given: traces.append(1) or trace(*given))
    arguments = ("--devices", "4", "--cluster", "gloo-1gbit", "--bandwidth", "x100", "--bandwidth", "x0.5")
    plain, fast, slow = planned(capsys, *arguments)
    assert len(traces) == 1 and [each["traced"] for each in (plain, fast, slow)] == [True, False, False]
    seconds = [chosen(each)["step_seconds"] for each in (fast, plain, slow)]
    assert seconds == sorted(seconds) and len(set(seconds)) == 3
    cluster = Case(4, bandwidth=100.0).config(lowered(device_num=4, cluster="gloo-1gbit").program.config).cluster
    assert chosen(fast)["step_seconds"] == pytest.approx(lowered(device_num=4, cluster=cluster).simulate().step_seconds)
    levels = zip(cluster.levels, preset("gloo-1gbit").levels, strict=True)
    assert all(level.bandwidth == 100 * own.bandwidth and level.alpha == own.alpha for level, own in levels)


def test_memory_drops_plans(capsys: pytest.CaptureFixture[str]) -> None:
    (plain,) = planned(capsys, "--devices", "4", "--cluster", "h100-node")
    peaks = {row["plan"]: row["peak_memory"] for row in plain["table"]["rows"]}
    limit = (min(peaks.values()) + max(peaks.values())) // 2
    _, limited = planned(capsys, "--devices", "4", "--cluster", "h100-node", "--memory", f"{limit}B")
    rows = limited["table"]["rows"]
    assert rows and all(row["peak_memory"] <= limit for row in rows)
    larger = {plan for plan, peak in peaks.items() if peak > limit}
    assert larger and larger <= {each["plan"] for each in limited["table"]["too_large"]}
    levels = {each["plan"].split(", ")[-1] for each in rows if "parallel optimizer" in each["plan"]}
    assert levels and levels <= {f"parallel optimizer level {level}" for level in (1, 2, 3)}


def test_memory_that_nothing_fits(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--devices", "4", "--cluster", "h100-node", "--memory", "1MiB")
    _, limited = planned(capsys, "--devices", "4", "--cluster", "h100-node", "--memory", "1MiB")
    needed = min(each["needed"] for each in limited["table"]["too_large"])
    assert code == 1 and limited["table"]["rows"] == [] and needed > 2**20
    assert any(each.startswith("more devices: twice as many") for each in limited["helps"])
    assert all(f"what would help: {each}\n" in out for each in limited["helps"])
    text = f"no plan fits: the smallest needs {needed / 2**20:.3g} MiB per rank, {needed / 2**20 - 1:.3g} MiB too much"
    assert f"4 devices, at most 1 MiB per rank, cluster h100-node\n{text}\n" in out


def test_other_devices_share_the_global_batch_of_one_trace(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--devices", "2", "--devices", "4", "--cluster", "h100-node", "--report", "plan.html")
    assert code == 0 and out.count("of the global batch of 16 rows each rank has 4\n") == 1 and "again" not in out
    two, four = planned(capsys, "--devices", "2,4", "--cluster", "h100-node")
    assert [(each["global_batch"], each["traced"]) for each in (two, four)] == [(16, True), (16, False)]
    run(capsys, "--devices", "4", "--cluster", "h100-node", "--report", "alone.html", factory="four_rows")
    assert Path("plan-2.html").read_text() == Path("alone.html").read_text() != Path("plan.html").read_text()


def test_devices_among_which_the_batch_does_not_divide(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--devices", "2,3,4", "--cluster", "h100-node")
    code, out, _ = run(capsys, *arguments)
    why = "the global batch of 16 rows does not divide among 3 devices"
    assert code == 1 and out.count("\n*  ") == 2
    assert f"3 devices, cluster h100-node\nno plan: {why}: give numbers of devices that divide it\n" in out
    assert [each["no_plan"] for each in planned(capsys, *arguments)] == ["", why, ""]


def test_parts_of_the_batch_are_traced_again(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--devices", "2,4", "--cluster", "h100-node")
    code, out, _ = run(capsys, *arguments, factory="normed")
    assert code == 0 and out.count("traced again, as the model computes with a rank's own part of the batch\n") == 1
    two, four = planned(capsys, *arguments, factory="normed")
    assert [(each["global_batch"], each["traced"]) for each in (two, four)] == [(16, True), (16, True)]
    (alone,) = planned(capsys, "--devices", "4", "--cluster", "h100-node", factory="normed_four_rows")
    assert four["table"] == alone["table"]


def test_a_full_batch_is_traced_once(capsys: pytest.CaptureFixture[str]) -> None:
    two, four = planned(capsys, "--devices", "2,4", "--cluster", "h100-node", "--set", "full_batch=true")
    assert [(each["global_batch"], each["traced"]) for each in (two, four)] == [(8, True), (8, False)]
    own = lowered(device_num=4, cluster="h100-node", full_batch=True).simulate()
    assert chosen(four)["step_seconds"] == pytest.approx(own.step_seconds)


@pytest.mark.parametrize("what_if", [(), ("--bandwidth", "x2")])
def test_an_interrupt_takes_what_is_there(
    what_if: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    divide = Divide.__call__

    def interrupted(self: Any, *arguments: Any) -> bool:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return divide(self, *arguments)

    monkeypatch.setattr(Divide, "__call__", interrupted)
    code, out, err = run(capsys, "--devices", "4", "--cluster", "h100-node", *what_if)
    assert code == 130 and len(calls) == 2 and "search: interrupted: planning ended after 1 of" in out
    assert any(line.startswith("*") and line.endswith(DATA_PARALLEL) for line in out.splitlines())
    assert "commfuse: interrupted: the last plan is the fastest of those that were made until then" in err
    assert ("1 of 2 cases is left out\n" in err) == bool(what_if) and out.count("\n*  ") == 1


def test_an_interrupt_ahead_of_a_plan_leaves_the_cases_before(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*given: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(plan_cases, "_plan_again", interrupted)
    code, out, err = run(capsys, "--devices", "4", "--cluster", "h100-node", "--bandwidth", "x2,x4", "--json")
    assert code == 130 and err == "commfuse: interrupted: 2 of 3 cases are left out\n"
    (case,) = json.loads(out)["cases"]
    assert chosen(case) and not case["was_interrupted"]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--devices", "x"), "--devices 'x': give numbers of devices, such as 64 or 64,128"),
        (("--devices", "4,,8"), "--devices '4,,8': a value between the commas is missing"),
        (("--devices", "0"), "--devices '0': give numbers"),
        (("--bandwidth", "2"), "--bandwidth '2': give factors above 0, such as x2"),
        (("--bandwidth", "x0"), "--bandwidth 'x0': give factors above 0"),
        (("--bandwidth", "x1e30", "--cluster", "h100-node"), "--bandwidth x1e+30: levels[0].bandwidth is"),
        (("--bandwidth", "-x2"), "--bandwidth '-x2': give factors above 0"),
        (("--memory", "-1GiB"), "--memory '-1GiB': give bytes per rank, above 0 and with a unit, such as 40GiB"),
        (("--memory", "40"), "--memory '40': give bytes per rank, above 0 and with a unit, such as 40GiB"),
        (("--memory", "0GiB"), "--memory '0GiB': give bytes per rank, above 0 and with a unit"),
        (
            ("--devices", "2,4", "--set", 'strategy_ckpt_save_file="x.json"'),
            "--set strategy_ckpt_save_file='x.json' is one file for several numbers of devices: give one of them as",
        ),
        (("--memory", "1GiB", "--schedule", "none"), "--memory needs a schedule: leave --schedule none out"),
        (("--mesh", "2x2", "--devices", "4,8"), "--mesh 2x2 has 4 devices: leave --devices out, or --mesh"),
        (("--devices", "8,16", "--cluster", "h100-node"), "cluster h100-node has 8 ranks (0..7); give a larger"),
        (("--set", 'parallel_mode="semi_auto"'), "--set parallel_mode='semi_auto': a search of strategies has 'auto'"),
        (("--devices", "2,4", "--set", "device_num=2"), "--set device_num=2: a search of strategies has 4"),
        (("--cluster", "measured"), "a virtual world measures none: give a preset or a file as --cluster"),
    ],
)
def test_bad_input(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str) -> None:
    code, out, err = run(capsys, *arguments, factory="small")
    assert code == 2 and err.startswith("commfuse: ") and message in err
    assert out == ""  # it is said before anything is planned


def test_cases_are_numbers_of_devices_with_what_ifs() -> None:
    found = cases(["8", "4,8"], ["x2"], ["1GiB", "2GB"], default=2)
    assert [str(case) for case in found] == [
        "8 devices",
        "8 devices, bandwidth x2, at most 1 GiB per rank",
        "8 devices, bandwidth x2, at most 1.86 GiB per rank",
        "4 devices",
        "4 devices, bandwidth x2, at most 1 GiB per rank",
        "4 devices, bandwidth x2, at most 1.86 GiB per rank",
    ]
    assert cases([], [], [], default=2) == [Case(2)] == cases([], ["x1"], [], default=2)


def test_parameters_that_lie_alike_are_one_line() -> None:
    def param(name: str, *layout: tuple[str, Any], rows: int = 8) -> Parameter:
        return Parameter(name, TensorSpec((rows, 8), torch.float32, (8, 1)), True, layout=layout)

    params = [
        *(param(f"blocks.{number}.up.weight", ("dp", S(0))) for number in range(12)),
        *(param(f"blocks.{number}.down.weight", *((("dp", S(1)),) if number else ())) for number in range(3)),
        *(param(f"pairs.{block}.{layer}.weight", rows=8 + layer) for block in range(2) for layer in (0, 2)),
        *(param(f"experts.{block}.{layer}.weight") for block in range(2) for layer in range(3)),
        param("head.0.weight2", ("dp.0", S(0)), ("dp.1", S(0)), ("tp", S(1))),
    ]
    found = parameter_groups({each.name: each for each in params})
    assert [(str(each), each.layout) for each in found] == [
        ("blocks.*.up.weight (12)", "S(0) on dp"),
        ("blocks.0.down.weight", "whole"),
        ("blocks.1.down.weight and 1 more", "S(1) on dp"),
        ("pairs.*.0.weight (2)", "whole"),
        ("pairs.*.2.weight (2)", "whole"),
        ("experts.*.*.weight (6)", "whole"),
        ("head.0.weight2", "S(0) on dp.0,dp.1; S(1) on tp"),
    ]
