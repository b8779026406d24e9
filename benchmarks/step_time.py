"""Gloo ranks on networks of known rates: this project's modes against what PyTorch programs do without it.

One core and one network namespace per rank, joined by veth links that tc holds to each rate. All rates and variants of
one workload take turns in the same processes, in blocks of consecutive steps: a slow moment of the machine hits them
all. Rates need root; without it only the unlimited rate is measured, over loopback.

The limit of a variant at a rate is the longer of its step without a rate (in the same round) and the seconds that its
bytes take at the rate. Bytes are those that the rate limiter counts, with the headers of every packet. A link that has
been idle takes 1 MB at once: small models can be faster than their bytes at the rate.
"""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from benchmarks.chart import draw_timelines
from benchmarks.launch import RanksFailed, run_ranks
from benchmarks.measure import OUT, at_least, save
from benchmarks.modes import MODES
from benchmarks.netns import Network, Unavailable
from benchmarks.peers import DIVIDED, PEERS
from benchmarks.step_rank import run
from benchmarks.step_summary import errors, means_over_limited, rows
from benchmarks.step_task import UNLIMITED, Result, Task, label
from benchmarks.workloads import WORKLOADS

VARIANTS = (*PEERS, *MODES)
BY_DEFAULT = (
    *(name for name in PEERS if name not in DIVIDED),
    *(name for name, mode in MODES.items() if mode.by_default),
)
_TIMED = ["mlp", "gpt2", "bert", "convnet", "many_small"]
HEADER = (
    f"{'workload':10} {'Gbit/s':>9} {'variant':24} {'ms/step':>9} {'(quartiles)':>17} "
    f"{'/ DDP':>7} {'wire MB':>8} {'wire ms':>8} {'limit ms':>9} {'/ limit':>8} "
    f"{'sim ms':>8} {'sim/ms':>7}"
)


def rate(text: str) -> float | None:
    """Gbit/s; None for "unlimited"."""
    if text == UNLIMITED:
        return None
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.001 <= value <= 400:
        raise argparse.ArgumentTypeError(f"{text!r} is not a rate: give Gbit/s in 0.001..400, or {UNLIMITED!r}")
    return value


def seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return value


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="benchmarks step_time", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--ranks", type=at_least(2), default=2)
    made.add_argument("--rates", type=rate, nargs="+", default=[None, 4.0, 3.0, 2.0, 1.0], metavar="GBIT")
    made.add_argument("--workloads", nargs="+", default=_TIMED, choices=list(WORKLOADS), metavar="NAME")
    made.add_argument("--variants", nargs="+", default=list(BY_DEFAULT), choices=VARIANTS, metavar="NAME")
    made.add_argument("--rounds", type=at_least(1), default=6, help="timed blocks of each variant (default 6)")
    made.add_argument("--block", type=at_least(1), default=10, help="consecutive steps of a block (default 10)")
    made.add_argument(
        "--timeout", type=seconds, default=300.0, help="seconds without a finished block that end a run (default 300)"
    )
    made.add_argument(
        "--timeline",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="draw one step of each mode, measured and simulated, as SVG",
    )
    made.add_argument(
        "--synchronized",
        action="store_true",
        help="complete the last step at the begin and at the end of each block, within its time",
    )
    made.add_argument("--worker", metavar="TASK", help=argparse.SUPPRESS)
    made.epilog = f"workloads: {', '.join(WORKLOADS)}; variants: {', '.join(VARIANTS)}"
    return made


def in_order(rates: Sequence[float | None]) -> list[float | None]:
    """Without repeats, the unlimited rate first, since limits come from it, then from fast to slow."""
    return sorted(dict.fromkeys(rates), key=lambda each: -float("inf") if each is None else -each)


def main(arguments: list[str]) -> int:
    options = parser().parse_args(arguments)
    if options.worker:
        run(Task.from_json(options.worker))
        return 0
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    try:
        return Benchmark(options, arguments).run()
    except KeyboardInterrupt:
        say("interrupted")
        return 130


