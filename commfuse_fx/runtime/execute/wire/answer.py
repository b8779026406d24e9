"""A rank without a batch joins the collectives of the other ranks with zeros.

Why: docs/decisions.md, "A rank without batches attends the votes of the others".
"""

from __future__ import annotations

import torch
from torch import fx

from commfuse_fx.ir.core.collectives import is_start, is_wait
from commfuse_fx.ir.core.meta import TensorSpec, info
from commfuse_fx.ir.core.program import Program
from commfuse_fx.runtime.execute.wire.wire import Wire


def answer(program: Program, wire: Wire, device: torch.device) -> None:
    """Run the collectives of a program on zeros.

    program: the program that the other ranks run.
    wire: the collectives of this program.
    device: the device of the zeros.

    Raises CollectiveError.
    """
    sends = wire.sends()
    memory: dict[fx.Node, torch.Tensor] = {}

    def zeros(value: fx.Node) -> torch.Tensor:
        if value not in memory:
            spec = info(value).spec
            assert isinstance(spec, TensorSpec), "a collective sends one tensor"
            memory[value] = spec.empty(device).zero_()
        return memory[value]

    with torch.no_grad():
        for node in program.graph.nodes:
            run = wire.bind(node) if is_start(node) or is_wait(node) else None
            if run is not None:
                given = node.args[0]
                assert isinstance(given, fx.Node)
                memory[node] = run(memory[given] if is_wait(node) else zeros(given), *node.args[1:])
            for send, storage in sends.get(node, ()):
                send(zeros(storage))
