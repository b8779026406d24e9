"""What the program that started this process says of how many it has started, and which of them this is.

Why: docs/decisions.md, "Ranks are taken up where they are used".
"""

from __future__ import annotations

import os

from commfuse_fx.errors import ConfigValueError
from commfuse_fx.support.checks import show

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

    "": this process is one alone, or nothing says otherwise. Raises ConfigValueError for a variable that is no number.
    """
    variable, count = _found()
    return f"{_LAUNCHERS[variable][0]} has started {count} ranks ({variable}={count})" if count > 1 else ""


def launched_ranks() -> int:
    """How many ranks a launcher says that there are; 1 where nothing says so. Raises ConfigValueError for no number."""
    return _found()[1]


def launched_rank() -> int:
    """Which of several ranks a launcher says that this is, else 0. Raises ConfigValueError where it does not say it."""
    variable, count = _found()
    name = _LAUNCHERS[variable][1]
    text = os.environ.get(name, "").strip()
    if count > 1 and not text.isdecimal():
        raise ConfigValueError(
            f"{several_ranks()}, but {name} does not say which one this is: set it to a number, or call cf.init() first"
        )
    return int(text) if count > 1 else 0


def rank_variable() -> str:
    """The variable in which the launcher that has started several ranks says which one this is."""
    return _LAUNCHERS[_found()[0]][1]


def _found() -> tuple[str, int]:
    for variable in _LAUNCHERS:
        text = os.environ.get(variable, "").strip()
        if text and not text.isdecimal():
            raise ConfigValueError(
                f"{variable} is {show(text)} in the environment, not a number of ranks: give a number, or remove it"
            )
        if text:
            return variable, int(text)
    return "WORLD_SIZE", 1
