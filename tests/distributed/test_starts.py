"""Ranks that are started again find nothing of those before them in a store that has outlived these."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from unittest import mock

import pytest
import torch.distributed as dist

import commfuse_fx as cf
from commfuse_fx.runtime.ranks.ballot_box import ballot_box
from commfuse_fx.runtime.ranks.joining import starts
from tests.distributed.harness import Ranks
from tests.distributed.models_of_ranks import adamw, compiled, digest, mlp, xy

SHORT = timedelta(seconds=0.2)
LONG = timedelta(seconds=30)


def start(store: dist.Store, ranks: Sequence[int], size: int, timeout: timedelta = LONG) -> list[str]:
    """What these ranks of a start agree on, or the error of each."""

    def agree(rank: int) -> str:
        try:
            return starts._agree(store, rank, size, timeout)
        except cf.CollectiveError as error:
            return str(error)

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(agree, ranks))


@pytest.mark.parametrize("size", [2, 5])
def test_each_start_has_a_number_of_its_own(size: int, caplog: pytest.LogCaptureFixture):
    store = dist.HashStore()
    everybody = range(size)
    with mock.patch.dict(os.environ, TORCHELASTIC_RUN_ID="job/7", TORCHELASTIC_RESTART_COUNT="0"):
        assert start(store, everybody, size) == ["job/7/0/1"] * size
    assert not caplog.records
    # Rank 0 is killed while it waits for the others, then it never comes, then another rank does not.
    assert start(store, [0], size, SHORT) == [
        f"rank 0: {size - 1} of {size - 1} other ranks have not started within the time-out: look at the output of all "
        "ranks"
    ]
    assert set(start(store, everybody[1:], size, SHORT)) == {
        f"rank {rank}: rank 0 has not started within the time-out: look at the output of all ranks"
        for rank in everybody[1:]
    }
    # Each node counts restarts for itself.
    with mock.patch.dict(os.environ, TORCHELASTIC_RUN_ID="job/7", TORCHELASTIC_RESTART_COUNT="2"):
        assert start(store, everybody, size) == ["job/7/2/3"] * size
        assert start(store, [*reversed(everybody)], size) == ["job/7/2/4"] * size
    assert "start 4 of these ranks in one store (restart 2 of run job/7)" in caplog.text


def restarted() -> tuple[list[str], list[str], bool]:
    """Two starts of the ranks in one store, the first of which ends with an error."""
    found, names = [], []
    heard = False
    for restart in ("0", "1"):
        with mock.patch.dict(os.environ, TORCHELASTIC_RUN_ID="job", TORCHELASTIC_RESTART_COUNT=restart):
            if restart == "1":
                cf.init(timeout=30)
            model = mlp()
            step = compiled(model, adamw(model))
            step(*xy(0))
            found.append(digest(model))
            names.append(ballot_box().distress.name)
            store = dist.distributed_c10d._get_default_store()
            heard = store.check([f"commfuse_fx/left/{names[0]}"])
            dist.barrier()
            if restart == "0":
                ballot_box().distress.call("rank 1: killed")
                dist.barrier()
                del step
                dist.destroy_process_group()
    ballot_box().distress.check()
    return found, names, heard


def numbered_groups() -> int:
    """The name of a group that is made in the third start of a world that the user has made."""
    with mock.patch.object(starts, "_agree", return_value="job/1/3"):
        starts.name_of_start(LONG)
    return int(dist.new_group().group_name)


@pytest.mark.dist
def test_restarted_ranks_find_no_message_and_no_address_of_those_before(ranks: Ranks):
    for (first, second), names, heard in ranks.values(restarted):
        assert first == second
        assert names[0] != names[1] and not heard
    assert ranks.values(numbered_groups) == [2 << 20] * 2
