"""One GPU: steps with Inductor and CUDA graphs against torch.compile and eager PyTorch, in time, memory and first step.

Every row is a ratio of two variants that take turns in one process. Two ranks on the one GPU, which talk over NCCL,
are compared with DistributedDataParallel. What the installed version cannot do is printed with its reason.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from benchmarks.gpu_measure import AGAIN, FIRST, MEMORY, TIME, Measured, first_step, measure, ratio, warm_up
from benchmarks.gpu_workloads import COMPILE, EAGER, GRAPH, INDUCTOR, LARGE, OVERHEAD, PLAIN, SMALL
from benchmarks.measure import MIB, at_least, save
from benchmarks.two_ranks import compare_two_ranks


@dataclass(frozen=True)
class Row:
    """A row is a ratio of two variants of a workload. `goal`: what it should not exceed; None without one."""

    workload: str
    what: str
    ours: str
    against: str
    goal: float | None = None


ROWS = [
    Row("gpt2", TIME, GRAPH, COMPILE, 0.90),
    Row("gpt2", MEMORY, GRAPH, COMPILE, 1.00),
    Row("gpt2", FIRST, GRAPH, COMPILE, 0.50),
    Row("gpt2", AGAIN, GRAPH, COMPILE, 0.25),
    Row("gpt2", TIME, PLAIN, EAGER, 1.00),
    Row("mlp", TIME, GRAPH, EAGER, 0.06),
    Row("mlp", TIME, GRAPH, OVERHEAD, 0.25),
    Row("mlp", TIME, PLAIN, EAGER, 1.00),
    Row("resnet50", TIME, GRAPH, COMPILE, 0.45),
    Row("resnet50", TIME, GRAPH, OVERHEAD, 0.90),
    Row("resnet50", TIME, PLAIN, EAGER, 1.00),
    Row("llama", TIME, GRAPH, COMPILE, 0.95),
    Row("llama", TIME, PLAIN, EAGER, 1.00),
]

VARIANTS = (EAGER, COMPILE, OVERHEAD, PLAIN, GRAPH)


def rows_of(workload: str, chosen: list[str]) -> list[Row]:
    """The rows of a workload between the chosen variants, and those without a graph that stand in for ones with."""
    rows = [row for row in ROWS if row.workload == workload and {row.ours, row.against} <= {*chosen}]
    return rows + [Row(workload, row.what, INDUCTOR, row.against) for row in rows if row.ours == GRAPH]


def variants_of(rows: list[Row]) -> list[str]:
    """The variants that rows compare, baselines first, and after the graph what stands in for it."""
    wanted = {variant for row in rows for variant in (row.ours, row.against)}
    return [variant for variant in (*VARIANTS, INDUCTOR) if variant in wanted]


def line(row: Row, found: Mapping[str, Measured]) -> tuple[str, float | None]:
    """The row as it is printed, and its ratio."""
    value = ratio(row.what, found[row.ours], found[row.against])
    head = f"{row.workload:9} {row.what:32} {row.ours:24} / {row.against:15}"
    if value is None:
        reasons = [why for each in (row.ours, row.against) if (why := found[each].why) is not None]
        return f"{head}    -   {brief([*reasons, 'not measured on this device'][0])}", None
    goal = "" if row.goal is None else f" goal {row.goal:.2f}, {'met' if value <= row.goal else 'missed'}"
    return f"{head} {value:6.3f}{goal}", value


def brief(reason: str) -> str:
    """What an error says has happened, without what to do about it. The JSON file has all of it."""
    return reason.partition("\n")[0].partition(";")[0].partition(": leave")[0]


def shown(variant: str, found: Measured) -> str:
    if found.why is not None:
        return f"  {variant:24} {brief(found.why)}"
    peak = "" if found.peak is None else f", peak {found.peak / MIB:8.0f} MiB"
    again = "" if found.again is None else f", {found.again:.1f} s in a second process"
    return f"  {variant:24} {min(found.seconds) * 1e3:9.2f} ms{peak}, first step {found.first:.1f} s{again}"


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="benchmarks gpu", description=__doc__)
    made.add_argument("--rounds", type=at_least(1), default=5, help="blocks of steps of each variant (default 5)")
    made.add_argument("--workloads", nargs="*", default=["gpt2", "mlp", "llama", "resnet50"], choices=list(LARGE))
    made.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS, metavar="VARIANT")
    made.add_argument("--no-ranks", action="store_true", help="leave the two ranks out")
    made.add_argument("--limit", type=float, default=200, help="seconds after which nothing else begins (default 200)")
    made.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu shows that the benchmark runs")
    made.add_argument("--small", action="store_true", help="tiny models, whose figures say nothing")
    made.add_argument("--first-step-of", nargs=2, metavar=("VARIANT", "WORKLOAD"), help=argparse.SUPPRESS)
    return made


def main(arguments: list[str]) -> int:
    """Print the table and write it as JSON.

    Exit code: 1 where something failed, or two ranks differ from DDP, 2 where there is no GPU.
    """
    began = time.perf_counter()
    options = parser().parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("this benchmark needs a CUDA device; there is none here (--device cpu --small tries it)", file=sys.stderr)
        return 2
    device = torch.device("cuda:0" if options.device == "cuda" else "cpu")
    workloads = SMALL if options.small else LARGE
    torch.set_float32_matmul_precision("high")
    if options.first_step_of:
        variant, name = options.first_step_of
        if variant in (COMPILE, OVERHEAD, INDUCTOR, GRAPH):
            warm_up(device)
        print(first_step(variant, workloads[name], device)[1])
        return 0
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print(f"{card}, PyTorch {torch.__version__}{', tiny models' if options.small else ''}", flush=True)
    result: dict[str, Any] = {"device": card, "torch": torch.__version__, "small": options.small, "rows": []}
    lines: list[str] = []
    is_fine = True
    compiles = {COMPILE, OVERHEAD, GRAPH} & {*options.variants}
    if compiles:
        warm_up(device)
    for name in options.workloads:
        rows = rows_of(name, options.variants)
        if time.perf_counter() - began > options.limit:
            lines.append(f"{name:9} not run: {options.limit:.0f} seconds were over")
            continue
        again = {} if not any(row.what == AGAIN for row in rows) else _second_process(name, options)
        variants = variants_of(rows)
        found = measure(workloads[name], variants, device, options.rounds, again, {INDUCTOR: GRAPH})
        print(name, *(shown(variant, each) for variant, each in found.items()), sep="\n", flush=True)
        is_fine &= not any(each.failed for each in found.values())
        for row in (row for row in rows if {row.ours, row.against} <= found.keys()):
            text, value = line(row, found)
            lines.append(text)
            result["rows"].append({**asdict(row), "ratio": value})
        result[name] = {variant: asdict(each) for variant, each in found.items()}
        del found
        torch._dynamo.reset()  # which holds the graphs of reduce-overhead
        gc.collect()
    if not options.no_ranks and time.perf_counter() - began > options.limit:
        lines.append(f"two ranks not run: {options.limit:.0f} seconds were over; --workloads alone runs nothing else")
    elif not options.no_ranks:
        result["two ranks"] = compare_two_ranks(options.device)
        is_fine &= all(each["equal"] for each in result["two ranks"] if each["why"] is None)
        lines += [
            f"two ranks {each['case']:32} / DDP: "
            + (brief(each["why"] or "") or ("equal bits" if each["equal"] else f"differ by {each['worst']}"))
            for each in result["two ranks"]
        ]
    print(*lines, sep="\n")
    print(f"{time.perf_counter() - began:.0f} s; written to {save('gpu_small' if options.small else 'gpu', result)}")
    return 0 if is_fine else 1


def _second_process(name: str, options: argparse.Namespace) -> dict[str, list[str]]:
    command = ["-m", "benchmarks", "gpu", "--device", options.device, *(["--small"] if options.small else [])]
    return {variant: [*command, "--first-step-of", variant, name] for variant in (INDUCTOR, GRAPH)}
