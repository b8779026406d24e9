"""Compile the regions of a program with torch's Inductor."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
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
from commfuse_fx.runtime.execute.shared_compiles import compile_each
from commfuse_fx.support.progress import progress

log = logging.getLogger("commfuse_fx.inductor")


def compiled_regions(program: Program, rank: int) -> dict[int, RegionCode]:
    """By its number the code of each region that Inductor compiles. The others run op by op.

    Regions that are alike share their code, and so do the ranks of one host.
    """
    regions = {region.number: region for region in regions_of(program)}
    if not regions:
        return {}
    texts = {number: _text(region) for number, region in regions.items()}
    tasks: dict[str, Callable[[], RegionCode | str]] = {}
    for number, text in texts.items():
        tasks.setdefault(text, partial(_compiled, regions[number]))
    from torch._inductor.runtime.cache_dir_utils import cache_dir  # takes seconds, and few programs need it

    try:
        folder = Path(cache_dir()) / "commfuse"
    except OSError as error:
        log.warning("%d regions run op by op, as Inductor has no folder for its code: %s", len(regions), error)
        return {}
    with progress(f"compiling {len(tasks)} regions with Inductor"):
        codes = compile_each(tasks, rank, folder)
    roots = Roots(program.graph, program.aliases())
    found: dict[int, RegionCode] = {}
    refused: list[str] = []
    for number, region in regions.items():
        code = codes[texts[number]]
        if isinstance(code, str):
            refused.append(f"region {number} (at {info(region.nodes[0]).name}): {code}")
        else:
            found[number] = RecordedOutputs(code, region, roots)
    if refused:
        count = f"{len(refused)} of {len(regions)} regions"
        log.warning("%s run op by op, as Inductor does not compile them; %s", count, refused[0])
    return found


def _text(region: Region) -> str:
    """What the code of a region depends on: regions with the same text compute the same from their inputs."""
    made = (*region.constants, *region.nodes)
    number = {node: _Place(i) for i, node in enumerate((*region.inputs, *made))}
    lines = [f"{tensor_spec(value)!r}" for value in region.inputs]
    lines += [f"{node.target} {map_arg((node.args, node.kwargs), number.__getitem__)}" for node in made]
    return "\n".join([*lines, str([number[node] for node in region.outputs])])


class _Place(int):
    """The number of a value; it does not print as a number of an op's arguments does."""

    def __repr__(self) -> str:
        return f"%{int(self)}"


def _compiled(region: Region) -> RegionCode | str:
    """The region's code, or why there is none."""
    from torch._dynamo.utils import GmWrapper
    from torch._inductor.compile_fx import compile_fx
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    # Inductor keeps code on disk only where there is a ShapeEnv, though all sizes are fixed.
    with FakeTensorMode(shape_env=ShapeEnv()):
        examples = [tensor_spec(value).empty() for value in region.inputs]
    # With this wrapper the code takes a list, which it empties: tensors go as soon as the region needs them no more.
    module: Any = GmWrapper(_graph_module(region), lambda given: given)
    try:
        with torch.no_grad():
            code: Any = compile_fx(module, examples)
    except Exception as error:  # whatever a compiler and its tools may raise
        return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    found: RegionCode = code
    return found


def _graph_module(region: Region) -> fx.GraphModule:
    """The region as a module that takes its inputs and returns the tuple of its outputs."""
    graph = fx.Graph()
    same = {value: graph.placeholder(f"input_{number}") for number, value in enumerate(region.inputs)}
    for node in (*region.constants, *region.nodes):
        args, kwargs = map_arg((node.args, node.kwargs), same.__getitem__)
        target: Any = node.target
        same[node] = graph.call_function(target, args, kwargs)
    graph.output(tuple(same[value] for value in region.outputs))
    return fx.GraphModule({}, graph)
