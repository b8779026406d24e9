"""An exchange gathers the parts of divided parameters from all ranks, in other processes or in this one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from commfuse_fx.errors import CollectiveError
from commfuse_fx.ir.core.mesh import Mesh
from commfuse_fx.runtime.ranks.broadcast import buckets
from commfuse_fx.runtime.ranks.distress import Distress
from commfuse_fx.runtime.ranks.forks import check_process, process
from commfuse_fx.runtime.ranks.joining.polling import value_of
from commfuse_fx.runtime.ranks.joining.world import world_timeout

LONGEST_WAIT = timedelta(seconds=60)
_TOGETHER = "together"


class Exchange(Protocol):
    """The way in which one rank gathers the parts that the other ranks hold."""

    def meet(self) -> None:
        """Wait until all ranks want to read. Raises CollectiveError if some rank does not come in time."""

    def gather(
        self, group: str, holders: Sequence[int], keys: Sequence[str], parts: Sequence[torch.Tensor]
    ) -> Iterator[Sequence[torch.Tensor]]:
        """Yield for each of this rank's parts the parts of all ranks of the group, in the order of the mesh.

        holders: the ranks of the group that hold parts; those of others have no rows. keys: names of the parts, the
        same on all ranks. parts: this rank's tensors under these names; on a rank that holds none, memory like theirs.
        """

    def release(self) -> None:
        """Drop the process groups."""


class ProcessExchange:
    """An exchange between processes, over process groups of its own: reading never mixes with a step's collectives.

    name: a key that is the same on all ranks and belongs to this step alone.
    epoch: a function that gives the number of the step's calls so far. If a rank misses a meeting, the ranks can meet
        again in the next epoch.
    distress: hears of a rank that has come alone.
    """

    def __init__(self, mesh: Mesh, rank: int, name: str, epoch: Callable[[], int], distress: Distress) -> None:
        self.mesh = mesh
        self.rank = rank
        self._store = dist.distributed_c10d._get_default_store()
        self._key = f"commfuse_fx/read/{name}"
        self._groups: dict[str, Any] = {}
        self._epoch = epoch
        self._distress = distress
        self._process = process()
        self._place = (-1, 0)  # epoch, and how many meetings it has seen
        self._behind: tuple[str, str] | None = None  # keys of the last meeting, to be deleted after the next one

    @property
    def limit(self) -> timedelta:
        """How long a rank waits for the others."""
        return min(world_timeout() / 2, LONGEST_WAIT)

    def meet(self) -> None:
        check_process(
            self._process,
            "this tensor is divided among the ranks, which have to read it together: read it on all ranks before the "
            "fork (call model.state_dict() there, or fork before the first step), or hand the child a copy",
        )
        if not dist.is_initialized():
            raise CollectiveError(
                f"rank {self.rank}: what is divided among the ranks can no longer be gathered: read it on all ranks "
                "before destroy_process_group()"
            )
        epoch = self._epoch()
        attempt = self._place[1] + 1 if self._place[0] == epoch else 0
        self._place = (epoch, attempt)
        count, verdict = (f"{self._key}/{epoch}/{attempt}/{part}" for part in ("count", "verdict"))
        if self._store.add(count, 1) == self.mesh.world:
            said = self._decide(verdict, _TOGETHER)
        else:
            said = self._await(verdict)
        if said != _TOGETHER:
            self._distress.tell(
                self.rank,
                f"Rank {self.rank} has come alone to read what is divided among ranks, as state_dict() does it, and "
                f"has given up after {self.limit.total_seconds():.0f} s",
            )
            raise CollectiveError(self._complaint(said))
        if self._behind is not None and self.rank == self._first:
            for key in self._behind:
                self._store.delete_key(key)
        self._behind = (count, verdict)

    def gather(
        self, group: str, holders: Sequence[int], keys: Sequence[str], parts: Sequence[torch.Tensor]
    ) -> Iterator[Sequence[torch.Tensor]]:
        members = self.mesh.ranks(group, self.rank)
        send = self._gather if len(holders) == len(members) else self._broadcast
        for bucket in buckets(parts):
            # As bytes, so that parts of all types travel together.
            given = torch.cat([part.contiguous().view(-1).view(torch.uint8) for part in bucket])
            try:
                rows = send(group, holders, given)
            except RuntimeError as error:
                raise CollectiveError(
                    f"rank {self.rank}: gathering the parameters' parts failed: another rank has died. "
                    f"[{type(error).__name__}: {error}]"
                ) from error
            begin = 0
            for part in bucket:
                end = begin + part.nbytes
                # A copy: the beginning of a tensor has to lie at a multiple of its item's size.
                yield [
                    rows[member][begin:end].clone().view(part.dtype).view(part.shape) if member in rows else part[:0]
                    for member in members
                ]
                begin = end

    def _gather(self, group: str, members: Sequence[int], given: torch.Tensor) -> dict[int, torch.Tensor]:
        """What each rank of the group has given."""
        rows = given.new_empty(len(members), given.numel()).unbind()
        dist.all_gather(list(rows), given, self._group(group))
        return dict(zip(sorted(members), rows, strict=True))  # torch.distributed sorts the ranks of a group

    def _broadcast(self, group: str, holders: Sequence[int], given: torch.Tensor) -> dict[int, torch.Tensor]:
        """What the holders have given."""
        rows = {rank: given if rank == self.rank else torch.empty_like(given) for rank in holders}
        for rank, row in rows.items():
            dist.broadcast(row, rank, self._group(group))
        return rows

    def release(self) -> None:
        self._groups.clear()

    @property
    def _first(self) -> int:
        return 0 if self.mesh.devices is None else self.mesh.devices[0]

    def _await(self, verdict: str) -> str:
        said = value_of(self._store, verdict, self.limit)
        # The first verdict counts for all ranks: this rank gives up, unless the last rank has come just now.
        return self._decide(verdict, f"rank {self.rank}") if said is None else said

    def _decide(self, verdict: str, said: str) -> str:
        return str(self._store.compare_set(verdict, "", said).decode())

    def _complaint(self, left: str) -> str:
        who = "the other ranks did not come" if left == f"rank {self.rank}" else f"{left} has given up waiting"
        return (
            f"rank {self.rank}: reading what is divided among ranks is done by all ranks together, and {who} within "
            f"{self.limit.total_seconds():.0f} s: call model.state_dict(), optimizer.state_dict() and "
            "step.state_dict() on every rank, then save on one (the same holds for code that reads a parameter, the "
            "optimizer's state or a gradient). Nothing is lost."
        )

    def _group(self, group: str) -> Any:
        """The process group, made at its first use: then all ranks are known to be there."""
        if group not in self._groups:
            made: dict[tuple[int, ...], Any] = {}
            for rank in range(self.mesh.world):
                ranks = self.mesh.ranks(group, rank)
                if ranks not in made:
                    made[ranks] = dist.new_group(list(ranks), timeout=world_timeout())
            self._groups[group] = made[self.mesh.ranks(group, self.rank)]
        return self._groups[group]


class LocalExchange:
    """An exchange between ranks that live in this process. `parts_of(rank)` gives the parts of one rank, by key."""

    def __init__(self, mesh: Mesh, rank: int, parts_of: Callable[[int], Mapping[str, torch.Tensor]]) -> None:
        self.mesh = mesh
        self.rank = rank
        self._parts_of = parts_of

    def meet(self) -> None:
        """Do nothing: all ranks are in this process."""

    def gather(
        self, group: str, holders: Sequence[int], keys: Sequence[str], parts: Sequence[torch.Tensor]
    ) -> Iterator[Sequence[torch.Tensor]]:
        held = [self._parts_of(member) for member in self.mesh.ranks(group, self.rank)]
        for key in keys:
            yield [each[key] for each in held]

    def release(self) -> None:
        """Do nothing: there are no process groups."""
