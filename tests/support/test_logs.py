"""COMMFUSE_LOGS: its words, what each shows, and who prints; and artifacts of torch's structured trace."""

from __future__ import annotations

import io
import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import commfuse_fx as cf
from commfuse_fx.ir.core.program import Program
from commfuse_fx.passes.schedule.overlap import Overlap
from commfuse_fx.support import logs
from commfuse_fx.support.logs import WORDS, configure_logs, parse_words
from commfuse_fx.support.progress import progress
from tests.inspect.steps import Net, train

ROOT = Path(__file__).parents[2]

Words = Callable[[str], None]


@pytest.fixture
def words(monkeypatch: pytest.MonkeyPatch) -> Iterator[Words]:
    """Sets COMMFUSE_LOGS; afterwards nothing of it is left."""
    yield lambda text: monkeypatch.setenv("COMMFUSE_LOGS", text)
    monkeypatch.setenv("COMMFUSE_LOGS", "")
    configure_logs()
    assert logs._terminal not in logging.getLogger("commfuse_fx").handlers
    assert logging.getLogger("commfuse_fx.passes").level == logging.NOTSET


def heads(printed: str) -> list[str]:
    return [line for line in printed.splitlines() if line.startswith("[commfuse")]


def test_words_are_parsed() -> None:
    assert parse_words("") == {}
    assert parse_words("passes, -trace,,") == {"passes": True, "trace": False}
    assert parse_words("passes,-passes") == {"passes": False}
    quiet = parse_words("all,-plan")
    assert [word for word in WORDS if not quiet.get(word, False)] == ["plan", "changed", "graphs"]
    with pytest.raises(cf.ConfigKeyError, match=r"'pases' is unknown \(did you mean 'passes'\?\); use trace, retrace"):
        parse_words("trace,pases")


def test_an_unknown_word_is_an_error_of_compile(words: Words) -> None:
    words("nonsense")
    for _ in range(2):
        with pytest.raises(cf.ConfigKeyError, match="COMMFUSE_LOGS='nonsense'.*all_ranks, separated by commas"):
            cf.compile(Net(), form="step")


