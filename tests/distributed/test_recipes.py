"""The recipes for Accelerate, Trainer and Fabric reduce gradients once per step, as DistributedDataParallel does."""

from __future__ import annotations

import ast
import re
import runpy
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import commfuse_fx as cf
from tests.distributed.harness import Ranks

pytestmark = pytest.mark.dist

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

RECIPES: dict[str, tuple[dict[str, Any], int]] = {
    "with_accelerate.py": ({"epochs": 1}, 4 + 1),
    "with_fabric.py": ({"epochs": 1}, 4 + 1),
    "with_trainer.py": ({"num_train_epochs": 1, "gradient_accumulation_steps": 2, "disable_tqdm": True}, 3),
}
"""Options of a recipe's `main`, and how many all_reduces it makes then: one for each optimizer step, and one for each
loss that is shown. All gradients of these small models fit into one bucket."""


def forget_accelerate() -> None:
    """Accelerate keeps what it knows of a world until the process ends."""
    from accelerate.state import AcceleratorState, GradientState  # takes long to import

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def trained(name: str, folder: str, compiler: Any) -> tuple[nn.Module, int]:
    """The model that a recipe trains with `compiler` as `cf.compile`, and how many all_reduces torch has been asked
    for, by whomever."""
    forget_accelerate()
    main = runpy.run_path(str(EXAMPLES / name))["main"]
    torch.manual_seed(0)
    with (
        mock.patch.object(cf, "compile", compiler),
        torch.autograd.profiler.profile(use_kineto=False) as profile,
    ):
        model = main(*([folder] if name == "with_trainer.py" else []), **RECIPES[name][0])
    count = sum(event.name == "c10d::allreduce_" for event in profile.function_events)
    return model, count


def beside_ddp(name: str, folder: str) -> tuple[int, int]:
    ours, count = trained(name, folder, cf.compile)
    theirs, count_of_ddp = trained(name, folder, lambda net, form: nn.parallel.DistributedDataParallel(net))
    torch.testing.assert_close([*ours.parameters()], [*theirs.parameters()])
    for param in ours.parameters():
        of_rank_0 = param.detach().clone()
        dist.broadcast(of_rank_0, 0)
        assert torch.equal(of_rank_0, param)
    return count, count_of_ddp


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_reduces_once_per_step(ranks: Ranks, name: str, tmp_path: Path) -> None:
    wanted = RECIPES[name][1]
    assert ranks.values(beside_ddp, name, str(tmp_path)) == [(wanted, wanted)] * 2


def lines_of_its_own(name: str) -> list[str]:
    """The lines of code of a recipe that a script with the library alone does not have, or has in another form: the
    classes that compile, and what names them or this package."""
    tree = ast.parse((EXAMPLES / name).read_text())
    found, names = [], ["cf", "contextlib", "DDPStrategy", r"\.prepare"]
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node):
            del node.body[0]
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and "Dataset" not in "".join(map(ast.unparse, node.bases)):
            found += ast.unparse(node).splitlines()
            names.append(node.name)
        else:
            found += [line for line in ast.unparse(node).splitlines() if re.search(rf"({'|'.join(names)})\b", line)]
    return found


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_short(name: str) -> None:
    assert 3 <= len(lines_of_its_own(name)) <= 15
