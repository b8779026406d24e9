"""`python -m benchmarks [NAME [options]]`: run one benchmark, or all of them."""

from __future__ import annotations

import importlib
import sys

NAMES = (
    "single_process",
    "ddp",
    "tensor_parallel",
    "planning",
    "search",
    "hand_made",
    "memory_cap",
    "module_memory",
    "divided_memory",
    "compile_cost",
    "guards",
    "cpu_kernels",
    "repeated_work",
    "gpu",
    "inductor",
    "inductor_values",
    "step_time",
    "changes",
    "plan_quality",
)

ELSEWHERE = 2
"""Exit code of a benchmark that needs what this machine does not have. It does not spoil a run of all of them."""


def main() -> int:
    name, arguments = (sys.argv[1], sys.argv[2:]) if len(sys.argv) > 1 else ("all", [])
    if name == "all":
        codes = []
        for each in NAMES:
            print(f"== {each}")
            codes.append(run(each, []))
        return max(0 if code == ELSEWHERE else code for code in codes)
    if name not in NAMES:
        print(f"no benchmark {name!r}; use one of {', '.join(NAMES)}, or none for all", file=sys.stderr)
        return ELSEWHERE
    return run(name, arguments)


def run(name: str, arguments: list[str]) -> int:
    """Exit code of one benchmark: 0 where it returns nothing."""
    code: int | None = importlib.import_module(f"benchmarks.{name}").main(arguments)
    return code or 0


if __name__ == "__main__":
    sys.exit(main())
