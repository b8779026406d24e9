"""Run many cases (`python -m tests.property.run_cases --cases 20000 --jobs 2`) or one (`--seed 1234 --shrink`).

Those of real ranks come last."""

from __future__ import annotations

import argparse
import collections
import gc
import itertools
import sys
import time
from collections.abc import Iterator, Sequence
from multiprocessing import get_context

import torch

from tests.distributed.harness import Ranks
from tests.property.compare_cases import Result, run_case
from tests.property.random_cases import COMPILED, KINDS, LOCAL, OF_RANKS, OP_BY_OP, draw
from tests.property.shrink_cases import shrink

Job = tuple[int, tuple[str, ...], bool]
"""Arguments of `draw`."""

TOGETHER = 20
"""Cases that real ranks run one after the other in one world."""


def run_seed(seed: int, kinds: Sequence[str] = LOCAL, small: bool = False) -> Result:
    return run_case(draw(seed, kinds, small))


def run_seeds(seeds: Sequence[int], kinds: Sequence[str], small: bool) -> list[tuple[Result, float]]:
    """What a real rank does; the results of a case may differ between ranks."""
    results = []
    for seed in seeds:
        began = time.process_time()
        results.append((run_seed(seed, kinds, small), time.process_time() - began))
    return results


def run_on_ranks(
    ranks: Ranks, seeds: Sequence[int], kinds: Sequence[str] = OF_RANKS, small: bool = False
) -> list[tuple[Result, float]]:
    """The worst result of each case among two ranks, with the seconds of CPU of both."""
    found: list[tuple[Result, float]] = []
    each = 100.0 if any(kind.startswith(COMPILED) for kind in kinds) else 10.0
    pairs = ranks.values(run_seeds, list(seeds), tuple(kinds), small, timeout=20.0 + each * len(seeds))
    for (first, seconds), (second, more) in zip(*pairs, strict=True):
        found.append((second if first.outcome == "same" else first, seconds + more))
    return found


def _prepare() -> None:
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()


def _run_one(job: Job) -> tuple[Result, float]:
    began = time.process_time()
    return run_seed(*job), time.process_time() - began


def _in_processes(jobs: Sequence[Job], count: int) -> Iterator[tuple[Result, float]]:
    if not jobs:
        return
    with get_context("spawn").Pool(count, initializer=_prepare) as pool:
        yield from pool.imap_unordered(_run_one, jobs)


def _on_ranks(jobs: Sequence[Job]) -> Iterator[tuple[Result, float]]:
    ranks = Ranks()
    seeds = [seed for seed, _, _ in jobs]
    kinds, small = jobs[0][1:]
    while seeds:
        try:
            results = run_on_ranks(ranks, seeds[:TOGETHER], kinds, small)
        except AssertionError as error:
            results = [(Result(seeds[0], "failed", f"(one of the cases {seeds[:TOGETHER]}) {error}"), 0.0)]
            seeds[1:TOGETHER] = []
        for number, (result, _) in enumerate(results, 1):
            if result.outcome == "failed":  # after which ranks may be at different places
                results = results[:number]
                break
        yield from results
        seeds[: len(results)] = []
    ranks.close()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, help="run this case alone, and print it")
    parser.add_argument("--shrink", action="store_true", help="with --seed: look for the smallest case that fails so")
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--small", action="store_true", help="the cases of the tests")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument(
        "--kinds", nargs="+", choices=[*KINDS, "all"], default=LOCAL, help="all: those that Inductor compiles excepted"
    )
    given = parser.parse_args(arguments)
    kinds = OP_BY_OP if "all" in given.kinds else tuple(given.kinds)
    _prepare()
    if given.seed is not None:
        return _show((given.seed, kinds, given.small), given.shrink)
    jobs = [(seed, kinds, given.small) for seed in range(given.start, given.start + given.cases)]
    of_ranks = [job for job in jobs if draw(*job).kind.endswith("ranks")]
    local = [job for job in jobs if job not in of_ranks]
    results = itertools.chain(_in_processes(local, given.jobs), _on_ranks(of_ranks) if of_ranks else ())
    counts: collections.Counter[str] = collections.Counter()
    reasons: collections.Counter[str] = collections.Counter()
    began, used = time.monotonic(), 0.0
    for number, (result, seconds) in enumerate(results, 1):
        kind = draw(result.seed, kinds, given.small).kind
        counts[f"{kind} {result.outcome}"] += 1
        used += seconds
        if result.outcome == "failed":
            print(f"\nseed {result.seed} ({kind}): {result.text}", flush=True)
        elif result.text:
            reasons[f"{result.outcome} {result.text[:150]}"] += 1
        if number % 100 == 0 or number == len(jobs):
            print(
                f"{number} of {len(jobs)} in {time.monotonic() - began:.0f} s, {used / number:.3f} s of CPU each: "
                f"{dict(sorted(counts.items()))}",
                flush=True,
            )
    for reason, count in reasons.most_common():
        print(f"{count:6} {reason}")
    return 1 if any("failed" in key for key in counts) else 0


def _show(job: Job, smaller: bool) -> int:
    case = draw(*job)
    print(case)
    if case.kind.endswith("ranks"):
        ((result, _),) = run_on_ranks(Ranks(), [job[0]], *job[1:])
    else:
        result = run_case(case)
    print(f"{result.outcome} {result.text}")
    if result.outcome == "failed" and smaller and not case.kind.endswith("ranks"):
        case, result = shrink(case, result)
        print(f"\nsmallest found:\n{case}\n{result.outcome} {result.text}")
    return 1 if result.outcome == "failed" else 0


if __name__ == "__main__":
    from tests.property import run_cases  # ranks find functions by the name of this file, which is __main__ here

    sys.exit(run_cases.main())
