"""`python -m benchmarks [NAME [options]]`: run one benchmark, or all of them."""

from __future__ import annotations

import importlib
import sys

NAMES = ("single_process", "ddp", "compile_cost")


def main() -> int:
    name, arguments = (sys.argv[1], sys.argv[2:]) if len(sys.argv) > 1 else ("all", [])
    if name == "all":
        for each in NAMES:
            print(f"== {each}")
            importlib.import_module(f"benchmarks.{each}").main([])
        return 0
    if name not in NAMES:
        print(f"no benchmark {name!r}; use one of {', '.join(NAMES)}, or none for all", file=sys.stderr)
        return 2
    importlib.import_module(f"benchmarks.{name}").main(arguments)
    return 0


sys.exit(main())
