"""Reads the header of canonical text: mesh, configuration and optimizer. What it does not say is default."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from commfuse_fx.config.compile_config import CompileConfig
from commfuse_fx.config.fusion_config import KINDS, FusionConfig
from commfuse_fx.config.options import DEFAULTS, ScheduleConfig
from commfuse_fx.config.parallel_optimizer import ParallelOptimizer
from commfuse_fx.errors import CommFuseError
from commfuse_fx.ir.core.mesh import Mesh
from commfuse_fx.ir.text.write_text import SCHEMA
from commfuse_fx.machine.presets import preset
from commfuse_fx.machine.source import Costs, costs_label
from commfuse_fx.support.checks import show

_AXIS = re.compile(r"([^=,]+?)=(\d{1,7})(?:x|$)")
_OPTIMIZER = re.compile(r"(\w+) \((\w+)\)")
_SCHEDULE = re.compile(r"ScheduleConfig\(memory_limit=(None|\d{1,18}), across_steps=(True|False)\)")
_FUSION = "comm_fusion."
_BOOLS = {"True": True, "False": False}
_OF_THE_GRAPH = ("schema", "torch", "world", "mesh", "step", "form", "aux", "optimizer")


@dataclass(frozen=True)
class Header:
    """What a header says. optimizer: its class and its rule, or None. aux: what is returned behind the gradients."""

    torch_version: str
    mesh: Mesh
    training: bool
    config: CompileConfig
    optimizer: tuple[str, str] | None
    aux: tuple[str, ...] = ()


def read_header(values: Mapping[str, str], cluster: Costs | None) -> Header:
    """The header, from its values by name. cluster: prices, where the header names no preset. Raises ValueError."""
    schema = values.get("schema", str(SCHEMA))
    if schema != str(SCHEMA):
        raise ValueError(f"schema is {schema[:40]!r}; this version reads {SCHEMA}")
    step = values.get("step", "train")
    if step not in ("train", "eval"):
        raise ValueError(f"step is {step[:40]!r}; write train or eval")
    return Header(
        values.get("torch", torch.__version__.split("+")[0]),
        _mesh(values.get("mesh"), values.get("world")),
        step == "train",
        _config({name: value for name, value in values.items() if name not in _OF_THE_GRAPH}, cluster),
        _optimizer(values["optimizer"]) if "optimizer" in values else None,
        tuple(values["aux"].split(", ")) if "aux" in values else (),
    )


def _mesh(mesh: str | None, world: str | None) -> Mesh:
    if world is not None and not (world.isascii() and world.isdecimal() and 0 < int(world) <= 1 << 20):
        raise ValueError(f"world is {world[:40]!r}; write a number of ranks")
    if mesh is None:
        return Mesh.of_sizes((int(world or 2),))
    axes = _AXIS.findall(mesh)
    names, sizes = tuple(name for name, _ in axes), tuple(int(size) for _, size in axes)
    if "x".join(f"{name}={size}" for name, size in axes) != mesh or len({*names}) < len(names) or 0 in sizes:
        raise ValueError(f"mesh is {mesh[:40]!r}; write axes and sizes such as dp=2xtp=2")
    if world is not None and prod(sizes) != int(world):
        raise ValueError(f"mesh {mesh} has {prod(sizes)} ranks, and world is {world}; write the same number")
    return Mesh(sizes, names)


def _optimizer(text: str) -> tuple[str, str]:
    match = _OPTIMIZER.fullmatch(text)
    if match is None:
        raise ValueError(f"optimizer is {text[:40]!r}; write class and rule such as AdamW (adamw)")
    return match[1], match[2]


def _config(values: Mapping[str, str], cluster: Costs | None) -> CompileConfig:
    given: dict[str, Any] = {}
    fusion: dict[str, Any] = {}
    for name, value in values.items():
        if name.startswith(_FUSION):
            key = name.removeprefix(_FUSION)
            fusion[key] = _bool(name, value) if key == "openstate" else _kind(name, value)
        elif name == "schedule":
            given[name] = _schedule(value)
        elif name == "cluster":
            cluster = _cluster(value, cluster)
        elif isinstance(DEFAULTS.get(name), bool):
            given[name] = _bool(name, value)
        elif isinstance(DEFAULTS.get(name), str):
            given[name] = value
        elif name == "parallel_optimizer_config":
            given[name] = ParallelOptimizer.dict_of(value)
        elif name == "accumulate_steps":
            given[name] = _whole_number(name, value)
        elif name == "clip_grad_norm":
            given[name] = _number(name, value)
        else:
            known = (*_OF_THE_GRAPH, *(f"{_FUSION}{kind}" for kind in KINDS), *DEFAULTS)
            raise ValueError(f"{name[:40]!r} is no name of a header line; use {', '.join(known)}")
    try:
        # All options, so that none is taken from the process-wide context.
        settings = {**DEFAULTS, **given, "comm_fusion": FusionConfig.parse(fusion), "cluster": cluster}
        return CompileConfig.resolve(settings)
    except CommFuseError as error:
        raise ValueError(str(error)) from None


def _bool(name: str, value: str) -> bool:
    if value not in _BOOLS:
        raise ValueError(f"{name} is {value[:40]!r}; write True or False")
    return _BOOLS[value]


def _number(name: str, value: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise ValueError(f"{name} is {value[:40]!r}; write a number") from None


def _whole_number(name: str, value: str) -> int:
    if not (value.isascii() and value.isdecimal() and len(value) < 10):
        raise ValueError(f"{name} is {value[:40]!r}; write a whole number")
    return int(value)


def _kind(name: str, value: str) -> dict[str, Any]:
    """Of "auto", "size 32" or "index 20,35"."""
    mode, _, numbers = value.partition(" ")
    try:
        found = [int(each) for each in numbers.split(",")] if numbers else []
    except ValueError:
        raise ValueError(f'{name} is {value[:40]!r}; write "auto", "optimal", "size 32" or "index 20,35"') from None
    return {"mode": mode, "config": found if mode == "index" else found[0] if found else None}


def _schedule(value: str) -> Any:
    match = _SCHEDULE.fullmatch(value)
    if match is None:
        return value
    limit = None if match[1] == "None" else int(match[1])
    return ScheduleConfig(memory_limit=limit, across_steps=match[2] == "True")


def _cluster(value: str, given: Costs | None) -> Costs:
    """A header has the name and a digest: a preset is known by these, any other cluster has to be given."""
    if given is not None:
        return given
    _, _, name = value.partition(" ")
    try:
        found = preset(name.split(" ")[0] or value)
    except CommFuseError:
        found = None
    if found is None or (name and costs_label(found) != value):
        raise ValueError(f"cluster {show(value)} is no preset of this version; give the cluster= that it stands for")
    return found
