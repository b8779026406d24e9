"""Models on the meta device: they are lowered as those with memory are, and whoever runs them is told what to do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import commfuse_fx as cf

Made = tuple[nn.Module, torch.Tensor, torch.Tensor]


def made(device: str) -> Made:
    """A model with parameters, tied ones and buffers, and inputs, one of which is always on the CPU."""
    with torch.device(device):
        embedding, head = nn.Embedding(32, 16), nn.Linear(16, 32, bias=False)
        head.weight = embedding.weight
        model = nn.Sequential(embedding, nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Dropout(0.1), head)
        target = torch.zeros(8, dtype=torch.long)
    return model, torch.zeros(8, dtype=torch.long), target


def compiled(model: nn.Module, **options: Any) -> cf.Step:
    return cf.compile(
        model, loss_fn=nn.functional.cross_entropy, optimizer=torch.optim.AdamW(model.parameters()), **options
    )


@pytest.mark.parametrize("mode", ["data_parallel", "auto"])
def test_the_graph_is_that_of_a_model_with_memory(mode: str) -> None:
    texts = []
    for device in ("cpu", "meta"):
        model, *inputs = made(device)
        lowered = compiled(model, parallel_mode=mode, device_num=4, cluster="gloo-1gbit").lower(*inputs)
        texts.append(lowered.text() + lowered.explain().text())
    assert texts[0] == texts[1] and "meta" not in texts[1]


def test_a_module() -> None:
    texts = [cf.compile(model).lower(inputs).text() for model, inputs, _ in map(made, ("cpu", "meta"))]
    assert texts[0] == texts[1]


def test_what_has_memory_says_where_the_rest_is_to_be() -> None:
    model = nn.Sequential(nn.Linear(4, 4, device="meta"), nn.Linear(4, 4, dtype=torch.float64))
    model[0].to(torch.float64)
    x = torch.zeros(2, 4, device="meta", dtype=torch.float64)
    specs = cf.compile(model).lower(x).program.params
    assert {spec.spec.device for spec in specs.values()} == {"cpu"}


def test_running_needs_memory() -> None:
    model, *inputs = made("meta")
    step = compiled(model)
    with pytest.raises(cf.CaptureError, match=r"parameter 0.weight is on the meta device.*model.to_empty\(device="):
        step(*inputs)
    with pytest.raises(cf.CaptureError, match="parameter 0.weight is on the meta device"):
        cf.compile(model)(inputs[0])
    model.to_empty(device="cpu")
    with pytest.raises(cf.CaptureError, match="^target is on the meta device.*pass a tensor with values"):
        compiled(model)(*inputs)
    ready = compiled(model)
    ready.lower(*inputs)  # what was lowered is not what runs
    with pytest.raises(cf.CaptureError, match="^target is on the meta device"):
        ready(*inputs)
    model[2].running_mean = torch.zeros(16, device="meta")
    with pytest.raises(cf.CaptureError, match="buffer 2.running_mean is on the meta device"):
        compiled(model)(inputs[0], torch.zeros(8, dtype=torch.long))
    model[2].running_mean = torch.zeros(16)
    for param in model.parameters():
        nn.init.zeros_(param)
    assert compiled(model)(inputs[0], torch.zeros(8, dtype=torch.long)).item() == pytest.approx(3.4657, abs=1e-3)


def test_lockstep_needs_memory() -> None:
    model, *inputs = made("meta")
    lowered = compiled(model, device_num=2).lower(*inputs)
    with pytest.raises(cf.CaptureError, match="is on the meta device"):
        cf.lockstep(lowered)(torch.zeros(16, dtype=torch.long), torch.zeros(16, dtype=torch.long))


class Scaled(nn.Linear):
    """Multiplies by a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.scale = torch.ones(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale


def test_another_tensor_on_meta() -> None:
    with torch.device("meta"):
        model = Scaled()
    with pytest.raises(cf.CaptureError, match=r"cannot trace .* at .*test_meta_device.py.*register it as a buffer"):
        cf.compile(model).lower(torch.zeros(2, 4))
