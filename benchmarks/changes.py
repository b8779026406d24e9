"""Steps that plan themselves while the machine changes: another rate, a busy neighbour, a slow rank.

One core and one network namespace per rank, as in step_time. Needs root and iproute2.

rates: the network goes from 4 to 1 to 4 Gbit/s. What a step takes 100 steps after each change is compared with a fresh
run at that rate. neighbour: something else computes on the core of the last rank for a third of the run. slow: it does
so all the time, which leaves that rank half of its core.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.changes_rank import SCENARIOS, ChangesTask, run
from benchmarks.launch import RanksFailed, run_ranks
from benchmarks.measure import save
from benchmarks.netns import Network, Unavailable
from benchmarks.step_time import environments, machine
from benchmarks.workloads import WORKLOADS


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="benchmarks changes", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--scenarios", nargs="+", default=list(SCENARIOS), choices=list(SCENARIOS), metavar="NAME")
    made.add_argument("--workloads", nargs="+", default=["mlp"], choices=list(WORKLOADS), metavar="NAME")
    made.add_argument("--timeout", type=float, default=300.0, help="seconds without progress that end a run")
    made.add_argument("--worker", metavar="TASK", help=argparse.SUPPRESS)
    return made


def main(arguments: list[str]) -> int:
    """Exit code: 1 when ranks failed, 2 where there are no network namespaces."""
    options = parser().parse_args(arguments)
    if options.worker:
        run(ChangesTask(**json.loads(options.worker)))
        return 0
    report: dict[str, Any] = {"machine": machine(), "runs": []}
    failures = 0
    try:
        with Network(2) as network:
            for workload in options.workloads:
                for scenario in options.scenarios:
                    try:
                        lines = measured(network, workload, scenario, options.timeout)
                    except RanksFailed as error:
                        failures += 1
                        print(f"{workload} {scenario}: failed\n{error}", flush=True)
                        continue
                    report["runs"].append({"workload": workload, "scenario": scenario, "lines": lines})
                    for line in lines:
                        print(f"{workload:10} {scenario:10} {line}", flush=True)
    except Unavailable as error:
        print(f"no network of a known rate: {error}", file=sys.stderr)
        return 2
    print(f"written to {save('changes', report)}")
    return 1 if failures else 0


def measured(network: Network, workload: str, scenario: str, timeout: float) -> list[str]:
    """What rank 0 has to say."""
    with tempfile.TemporaryDirectory() as folder:
        progress, out = Path(folder) / "progress", Path(folder) / "lines.json"
        task = {
            "workload": workload,
            "scenario": scenario,
            "timeout": timeout,
            "network": network.layout.pid,
            "out": str(out),
            "progress": str(progress),
        }
        command = [sys.executable, "-m", "benchmarks", "changes", "--worker", json.dumps(task)]
        commands = [[*network.inside(rank), *command] for rank in range(2)]
        surroundings = [{**each, "COMMFUSE_CACHE": "0"} for each in environments(2, network)]
        run_ranks(commands, surroundings, timeout, progress)
        found: list[str] = json.loads(out.read_text())
        return found