class Benchmark:
    """One invocation: its options, its network, and what it has found so far."""

    def __init__(self, options: argparse.Namespace, arguments: Sequence[str]) -> None:
        self.options = options
        self.rates = in_order(options.rates)
        self.variants = tuple(dict.fromkeys(options.variants))
        self.network: Network | None = None
        self.failures = 0
        self.report: dict[str, Any] = {
            "command": shlex.join(["python", "-m", "benchmarks", "step_time", *arguments]),
            "machine": machine(),
            "network": "",
            "options": {key: value for key, value in vars(options).items() if key != "worker"},
            "rows": [],
            "skipped": [],
            "means_over_limited_rates": {},
        }

    def run(self) -> int:
        """Exit code: 1 when ranks failed, 0 otherwise, whatever was skipped."""
        with ExitStack() as stack:
            try:
                self.network = stack.enter_context(Network(self.options.ranks))
                self.report["network"] = "one namespace per rank, veth, tbf burst 1 MB"
            except Unavailable as error:
                self._without_network(str(error))
            print(HEADER, flush=True)
            for workload in dict.fromkeys(self.options.workloads):
                if rates := [each for each in self.rates if each is None or self.network is not None]:
                    self._measure(workload, rates)
        self._print_means()
        print(f"written to {save('step_time', self.report)}")
        return 1 if self.failures else 0

    def _without_network(self, reason: str) -> None:
        self.report["network"] = f"loopback: {reason}"
        limited = [label(each) for each in self.rates if each is not None]
        if limited:
            print(f"skipped: {', '.join(limited)} Gbit/s: {reason}")
            self.report["skipped"].append({"rates": limited, "reason": reason})
        if None in self.rates:
            say(f"no network namespaces ({reason}): the unlimited rate runs over loopback")

    def _measure(self, workload: str, rates: Sequence[float | None]) -> None:
        start = time.monotonic()
        say(f"{workload}: {len(self.variants)} variants at {', '.join(map(label, rates))} ...")
        try:
            results = self._run_ranks(workload, rates)
        except RanksFailed as error:
            self.failures += 1
            print(f"{workload:10} failed: {str(error).splitlines()[0]}", flush=True)
            say(str(error))
            self._skip(workload, None, str(error).splitlines()[0])
            save("step_time", self.report)
            return
        for name, reason in results[0].skipped.items():
            print(f"{workload:10} {name:24} skipped: {reason}")
            self._skip(workload, name, reason)
        for each, name, figures in rows(rates, results):
            self.report["rows"].append({"workload": workload, "rate_gbit": each, "variant": name, **figures})
            print(table_line(workload, each, name, figures), flush=True)
        for each in rates:
            measured = results[0].at[label(each)]
            for name, text in measured.settled.items():
                print(f"{workload:10} {label(each):>9} {name:24} {text}", flush=True)
            for name, spans in measured.timelines.items():
                self._draw(workload, each, name, spans, measured.simulated[name])
        save("step_time", self.report)
        say(f"{workload}: done in {time.monotonic() - start:.0f} s")

    def _run_ranks(self, workload: str, rates: Sequence[float | None]) -> list[Result]:
        options = self.options
        with tempfile.TemporaryDirectory() as folder:
            progress = Path(folder) / "progress"
            outs = [Path(folder) / f"rank{rank}.json" for rank in range(options.ranks)]
            commands = []
            for rank, out in enumerate(outs):
                task = Task(
                    workload=workload,
                    rates=tuple(rates),
                    variants=self.variants,
                    rounds=options.rounds,
                    block=options.block,
                    timeout=options.timeout,
                    timeline=options.timeline,
                    synchronized=options.synchronized,
                    network=None if self.network is None else self.network.layout.pid,
                    out=str(out),
                    progress=str(progress),
                )
                command = [sys.executable, "-m", "benchmarks", "step_time", "--worker", task.to_json()]
                commands.append([*(self.network.inside(rank) if self.network else []), *command])
            run_ranks(commands, environments(options.ranks, self.network), options.timeout, progress)
            return [Result.from_json(out.read_text()) for out in outs]

    def _skip(self, workload: str, name: str | None, reason: str) -> None:
        self.report["skipped"].append({"workload": workload, "variant": name, "reason": reason})

    def _draw(self, workload: str, each: float | None, name: str, measured: Any, simulated: Any) -> None:
        title = f"{workload}, {name}, {label(each)}{'' if each is None else ' Gbit/s'}: one step, rank 0"
        OUT.mkdir(parents=True, exist_ok=True)
        path = OUT / f"timeline_{workload}_{label(each)}_{name.replace(' ', '-')}.svg"
        path.write_text(draw_timelines(title, measured, simulated))
        say(f"drawn {path}")

    def _print_means(self) -> None:
        off = errors([each["ratio_simulated"] for each in self.report["rows"]])
        self.report["simulation_error"] = off
        if off is not None:
            print(
                f"simulated against measured, {off['cells']} cells: {off['median']:.1%} off, {off['worst']:.1%} at most"
            )
        found = [(each["variant"], each["rate_gbit"], each) for each in self.report["rows"]]
        means = self.report["means_over_limited_rates"] = means_over_limited(found)
        for name, mean in means.items():
            print(
                f"geometric mean of {mean['cells']} limited runs: {name:24} "
                f"{number(mean['ratio_to_ddp'], 3)} / DDP, {number(mean['ratio_to_limit'], 3)} / limit"
            )


def environments(ranks: int, network: Network | None) -> list[dict[str, str]]:
    """What torchrun would set for each rank, and one core's worth of threads."""
    port = 29500 if network is not None else _free_port()
    address = "127.0.0.1" if network is None else network.layout.address(0)
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("TORCHELASTIC_")}
    return [
        {
            **inherited,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": "lo" if network is None else network.layout.interface(rank),
            "OMP_NUM_THREADS": "1",
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
        }
        for rank in range(ranks)
    ]


def machine() -> dict[str, Any]:
    """Where the figures come from; the load average tells whether the machine was busy with something else."""
    models = [line.split(":", 1)[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.processor(),
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load_average_before": os.getloadavg()[0],
    }


def table_line(workload: str, each: float | None, name: str, figures: Mapping[str, Any]) -> str:
    low, high = (each * 1e3 for each in figures["seconds_quartiles"])
    return (
        f"{workload:10} {label(each):>9} {name:24} {figures['seconds'] * 1e3:9.1f} {f'({low:.1f}-{high:.1f})':>17} "
        f"{number(figures['ratio_to_ddp'], 3):>7} {number(figures['wire_bytes'], 2, 1e-6):>8} "
        f"{number(figures['wire_seconds'], 1, 1e3):>8} {number(figures['limit_seconds'], 1, 1e3):>9} "
        f"{number(figures['ratio_to_limit'], 3):>8} {number(figures['simulated_seconds'], 1, 1e3):>8} "
        f"{number(figures['ratio_simulated'], 3):>7}"
    )


def number(value: float | None, digits: int, scale: float = 1.0) -> str:
    """As text; "-" for what is not known."""
    return "-" if value is None else f"{value * scale:.{digits}f}"


def say(text: str) -> None:
    """Progress goes to stderr, results to stdout."""
    print(text, file=sys.stderr, flush=True)


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
