"""How a rank gets at the other ranks' parts of the parameters: from their processes, or in this one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from time import monotonic, sleep
from typing import Any, Protocol

import torch
import torch.distributed as dist

from commfuse_fx.errors import CollectiveError
from commfuse_fx.ir.mesh import Mesh
from commfuse_fx.runtime.ranks.forks import check_process, process
from commfuse_fx.runtime.ranks.world import world_timeout

BUCKET_BYTES = 64 * 2**20
LONGEST_WAIT = timedelta(seconds=60)
_PAUSE = 0.005  # seconds
_TOGETHER = "together"


class Exchange(Protocol):
    def meet(self) -> None:
        """Wait until all ranks want to read. Raises CollectiveError if some rank does not come."""

    def gather(
        self, group: str, keys: Sequence[str], parts: Sequence[torch.Tensor]
    ) -> Iterator[Sequence[torch.Tensor]]:
        """For each tensor in turn the parts of all ranks of the group, in the group's order."""

    def release(self) -> None:
        """Let go of process groups."""


class ProcessExchange:
    """Between processes, over process groups of its own: reading never mixes with the collectives of a step.

    name: the same on all ranks, and of this step alone. epoch: gives the number of calls of the step so far: after a
    meeting that some rank has missed, all ranks find together again in the next epoch. Nothing is sent before the
    first `meet`.
    """

    def __init__(self, mesh: Mesh, rank: int, name: str, epoch: Callable[[], int]) -> None:
        self.mesh = mesh
        self.rank = rank
        self.limit = min(world_timeout() / 2, LONGEST_WAIT)
        self._store = dist.distributed_c10d._get_default_store()
        self._key = f"commfuse_fx/read/{name}"
        self._groups: dict[str, Any] = {}
        self._epoch = epoch
        self._process = process()
        self._place = (-1, 0)  # epoch, and how many meetings it has seen
        self._behind: tuple[str, str] | None = None  # keys of the last meeting, which nobody needs after the next one

    def meet(self) -> None:
        check_process(
            self._process,
            "this tensor is divided among the ranks, which have to read it together: read it on all ranks before the "
            "fork (call model.state_dict() there, or fork before the first step), or hand the child a copy",
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
            raise CollectiveError(self._complaint(said))
        if self._behind is not None and self.rank == self._first:
            for key in self._behind:
                self._store.delete_key(key)
        self._behind = (count, verdict)

    def gather(
        self, group: str, keys: Sequence[str], parts: Sequence[torch.Tensor]
    ) -> Iterator[Sequence[torch.Tensor]]:
        ways = self.mesh.size(group)
        for bucket in _buckets(parts):
            # As bytes, so that parts of all types travel together.
            given = torch.cat([part.contiguous().view(-1).view(torch.uint8) for part in bucket])
            out = given.new_empty(ways, given.numel())
            try:
                dist.all_gather(list(out.unbind()), given, self._group(group))
            except RuntimeError as error:
                raise CollectiveError(
                    f"rank {self.rank}: gathering the parameters' parts failed: another rank has died. "
                    f"[{type(error).__name__}: {error}]"
                ) from error
            begin = 0
            for part in bucket:
                end = begin + part.nbytes
                # A copy: the beginning of a tensor has to lie at a multiple of its item's size.
                yield [row[begin:end].clone().view(part.dtype).view(part.shape) for row in out.unbind()]
                begin = end

    def release(self) -> None:
        self._groups.clear()

    @property
    def _first(self) -> int:
        return 0 if self.mesh.devices is None else self.mesh.devices[0]

    def _await(self, verdict: str) -> str:
        until = monotonic() + self.limit.total_seconds()
        while monotonic() < until:
            # Asked again and again: a wait of the store that runs out prints a warning, and does not hear Ctrl-C.
            if self._store.check([verdict]):
                return str(self._store.get(verdict).decode())
            sleep(_PAUSE)
        # Only one verdict is heard by all: that this rank leaves, or that the last one has come just now.
        return self._decide(verdict, f"rank {self.rank}")

    def _decide(self, verdict: str, said: str) -> str:
        return str(self._store.compare_set(verdict, "", said).decode())

    def _complaint(self, left: str) -> str:
        who = "the other ranks did not come" if left == f"rank {self.rank}" else f"{left} has given up waiting"
        return (
            f"rank {self.rank}: reading sharded parameters is done by all ranks together, and {who} within "
            f"{self.limit.total_seconds():.0f} s: call model.state_dict() on every rank, then save "
            "on one (the same holds for the optimizer's state). Nothing is lost."
        )

    def _group(self, group: str) -> Any:
        """Made at the first use, when all ranks are known to be there."""
        if group not in self._groups:
            made: dict[tuple[int, ...], Any] = {}
            for rank in range(self.mesh.world):
                ranks = self.mesh.ranks(group, rank)
                if ranks not in made:
                    made[ranks] = dist.new_group(list(ranks), timeout=world_timeout())
            self._groups[group] = made[self.mesh.ranks(group, self.rank)]
        return self._groups[group]


class LocalExchange:
    """Between ranks that live in this process: `parts_of(rank)` gives what another one holds."""

    def __init__(self, mesh: Mesh, rank: int, parts_of: Callable[[int], Mapping[str, torch.Tensor]]) -> None:
        self.mesh = mesh
        self.rank = rank
        self._parts_of = parts_of

    def meet(self) -> None:
        """The others are always there."""

    def gather(
        self, group: str, keys: Sequence[str], parts: Sequence[torch.Tensor]
    ) -> Iterator[Sequence[torch.Tensor]]:
        held = [self._parts_of(member) for member in self.mesh.ranks(group, self.rank)]
        for key in keys:
            yield [each[key] for each in held]

    def release(self) -> None:
        """There are no process groups."""


def _buckets(parts: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Neighbours on one device, of at most 64 MiB together."""
    bucket: list[torch.Tensor] = []
    for part in parts:
        full = bucket and sum(each.nbytes for each in bucket) + part.nbytes > BUCKET_BYTES
        if bucket and (full or part.device != bucket[0].device):
            yield bucket
            bucket = []
        bucket.append(part)
    if bucket:
        yield bucket
