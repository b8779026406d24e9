"""The parts of benchmarks that measure nothing and need no rights."""

from __future__ import annotations

import itertools
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

import commfuse_fx as cf
from benchmarks import __main__ as benchmarks
from benchmarks import first_step, gpu, gpu_measure
from benchmarks.chart import LEFT, blocked_and_sent, draw_timelines, spans_of_events
from benchmarks.gpu_workloads import COMPILE, EAGER, GRAPH, INDUCTOR, PLAIN
from benchmarks.launch import RanksFailed, run_ranks
from benchmarks.netns import Layout, rate_commands, setup_commands, stale, teardown_commands
from benchmarks.peers import PEERS
from benchmarks.step_summary import (
    geometric_mean,
    limit_seconds,
    means_over_limited,
    pairwise,
    quartiles,
    row,
    rows,
    slowest,
    wire_seconds,
)
from benchmarks.step_task import Measured, Result, Task
from benchmarks.step_time import VARIANTS, environments, in_order, parser, table_line
from benchmarks.workloads import WORKLOADS
from commfuse_fx.machine.timeline import Span

SVG = "{http://www.w3.org/2000/svg}"


class TestArguments:
    def test_defaults(self) -> None:
        options = parser().parse_args([])
        assert options.ranks == 2 and options.rates == [None, 4.0, 3.0, 2.0, 1.0]
        assert options.rounds == 6 and options.block == 10 and options.timeout == 300.0
        assert options.workloads == ["mlp", "gpt2", "bert", "convnet", "many_small"]
        others = ("size ", "module form ", "parallel optimizer ", "searched", "tensor parallel")
        assert options.variants == [name for name in VARIANTS if not name.startswith(others)]
        assert list(VARIANTS)[: len(PEERS) + 1] == [*PEERS, "overlap"]

    def test_values(self) -> None:
        options = parser().parse_args(["--rates", "2.5", "unlimited", "--variants", "DDP + torch.compile", "--ranks=4"])
        assert options.rates == [2.5, None] and options.variants == ["DDP + torch.compile"] and options.ranks == 4

    @pytest.mark.parametrize(
        "arguments, message",
        [
            (["--rates", "fast"], "'fast' is not a rate"),
            (["--rates", "0"], "'0' is not a rate"),
            (["--rates", "nan"], "'nan' is not a rate"),
            (["--ranks", "1"], "'1' is not a whole number of at least 2"),
            (["--rounds", "0"], "at least 1"),
            (["--block", "two"], "at least 1"),
            (["--timeout", "-1"], "'-1' is not a number of seconds"),
            (["--workloads", "vgg"], "invalid choice"),
            (["--variants", "ZeRO"], "invalid choice"),
        ],
    )
    def test_bad_values(self, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit):
            parser().parse_args(arguments)
        assert message in capsys.readouterr().err

    def test_the_unlimited_rate_comes_first(self) -> None:
        assert in_order([1.0, 4.0, None, 2.0, 4.0]) == [None, 4.0, 2.0, 1.0]

    def test_tasks_and_results_survive_json(self) -> None:
        task = Task("mlp", (None, 2.5), ("DDP", "overlap"), 6, 5, 300.0, True, False, 42, "/x.json", "/progress")
        assert Task.from_json(task.to_json()) == task
        result = Result({"2.5": Measured({"DDP": [1.0]}, predicted={"overlap": 0.5})}, {"FSDP2": "why"})
        assert Result.from_json(result.to_json()) == result

    def test_ranks_on_loopback_find_each_other(self) -> None:
        first, second = environments(2, None)
        assert [first["RANK"], second["RANK"], second["WORLD_SIZE"]] == ["0", "1", "2"]
        assert first["MASTER_PORT"] == second["MASTER_PORT"] and first["MASTER_ADDR"] == "127.0.0.1"
        assert second["GLOO_SOCKET_IFNAME"] == "lo" and second["OMP_NUM_THREADS"] == "1"


