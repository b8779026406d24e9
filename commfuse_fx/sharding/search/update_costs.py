"""What the update of a parameter takes, by how it lies."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from commfuse_fx.config.parallel_optimizer import PARAMETERS
from commfuse_fx.ir.core.placement import R, S
from commfuse_fx.ir.core.program import Program
from commfuse_fx.kernels.update_rules import RULES
from commfuse_fx.sharding.search.axis_grid import AxisGrid
from commfuse_fx.sharding.search.exposure import PARAMETER
from commfuse_fx.sharding.search.kept_bytes import level_of, states_of
from commfuse_fx.sharding.search.layout_moves import Placements
from commfuse_fx.sharding.search.priced_reads import KnownLayouts
from commfuse_fx.solvers.strategies.factor_graph import Table


def update_layouts(program: Program, name: str, layouts: Sequence[Placements], grid: AxisGrid) -> list[Placements]:
    """How the gradient lies that updates a parameter, for each layout of the parameter: alike, or divided further into
    rows, where the parallel optimizer does so."""
    spec, level = program.params[name].spec, level_of(program, name)
    if not level or not moved_by_update(program, name):
        return [*layouts]
    rows = [tuple(S(0) if each == R else each for each in one) for one in layouts]
    return [each if grid.fits(spec, each) else one for one, each in zip(layouts, rows, strict=True)]


def update_seconds(
    program: Program,
    name: str,
    layouts: Sequence[Placements],
    updated: Sequence[Placements],
    grid: AxisGrid,
    known: KnownLayouts,
) -> Table:
    """Seconds of the update of a parameter that lies so, with the gathers of rows after the update, and at level 3 of
    the parallel optimizer for each use as well. updated: as `update_layouts` says."""
    spec, level, moved = program.params[name].spec, level_of(program, name), moved_by_update(program, name)
    of_rows = grid.of(PARAMETER)
    key = (grid.work, grid.key(True), of_rows.key(True), spec, level, moved, tuple(layouts))
    if key not in known.updates:
        parts = np.array([float(grid.parts(one)) for one in updated])
        seconds = grid.work * moved * spec.nbytes / parts / grid.device.memory_bandwidth
        shared = [at for at, (one, other) in enumerate(zip(layouts, updated, strict=True)) if one != other]
        if shared:
            have, wanted = [updated[at] for at in shared], [layouts[at] for at in shared]
            gathers = 2 if level == PARAMETERS else 1
            seconds[shared] += gathers * np.diagonal(of_rows.changes(spec, have, wanted, True))
        known.updates[key] = seconds
    return known.updates[key]


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
