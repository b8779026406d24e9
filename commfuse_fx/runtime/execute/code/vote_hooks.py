"""Where in a program its ranks vote.

Why: docs/decisions.md, "Ranks vote before the first collective of every step".
Why: docs/decisions.md, "What changes something votes, also where nothing is sent".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import fx

from commfuse_fx.ir.core.meta import info
from commfuse_fx.ir.core.program import Program
from commfuse_fx.runtime.execute.code.codegen import Hooks, first_commit


def communicates(node: fx.Node) -> bool:
    """Whether a node takes part in communication."""
    return bool(info(node).sends) or info(node).collective is not None


def vote_hooks(
    program: Program, body: Sequence[fx.Node], cast: Callable[[], None], settle: Callable[[], None], always: bool
) -> Hooks:
    """What runs just before a node, by node; nothing where ranks do not vote.

    body: the calls that run between a vote and the next one.
    cast: runs when the backward begins, or when the step begins if a collective comes earlier.
    settle: runs just before the first collective.
    always: whether both run where there is no collective, too: `settle` then just before the first change.
    """
    first = next(filter(communicates, body), None)
    if first is None and always and body:
        first = [*body, body[-1]][first_commit(program, body)]
    if first is None:
        return {}
    backward = next((node for node in body if info(node).phase == "backward"), first)
    begin = backward if body.index(backward) < body.index(first) else body[0]
    return {begin: [cast, settle]} if begin is first else {begin: [cast], first: [settle]}
