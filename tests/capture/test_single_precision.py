"""What the tests of layers, operations, modules and losses train in double precision has eager gradients in single and
half precision too: kernels differ by dtype, in what they take, in how they round and in how they lay out results."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from tests.capture import test_layers, test_modules, test_operations
from tests.capture.equivalence import assert_gradients_as_eager

TOLERANCE = {torch.float32: 1e-7, torch.bfloat16: 0.0}

LOSSES = [(name, torch.float32) for name in test_operations.LOSSES] + [
    (name, torch.bfloat16)
    for name in test_operations.LOSSES
    if name != "margin"  # for which eager has no kernel
]

# The fuser of TorchScript keeps what eager rounds.
_OTHERWISE_ROUNDED = ("jit_script_function",)


@pytest.fixture(autouse=True)
def default_dtype(request: pytest.FixtureRequest) -> Iterator[None]:
    torch.set_default_dtype(request.node.callspec.params.get("dtype", torch.float32))
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", list(test_layers.case))
def test_layer(name: str, dtype: torch.dtype) -> None:
    test_layers.case.check_gradients(name, TOLERANCE[dtype])


@pytest.mark.parametrize("name", [*test_operations.case, *test_modules.case])
def test_single(name: str) -> None:
    cases = test_operations.case if name in test_operations.case else test_modules.case
    cases.check_gradients(name, 1e-6 if name in _OTHERWISE_ROUNDED else TOLERANCE[torch.float32])


@pytest.mark.parametrize("name, dtype", LOSSES, ids=str)
def test_loss(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    loss, target = test_operations.losses()[name]
    assert_gradients_as_eager(nn.Linear(8, 8), (torch.randn(4, 8), target), loss_fn=loss, tolerance=TOLERANCE[dtype])
