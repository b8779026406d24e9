"""Hugging Face's Trainer, with a compiled module in place of DistributedDataParallel.

    torchrun --standalone --nproc-per-node 2 examples/with_trainer.py

The class below is all that differs from a script with `Trainer`.
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import commfuse_fx as cf


class CompiledTrainer(Trainer):
    """Compiles the model that it trains, where `Trainer` would wrap it."""

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        if not training or isinstance(model, cf.CompiledModule):
            return model
        # evaluation_mode: Accelerate moves the model and adds autocast, but wraps it in nothing.
        return self.accelerator.prepare_model(cf.compile(model, form="module"), evaluation_mode=True)


class Words(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Counting upwards, modulo 16, from another number in each row."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        words = (torch.arange(8) + row) % 16
        return {"input_ids": words, "labels": words}


def main(folder: str, **options: Any) -> nn.Module:
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=16, n_positions=8, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    )
    arguments: dict[str, Any] = {"num_train_epochs": 2, "per_device_train_batch_size": 4, "learning_rate": 1e-2}
    arguments |= {"report_to": "none", "save_strategy": "no", "use_cpu": not torch.cuda.is_available(), **options}
    trainer = CompiledTrainer(model, TrainingArguments(folder, **arguments), train_dataset=Words())
    trainer.train()
    return model


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(folder)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
