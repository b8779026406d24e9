"""A loss of which the backward has run is a plain tensor, but for `backward`."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import commfuse_fx as cf


def loss() -> torch.Tensor:
    found: torch.Tensor = cf.compile(nn.Linear(4, 2), loss_fn=F.mse_loss)(torch.ones(3, 4), torch.ones(3, 2))
    return found


def test_its_backward_says_that_it_has_run() -> None:
    with pytest.raises(cf.CommFuseError, match="this step has already run the backward; use form='module'"):
        loss().backward()


def test_files_copies_and_numbers_are_those_of_a_plain_tensor() -> None:
    value = loss()
    file, plain = io.BytesIO(), io.BytesIO()
    torch.save({"loss": value}, file)
    torch.save({"loss": value.detach()}, plain)
    assert len(file.getvalue()) == len(plain.getvalue())
    file.seek(0)
    for copied in (
        torch.load(file, weights_only=True)["loss"],
        pickle.loads(pickle.dumps(value)),
        copy.deepcopy(value),
    ):
        assert torch.equal(copied, value) and type(copied) is torch.Tensor
    assert value.item() == float(value) == float(value.numpy()) and not value.requires_grad


def test_it_goes_when_nobody_holds_it() -> None:
    gc.freeze()  # or collecting looks through what all tests before have left
    value = loss()
    held = weakref.ref(value)
    gc.collect()
    gc.disable()
    try:
        del value
        assert held() is None
    finally:
        gc.enable()
