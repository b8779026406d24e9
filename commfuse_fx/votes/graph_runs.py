"""Run a step from a CUDA graph, if all ranks can.

Why: docs/decisions.md, "Ranks vote before they launch a captured step, and again after they capture one".
"""

from __future__ import annotations

from collections.abc import Mapping
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist

from commfuse_fx.runtime.execute.cuda_graphs.launch_watch import LaunchWatch
from commfuse_fx.runtime.execute.cuda_graphs.step_graphs import CAPTURE, PLAIN, REPLAY, StepGraphs
from commfuse_fx.runtime.ranks.agreement import Agreement
from commfuse_fx.runtime.ranks.joining.world import world_timeout
from commfuse_fx.votes.runners import Runner
from commfuse_fx.votes.voting import Voting


def run(graphs: StepGraphs, voting: Voting, runner: Runner, inputs: Mapping[str, torch.Tensor]) -> tuple[Any, ...]:
    """What `Executor.run` returns for these inputs.

    The vote on a step comes before its launch, while the device still works on the step before. Ranks that capture a
    step vote again: either all of them run it from the graph, or none.
    """
    graphs.check()
    executor = runner.executor
    wish = graphs.wish(executor)
    if wish != PLAIN and runner.ballot is not None:
        since = perf_counter()
        wish = voting.least_wish(runner, wish)
        graphs.votes, graphs.vote_seconds = graphs.votes + 1, graphs.vote_seconds + perf_counter() - since
    if wish == CAPTURE:
        with voting.between_votes():
            is_captured = graphs.capture(executor)
        wish = voting.least_wish(runner, REPLAY if is_captured else PLAIN)
        if wish != REPLAY:
            graphs.end("another rank could not capture one")
    return graphs.replay(executor, inputs) if wish == REPLAY else executor.run(inputs)


def watch_of(agreement: Agreement | None) -> LaunchWatch | None:
    """What looks after the steps of several ranks. None for a step of one rank."""
    if agreement is None:
        return None
    return LaunchWatch(agreement.rank, world_timeout(), agreement.distress, _abort_nccl)


def _abort_nccl() -> None:
    """Make NCCL give up what is under way. Its kernels then end, and so do those who wait for the device."""
    if not dist.is_nccl_available():
        return
    device = torch.device("cuda")
    groups = [group for group in dist.distributed_c10d._world.pg_map if device in group._device_types]
    backends: list[Any] = [group._get_backend(device) for group in groups]
    backends = [each for each in backends if isinstance(each, dist.ProcessGroupNCCL)]
    if backends:  # in one group of calls, or aborts of several communicators wait for each other
        backends[0]._group_start()
        for backend in backends:
            backend.abort()
        backends[0]._group_end()
