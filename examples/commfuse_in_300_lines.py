"""The system in 300 lines: trace a training step, insert its collectives, fuse them, schedule them, run them.

    torchrun --standalone --nproc-per-node 2 examples/commfuse_in_300_lines.py

This file needs PyTorch alone and imports nothing of commfuse_fx. Read it from top to bottom: each part names the room
of the package that does the same for real models. The run ends with the parameters that DistributedDataParallel leaves,
bit by bit.
"""

from __future__ import annotations

import hashlib
import operator
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

aten = torch.ops.aten
LEARNING_RATE = 0.1
BUCKET_BYTES = 40 * 1024
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


# Capture (commfuse_fx/capture) ----------------------------------------------------------------------------------------


@dataclass
class Program:
    """A program is the graph of one training step, with what passes have to know of it.

    graph: its placeholders are the parameters and then the batch, its output is the loss.
    params: the placeholder of each parameter. gradients: the node that holds each parameter's gradient.
    buckets: the parameters whose gradients share a collective, once they have one.
    """

    graph: fx.Graph
    params: dict[str, fx.Node]
    gradients: dict[str, fx.Node]
    buckets: list[list[str]] = field(default_factory=list)


def capture(model: nn.Module, loss_fn: Loss, x: torch.Tensor, y: torch.Tensor) -> Program:
    """Run forward, loss and backward once, on tensors that write each op into a graph."""
    params = dict(model.named_parameters())

    def step(values: list[torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> Any:
        out = torch.func.functional_call(model, dict(zip(params, values, strict=True)), (x,))
        loss = loss_fn(out, y)
        return loss.detach(), *torch.autograd.grad(loss, values)

    graph = make_fx(step)(list(params.values()), x, y).graph
    graph.set_codegen(fx.graph.CodeGen())  # the generated function takes and returns plain tensors
    output = graph.output_node()
    results: Any = output.args[0]
    loss, *gradients = results
    output.args = (loss,)  # the caller gets the loss, and the update gets the gradients
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    return Program(graph, dict(zip(params, placeholders, strict=False)), dict(zip(params, gradients, strict=True)))


def shape_of(program: Program, name: str) -> torch.Size:
    shape: torch.Size = program.params[name].meta["val"].shape
    return shape


# Collectives as ops (commfuse_fx/ir/core/collectives.py) --------------------------------------------------------------

on_the_wire: dict[int, Any] = {}
"""What has been started and not waited for, by the address of the memory that is reduced."""


def all_reduce_start(values: torch.Tensor) -> torch.Tensor:
    """Begin to sum over all ranks, in place, and return at once."""
    on_the_wire[values.data_ptr()] = dist.all_reduce(values, async_op=True)
    return values


def all_reduce_wait(values: torch.Tensor) -> torch.Tensor:
    """Return the sum when all ranks have sent their part."""
    on_the_wire.pop(values.data_ptr()).wait()
    return values


# Distribute (passes/distribute) ---------------------------------------------------------------------------------------


class End:
    """Appends calls to a graph, just before its output."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph

    def __call__(self, op: Callable[..., Any], *args: Any, sends: bool = False) -> fx.Node:
        """sends: whether the call only prepares or starts a collective, so that it may run as early as its data."""
        with self.graph.inserting_before(self.graph.output_node()):
            node = self.graph.call_function(op, args)
        node.meta["sends"] = sends
        return node


def reduce_gradients(program: Program, world: int) -> None:
    """Let each gradient become its mean over the ranks: one all_reduce per parameter."""
    call = End(program.graph)
    for name, gradient in program.gradients.items():
        share = call(aten.div.Tensor, gradient, world, sends=True)
        start = call(all_reduce_start, share, sends=True)
        program.gradients[name] = call(all_reduce_wait, start)
    program.buckets = [[name] for name in program.gradients]


# Fuse (passes/fuse) ---------------------------------------------------------------------------------------------------


def fuse(program: Program, limit: int) -> None:
    """Merge all_reduces into buckets of at most `limit` bytes: concat, one start, one wait, split.

    A collective costs a latency and a time per byte. Merging saves latencies, but a bucket is only sent when its last
    gradient is there. So buckets take gradients in the order in which the backward makes them.
    """
    call, place = End(program.graph), {node: number for number, node in enumerate(program.graph.nodes)}
    shares = {name: source(source(wait)) for name, wait in program.gradients.items()}
    in_order = sorted(shares, key=lambda name: place[source(shares[name])])
    program.buckets = list(in_buckets(in_order, lambda name: 4 * shape_of(program, name).numel(), limit))
    for bucket in program.buckets:
        flat = [call(aten.reshape.default, shares[name], [-1], sends=True) for name in bucket]
        together = call(aten.cat.default, flat, sends=True)
        start = call(all_reduce_start, together, sends=True)
        wait = call(all_reduce_wait, start)
        parts = call(aten.split_with_sizes.default, wait, [shape_of(program, name).numel() for name in bucket])
        for number, name in enumerate(bucket):
            part = call(operator.getitem, parts, number)
            alone = program.gradients[name]
            program.gradients[name] = call(aten.reshape.default, part, list(shape_of(program, name)))
            for node in (alone, source(alone)):  # its own wait and start
                program.graph.erase_node(node)


def source(node: fx.Node) -> fx.Node:
    return node.all_input_nodes[0]


def in_buckets(names: Iterable[str], size: Callable[[str], int], limit: int) -> Iterable[list[str]]:
    bucket: list[str] = []
    for name in names:
        if bucket and sum(map(size, bucket)) + size(name) > limit:
            yield bucket
            bucket = []
        bucket.append(name)
    yield bucket


# The update (passes/distribute, kernels) ------------------------------------------------------------------------------


def subtract_(param: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """One step of SGD, as torch.optim.SGD rounds it."""
    return param.add_(gradient, alpha=-LEARNING_RATE)


def append_update(program: Program) -> None:
    """End the step with SGD, which writes each parameter in place."""
    call = End(program.graph)
    for name, param in program.params.items():
        call(subtract_, param, program.gradients[name])


# Schedule (passes/schedule) -------------------------------------------------------------------------------------------


def schedule(graph: fx.Graph) -> None:
    """Start each collective as soon as its data is there, and leave the waits at the end.

    Between a start and its wait the backward goes on: that time of communication is hidden. Only what the last bucket
    needs after the backward's end is exposed. All ranks have the same graph, so all start in the same order.
    """
    early = [node for node in graph.nodes if node.meta.get("sends")]
    order: dict[fx.Node, None] = {}
    for node in [node for node in graph.nodes if node not in set(early)]:
        order[node] = None
        for each in early:
            if each not in order and all(value in order for value in each.all_input_nodes):
                order[each] = None
    for node in order:
        if node.op != "output":
            graph.output_node().prepend(node)


# The dump (commfuse_fx/ir/text) ---------------------------------------------------------------------------------------


def text(program: Program) -> str:
    """One line per node, the same on every rank: for people, for diffs, and for the vote."""
    lines = []
    for node in program.graph.nodes:
        if node.op == "call_function":
            name = getattr(node.target, "__name__", str(node.target))
            lines.append(f"%{node.name} = {name}({', '.join(map(str, node.args))})")
    sizes = [sum(4 * shape_of(program, name).numel() for name in bucket) for bucket in program.buckets]
    for number, (bucket, size) in enumerate(zip(program.buckets, sizes, strict=True)):
        lines.append(f"# bucket {number}: all_reduce of {size} bytes, members {', '.join(bucket)}")
    return "\n".join(lines)


# Run (commfuse_fx/runtime, commfuse_fx/votes) -------------------------------------------------------------------------


def vote(what: str) -> None:
    """Compare the graph on all ranks. Ranks with different graphs would hang, or sum what does not belong together."""
    mine = torch.tensor([int(hashlib.sha256(what.encode()).hexdigest()[:15], 16)])
    found = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(found, mine)
    if any(not torch.equal(mine, other) for other in found):
        raise RuntimeError(f"ranks have different graphs: rank {dist.get_rank()} has\n{what}")


def compile_step(model: nn.Module, loss_fn: Loss, x: torch.Tensor, y: torch.Tensor) -> tuple[Any, Program]:
    """Everything above in its order: returns the step to call with a batch, and its program to look at."""
    program = capture(model, loss_fn, x, y)
    reduce_gradients(program, dist.get_world_size())
    fuse(program, BUCKET_BYTES)
    append_update(program)
    schedule(program.graph)
    program.graph.lint()
    vote(text(program))
    generated = fx.GraphModule({}, program.graph)  # Python code: generated.code
    params = list(model.parameters())

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            loss: torch.Tensor = generated(*params, x, y)
        return loss

    return step, program


# Two ranks, and the proof ---------------------------------------------------------------------------------------------


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 10))


def batches(rank: int, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(rank)
    return [
        (torch.randn(32, 64, generator=generator), torch.randint(10, (32,), generator=generator)) for _ in range(count)
    ]


def main() -> None:
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    data = batches(dist.get_rank(), 5)

    ours = make_model()
    step, program = compile_step(ours, F.cross_entropy, *data[0])
    losses = [step(x, y).item() for x, y in data]

    theirs = make_model()
    wrapped = DistributedDataParallel(theirs)
    sgd = torch.optim.SGD(theirs.parameters(), lr=LEARNING_RATE)
    for number, (x, y) in enumerate(data):
        loss = F.cross_entropy(wrapped(x), y)
        assert loss.item() == losses[number], f"step {number}: loss {losses[number]}, DDP's is {loss.item()}"
        sgd.zero_grad()
        loss.backward()
        sgd.step()
    for name, param in theirs.named_parameters():
        assert torch.equal(param, ours.get_parameter(name)), f"{name} is not what DDP leaves"

    if dist.get_rank() == 0:
        print(text(program))
        print(f"{len(data)} steps on {dist.get_world_size()} ranks: losses and parameters are DDP's, bit by bit")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
