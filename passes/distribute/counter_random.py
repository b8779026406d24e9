"""Draw random numbers from a counter, so that they do not depend on how the step is divided.

Number and place of a draw in the whole tensor decide its value, together with a seed that all ranks share: the masks
of dropout are those of one device, whatever part a rank holds.

Why: docs/decisions.md, "Random numbers of a divided step come from a counter, not from torch's generator".
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any

from torch import fx

from commfuse_fx.ir.core.bound_arguments import bound_arguments
from commfuse_fx.ir.core.builder import Builder
from commfuse_fx.ir.core.edit import replace_all
from commfuse_fx.ir.core.meta import NodeInfo, TensorSpec, info
from commfuse_fx.ir.core.program import Program
from commfuse_fx.ir.core.random_draws import draws_random_numbers
from commfuse_fx.kernels.random_replacements import counter_based
from commfuse_fx.passes.declaration import Pass, Situation
from commfuse_fx.sharding.dividing.own_parts import own_values
from commfuse_fx.sharding.marking.part_ops import ENTERING, part_number


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
        own = own_values(program)
        part: fx.Node | None = None
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
                if node in own:
                    part = part or _number_of_part(build, own, like)
                    args = _in_part(build, args, replacement.function, first, part, like)
                name = f"{like.name}/{replacement.function.__name__}"
                made[node] = build.call(replacement.function, args, spec=spec, like=like, name=name)
        replace_all(program, made)
        for node in made:
            program.graph.erase_node(node)
        if seed is not None and not seed.users:
            program.remove_source(seed)
            program.graph.erase_node(seed)
        return bool(made)


def _number_of_part(build: Builder, own: Mapping[fx.Node, None], like: NodeInfo) -> fx.Node:
    parts = next(node.args[1] for node in own if node.target in ENTERING)
    return build.call(part_number, (0, parts), spec=None, like=like, name="part_number")


def _in_part(
    build: Builder, args: Sequence[Any], function: Any, drawn: TensorSpec, part: fx.Node, like: NodeInfo
) -> tuple[Any, ...]:
    """The same draw at other places for each part of the batch, which are stacked along the first dimension."""
    if not drawn.shape:
        return tuple(args)
    at = list(signature(function).parameters).index("starts")
    begin = build.call(operator.mul, (part, drawn.shape[0]), spec=None, like=like, name=f"{like.name}/begin")
    return (*args[:at], [begin, *args[at][1:]], *args[at + 1 :])
