"""The examples run as their documentation says, on one and on several ranks."""

from __future__ import annotations

import io
import math
import os
import re
import runpy
import sys
import tempfile
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed import run

from tests.distributed.harness import Ranks
from tests.distributed.programs import run_programs

ROOT = Path(__file__).resolve().parent.parent

FUSION_IDS = [
    f"The parameter {layer}{part}'s fusion id is {number}"
    for number, (layer, parts) in enumerate(
        [("head", ("",)), *((f"layer{i}", (".input_mapping", ".output_mapping")) for i in (1, 2, 3))]
    )
    for half in parts
    for part in (f"{half}.weight", f"{half}.bias")
]
LEAKS_OF_TRITON = re.compile(r"^(?:nanobind: | - leaked | - \.\.\. skipped|See https://nanobind\.).*\n?", re.MULTILINE)
"""What Triton's bindings say at the end of a process that has imported them, with PyTorch 2.15."""

LOSS = re.compile(r"epoch: (\d+), step: (\d+), loss is (\d+\.\d+)")


def torchrun(*arguments: str) -> None:
    """As the command, in a process that has imported what ranks need. The ranks that it starts are its forks."""
    os.environ["OMP_NUM_THREADS"] = "1"

    def as_forks(args: Any) -> tuple[Any, Callable[..., None], list[str]]:
        config, _, (_, script, *others) = config_from_args(args)  # the command is python -u script
        return replace(config, start_method="fork"), run_script, [script, *others]

    config_from_args = run.config_from_args
    with mock.patch.object(run, "config_from_args", as_forks):
        run.main(list(arguments))


def run_script(script: str, *arguments: str) -> None:
    """As `python script arguments`."""
    torch.set_num_threads(torch.get_num_threads())  # a fork makes the pool of threads anew
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")


def start_example(ranks: Ranks, folder: Path, size: int, name: str, *arguments: str) -> str:
    """What the example prints when torchrun starts it. Fails on a bad exit and on anything on stderr."""
    options = ("--standalone", f"--nproc-per-node={size}", str(ROOT / "examples" / name))
    (done,) = run_programs(ranks, torchrun, *options, *arguments, files=folder, folder=ROOT, size=1)
    assert done.code == 0, done.out + done.err
    assert LEAKS_OF_TRITON.sub("", done.err) == ""
    return done.out


def run_example(name: str, *arguments: str) -> str:
    """What the example prints when this process runs it."""
    printed = io.StringIO()
    with mock.patch.object(sys, "argv", [name, *arguments]), redirect_stdout(printed):
        runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
    return printed.getvalue()


def run_on_rank(name: str, *arguments: str) -> tuple[str, str]:
    """What the example prints on one rank: stdout, and whatever reaches stderr."""
    with tempfile.TemporaryFile("w+") as file:
        own = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            printed = run_example(name, *arguments)
        finally:
            sys.stderr.flush()
            os.dup2(own, 2)
            os.close(own)
        file.seek(0)
        return printed, file.read()


def run_on_ranks(ranks: Ranks, name: str, *arguments: str) -> str:
    """What the example prints on two ranks. Fails on anything on stderr."""
    (printed, complaints), (other, others) = ranks.values(run_on_rank, name, *arguments)
    assert (other, complaints, others) == ("", "", "")
    return printed


@pytest.mark.dist
@pytest.mark.xdist_group("dist")
@pytest.mark.parametrize("size", [0, 2])
def test_train_digits(ranks: Ranks, size: int, tmp_path: Path) -> None:
    dumps, printed = tmp_path / "dumps", tmp_path / "printed"
    printed.mkdir()
    arguments = ("train_digits.py", "--dump-graph", "--dump", str(dumps))
    output = start_example(ranks, printed, size, *arguments) if size else run_example(*arguments)
    lines = output.splitlines()
    assert lines[: len(FUSION_IDS)] == FUSION_IDS
    losses = LOSS.findall(output)
    assert [(int(epoch), int(step)) for epoch, step, _ in losses] == [(e, s) for e in range(15) for s in (0, 10, 20)]
    assert lines[len(FUSION_IDS)].startswith("epoch: 0, step: 0, loss is ")
    assert float(losses[0][2]) == pytest.approx(math.log(10), abs=0.05)
    assert float(losses[-1][2]) < 0.5
    accuracy = re.fullmatch(r"test accuracy: (\d+\.\d+)%", lines[len(FUSION_IDS) + len(losses)])
    assert accuracy
    assert float(accuracy.group(1)) > 90
    check_graph(output, size)
    assert sorted(folder.name for folder in dumps.iterdir()) == [f"rank{rank}" for rank in range(max(size, 1))]


def check_graph(output: str, ranks: int) -> None:
    """The graph and the measurement that --dump-graph prints."""
    collectives = re.findall(r"^bwd .*all_reduce_.*fusion_id=(\d) members=\[(.*)\]}$", output, re.MULTILINE)
    if ranks < 2:
        assert not collectives
        assert "0 collective(s)\n" in output
        assert "measured communication: none in 20 step(s)\n" in output
        return
    # The backward comes to the last layer first. Id 0 is never fused.
    assert [int(fusion_id) for fusion_id, _ in collectives] == [3, 2, 1, 0, 0]
    assert [len(members.split(", ")) for _, members in collectives] == [4, 4, 4, 1, 1]
    assert "5 collective(s)\n" in output
    measured = re.search(r"^total: (\S+) ms in flight, (\S+) ms exposed .*, (\d+)% hidden", output, re.MULTILINE)
    assert measured
    in_flight, exposed, hidden = map(float, measured.groups())
    assert 0 < exposed <= in_flight + 0.001
    assert hidden == pytest.approx(100 * (1 - exposed / in_flight), abs=1)


