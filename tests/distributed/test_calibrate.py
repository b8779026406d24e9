"""Calibration and step profiles on real ranks, and the command line around them."""

from __future__ import annotations

import io
import json
import os
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import pytest
import torch

import commfuse_fx as cf
from commfuse_fx.cli import main
from commfuse_fx.cost.priced import model_fingerprint
from commfuse_fx.errors import ConfigTypeError, ConfigValueError
from commfuse_fx.machine.cluster import ClusterSpec
from commfuse_fx.machine.presets import preset, resolve_cluster
from commfuse_fx.machine.step_profile import StepProfile
from commfuse_fx.measure import calibration
from commfuse_fx.measure.calibration import Calibration, calibrate
from commfuse_fx.measure.profiling import profile_step
from commfuse_fx.support.writing import write_whole
from tests.distributed.harness import Ranks
from tests.distributed.models_of_ranks import adamw, assert_same, compiled, mlp, snapshot, xy
from tests.distributed.programs import run_module, run_programs


def calibrated(group_rank: list[str] | None = None) -> Calibration:
    """`group_rank`: the node that torchrun would put each rank on."""
    if group_rank is None:
        return calibrate(seconds=0.1)
    os.environ["GROUP_RANK"] = group_rank[cf.get_rank()]
    try:
        return calibrate(seconds=0.1)
    finally:
        del os.environ["GROUP_RANK"]


def check_figures(found: Calibration, world: int) -> None:
    device = found.cluster.device
    assert found.cluster.ranks == found.report.world == world
    assert {"f32", "f64"} <= set(device.flops)
    assert all(value > 0 for value in device.flops.values())
    assert device.memory_bandwidth > 0 and device.memory_bytes > 0 and device.op_overhead > 0
    for level, report in zip(found.cluster.levels, found.report.levels, strict=True):
        assert level.alpha > 0 and level.bandwidth > 0 and level.host_seconds_per_byte >= 0
        assert (level.name, level.alpha, level.bandwidth) == (report.name, report.alpha, report.bandwidth)
        assert level.bandwidth == report.bandwidth > 0 and report.fitted_bandwidth > 0
        assert 0 <= report.median_error <= report.max_error
        assert {sample.kind for sample in report.samples} == {"all_reduce", "all_gather", "broadcast"}
        assert len({sample.nbytes for sample in report.samples}) >= 4
    assert json.loads(json.dumps(found.report.to_dict()))["levels"][0]["name"] == found.cluster.levels[0].name
    assert ClusterSpec.from_json(found.cluster.to_json()) == found.cluster


def test_every_rank_gets_the_same_cluster(ranks: Ranks) -> None:
    first, second = ranks.values(calibrated)
    assert first == second
    check_figures(first, 2)
    (level,) = first.cluster.levels
    assert (level.name, level.domains) == ("host", None)
    for part in ("calibrated 2 ranks over gloo", "level host: 2 ranks", "GFLOP/s f32", "relative error"):
        assert part in first.report.text()


def test_two_hosts_have_two_levels(ranks: Ranks) -> None:
    found = ranks.values(calibrated, ["0", "0", "1"], size=3)
    assert found[0] == found[1] == found[2]
    check_figures(found[0], 3)
    inner, outer = found[0].cluster.levels
    assert (inner.name, inner.domains, outer.name, outer.domains) == ("host", ((0, 1), (2,)), "network", None)
    assert [level.groups for level in found[0].report.levels] == [((0, 1),), ((0, 2),)]


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        (((0, 1, 2),), [("host", None, ((0, 1, 2),))]),
        (((0,), (1,), (2,)), [("network", None, ((0, 1, 2),))]),
        (((0, 1), (2, 3)), [("host", 2, ((0, 1), (2, 3))), ("network", None, ((0, 2), (1, 3)))]),
        (((0, 2), (1, 3)), [("host", ((0, 2), (1, 3)), ((0, 2), (1, 3))), ("network", None, ((0, 1), (2, 3)))]),
        (((0, 1, 2), (3,)), [("host", ((0, 1, 2), (3,)), ((0, 1, 2),)), ("network", None, ((0, 3),))]),
    ],
)
def test_levels_follow_from_who_shares_a_host(hosts: tuple[tuple[int, ...], ...], expected: list[Any]) -> None:
    assert [(p.name, p.domains, p.groups) for p in calibration._levels_of(hosts)] == expected