class TestArithmetic:
    def test_quartiles(self) -> None:
        assert quartiles([3.0]) == (3.0, 3.0, 3.0)
        assert quartiles([5.0, 1.0, 2.0, 4.0, 3.0]) == (2.0, 3.0, 4.0)

    def test_ratios_are_taken_pair_by_pair(self) -> None:
        # A slow moment that hits both of a pair does not show.
        assert pairwise([1.0, 10.0, 1.0], [2.0, 20.0, 2.0]) == (0.5, 0.5, 0.5)

    def test_a_step_takes_as_long_as_its_slowest_rank(self) -> None:
        assert slowest([{"DDP": [1.0, 5.0]}, {"DDP": [2.0, 4.0]}]) == {"DDP": [2.0, 5.0]}

    def test_wire_seconds(self) -> None:
        assert wire_seconds(100e6, 2.0) == pytest.approx(0.4)
        assert wire_seconds(100e6, None) is None

    @pytest.mark.parametrize(
        "unlimited, wire, limit", [(0.3, 0.4, 0.4), (0.5, 0.4, 0.5), (None, 0.4, 0.4), (0.5, None, 0.5)]
    )
    def test_limit(self, unlimited: float | None, wire: float | None, limit: float) -> None:
        assert limit_seconds(unlimited, wire) == limit

    def test_no_limit_is_known_without_a_measurement(self) -> None:
        assert limit_seconds(None, None) is None

    def test_geometric_mean(self) -> None:
        assert geometric_mean([0.5, 2.0]) == pytest.approx(1.0)
        assert geometric_mean([8.0, 1.0, 1.0]) == pytest.approx(2.0)
        assert geometric_mean([]) is None

    def test_row(self) -> None:
        times = {"DDP": [0.5, 0.6, 0.7], "overlap": [0.4, 0.54, 0.7]}
        found = row("overlap", times, 100e6, 2.0, unlimited=[0.3, 0.3, 0.3])
        assert found["seconds"] == 0.54 and found["wire_seconds"] == pytest.approx(0.4)
        assert found["limit_seconds"] == pytest.approx(0.4) and found["ratio_to_limit"] == pytest.approx(1.35)
        assert found["ratio_to_ddp"] == pytest.approx(0.9)
        assert found["ratio_to_ddp_quartiles"] == pytest.approx([0.85, 0.95])

    def test_row_without_a_rate_or_a_baseline(self) -> None:
        found = row("overlap", {"overlap": [0.5]}, None, None, unlimited=[0.5])
        assert found["limit_seconds"] == 0.5 and found["ratio_to_limit"] == 1.0
        assert found["wire_bytes"] is None and found["wire_seconds"] is None and found["ratio_to_ddp"] is None
        assert "500.0" in table_line("mlp", None, "overlap", found) and " - " in table_line("mlp", 1.0, "x", found)

    def test_the_limit_of_a_block_is_of_its_own_round(self) -> None:
        # The machine was half as fast in the second round.
        found = row("overlap", {"overlap": [1.1, 2.2, 1.1]}, 1.0, 1.0, unlimited=[1.0, 2.0, 1.0])
        assert found["ratio_to_limit"] == pytest.approx(1.1)
        assert row("overlap", {"overlap": [1.1]}, None, 1.0, unlimited=None)["ratio_to_limit"] is None

    def test_rows_take_limits_from_the_unlimited_rate(self) -> None:
        plan = {"collectives": 2, "next_step": 0, "messages": 3}
        fast, slow = Measured({"DDP": [1.0]}), Measured({"DDP": [3.0]}, {"DDP": [250e6]}, {"DDP": 2.7}, {"DDP": plan})
        other = Measured({"DDP": [2.0]}, {"DDP": [200e6]})
        ranks = [Result({"unlimited": fast, "1": slow}), Result({"unlimited": fast, "1": other})]
        found = {(rate, name): figures for rate, name, figures in rows([None, 1.0], ranks)}
        assert list(found) == [(None, "DDP"), (1.0, "DDP")]
        assert found[1.0, "DDP"]["seconds"] == 3.0 and found[1.0, "DDP"]["ratio_simulated"] == pytest.approx(0.9)
        assert found[None, "DDP"]["plan"] is None and found[1.0, "DDP"]["plan"] == plan
        assert found[None, "DDP"]["ratio_to_limit"] == 1.0 and found[1.0, "DDP"]["ratio_to_limit"] == pytest.approx(1.5)

    def test_means_leave_the_unlimited_rate_out(self) -> None:
        rows = [
            ("overlap", rate, {"ratio_to_ddp": ratio, "ratio_to_limit": limit})
            for rate, ratio, limit in [(None, 9.0, 9.0), (4.0, 0.5, 1.0), (1.0, 2.0, 4.0)]
        ]
        found = means_over_limited([*rows, ("FSDP2", 1.0, {"ratio_to_ddp": None, "ratio_to_limit": 3.0})])
        assert found["overlap"] == pytest.approx({"ratio_to_ddp": 1.0, "ratio_to_limit": 2.0, "cells": 2})
        assert found["FSDP2"]["ratio_to_ddp"] is None and found["FSDP2"]["cells"] == 0


