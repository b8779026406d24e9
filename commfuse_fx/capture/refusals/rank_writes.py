"""Warn of forwards that write to a parameter a value that differs between ranks, which have different batches."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from torch import fx

from commfuse_fx.ir.core.meta import info
from commfuse_fx.ir.core.program import Program
from commfuse_fx.ir.core.random_draws import draws_random_numbers

log = logging.getLogger("commfuse_fx.trace")

_SAME_AFTER = ("all_reduce", "all_gather", "all_gather_into_tensor", "broadcast")
_NAMESPACES = ("commfuse", "_c10d_functional")


def warn_of_rank_writes(program: Program, mutations: Sequence[tuple[fx.Node, fx.Node]]) -> None:
    """Warn of written parameters that would differ between ranks, since only gradients are reduced.

    A value differs if it follows from the batch or from random numbers, unless a collective of the model made it equal.
    It is no error, as replicas of DistributedDataParallel differ then, too.
    """
    config = program.config
    if program.mesh.world == 1 or config.parallel_mode not in ("data_parallel", "hybrid_parallel"):
        return
    written = [(target, value) for target, value in mutations if program.sources[target].kind == "parameter"]
    if not written:
        return
    differs: dict[fx.Node, None] = {node: None for node, source in program.sources.items() if source.kind == "input"}
    for node in program.graph.nodes:
        if node.op == "call_function" and not _makes_the_same(node):
            if draws_random_numbers(node) or any(value in differs for value in node.all_input_nodes):
                differs[node] = None
    for target, value in written:
        param = program.params[program.sources[target].name]
        if value in differs and param.name not in program.params_of_each_rank:
            source = info(value).source
            why = (
                f"the forward writes a value to it{f' at {source}' if source else ''} that follows from the rank's "
                "batch or random numbers, so ranks hold different values from then on: reduce the value before it is "
                'written, with cf.ops.all_reduce(value, op="avg")'
            )
            program.note("differs between ranks", param.name, why)
            log.warning("parameter %s: %s", param.name, why)


def _makes_the_same(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return False
    namespace, _, name = schema.name.partition("::")
    return namespace in _NAMESPACES and name.removesuffix("_") in _SAME_AFTER