def test_a_world_of_one_cannot_be_calibrated() -> None:
    with pytest.raises(ConfigValueError, match="start at least two with torchrun"):
        calibrate()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"seconds": "3"}, ConfigTypeError, "seconds='3' must be a number"),
        ({"seconds": True}, ConfigTypeError, "seconds=True must be a number"),
        ({"seconds": 0}, ConfigValueError, "seconds=0 must be positive"),
        ({"seconds": float("inf")}, ConfigValueError, "seconds=inf must be positive"),
        ({"device": "abacus"}, ConfigValueError, "device='abacus' is not a device: use 'cpu' or 'cuda'"),
        ({"device": "meta"}, ConfigValueError, "device='meta' cannot be calibrated"),
    ],
)
def test_bad_options(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        calibrate(**options)


def profiled() -> tuple[StepProfile, list[str]]:
    """Of a step that sends its bucket in pieces."""
    model = mlp(1600)  # its middle weight fills 10 MB
    optimizer = adamw(model)
    step = compiled(model, optimizer)
    step(*xy(0))
    before = snapshot(model, optimizer)
    executor = step.session.running
    assert executor is not None
    call = step.planner.take_apart(xy(1), {})
    params = dict(model.named_parameters())
    profile = profile_step(executor, dict(call.leaves), preset("gloo-10gbit"), 2, model_fingerprint(params))
    assert_same(snapshot(model, optimizer), before)
    step(*xy(1))  # the ranks are still at the same place
    assert any(node.meta["commfuse"].sends for node in executor.program.graph.nodes)
    names = [node.meta["commfuse"].name for node in executor.program.collectives()]
    return profile, names


def test_every_rank_gets_the_same_profile(ranks: Ranks) -> None:
    (first, collectives), (second, _) = ranks.values(profiled)
    assert first == second
    assert first.world == 2
    assert first.torch == torch.__version__
    assert all(value >= 0 for value in first.node_seconds.values())
    assert any(value > 0 for value in first.node_seconds.values())
    assert collectives and not set(collectives) & set(first.node_seconds)


# The command line.


def test_the_command_on_two_ranks(ranks: Ranks, tmp_path: Path) -> None:
    folder = tmp_path / "here"
    folder.mkdir()
    arguments = ("calibrate", "--seconds", "0.1", "--out", "mine.json", "--json")
    ended = run_programs(ranks, run_module, "commfuse_fx", *arguments, files=tmp_path, folder=folder)
    assert [each.code for each in ended] == [0, 0], ended
    report = json.loads(ended[0].out)
    assert ended[1].out == ""
    assert (report["file"], report["world"]) == ("mine.json", 2)
    cluster = resolve_cluster(str(folder / "mine.json"))
    assert cluster.levels[0].alpha == report["levels"][0]["alpha"]
    assert [path.name for path in folder.iterdir()] == ["mine.json"]


def command(*arguments: str) -> tuple[int, str]:
    """What the command returns on a rank, and what it says on stderr."""
    said = io.StringIO()
    with redirect_stderr(said):
        return main(arguments), said.getvalue()


def test_an_output_that_cannot_be_written_is_bad_usage_before_measuring(ranks: Ranks) -> None:
    arguments = ("calibrate", "--seconds", "500", "--out", "no/where.json")
    (code, said), (other, silent) = ranks.values(command, *arguments)
    assert (code, other) == (2, 2)
    assert said.splitlines()[-1] == "commfuse: --out no/where.json: there is no folder no; make it first"
    assert "commfuse:" not in silent


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "mine.json"
    write_whole(path, "old")

    def interrupted(*args: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("commfuse_fx.support.writing.os.replace", interrupted)
        with pytest.raises(KeyboardInterrupt):
            write_whole(path, "new")
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("mine.json", "old")]
    write_whole(path, "new")
    assert path.read_text() == "new"


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(arguments)
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--help")
    assert code == 0
    assert "calibrate" in out
    code, out, _ = run(capsys, "calibrate", "--help")
    assert code == 0
    for option in ("--out", "--seconds", "--device", "--json", "--traceback"):
        assert option in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("calibrat",), "invalid choice: 'calibrat'"),
        (("calibrate", "--seconds", "soon"), "'soon' must be a positive number of seconds"),
        (("calibrate", "--seconds", "0"), "'0' must be a positive number of seconds"),
        (("calibrate", "--device", "tpu"), "invalid choice: 'tpu'"),
        (("calibrate",), "start it with torchrun --nproc-per-node 2 -m commfuse_fx calibrate --out gloo.json"),
    ],
)
def test_bad_usage(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str) -> None:
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert "Traceback" not in err


def test_traceback_is_shown_when_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "calibrate", "--traceback")
    assert code == 2
    assert "Traceback" in err


def test_failures_and_interrupts_have_their_own_codes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(error: BaseException) -> Any:
        def init() -> None:
            raise error

        return init

    monkeypatch.setattr("commfuse_fx.commands.calibrate.init", fails(RuntimeError("no route to host\nmore")))
    assert run(capsys, "calibrate")[::2] == (1, "commfuse: RuntimeError: no route to host (--traceback shows where)\n")
    monkeypatch.setattr("commfuse_fx.commands.calibrate.init", fails(KeyboardInterrupt()))
    assert run(capsys, "calibrate")[::2] == (130, "commfuse: interrupted\n")