class TestNetwork:
    def test_two_ranks_share_one_pair(self) -> None:
        layout = Layout(42, 2)
        commands = [" ".join(command) for command in setup_commands(layout)]
        assert commands[:3] == [
            "ip netns add cfbench-42-0",
            "ip netns add cfbench-42-1",
            "ip link add veth0 netns cfbench-42-0 type veth peer name veth1 netns cfbench-42-1",
        ]
        assert "ip -n cfbench-42-1 addr add 10.213.0.2/16 dev veth1" in commands
        assert not any("bridge" in command for command in commands)

    def test_more_ranks_hang_on_a_bridge(self) -> None:
        layout = Layout(42, 3)
        commands = [" ".join(command) for command in setup_commands(layout)]
        assert "ip -n cfbench-42-hub link add bridge type bridge" in commands
        for rank in range(3):
            namespace = f"cfbench-42-{rank}"
            pair = f"ip link add veth{rank} netns {namespace} type veth peer name port{rank} netns cfbench-42-hub"
            assert pair in commands
            assert f"ip -n cfbench-42-hub link set port{rank} master bridge up" in commands

    @pytest.mark.parametrize("ranks, ends", [(2, 2), (3, 6)])
    def test_every_end_of_every_link_has_the_rate(self, ranks: int, ends: int) -> None:
        commands = [" ".join(command) for command in rate_commands(Layout(42, ranks), 2.5)]
        assert len(set(commands)) == ends
        limited = r"tc -n cfbench-42-\w+ qdisc replace dev \w+ root tbf rate 2\.5gbit burst 1mb latency 100ms"
        assert all(re.fullmatch(limited, command) for command in commands)
        assert all(command[-1] == "noqueue" for command in rate_commands(Layout(42, ranks), None))

    @pytest.mark.parametrize("ranks", [2, 3, 300])
    def test_names_fit_and_differ_and_everything_is_removed(self, ranks: int) -> None:
        layout = Layout(2**22, ranks)
        added = [command[-1] for command in setup_commands(layout) if command[:3] == ["ip", "netns", "add"]]
        assert [command[-1] for command in teardown_commands(layout)] == added and len(set(added)) == len(added)
        # The kernel's limit for the name of an interface.
        assert all(len(interface) <= 15 for _, interface in layout.ends())
        assert len({layout.address(rank) for rank in range(ranks)}) == ranks

    def test_only_what_a_dead_benchmark_left_is_stale(self) -> None:
        names = ["cfbench-1-0", "cfbench-2-0", "cfbench-2-hub", "cfbench-x-0", "other-2-0", "cfbench-2"]
        assert stale(names, alive=lambda pid: pid == 1) == ["cfbench-2-0", "cfbench-2-hub"]


class TestLaunch:
    """Ranks that fail or hang end the run, and what they printed is shown."""

    def test_ranks_that_end_well(self, tmp_path: Path) -> None:
        _launch(["open('0', 'w')", "open('1', 'w')"], tmp_path, timeout=60)
        assert (tmp_path / "0").exists() and (tmp_path / "1").exists()

    def test_a_rank_that_fails_ends_the_others(self, tmp_path: Path) -> None:
        with pytest.raises(RanksFailed, match=r"rank 1 ended with exit code 3\n--- rank 0\n(.|\n)*the reason"):
            _launch(["import time; time.sleep(600)", "import sys; print('the reason'); sys.exit(3)"], tmp_path, 60)

    def test_ranks_that_hang_are_given_up(self, tmp_path: Path) -> None:
        with pytest.raises(RanksFailed, match=r"ranks \[0, 1\] got nothing done for 1 s"):
            _launch(["import time; time.sleep(600)"] * 2, tmp_path, timeout=1)


def _launch(programs: list[str], folder: Path, timeout: float) -> None:
    commands = [[sys.executable, "-c", f"import os; os.chdir({str(folder)!r}); {program}"] for program in programs]
    run_ranks(commands, [dict(os.environ)] * len(programs), timeout, folder / "progress")


