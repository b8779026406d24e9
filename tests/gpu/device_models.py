"""Small models that return their loss, with batches, on any device and in any dtype."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.plain_models import GPT2, Llama, NormedMLP, ResNet

Batch = dict[str, torch.Tensor]


class Recurrent(nn.Module):
    """A recurrent module over sequences of vectors, of which the output and all last states decide the class."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.layer = layer
        features = (layer.proj_size or layer.hidden_size) * (2 if layer.bidirectional else 1)
        self.head = nn.Linear(features, 4)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        output, states = self.layer(x)
        last = states if isinstance(states, tuple) else (states,)
        of_states = sum(state.float().square().mean() for state in last)
        loss: torch.Tensor = F.cross_entropy(self.head(output.mean(0 if not self.layer.batch_first else 1)), labels)
        return loss + of_states.to(loss.dtype)


@dataclass(frozen=True)
class DeviceModel:
    """`build()` makes the model; `batch(generator)` its arguments on the CPU, in float32."""

    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Batch]

    def on(self, device: torch.device, dtype: torch.dtype, channels_last: bool = False) -> nn.Module:
        torch.manual_seed(0)
        model = self.build().to(device, dtype)
        if channels_last:
            model.to(memory_format=torch.channels_last)
        return model

    def batches(self, device: torch.device, dtype: torch.dtype, count: int, seed: int = 0) -> list[Batch]:
        generator = torch.Generator().manual_seed(seed)
        return [
            {
                name: (value.to(dtype) if value.is_floating_point() else value).to(device)
                for name, value in self.batch(generator).items()
            }
            for _ in range(count)
        ]


def vectors(generator: torch.Generator) -> Batch:
    x = torch.randn(8, 16, generator=generator)
    return {"x": x, "labels": torch.randint(0, 10, (8,), generator=generator)}


def tokens(generator: torch.Generator) -> Batch:
    ids = torch.randint(0, 61, (4, 12), generator=generator)
    return {"ids": ids, "labels": ids}


def images(generator: torch.Generator) -> Batch:
    x = torch.randn(4, 3, 32, 32, generator=generator)
    return {"images": x, "labels": torch.randint(0, 10, (4,), generator=generator)}


def sequences(generator: torch.Generator) -> Batch:
    x = torch.randn(5, 5, 4, generator=generator)
    return {"x": x, "labels": torch.randint(0, 4, (5,), generator=generator)}


def recurrent(layer: Callable[[], nn.RNNBase]) -> DeviceModel:
    return DeviceModel(lambda: Recurrent(layer()), sequences)


MODELS: dict[str, DeviceModel] = {
    "mlp": DeviceModel(lambda: NormedMLP(16, 2), vectors),
    "gpt2": DeviceModel(lambda: GPT2(2, 32, 2, 61, 12), tokens),
    "llama": DeviceModel(lambda: Llama(2, 32, 4, 2, 48, 61, 12), tokens),
    "resnet": DeviceModel(lambda: ResNet((1, 1), 8, 10), images),
}

WITH_DROPOUT: dict[str, DeviceModel] = {
    "mlp": DeviceModel(lambda: NormedMLP(16, 2, 0.3), vectors),
    "gpt2": DeviceModel(lambda: GPT2(2, 32, 2, 61, 12, 0.1), tokens),
}

RECURRENT: dict[str, DeviceModel] = {
    "lstm": recurrent(lambda: nn.LSTM(4, 8, 2)),
    "lstm batch first": recurrent(lambda: nn.LSTM(4, 8, 2, batch_first=True)),
    "lstm projected": recurrent(lambda: nn.LSTM(4, 8, 2, bias=False, proj_size=3)),
    "gru": recurrent(lambda: nn.GRU(4, 8, 2, bidirectional=True)),
    "rnn": recurrent(lambda: nn.RNN(4, 8, nonlinearity="relu")),
}
