"""Train a small character-level GPT-2 on the documentation of Python's own standard library.

    torchrun --standalone --nproc-per-node 2 examples/train_char_gpt.py
    torchrun --standalone --nproc-per-node 2 examples/train_char_gpt.py --steps 200 --save out/gpt.pt
    python examples/train_char_gpt.py --load out/gpt.pt --steps 0 --prompt "Return the "

Nothing is downloaded: the text is the docstrings of the Python that runs this, the model a fresh one.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel

import commfuse_fx as cf

MODULES = (
    "argparse", "collections", "configparser", "csv", "datetime", "decimal", "difflib", "email", "fractions",
    "functools", "heapq", "inspect", "io", "json", "logging", "os", "pathlib", "pickle", "random", "shutil",
    "socket", "statistics", "string", "subprocess", "tarfile", "textwrap", "threading", "unittest", "urllib.request",
    "uuid", "zipfile",
)  # fmt: skip
CHARACTERS = "\n" + "".join(map(chr, range(32, 127)))


def main() -> None:
    options = parse_options()
    cf.init()
    rank, world = cf.get_rank(), cf.get_group_size()
    if options.batch_size % world:
        raise SystemExit(f"--batch-size {options.batch_size} does not divide by {world} ranks")

    torch.manual_seed(options.seed)  # the same on every rank, so that all start from the same parameters
    model = make_model(options.layers, options.context)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    warmup = 20
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: min(1.0, (done + 1) / warmup))
    if options.load is not None:
        saved = torch.load(options.load, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        schedule.load_state_dict(saved["schedule"])

    text = encode(collect_text())
    say(f"{len(text)} characters of text, {sum(p.numel() for p in model.parameters())} parameters")
    step = cf.compile(model, optimizer=optimizer)  # the model computes its own loss
    draw = torch.Generator().manual_seed(options.seed + schedule.last_epoch)  # one order for all ranks
    for number in range(options.steps):
        starts = torch.randint(len(text) - options.context, (options.batch_size,), generator=draw)
        mine = starts[rank::world]
        batch = torch.stack([text[start : start + options.context] for start in mine.tolist()])
        loss = step(input_ids=batch, labels=batch)
        schedule.step()
        mean = cf.ops.all_reduce(loss, op="avg")  # the loss of the global batch
        say(f"step: {number}, lr: {schedule.get_last_lr()[0]:.6f}, loss is {mean.item():.4f}")

    if options.save is not None and rank == 0:
        options.save.parent.mkdir(parents=True, exist_ok=True)
        parts = {"model": model, "optimizer": optimizer, "schedule": schedule}
        torch.save({name: part.state_dict() for name, part in parts.items()}, options.save)
    if rank == 0:
        say(f"sample: {sample(model, options.prompt, options.sample_length, options.seed)}")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a character-level GPT-2 on Python's docstrings.")
    parser.add_argument("--steps", type=positive, default=100)
    parser.add_argument("--batch-size", type=positive, default=32, help="global batch, divided among the ranks")
    parser.add_argument("--layers", type=positive, default=4)
    parser.add_argument("--context", type=positive, default=64, help="characters per sequence")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--load", type=Path, metavar="FILE", help="go on from a checkpoint")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write a checkpoint at the end")
    parser.add_argument("--prompt", default="Return ", help="how the generated sample begins")
    parser.add_argument("--sample-length", type=int, default=120, help="characters to generate")
    return parser.parse_args()


def make_model(layers: int, context: int) -> GPT2LMHeadModel:
    """Width 128, one token per character."""
    model = GPT2LMHeadModel(
        GPT2Config(
            n_layer=layers,
            n_head=4,
            n_embd=128,
            n_positions=context,
            vocab_size=len(CHARACTERS),
            bos_token_id=0,
            eos_token_id=0,
            use_cache=False,
            resid_pdrop=0.0,
        )
    )
    model.loss_type = "ForCausalLM"  # the default, which some versions warn about when it is not said
    return model


def collect_text() -> str:
    """The docstrings of some modules and of what they define, each once, in a fixed order."""
    found: dict[str, None] = {}
    for name in MODULES:
        module = importlib.import_module(name)
        for owner in (module, *(value for _, value in public_members(module))):
            members = public_members(owner) if inspect.isclass(owner) else []
            for item in (owner, *(value for _, value in members)):
                if doc := inspect.getdoc(item):
                    found[doc] = None
    return "\n\n".join(found)


def public_members(owner: Any) -> list[tuple[str, Any]]:
    """Classes and functions by name, sorted; private ones left out."""
    members = sorted(vars(owner).items())
    return [
        (name, value)
        for name, value in members
        if name[0] != "_" and (inspect.isroutine(value) or inspect.isclass(value))
    ]


def encode(text: str) -> torch.Tensor:
    number = {character: i for i, character in enumerate(CHARACTERS)}
    return torch.tensor([number[character] for character in text if character in number])


@torch.no_grad()
def sample(model: GPT2LMHeadModel, prompt: str, length: int, seed: int) -> str:
    """Go on from `prompt`, character by character."""
    model.eval()
    generator = torch.Generator().manual_seed(seed)
    tokens = encode(prompt or "\n")
    for _ in range(length):
        logits = model(tokens[None, -model.config.n_positions :]).logits[0, -1]
        chance = torch.softmax(logits / 0.8, dim=-1)
        tokens = torch.cat([tokens, torch.multinomial(chance, 1, generator=generator)])
    model.train()
    return repr("".join(CHARACTERS[i] for i in tokens.tolist()))


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