class TestChart:
    def test_well_formed_with_names_escaped(self) -> None:
        name = '<b> & "c"'
        text = draw_timelines(f"title {name}", [("lane <1>", name, 0.0, 0.5)], [("comm & co", "x", 0.1, 0.2)])
        root = ElementTree.fromstring(text)
        texts = [element.text for element in root.iter(f"{SVG}text")]
        assert root.tag == f"{SVG}svg"
        assert f"title {name}" in texts and "lane <1>" in texts and "comm & co" in texts and name in texts
        hints = [element.text for element in root.iter(f"{SVG}title")]
        assert hints == [f"{name}: 0.000 to 500.000 ms", "x: 100.000 to 200.000 ms"]

    def test_both_groups_have_one_axis(self) -> None:
        bars = _bars(draw_timelines("t", [("a", "long", 0.0, 1.0)], [("a", "half", 0.0, 0.5)]))
        assert bars["half"][2] == pytest.approx(bars["long"][2] / 2, abs=0.01)
        assert bars["half"][0] == bars["long"][0] and bars["half"][1] > bars["long"][1]

    def test_bars_never_lie_on_each_other(self) -> None:
        spans = [("a", "one", 0.0, 0.5), ("a", "two", 0.2, 0.7), ("a", "three", 0.5, 0.9), ("b", "four", 0.0, 1.0)]
        bars = _bars(draw_timelines("t", spans, []))
        assert bars["one"][1] == bars["three"][1] != bars["two"][1]
        for (x, y, width), (other_x, other_y, other_width) in itertools.combinations(bars.values(), 2):
            apart = x + width <= other_x + 0.02 or other_x + other_width <= x + 0.02
            assert y != other_y or apart

    def test_the_axis_has_round_numbers(self) -> None:
        text = draw_timelines("t", [("a", "x", 0.0, 0.026)], [])
        assert re.findall(r">([\d.]+ ms)<", text) == ["0 ms", "5 ms", "10 ms", "15 ms", "20 ms", "25 ms"]

    def test_nothing_to_draw(self) -> None:
        assert _bars(draw_timelines("t", [], [])) == {}

    def test_spans_of_a_measured_step(self) -> None:
        first = Span("b.0", "", issued=10.1, done=10.3, wait_entered=10.2, wait_left=10.4)
        second = Span("b.1", "", issued=10.15, done=None, wait_entered=10.5, wait_left=10.6)
        found = blocked_and_sent([first, second], 10.0, 10.7)
        assert [span[:2] for span in found] == [span[:2] for span in _expected()]
        assert [span[2:] for span in found] == [pytest.approx(span[2:]) for span in _expected()]

    def test_spans_of_simulated_events(self) -> None:
        events = [
            SimpleNamespace(name=name, kind=kind, stream=stream, begin=begin, end=end)
            for name, kind, stream, begin, end in [
                ("b.0", "communication", "data", 1, 3),
                ("mm", "compute", "compute", 0, 1),
                ("issue b.0", "issue", "compute", 1, 1.5),
                ("relu", "compute", "compute", 1.5, 2),
                ("b.0.wait", "wait", "compute", 2, 3),
                ("adam", "compute", "compute", 3, 4),
            ]
        ]
        assert spans_of_events(events) == [
            ("compute", "compute", 0.0, 2.0),
            ("compute", "compute", 3.0, 4.0),
            ("communication data", "b.0", 1.0, 3.0),
            ("blocked", "b.0.wait", 2.0, 3.0),
        ]

    def test_what_the_step_before_left_in_flight_is_drawn_whole(self) -> None:
        bars = _bars(draw_timelines("t", [("a", "now", 0.0, 0.5), ("b", "tail", -0.5, 0.5)], []))
        assert bars["tail"][0] == LEFT and bars["tail"][2] == pytest.approx(2 * bars["now"][2], abs=0.01)
        assert bars["now"][0] == pytest.approx(LEFT + bars["now"][2], abs=0.01)


def _expected() -> list[tuple[str, str, float, float]]:
    return [
        ("compute", "compute", 0.0, 0.2),
        ("compute", "compute", 0.4, 0.5),
        ("compute", "compute", 0.6, 0.7),
        ("blocked", "b.0", 0.2, 0.4),
        ("blocked", "b.1", 0.5, 0.6),
        ("communication", "b.0", 0.1, 0.3),
        ("communication", "b.1", 0.15, 0.6),
    ]


def _bars(svg: str) -> dict[str, tuple[float, float, float]]:
    """Name -> x, y and width of its bar."""
    bars = {}
    for rectangle in ElementTree.fromstring(svg).iter(f"{SVG}rect"):
        hint = rectangle.find(f"{SVG}title")
        if hint is not None and hint.text is not None:
            values = tuple(float(rectangle.attrib[key]) for key in ("x", "y", "width"))
            bars[hint.text.partition(":")[0]] = (values[0], values[1], values[2])
    return bars


