"""Train a small linear network on handwritten digits, with one fused all_reduce per layer.

    torchrun --standalone --nproc-per-node 2 examples/train_digits.py --dump-graph
    python examples/train_digits.py

The digits are the 1797 images of 8x8 pixels that scikit-learn ships; 1437 of them train, 360 test.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn

import commfuse_fx as cf

TRAIN = 1437
MEASURED_STEPS = 20


class DenseLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_mapping = nn.Linear(10, 32)
        self.output_mapping = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.output_mapping(self.input_mapping(x))


class Net(nn.Module):
    """The network of the communication fusion tutorial; its input is 8x8 here, not 28x28."""

    def __init__(self) -> None:
        super().__init__()
        self.flatten = nn.Flatten()
        self.head = nn.Linear(8 * 8, 10)
        self.layer1 = DenseLayer()
        self.layer2 = DenseLayer()
        self.layer3 = DenseLayer()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.head(self.flatten(x))
        return self.layer3(self.layer2(self.layer1(x)))


def main() -> None:
    options = parse_options()
    cf.init()
    rank, world = cf.get_rank(), cf.get_group_size()
    if options.batch_size % world:
        raise SystemExit(f"--batch-size {options.batch_size} does not divide by {world} ranks")

    torch.manual_seed(options.seed)  # the same on every rank, so that all start from the same parameters
    net = Net()
    cf.set_comm_fusion(net.head, 0)  # 0: each parameter's all_reduce stays alone
    cf.set_comm_fusion(net.layer1, 1)  # n > 0: one all_reduce for all parameters with this id
    cf.set_comm_fusion(net.layer2, 2)
    cf.set_comm_fusion(net.layer3, 3)
    for name, param in net.named_parameters():
        if param.requires_grad:
            say(f"The parameter {name}'s fusion id is {param.comm_fusion}")

    (images, labels), (test_images, test_labels) = load_data()
    steps = len(images) // options.batch_size
    optimizer = torch.optim.AdamW(net.parameters(), lr=options.lr)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, options.lr, total_steps=steps * options.epochs)
    step = cf.compile(net, loss_fn=nn.CrossEntropyLoss(), optimizer=optimizer)

    order = torch.Generator().manual_seed(options.seed)  # one order for all ranks; each takes its share
    for epoch in range(options.epochs):
        shuffled = torch.randperm(len(images), generator=order)
        for number in range(steps):
            batch = shuffled[number * options.batch_size :][: options.batch_size]
            mine = batch[rank::world]
            loss = step(images[mine], labels[mine])
            schedule.step()
            if number % 10 == 0:
                mean = cf.ops.all_reduce(loss, op="avg")  # the loss of the global batch
                say(f"epoch: {epoch}, step: {number}, loss is {mean.item():.6f}")

    with torch.no_grad():
        accuracy = (net(test_images).argmax(1) == test_labels).float().mean().item()
    say(f"test accuracy: {accuracy:.2%}")

    share = slice(rank, options.batch_size, world)
    if options.dump_graph:
        show_graph(step, images[share], labels[share])
    if options.dump is not None:
        say(f"dump of rank {rank}: {step.lower(images[share], labels[share]).dump(options.dump)}")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train the fusion tutorial's network on handwritten digits.")
    parser.add_argument("--epochs", type=positive, default=15)
    parser.add_argument("--batch-size", type=positive, default=64, help="global batch, divided among the ranks")
    parser.add_argument("--lr", type=float, default=1e-2, help="peak learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dump-graph", action="store_true", help="print the compiled graph and measured overlap")
    parser.add_argument("--dump", type=Path, metavar="DIR", help="write every stage of the graph to DIR/rank<r>/")
    return parser.parse_args()


def load_data() -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """(images, labels) to train and to test with, split alike on every rank and run."""
    digits = load_digits()
    shuffled = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(digits.images, dtype=torch.float32)[shuffled]
    labels = torch.tensor(digits.target)[shuffled]
    images = (images - images[:TRAIN].mean()) / images[:TRAIN].std()
    return (images[:TRAIN], labels[:TRAIN]), (images[TRAIN:], labels[TRAIN:])


def show_graph(step: cf.CompiledStep, images: torch.Tensor, labels: torch.Tensor) -> None:
    """Print the graph of one step, why it is so, and how much of its communication was hidden."""
    lowered = step.lower(images, labels)
    say("\n" + excerpt(lowered.text()))
    say(lowered.explain().text())
    step(images, labels)  # once, so that nothing is measured for the first time
    with step.record_communication() as timeline:
        for _ in range(MEASURED_STEPS):
            step(images, labels)
    say(timeline.text())


def excerpt(text: str) -> str:
    """The header, and the lines about communication and updates; the rest is counted. --dump writes it all."""
    lines: list[str] = []
    skipped = 0
    for line in [*text.splitlines(), ""]:
        if line.startswith(("#", "upd", "return")) or "_c10d_functional" in line or not line:
            if skipped:
                lines.append(f"... {skipped} line(s) of inputs and compute")
            lines.append(line)
            skipped = 0
        else:
            skipped += 1
    return "\n".join(lines)


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
