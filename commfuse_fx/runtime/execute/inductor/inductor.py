"""Compile the regions of a program with torch's Inductor.

Why: docs/decisions.md, "Regions draw masks by an op of this package".
"""

from __future__ import annotations

import logging
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._subclasses import FakeTensorMode
from torch.fx.node import map_arg

from commfuse_fx.ir.core.dependence import Roots
from commfuse_fx.ir.core.meta import info, tensor_spec
from commfuse_fx.ir.core.program import Program
from commfuse_fx.ir.ops.regions import Region, regions_of
from commfuse_fx.kernels import masks
from commfuse_fx.kernels.inductor_ops import SETTINGS, looks_like_attention
from commfuse_fx.kernels.rounding import rounded_numbers
from commfuse_fx.runtime.execute.inductor.half_written import remove_half_written
from commfuse_fx.runtime.execute.inductor.region_outputs import RecordedOutputs, RegionCode
from commfuse_fx.runtime.execute.inductor.shared_compiles import compile_each
from commfuse_fx.runtime.memory.modes import outside_modes
from commfuse_fx.support.progress import progress

log = logging.getLogger("commfuse_fx.inductor")


_known: set[str] = set()  # digests of the texts of regions whose code this process has


def regions_to_compile(program: Program) -> int:
    """How many different regions of a program this process has no code of yet."""
    return len({_digest(_text(region)) for region in regions_of(program)} - _known)


def _digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()


def compiled_regions(program: Program, rank: int) -> dict[int, RegionCode]:
    """By its number the code of each region that Inductor compiles. The others run op by op.

    Regions that are alike share their code, and so do the ranks of one host.
    """
    regions = regions_of(program)
    if not regions:
        return {}
    alike: dict[str, list[Region]] = {}
    for region in regions:
        alike.setdefault(_text(region), []).append(region)
    from torch._inductor.runtime.cache_dir_utils import cache_dir  # takes seconds, and few programs need it

    try:
        folder = Path(cache_dir())
    except OSError as error:
        log.warning("%d regions run op by op, as Inductor has no folder for its code: %s", len(regions), error)
        return {}
    if removed := remove_half_written(folder):
        log.info("%d libraries are compiled again, as a killed process had not finished them", len(removed))
    # Inductor traces a region again, and would take casts and the like of the caller's modes into its code.
    with progress(_shown(0, len(regions))) as show, outside_modes():
        done = 0

        def compiled(same: list[Region]) -> RegionCode | str:
            nonlocal done
            code = _compiled(same[0])
            done += len(same)
            show(_shown(done, len(regions)))
            return code

        tasks = {text: partial(compiled, same) for text, same in alike.items()}
        codes = compile_each(tasks, rank, folder / "commfuse")
    _known.update(_digest(text) for text in alike)
    roots = Roots(program.graph, program.aliases())
    found: dict[int, RegionCode] = {}
    refused: dict[int, str] = {}
    for text, same in alike.items():
        for region in same:
            code = codes[text]
            if isinstance(code, str):
                refused[region.number] = f"region {region.number} (at {info(region.nodes[0]).name}): {code}"
            else:
                found[region.number] = RecordedOutputs(code, region, roots)
    if refused:
        count = f"{len(refused)} of {len(regions)} regions"
        log.warning("%s run op by op, as Inductor does not compile them; %s", count, refused[min(refused)])
    return found


def _shown(done: int, regions: int) -> str:
    return f"compiling regions {done}/{regions} with Inductor"


def _text(region: Region) -> str:
    """What the code of a region depends on: regions with the same text compute the same from their inputs."""
    made = (*region.constants, *region.nodes)
    number = {node: _Place(i) for i, node in enumerate((*region.inputs, *made))}
    lines = [f"{tensor_spec(value)!r}" for value in region.inputs]
    lines += [f"{node.target} {map_arg((node.args, node.kwargs), number.__getitem__)}" for node in made]
    return "\n".join([*lines, str([number[node] for node in region.outputs]), *(["rounded"] if region.rounded else [])])


class _Place(int):
    """The number of a value; it does not print as a number of an op's arguments does."""

    def __repr__(self) -> str:
        return f"%{int(self)}"


def _compiled(region: Region) -> RegionCode | str:
    """The region's code, or why there is none."""
    from torch._dynamo.utils import GmWrapper
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    # Inductor keeps code on disk only where there is a ShapeEnv, though all sizes are fixed.
    with FakeTensorMode(shape_env=ShapeEnv()):
        examples = [tensor_spec(value).empty() for value in region.inputs]
    try:
        # With this wrapper the code takes a list, which it empties: tensors go when the region needs them no more.
        module: Any = GmWrapper(_graph_module(region), lambda given: given)
        patterns = config.pattern_matcher and not looks_like_attention(region.nodes)
        rounded = region.rounded or config.emulate_precision_casts
        with config.patch({**SETTINGS, "pattern_matcher": patterns, "emulate_precision_casts": rounded}):
            code: Any = compile_fx(module, examples)
    except Exception as error:  # whatever a compiler and its tools may raise
        lines = str(error).strip().splitlines() or [""]
        return f"{type(error).__name__}: {next((line for line in lines if ' error: ' in line), lines[0])}"
    found: RegionCode = code
    return found


def _graph_module(region: Region) -> fx.GraphModule:
    """The region as a module that takes its inputs and returns the tuple of its outputs."""
    graph = fx.Graph()
    same = {value: graph.placeholder(f"input_{number}") for number, value in enumerate(region.inputs)}
    for node in (*region.constants, *region.nodes):
        args, kwargs = rounded_numbers(node) if region.rounded else (node.args, node.kwargs)
        call: Any = _drawn_by_torch(node) or (_RESHAPED.get(node.target, node.target), args, kwargs)
        target, args, kwargs = map_arg(call, same.__getitem__)
        same[node] = graph.call_function(target, args, kwargs)
    graph.output(tuple(same[value] for value in region.outputs))
    return fx.GraphModule({}, graph)


_RESHAPED: dict[Any, Any] = dict.fromkeys(
    (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default), torch.ops.aten.reshape.default
)
"""What stands for ops that refuse a tensor with other strides than recorded, such as Inductor gives some results."""


def _drawn_by_torch(node: fx.Node) -> tuple[Any, tuple[Any, ...], dict[str, Any]] | None:
    """A call that draws the same mask; None if Inductor may have the node.

    Where it does not draw by itself, Inductor writes the mask into memory that it has filled, and may let what reads
    the mask run before.
    """
    quick = node.target is masks.bernoulli
    if not quick and (node.target is not torch.ops.aten.bernoulli.p or node.kwargs):
        return None
    spec = tensor_spec(node)
    if spec.device != "cpu" and not torch._inductor.config.fallback_random:
        return None
    options = {"dtype": spec.dtype, "device": torch.device(spec.device)}
    return masks.mask, (list(spec.shape), list(spec.stride), node.args[1], quick), options