class TestGPU:
    """The benchmark for a GPU, on a CPU with tiny models."""

    def test_it_runs(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        monkeypatch.chdir(tmp_path)
        arguments = ["--device", "cpu", "--small", "--rounds", "1", "--no-ranks", "--variants", EAGER, PLAIN]
        assert gpu.main(arguments) == 0
        shown = capsys.readouterr().out
        result = json.loads((tmp_path / "out/benchmarks/gpu_small.json").read_text())
        assert [row["workload"] for row in result["rows"]] == ["gpt2", "mlp", "llama", "resnet50"]
        for found in result["rows"]:
            assert found["ratio"] > 0 and f"{found['ratio']:.3f} goal 1.00" in shown

    def test_without_a_gpu_it_says_so(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setattr(benchmarks, "NAMES", ("gpu",))
        codes = []
        for arguments in ["gpu"], []:
            monkeypatch.setattr(sys, "argv", ["benchmarks", *arguments])
            codes.append(benchmarks.main())
            assert "needs a CUDA device; there is none here" in capsys.readouterr().err
        assert codes == [2, 0], "who runs all benchmarks does without it"

    def test_no_workload_begins_when_the_time_is_over(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.chdir(tmp_path)
        assert gpu.main(["--device", "cpu", "--small", "--no-ranks", "--limit", "0", "--variants", EAGER, PLAIN]) == 0
        assert capsys.readouterr().out.count("not run: 0 seconds were over") == 4

    def test_a_variant_that_cannot_be_is_shown_with_the_reason_and_another_one_stands_in(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def make_step(variant: str, workload: object, device: object) -> Callable[[], None]:
            if variant == GRAPH:
                raise cf.NotAvailableError("graphs are for another day; use none")
            if variant == COMPILE:
                raise ZeroDivisionError("oh")
            return lambda: None

        monkeypatch.setattr(gpu_measure, "make_step", make_step)
        monkeypatch.setattr(gpu_measure, "_seconds_of", lambda command: 7.0)
        rows = gpu.rows_of("gpt2", list(gpu.VARIANTS))
        variants = gpu.variants_of(rows)
        assert variants == [EAGER, COMPILE, PLAIN, GRAPH, INDUCTOR]
        device, workload = torch.device("cpu"), gpu.SMALL["gpt2"]
        found = gpu_measure.measure(workload, variants, device, 2, {INDUCTOR: ["x"]}, {INDUCTOR: GRAPH})
        assert {name: each.failed for name, each in found.items()} == dict.fromkeys(variants, False) | {COMPILE: True}
        lines = [gpu.line(row, found)[0] for row in rows]
        assert lines[0].endswith("graphs are for another day")
        assert lines[-1].endswith("ZeroDivisionError: oh") and found[INDUCTOR].again == 7.0
        known = gpu_measure.Measured(seconds=[4.0, 8.0], first=10.0, peak=50)
        other = gpu_measure.Measured(seconds=[2.0, 4.0], first=2.0, again=1.0, peak=100)
        ratios = {what: gpu_measure.ratio(what, other, known) for what in ("time", "peak memory", "first step")}
        assert ratios == {"time": 0.5, "peak memory": 2.0, "first step": 0.2}
        assert gpu_measure.ratio("first step of a second process", other, known) == 0.1
        assert [*gpu_measure.measure(workload, [EAGER, INDUCTOR], device, 2, {}, {INDUCTOR: EAGER})] == [EAGER]


@pytest.mark.parametrize("name", ["mlp", "convnet", "many_small"])
def test_blocks_are_parts_of_the_model_and_disjoint(name: str) -> None:
    model = WORKLOADS[name].model()
    inside = list(model.modules())
    blocks = [module for block in WORKLOADS[name].blocks(model) for module in block]
    assert blocks and len({id(module) for module in blocks}) == len(blocks)
    assert all(any(module is other for other in inside) for module in blocks)


def test_first_steps_are_timed_in_processes_that_share_only_code_on_disk(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folders: list[str] = []

    def run(command: list[str], env: dict[str, str], **options: Any) -> Any:
        folders.append(env["TORCHINDUCTOR_CACHE_DIR"])
        return SimpleNamespace(stdout=f'a word\n{{"seconds": {len(folders)}, "compiled": {command[-2]}}}\n')

    monkeypatch.setattr(first_step.subprocess, "run", run)
    monkeypatch.setattr(first_step, "_cpu_seconds_of_children", lambda: 10.0 * len(folders))
    results = first_step.table(["gpt2"], [2, 6], ["layers"])
    assert folders[0] == folders[1] != folders[2] == folders[3] and not any(map(os.path.exists, folders))
    assert results["gpt2 6 layers"]["second"] == {"seconds": 4, "compiled": 6, "cpu": 10.0}
    assert capsys.readouterr().out.splitlines()[1].split() == ["gpt2", "2", "layers", "2", "1.0", "10.0", "2.0", "10.0"]
