"""Train a small GPT-2 whose layers are divided among ranks, and show how it was divided.

    torchrun --standalone --nproc-per-node 2 examples/shard_gpt2.py
    torchrun --standalone --nproc-per-node 4 examples/shard_gpt2.py --tensor 2 --vocabulary
    python examples/shard_gpt2.py

Nothing is downloaded: the model learns to count in steps. The losses are those of one process, dropout included,
however many ranks there are and however the model is divided among them.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel

import commfuse_fx as cf

TOKENS = 64
HEADS = 8


def main() -> None:
    options = parse_options()
    cf.init()
    rank, world = cf.get_rank(), cf.get_group_size()
    tensor = world if options.tensor is None else options.tensor
    check(options, world, tensor)
    data = world // tensor

    torch.manual_seed(options.seed)  # the same on every rank, so that all start from the same parameters
    model = make_model(options.context)
    cf.shard(model, cf.plans.tensor_parallel(model, "tp", options.vocabulary, options.sequence))
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    step = cf.compile(model, optimizer=optimizer, parallel_mode="semi_auto", mesh=(data, tensor))
    say(f"{world} rank(s): the batch is divided by {data} (dp), the model by {tensor} (tp)")

    draw = torch.Generator().manual_seed(options.seed)  # one order for all ranks
    rows = options.batch_size // data
    mine = slice(rank // tensor * rows, (rank // tensor + 1) * rows)  # ranks that share a model share their rows
    for number in range(options.steps):
        batch = count_up(options.batch_size, options.context, draw)[mine]
        loss = step(input_ids=batch, labels=batch)  # the loss of the global batch, on every rank
        say(f"step: {number}, loss is {loss.item():.4f}")

    show_division(step, batch)
    if options.save is not None:
        state = model.state_dict()  # gathers the parts: on all ranks, though only one writes
        if rank == 0:
            options.save.parent.mkdir(parents=True, exist_ok=True)
            torch.save(state, options.save)
        say(f"saved: {options.save}")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small GPT-2 whose layers are divided among ranks.")
    parser.add_argument("--tensor", type=positive, metavar="N", help="ranks that share one model; all, if not given")
    parser.add_argument("--vocabulary", action="store_true", help="divide embedding and head by words as well")
    parser.add_argument("--sequence", action="store_true", help="divide norms and residuals by positions")
    parser.add_argument("--steps", type=positive, default=20)
    parser.add_argument("--batch-size", type=positive, default=16, help="global batch, divided among the models")
    parser.add_argument("--context", type=positive, default=32, help="tokens per sequence")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the whole parameters at the end")
    return parser.parse_args()


def check(options: argparse.Namespace, world: int, tensor: int) -> None:
    """Refuse, on every rank alike, what does not divide."""
    if world % tensor:
        raise SystemExit(f"--tensor {tensor} does not divide the {world} ranks")
    if HEADS % tensor:
        raise SystemExit(f"{tensor} ranks do not divide the {HEADS} heads: give --tensor one of 1, 2, 4, 8")
    if options.batch_size % (world // tensor):
        raise SystemExit(f"--batch-size {options.batch_size} does not divide by {world // tensor} models")
    if options.sequence and options.context % tensor:
        raise SystemExit(f"--context {options.context} does not divide by {tensor} ranks, as --sequence needs")


def make_model(context: int) -> GPT2LMHeadModel:
    """2 layers, width 64, with GPT-2's own dropout."""
    config = GPT2Config(
        n_layer=2,
        n_head=HEADS,
        n_embd=64,
        n_positions=context,
        vocab_size=TOKENS,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # the default, which some versions warn about when it is not said
    return model


def count_up(rows: int, length: int, draw: torch.Generator) -> torch.Tensor:
    """[rows, length] tokens: each row counts from somewhere, in steps of 1 to 4."""
    start = torch.randint(TOKENS, (rows, 1), generator=draw)
    stride = torch.randint(1, 5, (rows, 1), generator=draw)
    return (start + stride * torch.arange(length)) % TOKENS


def show_division(step: cf.CompiledStep, batch: torch.Tensor) -> None:
    """Print how the parameters of the first block lie, and what the step communicates."""
    lowered = step.lower(input_ids=batch, labels=batch)
    explanation = lowered.explain()
    for layout in explanation.layouts:
        if "S(" in str(layout) and ".h.1." not in layout.name:  # the second block is like the first
            shape = "x".join(map(str, lowered.program.params[layout.name].spec.shape))
            say(f"layout: {layout.name}, {shape} on each rank: {'; '.join(layout.placements)}")
    for each in explanation.collectives:
        say(f"collective: {each.name}: {each.description.partition(' members=')[0]}")
    say(f"{len(explanation.collectives)} collective(s)")


def positive(text: str) -> int:
    """The type of options that count something."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 1")
    return value


def say(text: str) -> None:
    """Print on rank 0 only."""
    if cf.get_rank() == 0:
        print(text, flush=True)


if __name__ == "__main__":
    try:
        main()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
