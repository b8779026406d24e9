"""What the program that started this process says of how many it has started."""

from __future__ import annotations

import os

_LAUNCHERS = {
    "WORLD_SIZE": ("torchrun", "RANK"),
    "SLURM_STEP_NUM_TASKS": ("srun", "SLURM_PROCID"),  # SLURM_NTASKS is that of a job, whose script runs once
    "OMPI_COMM_WORLD_SIZE": ("mpirun", "OMPI_COMM_WORLD_RANK"),
    "PMI_SIZE": ("mpiexec", "PMI_RANK"),
}
"""By the variable that holds a number of ranks: who sets it, and which variable holds the rank. Of launchers inside of
each other the innermost counts, as torchrun in each task of srun. They stand in this order."""


def several_ranks() -> str:
    """What a launcher says of several ranks, as in "torchrun has started 2 ranks (WORLD_SIZE=2)".

    "": this process is one alone, or nothing says otherwise.
    """
    variable, count = _found()
    return f"{_LAUNCHERS[variable][0]} has started {count} ranks ({variable}={count})" if count > 1 else ""


def rank_variable() -> str:
    """The variable in which the launcher that has started several ranks says which one this is."""
    return _LAUNCHERS[_found()[0]][1]


def _found() -> tuple[str, int]:
    for variable in _LAUNCHERS:
        text = os.environ.get(variable, "").strip()
        if text.isdecimal():
            return variable, int(text)
    return "WORLD_SIZE", 1
