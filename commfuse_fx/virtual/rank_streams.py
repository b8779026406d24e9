"""The random numbers of all ranks that run in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from commfuse_fx.ir.core.program import Program
from commfuse_fx.ir.core.random_draws import draws_random_numbers
from commfuse_fx.runtime.execute.random_states import seed_of_rank
from commfuse_fx.runtime.ranks.seeds import draw_seed


class RankStreams:
    """One random stream per rank, with the numbers that separate processes with equal seeds would draw.

    shared: the seed for a graph that is divided among the ranks. Then all ranks draw the same numbers.
    """

    def __init__(self, program: Program, shared: int) -> None:
        self.states: dict[int, torch.Tensor] = {}
        world = program.mesh.world
        if world == 1 or not any(draws_random_numbers(node) for node in program.graph.nodes):
            return
        divided = program.config.divides_graphs
        seed = shared if divided else draw_seed()
        for rank in range(world):
            own = seed_of_rank(seed, 0 if divided else rank)
            self.states[rank] = torch.Generator().manual_seed(own).get_state()

    def draw(self, rank: int, function: Callable[[], Any]) -> Any:
        """Call the function while torch's default generator stands where the rank's stream does."""
        if rank not in self.states:
            return function()
        held = torch.get_rng_state()
        torch.set_rng_state(self.states[rank])
        try:
            return function()
        finally:
            self.states[rank] = torch.get_rng_state()
            torch.set_rng_state(held)
