"""A part of the checks that machines with a GPU run (tests/gpu), on small CPU tensors."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from importlib import metadata
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.gpu import graph_checks, step_checks
from tests.gpu.device_models import MODELS, RECURRENT, WITH_DROPOUT
from tests.gpu.step_checks import OPTIMIZERS

ROOT = Path(__file__).parents[1]
CPU = torch.device("cpu")
ADAMW = OPTIMIZERS["AdamW fused"]


@pytest.mark.parametrize(
    ("name", "dtype", "amp"),
    [
        ("mlp", torch.float64, None),
        ("gpt2", torch.bfloat16, None),
        ("llama", torch.float32, None),
        ("resnet", torch.float32, torch.bfloat16),
    ],
)
def test_steps(name: str, dtype: torch.dtype, amp: torch.dtype | None) -> None:
    step_checks.check_step(MODELS[name], CPU, dtype, ADAMW, amp=amp, channels_last=name == "resnet")


@pytest.mark.parametrize("name", ["AdamW foreach", "Adam amsgrad", "RMSprop", "Adagrad", "NAdam"])
def test_optimizers(name: str) -> None:
    step_checks.check_step(MODELS["mlp"], CPU, torch.float64, OPTIMIZERS[name])


def test_gradients_of_several_calls_that_are_clipped() -> None:
    step_checks.check_step(MODELS["mlp"], CPU, torch.float64, ADAMW, accumulate_steps=2, clip_grad_norm=0.05)


def test_dropout() -> None:
    step_checks.check_step(WITH_DROPOUT["mlp"], CPU, torch.float32, ADAMW)


@pytest.mark.parametrize("name", ["lstm batch first", "rnn"])
def test_recurrent_steps(name: str) -> None:
    step_checks.check_step(RECURRENT[name], CPU, torch.float64, OPTIMIZERS["SGD momentum"])


@pytest.mark.parametrize("name", ["gpt2", "lstm projected"])
def test_modules(name: str) -> None:
    step_checks.check_module({**MODELS, **RECURRENT}[name], CPU, torch.float64)


def test_dropout_between_the_layers_of_a_recurrent_module() -> None:
    step_checks.check_dropout_between_layers(CPU)


def test_a_backward_that_runs_twice() -> None:
    step_checks.check_retained_backward(RECURRENT["lstm"], CPU)


@pytest.mark.parametrize("name", ["AdamW", "SGD momentum"])
def test_between_steps(name: str) -> None:
    graph_checks.check_what_users_do_between_steps(CPU, OPTIMIZERS[name])
    graph_checks.check_one_cycle(CPU, OPTIMIZERS[name])
    graph_checks.check_scheduled_rate(CPU, OPTIMIZERS[name])


def test_other_checks_of_graphs() -> None:
    graph_checks.check_gradients_without_optimizer(CPU)
    graph_checks.check_a_loader_that_pins_memory(CPU, ADAMW)
    graph_checks.check_masks_after_a_checkpoint(CPU, OPTIMIZERS["SGD"])


def test_checks_of_what_only_a_gpu_shows_run() -> None:
    step_checks.check_that_no_step_waits_for_the_host(MODELS["mlp"], CPU, ADAMW)
    step_checks.check_that_no_half_waits_for_the_host(MODELS["mlp"], CPU)
    step_checks.check_that_no_needless_warning_comes(MODELS["mlp"], CPU, OPTIMIZERS["SGD"])
    assert not step_checks.has_graphs(CPU)


WITHOUT = """
import importlib, sys
sys.modules.update(dict.fromkeys(sys.argv[1].split()))  # importing these is an error
for name in sys.argv[2:]:
    importlib.import_module(name)
"""


def needed(*names: str) -> set[str]:
    """These distributions and all that they require here."""
    found: set[str] = set()
    left = [*names]
    while left:
        name = canonicalize_name(left.pop())
        if name not in found:
            found.add(name)
            with suppress(metadata.PackageNotFoundError):
                wanted = [Requirement(each) for each in metadata.requires(name) or []]
                left += [each.name for each in wanted if each.marker is None or each.marker.evaluate({"extra": ""})]
    return found


ASKING = """
import sys, pytest
print(*(int(pytest.main(["-q", asked])) for asked in sys.argv[1:]))
"""


def test_who_asks_for_the_checks_of_a_gpu_where_there_is_none_learns_why_they_do_not_run() -> None:
    command = [sys.executable, "-c", ASKING, "tests/gpu", "tests/gpu/test_steps.py::test_inductor"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert ended.stdout.split() == 2 * [str(int(pytest.ExitCode.USAGE_ERROR))], ended
    said = "ERROR: tests/gpu needs a CUDA device, and PyTorch sees none here"
    assert [line for line in ended.stderr.splitlines() if line] == [said, said]


def test_checks_and_benchmark_of_a_gpu_need_no_other_packages() -> None:
    """Where a GPU is there may be no network to install any from."""
    there = needed("torch", "networkx", "pytest")
    others = [
        module
        for module, packages in metadata.packages_distributions().items()
        if module.isidentifier()
        and not module.startswith(("_", "commfuse"))
        and there.isdisjoint(map(canonicalize_name, packages))
    ]
    assert others and "networkx" not in others
    asking = {"test_graphs", "test_two_ranks"}  # which ask the GPU already when they are imported
    names = [f"tests.gpu.{stem}" for stem in sorted({file.stem for file in (ROOT / "tests/gpu").glob("*.py")} - asking)]
    command = [sys.executable, "-c", WITHOUT, " ".join(others), "tests.fixtures", "benchmarks.gpu", *names]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert len(names) > 9 and ended.returncode == 0, ended.stderr[-2000:]
