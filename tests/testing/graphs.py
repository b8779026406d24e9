"""Graphs for tests of the plugin, compiled once per process: tests run in the process of the test that runs them."""

from __future__ import annotations

from functools import cache

import torch

import commfuse_fx as cf


@cache
def lowered(features: int = 4) -> cf.Lowered:
    model = torch.nn.Linear(features, 2)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    step = cf.compile(model, loss_fn=torch.nn.functional.mse_loss, optimizer=sgd, device_num=2)
    return step.lower(torch.ones(3, features), torch.ones(3, 2))


@cache
def lowered_module(features: int = 4) -> cf.Lowered:
    return cf.compile(torch.nn.Linear(features, 2), device_num=2).lower(torch.ones(3, features))
