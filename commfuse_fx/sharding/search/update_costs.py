"""What the update of a parameter takes, by how it lies."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from commfuse_fx.config.parallel_optimizer import PARAMETERS
from commfuse_fx.ir.placement import R, S
from commfuse_fx.ir.program import Program
from commfuse_fx.kernels.update_rules import RULES
from commfuse_fx.sharding.search.axis_grid import AxisGrid
from commfuse_fx.sharding.search.exposure import PARAMETER
from commfuse_fx.sharding.search.kept_bytes import level_of, states_of
from commfuse_fx.sharding.search.layout_moves import Placements
from commfuse_fx.sharding.search.priced_reads import KnownLayouts
from commfuse_fx.solvers.factor_graph import Table


def update_seconds(
    program: Program, name: str, layouts: Sequence[Placements], grid: AxisGrid, known: KnownLayouts
) -> Table:
    """Seconds of the update of a parameter that lies so, with what the parallel optimizer sends where it divides it
    further: the gradient is reduced to rows alone, and rows are gathered after the update, or for each use."""
    spec, level, moved = program.params[name].spec, level_of(program, name), moved_by_update(program, name)
    of_rows = grid.of(PARAMETER)
    key = (grid.work, grid.key(True), of_rows.key(True), spec, level, moved, tuple(layouts))
    if key in known.updates:
        return known.updates[key]
    rows = [tuple(S(0) if each == R else each for each in one) for one in layouts]
    shared = [at for at, one in enumerate(rows) if level > 0 and one != layouts[at] and grid.fits(spec, one)]
    parts = np.array([float(grid.parts(one)) for one in layouts])
    parts[shared] = [grid.parts(rows[at]) for at in shared]
    seconds = grid.work * moved * spec.nbytes / parts / grid.device.memory_bandwidth
    if shared and moved:
        have, wanted = [rows[at] for at in shared], [layouts[at] for at in shared]
        gathers = 2 if level == PARAMETERS else 1
        sent, reduced = (np.diagonal(each.changes(spec, have, wanted, True)) for each in (of_rows, grid))
        seconds[shared] += gathers * sent - reduced
    known.updates[key] = seconds
    return seconds


def moved_by_update(program: Program, name: str) -> int:
    """How many times the bytes of a parameter its update reads and writes: it reads the gradient, and reads and writes
    the parameter and each of its states.

    An optimizer without a rule updates whole parameters on each rank, whatever their layout: it counts as nothing.
    """
    optimizer = program.optimizer
    if optimizer is None or optimizer.rule not in RULES or name not in program.grads:
        return 0
    is_updated = any(name in group.params for group in optimizer.groups)
    return 3 + 2 * states_of(program, name) if is_updated else 0
