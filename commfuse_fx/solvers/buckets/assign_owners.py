"""Which rank gets which item, so that all ranks get about as many bytes."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def assign_owners(sizes: Sequence[int], ranks: int) -> list[int]:
    """The rank of each item: the largest item first, each to the rank that has least so far (Graham, "Bounds on
    multiprocessing timing anomalies", 1969: no rank gets more than 4/3 of what it has to in the best assignment).

    Of equal items the first one comes first, and of equal ranks the lowest.
    """
    loads = [(0, rank) for rank in range(ranks)]
    owners = [0] * len(sizes)
    for item in sorted(range(len(sizes)), key=lambda item: (-sizes[item], item)):
        load, owners[item] = loads[0]
        heapq.heapreplace(loads, (load + sizes[item], owners[item]))
    return owners
