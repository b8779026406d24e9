"""Lightning Fabric's training loop, with a compiled module in place of DistributedDataParallel.

    torchrun --standalone --nproc-per-node 2 examples/with_fabric.py

The two classes below, and `strategy=`, are all that differs from a script with `Fabric(strategy="ddp")`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from lightning_fabric import Fabric
from lightning_fabric.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import commfuse_fx as cf


class NoSync:
    """What `fabric.no_backward_sync` does."""

    def no_backward_sync(self, module: cf.CompiledModule, enabled: bool) -> AbstractContextManager[None]:
        return module.no_sync() if enabled else nullcontext()


class CompiledStrategy(DDPStrategy):
    """Compiles the model, where `DDPStrategy` would wrap it."""

    def setup_module(self, module: nn.Module) -> nn.Module:
        self._backward_sync_control = NoSync()
        return cf.compile(module, form="module")


def main(epochs: int = 3) -> nn.Module:
    fabric = Fabric(accelerator="auto", devices=2, strategy=CompiledStrategy())
    fabric.launch()
    torch.manual_seed(0)
    x = torch.randn(64, 16)
    loader = fabric.setup_dataloaders(DataLoader(TensorDataset(x, x[:, :4].argmax(1)), batch_size=4, shuffle=True))
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-2))

    for epoch in range(epochs):
        for number, (inputs, labels) in enumerate(loader):
            accumulates = number % 2 == 0
            with fabric.no_backward_sync(model, enabled=accumulates):
                loss = F.cross_entropy(model(inputs), labels)
                fabric.backward(loss)
            if not accumulates:
                fabric.clip_gradients(model, optimizer, max_norm=1.0)
                optimizer.step()
                optimizer.zero_grad()
        fabric.print(f"epoch {epoch}: loss {fabric.all_reduce(loss.detach(), reduce_op='mean').item():.4f}")
    return model


if __name__ == "__main__":
    main()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
