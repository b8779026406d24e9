"""How much memory a step has allocated, node by node."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from torch import fx

from commfuse_fx.ir.core.collectives import is_wait, memory_on_wire
from commfuse_fx.ir.core.dependence import Roots
from commfuse_fx.ir.core.meta import Spec, TensorSpec, info, tensor_spec
from commfuse_fx.ir.core.owner_ops import of_owner
from commfuse_fx.ir.core.program import Program
from commfuse_fx.ir.ops.deferred import execution_order, is_deferred
from commfuse_fx.ir.ops.fixed_values import held_values
from commfuse_fx.ir.ops.fusible import fused_values
from commfuse_fx.ir.rows.owned_work import share_of_rank
from commfuse_fx.ir.updates.whole_updates import BY_OP


def bytes_of(spec: Spec) -> int:
    """Bytes of a tensor or a nest of tensors, without padding of the allocator."""
    if isinstance(spec, TensorSpec):
        return spec.nbytes
    return sum(bytes_of(item) for item in spec) if spec else 0


def memory_profile(program: Program, roots: Roots | None = None) -> list[int]:
    """Bytes that the step has allocated while each node runs, in graph order. `roots`: those of the program, if known.

    Inputs (parameters, buffers, optimizer state, flat storage) and constants are there all the time, memory that
    two inputs share once, and of state that one rank of a group owns what each rank has on the average; so is memory
    that is kept between steps, and what is computed once and needed by other nodes.
    All else lives from the node that makes it to its last use, what a collective sends or receives at least to its
    wait, and what a node of the following step uses to that node: such memory may be there twice, for this step and
    for the one before. Of a gradient that one rank of a group keeps, the others let go: it counts as on the average.
    What a compiled region never writes to memory (`fused_values`) takes none. An update that
    runs several ops inside of its own has their temporary tensors while it runs.
    """
    return Memory(program, roots).profile()


def peak_memory(program: Program, roots: Roots | None = None) -> int:
    """Bytes that the step has allocated at most."""
    return Memory(program, roots).peak()


def _given_bytes(program: Program, node: fx.Node) -> int:
    """Bytes of an input or a constant on a rank."""
    spec, source = info(node).spec, program.sources.get(node)
    if source is None or source.kind != "state" or not isinstance(spec, tuple):
        return bytes_of(spec)
    params = [program.params[segment.members[0][0]] for segment in program.updates[source.owner].segments]
    ways = [1 if param.owner is None else program.mesh.size(param.shard) for param in params]
    return sum(bytes_of(each) // count for each, count in zip(spec, ways, strict=True))


@dataclass(frozen=True, slots=True)
class _Lifetime:
    """first, last: positions; later: the last one in the following step, or -1; nbytes: of what lives so long."""

    first: int
    last: int
    later: int
    nbytes: int


class Memory:
    """The bytes that a step has allocated over its nodes, as in `memory_profile`, when some of it is no longer kept."""

    def __init__(self, program: Program, roots: Roots | None = None) -> None:
        self.program = program
        aliases = program.aliases()
        roots = roots or Roots(program.graph, aliases)
        self._order = execution_order(program)
        self._position = {node: i for i, node in enumerate(self._order)}
        self._lifetimes = _lifetimes(self._order, self._position, roots)
        for node in fused_values(program):
            self._lifetimes.pop(node, None)
        self._always = sum(
            _given_bytes(program, node) for node in self._order if _is_given(node) and node not in aliases
        )
        self._always += sum(bytes_of(info(node).spec) for node in self._order if info(node).kept)
        held = dict.fromkeys(roots[node] for node in held_values(program))
        self._always += sum(bytes_of(info(root).spec) for root in held if root.op != "get_attr")
        self._change = [0] * (len(self._order) + 1)
        for root, lifetime in self._lifetimes.items():
            if not info(root).kept:
                self._add(lifetime)
        for at, node in enumerate(self._order):
            if update := BY_OP.get(node.target):
                params: Any = node.args[0]
                self._add(_Lifetime(at, at, -1, update.scratch_bytes([tensor_spec(param) for param in params])))

    def let_go(self, node: fx.Node) -> None:
        """Memory of this node was kept between steps, and no longer is."""
        info(node).kept = False
        self._always -= bytes_of(info(node).spec)
        if node in self._lifetimes:
            self._add(self._lifetimes[node])

    def peak(self) -> int:
        """Bytes that the step has allocated at most."""
        return self._always + max(accumulate(self._change[:-1]))

    def profile(self) -> list[int]:
        """Bytes that the step has allocated while each node runs, in graph order."""
        live = list(accumulate(self._change[:-1], initial=self._always))[1:]
        return [live[self._position[node]] for node in self.program.graph.nodes]

    def at_peak(self) -> tuple[fx.Node, dict[fx.Node, int]]:
        """The node that runs when most is allocated, and the bytes of what is there then, by its maker: what is there
        all the time is not among them."""
        live = list(accumulate(self._change[:-1]))
        moment = max(range(len(live)), key=live.__getitem__)
        found = {root: each.nbytes for root, each in self._lifetimes.items() if each.first <= moment <= each.last}
        return self._order[moment], found

    def kept_by_forward(self) -> int:
        """Bytes that the forward leaves for the backward; 0 where there is no backward."""
        phases = [info(node).phase for node in self._order]
        if "backward" not in phases:
            return 0
        first = phases.index("backward")
        return sum(each.nbytes for each in self._lifetimes.values() if each.first < first <= each.last)

    def _add(self, lifetime: _Lifetime) -> None:
        change, size = self._change, lifetime.nbytes
        change[lifetime.first] += size
        if lifetime.later < 0:
            change[lifetime.last + 1] -= size
        else:  # over the end of the step, and on to `later` in the next one
            change[0] += size
            change[lifetime.later + 1] -= size


def _is_given(node: fx.Node) -> bool:
    return node.op in ("placeholder", "get_attr")


def _lifetimes(order: list[fx.Node], position: dict[fx.Node, int], roots: Roots) -> dict[fx.Node, _Lifetime]:
    """Of all memory that the step allocates or keeps, by the node that makes it."""
    parts = [node for node in order if _is_part(node, roots)]
    twins = _twins(parts)
    last: dict[fx.Node, int] = {}
    later: dict[fx.Node, int] = {}

    for at, node in enumerate(order):
        if info(node).once:
            continue
        kept = _is_kept_by_owner(node, roots)
        used = [node] if kept else [_root(each, roots) for each in (node, *node.all_input_nodes)]
        if is_wait(node) and (sent := memory_on_wire(node)) is not None:
            used.append(roots[sent])
        uses = [(root, at) for root in used]
        if kept:
            uses.append((roots[node], at - 1))  # all ranks have it up to here
        deferred = is_deferred(node)
        for root, until in uses:
            root = twins.get(root, root)
            if deferred and not is_deferred(root):
                later[root] = until
            else:
                last[root] = max(last.get(root, until), until)
    taken: dict[fx.Node, int] = {}
    for part in parts:
        if part not in twins:
            maker = _maker(part)
            taken[maker] = taken.get(maker, 0) + _bytes_of_rank(part)
    found: dict[fx.Node, _Lifetime] = {}
    for root in order:
        if root.op != "call_function" or _root(root, roots) is not root or root in twins or info(root).once:
            continue
        # An op that yields several tensors makes them all; each then lives as long as somebody needs it.
        maker = _maker(root) if _is_part(root, roots) else root
        size = _bytes_of_rank(root) - taken.get(root, 0)
        until = max(last.get(maker, -1), last.get(root, -1))
        found[root] = _Lifetime(position[maker], until, max(later.get(maker, -1), later.get(root, -1)), size)
    return found


def _bytes_of_rank(node: fx.Node) -> int:
    """Bytes that a node makes on a rank."""
    return round(bytes_of(info(node).spec) * share_of_rank(node))


def _root(node: fx.Node, roots: Roots) -> fx.Node:
    """Whose memory a node refers to, once ranks have let go of what another one owns."""
    return node if _is_kept_by_owner(node, roots) else roots[node]


def _is_kept_by_owner(node: fx.Node, roots: Roots) -> bool:
    """Whether one rank of a group keeps a value that the step has made, and others have no memory of it from here."""
    return node.target is of_owner and roots[node].op == "call_function"


def _is_part(node: fx.Node, roots: Roots) -> bool:
    """One of several results that an op makes separately."""
    return node.target is operator.getitem and roots[node] is node


def _maker(part: fx.Node) -> fx.Node:
    maker = part.args[0]
    assert isinstance(maker, fx.Node)
    return maker


def _twins(parts: list[fx.Node]) -> dict[fx.Node, fx.Node]:
    """Parts that take the same result as an earlier one, and that one."""
    first: dict[tuple[fx.Node, object], fx.Node] = {}
    twins: dict[fx.Node, fx.Node] = {}
    for node in parts:
        kept = first.setdefault((_maker(node), node.args[1]), node)
        if kept is not node:
            twins[node] = kept
    return twins
