"""Draw random numbers from a counter, so that they do not depend on how the step is divided.

Number and place of a draw in the whole tensor decide its value, together with a seed that all ranks share: the masks
of dropout are those of one device, whatever part a rank holds.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from commfuse_fx.ir.bound_arguments import bound_arguments
from commfuse_fx.ir.builder import Builder
from commfuse_fx.ir.edit import replace_all
from commfuse_fx.ir.meta import TensorSpec, info
from commfuse_fx.ir.program import Program
from commfuse_fx.ir.random_draws import draws_random_numbers
from commfuse_fx.kernels.random_replacements import counter_based
from commfuse_fx.passes.declaration import Pass, Situation


@dataclass(frozen=True)
class CounterRandom(Pass):
    """Ops without a counterpart stay, and draw the same numbers on every rank: they are never divided."""

    name = "counter_random"
    numerics = "defines"

    @classmethod
    def when(cls, situation: Situation) -> CounterRandom | None:
        return cls() if situation.divides else None

    def __call__(self, program: Program) -> bool:
        build = Builder(program)
        seed: fx.Node | None = None
        made: dict[fx.Node, fx.Node] = {}
        for node in [node for node in program.graph.nodes if draws_random_numbers(node)]:
            replacement = counter_based(node.target)
            if replacement is None:
                continue
            seed = seed or build.placeholder("seed", "seed", None)
            spec = info(node).spec
            first = spec[0] if isinstance(spec, tuple) else spec
            assert isinstance(first, TensorSpec)
            args = replacement.convert(bound_arguments(node.target, node.args, node.kwargs), first, seed, len(made))
            if args is None:
                continue
            like = info(node)
            with build.before(node):
                name = f"{like.name}/{replacement.function.__name__}"
                made[node] = build.call(replacement.function, args, spec=spec, like=like, name=name)
        replace_all(program, made)
        for node in made:
            program.graph.erase_node(node)
        if seed is not None and not seed.users:
            program.remove_source(seed)
            program.graph.erase_node(seed)
        return bool(made)
