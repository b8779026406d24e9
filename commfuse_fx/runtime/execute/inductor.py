"""Compile the regions of a program with torch's Inductor."""

from __future__ import annotations

import logging
from collections.abc import Hashable
from typing import Any

import torch
from torch import fx
from torch._subclasses import FakeTensorMode
from torch.fx.node import map_arg

from commfuse_fx.ir.dependence import Roots
from commfuse_fx.ir.meta import info, tensor_spec
from commfuse_fx.ir.program import Program
from commfuse_fx.ir.regions import Region, regions_of
from commfuse_fx.runtime.execute.region_outputs import RecordedOutputs, RegionCode
from commfuse_fx.support.progress import progress

log = logging.getLogger("commfuse_fx.inductor")


def compiled_regions(program: Program) -> dict[int, RegionCode]:
    """By its number the code of each region that Inductor compiles. The others run op by op.

    Regions that are alike share their code.
    """
    regions = regions_of(program)
    if not regions:
        return {}
    roots = Roots(program.graph, program.aliases())
    known: dict[Hashable, RegionCode] = {}
    found: dict[int, RegionCode] = {}
    refused: list[str] = []
    with progress(f"compiling {len(regions)} regions with Inductor"):
        for region in regions:
            key = _structure(region)
            try:
                if key not in known:
                    known[key] = _compiled(region)
                found[region.number] = RecordedOutputs(known[key], region, roots)
            except Exception as error:
                why = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
                refused.append(f"region {region.number} (at {info(region.nodes[0]).name}): {why}")
    if refused:
        log.warning(
            "%d of %d regions run op by op, as Inductor does not compile them; %s",
            len(refused),
            len(regions),
            refused[0],
        )
    return found


def _structure(region: Region) -> Hashable:
    """What the code of a region depends on: regions with the same structure compute the same from their inputs."""
    number = {node: i for i, node in enumerate((*region.inputs, *region.nodes))}
    calls = tuple(
        (node.target, str(map_arg((node.args, node.kwargs), lambda value: _Place(number[value]))))
        for node in region.nodes
    )
    return tuple(map(tensor_spec, region.inputs)), calls, tuple(number[node] for node in region.outputs)


class _Place(int):
    """The number of a value; it does not print as a number of an op's arguments does."""

    def __repr__(self) -> str:
        return f"%{int(self)}"


def _compiled(region: Region) -> RegionCode:
    from torch._dynamo.utils import GmWrapper
    from torch._inductor.compile_fx import compile_fx

    with FakeTensorMode():
        examples = [tensor_spec(value).empty() for value in region.inputs]
    # With this wrapper the code takes a list, which it empties: tensors go as soon as the region needs them no more.
    module: Any = GmWrapper(_graph_module(region), lambda given: given)
    with torch.no_grad():
        code: Any = compile_fx(module, examples)
    found: RegionCode = code
    return found


def _graph_module(region: Region) -> fx.GraphModule:
    """The region as a module that takes its inputs and returns the tuple of its outputs."""
    graph = fx.Graph()
    same = {value: graph.placeholder(f"input_{number}") for number, value in enumerate(region.inputs)}
    for node in region.nodes:
        args, kwargs = map_arg((node.args, node.kwargs), same.__getitem__)
        target: Any = node.target
        same[node] = graph.call_function(target, args, kwargs)
    graph.output(tuple(same[value] for value in region.outputs))
    return fx.GraphModule({}, graph)
