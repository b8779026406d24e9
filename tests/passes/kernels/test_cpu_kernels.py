"""One option turns off all passes that only make kernels of the CPU faster."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn import functional as F

import commfuse_fx as cf
from commfuse_fx.ir import from_json
from commfuse_fx.planning.pipeline.pass_table import KERNELS, TABLE
from commfuse_fx.virtual.virtual_world import LockstepWorld

NAMES = [each.name for each in TABLE[KERNELS]]


class Net(nn.Sequential):
    def __init__(self, dropout: float) -> None:
        layers = [nn.Dropout(dropout), nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1)]
        super().__init__(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 4))


def images(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(rows, 3, 32, 32), torch.arange(rows) % 4


def step_of(model: nn.Module, **options: object) -> cf.CompiledStep:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return cf.compile(model, loss_fn=F.cross_entropy, optimizer=optimizer, device_num=2, **options)


def test_all_of_them_run_or_none() -> None:
    with_all = step_of(Net(0.5)).lower(*images(8))
    without = step_of(Net(0.5), cpu_kernels=False).lower(*images(8))
    assert {name: with_all.stages[name].modified for name in NAMES} == dict.fromkeys(NAMES, True)
    assert not {*NAMES} & {*without.stages}
    assert "\n# cpu_kernels: True\n" in with_all.text() and "\n# cpu_kernels: False\n" in without.text()
    for lowered in (with_all, without):
        assert from_json(lowered.to_json()).config.cpu_kernels is lowered.program.config.cpu_kernels


def test_training_is_the_same_but_for_rounding() -> None:
    model = Net(0.0)
    models = [model, copy.deepcopy(model)]
    batches = [[images(4) for _ in range(2)] for _ in range(3)]
    for each, kernels in zip(models, (True, False), strict=True):
        world = LockstepWorld(step_of(each, cpu_kernels=kernels))
        for batch in batches:
            world(batch)
    for one, other in zip(*(each.parameters() for each in models), strict=True):
        torch.testing.assert_close(one, other)