def test_nothing_is_printed_or_changed_without_the_variable(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COMMFUSE_LOGS", raising=False)
    train(Net())
    assert capsys.readouterr().err == ""
    assert logging.getLogger("commfuse_fx").handlers == []


def test_one_line_for_each_pass(words: Words, capsys: pytest.CaptureFixture[str]) -> None:
    words("passes")
    lowered = train(Net())
    lines = heads(capsys.readouterr().err)
    assert [line.split()[3].rstrip(":") for line in lines] == [record.name for record in lowered.pass_records]
    first = lowered.pass_records[0]
    assert f"{first.nodes_before} -> {first.nodes_after} nodes" in lines[0] and lines[0].endswith(" ms")


def test_areas_and_their_words(words: Words, capsys: pytest.CaptureFixture[str]) -> None:
    words("trace,plan,collectives,retrace")
    cut = {"allreduce": {"mode": "index", "config": [2, 99]}}
    lowered = train(Net(), cut)
    printed = capsys.readouterr().err
    areas = [line.split()[1].rstrip("]") for line in heads(printed)]
    assert areas == ["passes", "trace", "plan", "collectives"], "the warning of a pass is shown without its word"
    for each in lowered.collectives:
        assert f"  {each.bytes}  " in printed
    assert (
        f"{len(lowered.collectives)} collective(s), {sum(each.bytes for each in lowered.collectives)} bytes" in printed
    )

    words("retrace,-passes")
    step = cf.compile(nn.Linear(8, 8), cut, loss_fn=nn.functional.mse_loss)
    for rows in (2, 3):
        step(torch.ones(rows, 8), torch.ones(rows, 8))
    change = "input.0 (input): f32[2,8] -> f32[3,8]"
    assert capsys.readouterr().err == f"[commfuse retrace] re-tracing: {change}\n"


def test_graphs_after_every_pass_or_those_that_changed_it(words: Words, capsys: pytest.CaptureFixture[str]) -> None:
    for word in ("graphs", "changed"):
        words(word)
        lowered = train(Net())
        printed = capsys.readouterr().err
        shown = {name: each for name, each in lowered.stages.items() if word == "graphs" or each.modified}
        assert [line.split()[4] for line in heads(printed)] == list(shown)
        texts = re.split(r"^\[commfuse .*\n", printed, flags=re.MULTILINE)[1:]
        assert texts == [each.text() for each in shown.values()], "each is whole, as the stage has it"
        assert (len(shown) < len(lowered.stages)) == (word == "changed")


def test_the_graph_before_a_pass_that_fails(
    words: Words, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words("failed")
    sound = train(Net())
    assert capsys.readouterr().err == "", "nothing fails"

    def fails(*_: object) -> bool:
        raise RuntimeError("out of ideas")

    def breaks(self: Overlap, program: Program) -> bool:
        node = next(node for node in program.graph.nodes if node.op == "call_function")
        node.meta.clear()
        return True

    before = sound.stages["lower_average"].text()
    for replacement, error in ((fails, RuntimeError), (breaks, Exception)):
        with monkeypatch.context() as patch:
            patch.setattr(Overlap, "__call__", replacement)
            with pytest.raises(error):
                train(Net())
        head, graph = capsys.readouterr().err.split("\n", 1)
        assert head.startswith("[commfuse failed] pass overlap raised ") and head.endswith("; the graph before it:")
        assert graph == before


def test_layouts_of_a_divided_step(words: Words, capsys: pytest.CaptureFixture[str]) -> None:
    words("sharding")
    model = nn.Linear(8, 8)
    cf.shard(model.weight, ("tp", None))
    options = {"loss_fn": nn.functional.mse_loss, "parallel_mode": "semi_auto", "mesh": (1, 2), "device_num": 2}
    cf.compile(model, **options, form="step").lower(torch.ones(4, 8), torch.ones(4, 8))
    printed = capsys.readouterr().err
    assert printed.startswith("[commfuse sharding] layouts; ") and "\n  weight: " in printed


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_no_spinner_beside_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value, is_shown in (("COMMFUSE_LOGS", "", True), ("COMMFUSE_LOGS", "plan", False), ("RANK", "1", False)):
        with monkeypatch.context() as patch:
            terminal = Terminal()
            patch.setattr(sys, "stderr", terminal)
            patch.setenv(name, value)
            with progress("waiting") as show:
                show("waiting still")
            assert ("commfuse: waiting still ..." in terminal.getvalue()) == is_shown


def test_the_programs_own_handlers_print_alone(words: Words, capsys: pytest.CaptureFixture[str]) -> None:
    words("plan")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("mine: %(message)s"))
    logging.getLogger().addHandler(handler)
    try:
        train(Net())
    finally:
        logging.getLogger().removeHandler(handler)
    printed = capsys.readouterr().err
    assert heads(printed) == [] and printed.startswith("mine: the train step: ")


def test_debug_level_does_not_print_whole_graphs(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "commfuse_fx"):
        train(Net())
    areas = {record.name.split(".")[1] for record in caplog.records}
    assert {"passes", "plan", "trace"} <= areas and not areas & {"graphs", "changed", "failed"}


@pytest.mark.parametrize("text, rank, prefix", [("plan", 1, ""), ("plan,all_ranks", 1, "[commfuse rank 1 plan]")])
def test_rank_0_prints_unless_all_are_asked_for(
    words: Words, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, text: str, rank: int, prefix: str
) -> None:
    monkeypatch.setattr(logs, "joined_rank", lambda: rank)
    words(text)
    train(Net())
    printed = capsys.readouterr().err
    assert printed.startswith(prefix) and bool(printed) == bool(prefix)
    monkeypatch.setattr(logs, "joined_rank", lambda: 0)


SCRIPT = """
import torch, commfuse_fx as cf
torch.manual_seed(0)
model = torch.nn.Linear(8, 8)
step = cf.compile(model, loss_fn=torch.nn.functional.mse_loss, device_num=2)
print(step.lower(torch.ones(4, 8), torch.ones(4, 8)).text(), end="")
model.eval()
step.lower(torch.ones(4, 8), torch.ones(4, 8))
"""


def test_torch_trace_has_the_graphs(tmp_path: Path) -> None:
    environment = {**os.environ, "TORCH_TRACE": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=True, timeout=120
    )
    (file,) = tmp_path.iterdir()
    content = file.read_text()
    names = ["train_graph", "train_explain", "eval_graph", "eval_explain"]
    places = [content.index(f'{{"name": "commfuse_{i // 2:03d}_{name}"') for i, name in enumerate(names)]
    assert places == sorted(places)
    payload = content[places[0] : places[1]].split("\n", 1)[1]
    graph = "".join(f"\t{line}\n" for line in done.stdout.splitlines())
    assert graph in payload
    assert "\tpredicted step: " in content[places[1] : places[2]]


def test_without_a_folder_nothing_is_traced() -> None:
    from commfuse_fx.support.torch_trace import is_tracing

    assert not is_tracing(), "though pytest has handlers on every logger"


def test_without_the_private_interface_nothing_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    from commfuse_fx.support.torch_trace import is_tracing, write_artifact

    monkeypatch.setitem(sys.modules, "torch._logging._internal", None)
    assert not is_tracing()
    write_artifact("name", lambda: pytest.fail("must not be made"))
