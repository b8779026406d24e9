"""Hugging Face Accelerate's training loop, with a compiled module in place of DistributedDataParallel.

    torchrun --standalone --nproc-per-node 2 examples/with_accelerate.py

Three lines differ from Accelerate's own example; they are marked.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

import commfuse_fx as cf  # (1)


def main(epochs: int = 3) -> torch.nn.Module:
    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=not torch.cuda.is_available())
    torch.manual_seed(0)
    x = torch.randn(64, 16)
    loader = DataLoader(TensorDataset(x, x[:, :4].argmax(1)), batch_size=4, shuffle=True)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs * len(loader))

    optimizer, loader, scheduler = accelerator.prepare(optimizer, loader, scheduler)  # (2) without the model
    # (3) evaluation_mode: Accelerate moves the model and adds autocast, but wraps it in nothing.
    model = accelerator.prepare_model(cf.compile(model.to(accelerator.device), form="module"), evaluation_mode=True)

    for epoch in range(epochs):
        for inputs, labels in loader:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(inputs), labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        accelerator.print(f"epoch {epoch}: loss {accelerator.reduce(loss.detach(), 'mean').item():.4f}")
    return model


if __name__ == "__main__":
    main()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
