"""Options that several commands share: what to compile a target for, and what every command has."""

from __future__ import annotations

import argparse
from math import prod
from typing import Any

from commfuse_fx.config.compile_config import DEFAULTS, ScheduleConfig
from commfuse_fx.config.fusion_config import KINDS
from commfuse_fx.config.options import PARALLEL_MODES
from commfuse_fx.errors import ConfigKeyError, ConfigValueError
from commfuse_fx.support.checks import alternatives
from commfuse_fx.support.strict_json import TYPED, parse_json

DEFAULT_DEVICES = 2

EXIT_CODES = "exit codes: 0 done, 1 failed, 2 bad usage, or a file or target that cannot be read, 130 interrupted"

TARGETS = """\
TARGET is package.module:factory or path/to/file.py:factory. The factory is a function without arguments. It returns
(model, loss_fn, optimizer, inputs), or a dict with these keys. inputs are a tensor, a tuple of arguments (with a
loss_fn the last one is the target) or a dict of keyword arguments. loss_fn and optimizer may be None. Without both, as
in (model, inputs), the graph is that of the module form. The current folder is on the path. The code of a target is
run."""

SAVED = """\
SAVED is a folder that lowered.dump() wrote, the folder of one rank in it, or its graph.json. Nothing in it is run."""

_COMPILE_FLAGS = ("devices", "rank", "mesh", "parallel_mode", "fusion", "schedule", "memory_limit", "gradients_sum")


def add_common(command: argparse.ArgumentParser) -> None:
    """What every command has."""
    command.add_argument("--traceback", action="store_true", help="show where an error comes from")


def add_compile(command: argparse.ArgumentParser) -> None:
    """The options of `compile` that a target takes; `compile_options` reads them."""
    group = command.add_argument_group("what a target is compiled for")
    group.add_argument(
        "--devices", type=int, metavar="N", help=f"size of the virtual world (default: the mesh, or {DEFAULT_DEVICES})"
    )
    group.add_argument("--parallel-mode", choices=PARALLEL_MODES, help="default: data_parallel")
    group.add_argument("--memory-limit", type=int, metavar="MIB", help="highest predicted peak memory of a step")
    add_search(group)


def add_search(group: argparse._ArgumentGroup) -> None:
    """Those that also hold for a step whose strategies are searched, on several numbers of devices."""
    group.add_argument("--rank", type=int, metavar="R", help="compile for this rank (default: 0)")
    group.add_argument("--mesh", metavar="SIZES", help="sizes of the mesh axes, such as 2x4 (default: one axis)")
    group.add_argument(
        "--fusion",
        metavar="MODE[=CONFIG]",
        help="auto, size=MIB, index=20,35 (all_reduce only), optimal or off (default: auto)",
    )
    group.add_argument(
        "--schedule",
        choices=("overlap", "none", "across-steps", "auto"),
        help="when communication runs (default: overlap). auto: with the profile of a step that has chosen its plan as "
        "--cluster, that plan",
    )
    group.add_argument("--cluster", metavar="NAME|FILE", help="what the plan is priced with: a preset or a file")
    group.add_argument("--gradients-sum", action="store_true", default=None, help="sum gradients over ranks, no mean")
    group.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=JSON",
        help="any other option of compile(), such as full_batch=true; may be given several times",
    )


def compile_options(options: argparse.Namespace) -> dict[str, Any]:
    """Options for `compile`, which checks them, from those of `add_compile`.

    Raises ConfigKeyError or ConfigValueError for what cannot be understood.
    """
    found: dict[str, Any] = {}
    mesh = None if options.mesh is None else _mesh(options.mesh)
    if mesh is not None:
        found["mesh"] = mesh
    world = prod(mesh) if mesh else DEFAULT_DEVICES
    found["device_num"] = world if options.devices is None else options.devices
    if options.rank is not None:
        found["global_rank"] = options.rank
    if options.parallel_mode is not None:
        found["parallel_mode"] = options.parallel_mode
    if options.fusion is not None:
        found["comm_fusion"] = _fusion(options.fusion)
    if options.schedule is not None or options.memory_limit is not None:
        found["schedule"] = _schedule(options.schedule, options.memory_limit)
    if options.cluster is not None:
        found["cluster"] = options.cluster
    if options.gradients_sum:
        found["gradients_mean"] = False
    for text in options.set:
        name, value = _setting(text)
        found[name] = value
    return found


def refuse_compile_options(options: argparse.Namespace) -> None:
    """A saved graph is compiled already. Raises ConfigValueError for options that say how."""
    given = [name for name in _COMPILE_FLAGS if getattr(options, name) is not None]
    if options.set:
        given.append("set")
    if given:
        raise ConfigValueError(
            f"--{given[0].replace('_', '-')} says how to compile a target, and {options.source!r} is a saved graph, "
            "which is compiled already"
        )


def _mesh(text: str) -> tuple[int, ...]:
    sizes = text.replace("x", ",").split(",")
    if not all(size.strip().isdecimal() for size in sizes):
        raise ConfigValueError(f"--mesh {text!r}: give the sizes of the axes, such as 8 or 2x4")
    return tuple(int(size) for size in sizes)


def _fusion(text: str) -> dict[str, Any]:
    mode, _, rest = text.partition("=")
    if mode == "off":
        if rest:
            raise ConfigValueError(f"--fusion {text!r}: off takes nothing")
        return {"openstate": False}
    kinds = ("allreduce",) if mode == "index" else KINDS
    config: Any = _number(rest) if rest else None
    if mode == "index" and rest:
        config = [_number(part) for part in rest.split(",")]
    return {kind: {"mode": mode, "config": config} for kind in kinds}


def _number(text: str) -> int | str:
    """Text that is no number stays text: `compile` says what is allowed."""
    return int(text) if text.strip().isdecimal() else text


def _schedule(word: str | None, mib: int | None) -> Any:
    if mib is None and word != "across-steps":
        return word
    if word == "none":
        raise ConfigValueError("--memory-limit needs a schedule: leave --schedule none out")
    limit = None if mib is None else mib * 2**20
    if word == "auto":
        return ScheduleConfig(mode="auto", memory_limit=limit)
    return ScheduleConfig(across_steps=word == "across-steps", memory_limit=limit)


def _setting(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    name = name.strip()
    if not equals:
        raise ConfigValueError(f"--set {text!r}: give NAME=JSON, such as full_batch=true")
    known = (*DEFAULTS, "form")
    if name not in known:
        raise ConfigKeyError(f"--set {text!r}: {name!r} is not an option of compile{alternatives(name, known)}")
    try:
        return name, parse_json(value, "--set", TYPED)
    except ConfigValueError:
        raise ConfigValueError(
            f"--set {text!r}: {value!r} is not JSON; write true, null, 3, [1, 2] or '\"text\"'"
        ) from None
