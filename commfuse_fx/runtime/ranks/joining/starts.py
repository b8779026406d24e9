"""Ranks agree on the number of their start, because torchrun keeps one store over all restarts of a job.

The store still holds what dead ranks wrote: addresses where nobody listens, and messages of old errors. So all keys of
a start carry its number, which rank 0 draws. TORCHELASTIC_RESTART_COUNT is not enough: each node counts for itself,
and does not count restarts that other nodes ask for.

Why: docs/decisions.md, "Starts are told apart by a number that rank 0 draws, not by retries".
"""

from __future__ import annotations

import logging
import os
import weakref
from datetime import timedelta
from time import monotonic, sleep
from typing import Any

import torch.distributed as dist

from commfuse_fx.errors import CollectiveError
from commfuse_fx.runtime.ranks.joining.polling import PAUSE, value_of

log = logging.getLogger("commfuse_fx.runtime")

_KEY = "commfuse_fx/start"
_GROUPS_OF_A_START = 1 << 20  # torch numbers process groups; a start makes fewer than this


def store_outlives_ranks() -> bool:
    """Whether the world's store is held by torchrun's agent."""
    return "TORCHELASTIC_RUN_ID" in os.environ or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)


def store_of_this_start(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """A view of the store that no earlier start has written to.

    All ranks call this together. Raises CollectiveError if some rank does not within `timeout`.
    """
    return dist.PrefixStore(f"{_KEY}/{_agree(store, rank, size, timeout)}", store)


_names: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
"""The name of each world's start, by the process group of the world."""


def name_of_start(timeout: timedelta) -> str:
    """The prefix for keys of the running world, which no earlier start has used. All ranks call this together.

    Process groups that are made from now on get names of this start too, since their ranks meet by keys of the store.
    Raises CollectiveError if some rank does not call this within `timeout`.
    """
    world = dist.group.WORLD
    if world not in _names:
        store = dist.distributed_c10d._get_default_store()
        name = _agree(store, dist.get_rank(), dist.get_world_size(), timeout)
        before = int(name.rsplit("/", 1)[1]) - 1
        state = dist.distributed_c10d._world
        state.group_count = max(state.group_count, before * _GROUPS_OF_A_START)
        _names[world] = name
    return _names[world]


def _agree(store: Any, rank: int, size: int, timeout: timedelta) -> str:
    """Agree on `run/restart/number`, where the number is new in this store.

    Each rank asks under a key that nobody has used before, and rank 0 answers every key. So no answer is an old one.
    """
    if rank:
        return _ask(store, rank, timeout)
    until = monotonic() + timeout.total_seconds()
    number = store.add(f"{_KEY}/count", 1)
    restart, run = (os.environ.get(f"TORCHELASTIC_{what}", "0") for what in ("RESTART_COUNT", "RUN_ID"))
    name = f"{run}/{restart}/{number}"
    if number > 1:
        log.warning(
            "start %d of these ranks in one store (restart %s of run %s): entries of earlier starts in the store are "
            "ignored",
            number,
            restart,
            run,
        )
    answered = joined = 0
    while joined < size - 1:
        asked = store.add(f"{_KEY}/asked", 0)
        for each in range(answered + 1, asked + 1):
            store.set(f"{_KEY}/answer/{each}", name)
        answered = asked
        joined = store.add(f"{_KEY}/joined/{number}", 0)
        if joined < size - 1:
            if monotonic() > until:
                raise _late(rank, f"{size - 1 - joined} of {size - 1} other ranks have not started")
            sleep(PAUSE)
    return name


def _ask(store: Any, rank: int, timeout: timedelta) -> str:
    name = value_of(store, f"{_KEY}/answer/{store.add(f'{_KEY}/asked', 1)}", timeout)
    if name is None:
        raise _late(rank, "rank 0 has not started")
    store.add(f"{_KEY}/joined/{name.rsplit('/', 1)[1]}", 1)
    return name


def _late(rank: int, what: str) -> CollectiveError:
    return CollectiveError(f"rank {rank}: {what} within the time-out: look at the output of all ranks")
