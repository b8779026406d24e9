"""`commfuse demo`: train a small network on handwritten digits, and show what was compiled."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from commfuse_fx.api import compile
from commfuse_fx.commands.arguments import add_common
from commfuse_fx.config.fusion_marks import set_comm_fusion
from commfuse_fx.errors import ConfigValueError, NotAvailableError
from commfuse_fx.frontends.step import CompiledStep
from commfuse_fx.inspect.explain.table import collectives_table
from commfuse_fx.machine.timeline import Timeline
from commfuse_fx.ops import all_reduce
from commfuse_fx.runtime.ranks.joining.world import init
from commfuse_fx.support.ranks import get_group_size, get_rank, is_distributed

BATCH = 64
"""Rows of a batch of all ranks together."""

MEASURED_STEPS = 10

_DESCRIPTION = """\
Train a small network of three fused layers on the handwritten digits of scikit-learn, then print the collectives of
its step and how much of them was hidden behind compute. Without torchrun it is a world of one, which communicates
nothing: the collectives shown are those of a virtual world of --devices ranks.
"""

_EPILOG = """\
examples:
  commfuse demo
  commfuse demo --steps 50 --devices 8
  torchrun --standalone --nproc-per-node 2 -m commfuse_fx demo      # with real ranks, and the overlap as measured

It needs scikit-learn: pip install "commfuse-fx[examples]"

exit codes: 0 done, 1 failed, 2 bad usage, 130 interrupted
"""


def register(command: argparse.ArgumentParser) -> None:
    """Tell the parser of this command what it takes."""
    command.description, command.epilog = _DESCRIPTION, _EPILOG
    command.add_argument("--steps", type=int, default=100, metavar="N", help="training steps (default: %(default)s)")
    command.add_argument(
        "--devices", type=int, metavar="N", help="show the collectives of a virtual world of N ranks (default: 2)"
    )
    command.add_argument("--json", action="store_true", help="print losses and collectives as JSON")
    add_common(command)
    command.set_defaults(run=_run, on_all_ranks=True)


class DenseLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_mapping = nn.Linear(10, 32)
        self.output_mapping = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mapped: torch.Tensor = self.output_mapping(self.input_mapping(x))
        return mapped


class Net(nn.Module):
    """A head whose parameters are reduced alone, and three layers with a fused all_reduce each."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8 * 8, 10)
        self.layers = nn.ModuleList(DenseLayer() for _ in range(3))
        set_comm_fusion(self.head, 0)
        for number, layer in enumerate(self.layers, 1):
            set_comm_fusion(layer, number)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.head(x)
        for layer in self.layers:
            x = layer(x)
        return x


def _run(options: argparse.Namespace) -> int:
    if options.steps < 1:
        raise ConfigValueError(f"--steps {options.steps}: give at least 1")
    images, labels = _digits()
    started_here = not is_distributed()
    init()
    try:
        _train_and_show(options, images, labels)
    finally:
        if started_here:
            dist.destroy_process_group()
    return 0


def _digits() -> tuple[torch.Tensor, torch.Tensor]:
    """(images [1797, 64], labels), the images with mean 0 and deviation 1."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise NotAvailableError(
            'the demo needs the digits of scikit-learn: pip install "commfuse-fx[examples]"'
        ) from error
    found = load_digits()
    images = torch.tensor(found.data, dtype=torch.float32)
    return (images - images.mean()) / images.std(), torch.tensor(found.target)


def _train_and_show(options: argparse.Namespace, images: torch.Tensor, labels: torch.Tensor) -> None:
    world = get_group_size()
    is_virtual = options.devices is not None or world == 1
    devices = 2 if options.devices is None else options.devices
    if BATCH % world:
        raise ConfigValueError(f"the batch of {BATCH} does not divide by {world} ranks; start 1, 2, 4 or 8")
    torch.manual_seed(0)  # the same parameters on every rank
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    # First, so that a bad number is found before training.
    shown = _compiled(net, optimizer, device_num=devices) if is_virtual else None
    step = _compiled(net, optimizer)
    batches = _batches(images, labels)
    losses: list[float] = []
    for number in range(options.steps):
        mean = all_reduce(step(*next(batches)), op="avg")  # the loss of the whole batch
        losses.append(mean.item())
        if not options.json and (number % max(options.steps // 10, 1) == 0 or number == options.steps - 1):
            _tell(f"step {number}: loss {losses[-1]:.4f}")
    lowered = (shown or step).lower(*next(batches))
    measured = None if world == 1 else _measured(step, batches)
    if options.json:
        table = [{"kind": c.kind, "bytes": c.bytes, "members": c.members} for c in lowered.collectives]
        _tell(json.dumps({"losses": losses, "collectives": table}, indent=1))
        return
    who = f"a virtual world of {devices}" if is_virtual else f"these {world} ranks"
    _tell(f"\ncollectives of a step, for {who}:\n{collectives_table(lowered.program)}")
    if measured is None:
        _tell("overlap is measured on real ranks: torchrun --standalone --nproc-per-node 2 -m commfuse_fx demo")
    else:
        _tell(measured.text())


def _compiled(net: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> CompiledStep:
    step: CompiledStep = compile(net, loss_fn=nn.CrossEntropyLoss(), optimizer=optimizer, **options)
    return step


def _batches(images: torch.Tensor, labels: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """This rank's parts of the batches, without end."""
    order = torch.Generator().manual_seed(0)  # one order for all ranks
    while True:
        shuffled = torch.randperm(len(images), generator=order)
        for number in range(len(images) // BATCH):
            mine = shuffled[number * BATCH :][:BATCH][get_rank() :: get_group_size()]
            yield images[mine], labels[mine]


def _measured(step: CompiledStep, batches: Iterator[tuple[torch.Tensor, torch.Tensor]]) -> Timeline:
    with step.record_communication() as timeline:
        for _ in range(MEASURED_STEPS):
            step(*next(batches))
    return timeline


def _tell(text: str) -> None:
    if get_rank() == 0:
        print(text, flush=True)