@pytest.mark.dist
@pytest.mark.xdist_group("dist")
def test_the_system_in_300_lines(ranks: Ranks, tmp_path: Path) -> None:
    name = "commfuse_in_300_lines.py"
    assert len((ROOT / "examples" / name).read_text().splitlines()) <= 300
    lines = start_example(ranks, tmp_path, 2, name).splitlines()
    assert lines[-1] == "5 steps on 2 ranks: losses and parameters are DDP's, bit by bit"
    buckets = [line for line in lines if line.startswith("# bucket")]
    assert [line.partition("members ")[2] for line in buckets] == [
        "4.bias, 4.weight, 2.bias", "2.weight, 0.bias", "0.weight",
    ]  # fmt: skip
    ops = [line.partition(" = ")[2].partition("(")[0] for line in lines]
    starts = [place for place, op in enumerate(ops) if op == "all_reduce_start"]
    last_product = max(place for place, op in enumerate(ops) if op.startswith("mm"))
    assert starts[0] < last_product < starts[-1] < ops.index("all_reduce_wait")


@pytest.mark.dist
@pytest.mark.xdist_group("dist")
def test_train_char_gpt_and_its_checkpoint(ranks: Ranks, tmp_path: Path) -> None:
    small = ("--layers", "1", "--batch-size", "4", "--context", "32", "--sample-length", "10")
    saved = tmp_path / "folder" / "gpt.pt"
    output = run_on_ranks(ranks, "train_char_gpt.py", "--steps", "3", "--save", str(saved), *small)
    steps = re.findall(r"^step: (\d), lr: \d\.\d+, loss is (\d+\.\d+)$", output, re.MULTILINE)
    assert [int(number) for number, _ in steps] == [0, 1, 2]
    assert float(steps[0][1]) == pytest.approx(math.log(96), abs=0.4)
    assert re.search(r"^sample: ['\"]Return ", output, re.MULTILINE)
    again = run_example("train_char_gpt.py", "--steps", "1", "--load", str(saved), *small)
    resumed = re.search(r"^step: 0, lr: (\S+), loss is (\S+)$", again, re.MULTILINE)
    assert resumed
    assert float(resumed.group(1)) == pytest.approx(3e-3 * 5 / 20)  # the schedule goes on
    assert float(resumed.group(2)) < float(steps[0][1])


@pytest.mark.dist
@pytest.mark.xdist_group("dist")
def test_shard_gpt2_trains_as_one_process_does(ranks: Ranks, tmp_path: Path) -> None:
    files = [tmp_path / "folder" / f"{count}.pt" for count in (0, 2)]
    arguments = [("shard_gpt2.py", "--steps", "3", "--save", str(file)) for file in files]
    outputs = [run_example(*arguments[0]), run_on_ranks(ranks, *arguments[1])]
    assert outputs[1].startswith("2 rank(s): the batch is divided by 1 (dp), the model by 2 (tp)\n")
    alone, divided = (re.findall(r"^step: \d, loss is (\d+\.\d+)$", each, re.MULTILINE) for each in outputs)
    assert len(divided) == 3
    assert [float(each) for each in divided] == pytest.approx([float(each) for each in alone], abs=2e-4)
    layouts = dict(re.findall(r"^layout: (\S+), (\S+) on each rank: ", outputs[1], re.MULTILINE))
    assert layouts["transformer.h.0.attn.c_attn.weight"] == "64x96"
    assert layouts["transformer.h.0.mlp.c_proj.weight"] == "128x64"
    kinds = re.findall(r"^collective: \S+: (\w+) group=(\S+)\(", outputs[1], re.MULTILINE)
    assert f"\n{len(kinds)} collective(s)\n" in outputs[1]
    assert kinds.count(("all_reduce", "tp")) >= 8  # one behind attention and MLP, forward and backward
    saved, whole = (torch.load(file, weights_only=True) for file in files)
    assert whole["transformer.h.0.attn.c_attn.weight"].shape == (64, 192)
    assert whole.keys() == saved.keys()
    for name, want in saved.items():
        # As a whole: where a gradient is zero but for rounding, Adam makes steps of any sign.
        if name.endswith("weight"):
            assert float((whole[name] - want).norm()) < 1e-3 * float(want.norm()), name


@pytest.mark.dist
@pytest.mark.xdist_group("dist")
def test_parallel_optimizer_shows_fusion_ids_and_what_they_merge(ranks: Ranks) -> None:
    alone, together = run_example("parallel_optimizer.py"), run_on_ranks(ranks, "parallel_optimizer.py")
    for output in (alone, together):
        ids = re.findall(r"^The parameter (\d)\.\w+\.\w+'s fusion id is (\d)$", output, re.MULTILINE)
        assert ids == [(layer, layer) for layer in "000011112222"]
        merged = re.findall(r"^(all_gather|reduce_scatter) of (.+)$", output, re.MULTILINE)
        counts = sorted((kind, members.count(",") + 1) for kind, members in merged)
        assert counts == [(kind, count) for kind in ("all_gather", "reduce_scatter") for count in (1, 1, 1, 1, 4, 4)]
    assert re.search(r"^loss \d\.\d{4}$", together, re.MULTILINE)


def test_shard_gpt2_says_what_does_not_divide() -> None:
    with pytest.raises(SystemExit) as stopped:  # Python prints it, and exits with 1
        run_example("shard_gpt2.py", "--tensor", "2")
    assert stopped.value.code == "--tensor 2 does not divide the 1 ranks"
