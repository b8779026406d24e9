"""Which start of the ranks this is, in a store that may be older than they are.

torchrun keeps one store over all restarts of a job. What ranks that have died have written there is still to be read:
addresses that nobody listens at, and messages of errors that are over. So the keys of a start carry its number, which
rank 0 draws. TORCHELASTIC_RESTART_COUNT alone does not tell: each node counts for itself, and does not count restarts
that other nodes ask for.
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

log = logging.getLogger("commfuse_fx.runtime")

_KEY = "commfuse_fx/start"
_PAUSE = 0.005  # seconds

_GROUPS_OF_A_START = 1 << 20


def store_outlives_ranks() -> bool:
    """Whether the world's store is held by torchrun's agent."""
    return "TORCHELASTIC_RUN_ID" in os.environ or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)


def store_of_this_start(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """A view of the store that no earlier start has written to. All ranks call this together; raises CollectiveError
    where some do not within the time-out."""
    return dist.PrefixStore(f"{_KEY}/{_agree(store, rank, size, timeout)}", store)


_names: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
"""By the group of the world."""


def name_of_start(timeout: timedelta) -> str:
    """What keys of the running world begin with, so that they are of this start. All ranks call this together.

    Groups that are made from now on have names of this start, too: their ranks find each other by keys of the store.
    Raises CollectiveError as `store_of_this_start`.
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
    """`run/restart/number`, the same on all ranks, of which the number is new in this store.

    A rank asks with a key that nobody has used, and rank 0 answers all that have ever asked, so that no answer can
    be an old one.
    """
    until = monotonic() + timeout.total_seconds()
    if rank:
        return _ask(store, rank, until)
    number = store.add(f"{_KEY}/count", 1)
    restart, run = (os.environ.get(f"TORCHELASTIC_{what}", "0") for what in ("RESTART_COUNT", "RUN_ID"))
    name = f"{run}/{restart}/{number}"
    if number > 1:
        log.warning(
            "start %d of these ranks in one store (restart %s of run %s): what earlier starts have written there is "
            "left alone",
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
            _pause(until, rank, f"{size - 1 - joined} of {size - 1} other ranks have not started")
    return name


def _ask(store: Any, rank: int, until: float) -> str:
    answer = f"{_KEY}/answer/{store.add(f'{_KEY}/asked', 1)}"
    while not store.check([answer]):
        _pause(until, rank, "rank 0 has not started")
    name = str(store.get(answer).decode())
    store.add(f"{_KEY}/joined/{name.rsplit('/', 1)[1]}", 1)
    return name


def _pause(until: float, rank: int, what: str) -> None:
    if monotonic() > until:
        raise CollectiveError(f"rank {rank}: {what} within the time-out: look at the output of all ranks")
    sleep(_PAUSE)
