"""Compare the search of a GPT-2 on one mesh axis with its integer program, for models that are too large for a test:
python -m tests.sharding.run_integer_program 32"""

from __future__ import annotations

import sys
import time

from commfuse_fx.cost.model import CostModel
from commfuse_fx.machine.presets import resolve_cluster
from commfuse_fx.sharding.search.axis_search import AxisSearch
from tests.sharding.test_search_bounds import step_of
from tests.solvers.integer_program import by_integer_program


def main(layers: int) -> None:
    program, axes = step_of(layers, (8,))
    search = AxisSearch(program, CostModel(resolve_cluster("h100-node")))
    found = search.cheapest(axes)
    start = time.perf_counter()
    best = by_integer_program(search.problem(axes).graph)
    print(f"search: {found.cost * 1e3:.9f} ms, {found.solver}")
    print(
        f"HiGHS: {best.cost * 1e3:.9f} ms, no less than {best.bound * 1e3:.9f} ms; {time.perf_counter() - start:.1f} s"
    )


if __name__ == "__main__":
    main(int(sys.argv[1]))
