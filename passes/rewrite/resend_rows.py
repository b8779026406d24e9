"""Send the gradient of a parameter that is also looked up before its lookups' part of it is there.

The gradient of a tied embedding is the sum of two: that of the output layer, with which the backward begins, and
that of the lookups, with which it ends. The second one is zero but for the rows that the batch has looked up. So the
first one is reduced as it is, early, and behind the backward only the rows that any rank has looked up are reduced
once more, now with both parts. They take the places of what was sent before. A few more bytes go over the wire, but
little is left to send at the end, where nothing is left to compute, of what the next step's forward needs first.

Why: docs/decisions.md, "A tied embedding's gradient is sent in two parts".
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import fx

from commfuse_fx.ir.core.builder import Builder, aten
from commfuse_fx.ir.core.collectives import WAIT, c10d, collective_of, group_of, kind_of, wait_of
from commfuse_fx.ir.core.edit import erase_upwards
from commfuse_fx.ir.core.meta import CollectiveInfo, NodeInfo, TensorSpec, dtype_name, info, tensor_spec
from commfuse_fx.ir.core.naming import rows_of
from commfuse_fx.ir.core.program import Program
from commfuse_fx.kernels.rows import put_rows_
from commfuse_fx.passes.declaration import Pass, Situation, Variants


@dataclass(frozen=True)
class ResendRows(Pass):
    """`most`: where more rows than this part of all would be sent twice, the gradient stays whole.

    Every element is the same sum over ranks as before: bitwise neutral for groups of two, else within reduction order.
    """

    name = "resend_rows"
    numerics = "reordered"
    needs_sizes = True
    optional = True
    requires = ("reduced", "updated")

    most: float = 0.5

    @classmethod
    def when(cls, situation: Situation) -> ResendRows | None:
        return cls() if situation.variant.get("resent", False) else None

    @classmethod
    def candidates(cls, situation: Situation, program: Program, found: Variants) -> Variants:
        mode = situation.config.comm_fusion.for_kind("all_reduce").mode
        # How many rows are sent again follows from a rank's batch: not where batches differ.
        if situation.divides or not situation.same_batches or mode != "optimal":
            return found
        if not may_resend(program):
            return found
        plain, *others = found.searched
        first, *more = (each.but(resent=True) for each in found.searched[:3])
        if not situation.schedules:
            return replace(found, searched=(first,))
        return replace(found, searched=(first, plain, *more, *others))

    def __call__(self, program: Program) -> bool:
        if not program.updates:
            return False
        modified = False
        for start in list(program.collectives()):
            found = _found(start)
            if found is not None and found.rows(program.mesh.size(group_of(start))) <= self.most:
                _Rewriting(program, start, found).run()
                modified = True
        return modified


@dataclass(frozen=True)
class LookedUp:
    """A gradient that is a sum. total: it; early: the part that is there first; lookup: that of the lookups of the rows
    `numbers`; cast: the total in the dtype of the wire, or None where it is sent as it is."""

    total: fx.Node
    early: fx.Node
    lookup: fx.Node
    numbers: fx.Node
    cast: fx.Node | None = None

    def rows(self, ranks: int) -> float:
        """How many rows all ranks look up at most, in parts of those that there are."""
        return ranks * tensor_spec(self.numbers).numel / tensor_spec(self.total).shape[0]


def may_resend(program: Program) -> bool:
    """Whether a gradient of this captured program is such a sum."""
    ranks = program.mesh.world
    sums = (_sum(grad) for grad in program.grads.values())
    return ranks > 1 and any(found.rows(ranks) <= ResendRows.most for found in sums if found is not None)


def _found(start: fx.Node) -> LookedUp | None:
    details = collective_of(start)
    value = start.args[0]
    if kind_of(start) != "all_reduce" or details.role != "gradient" or details.fusion_id is not None:
        return None
    if not isinstance(value, fx.Node) or len(details.members) != 1:
        return None
    cast = value if value.target is aten._to_copy.default else None
    total = value.args[0] if cast is not None else value
    found = _sum(total) if isinstance(total, fx.Node) else None
    return None if found is None else replace(found, cast=cast)


def _sum(total: fx.Node) -> LookedUp | None:
    if total.target is not aten.add.Tensor or len(total.args) != 2 or total.kwargs:
        return None
    for early, lookup in (total.args, total.args[::-1]):
        if not isinstance(early, fx.Node) or not isinstance(lookup, fx.Node) or not early < lookup:
            continue
        if early.op == "placeholder":  # what earlier micro-batches have left, which is there from the beginning
            continue
        numbers = lookup.args[1] if lookup.target is aten.embedding_dense_backward.default else None
        if isinstance(numbers, fx.Node) and info(early).spec == info(lookup).spec == info(total).spec:
            return LookedUp(total, early, lookup, numbers)
    return None


class _Rewriting:
    """Of one gradient's all_reduce, into one of its early part and one of the rows that have been looked up."""

    def __init__(self, program: Program, start: fx.Node, found: LookedUp) -> None:
        details = collective_of(start)
        self.program = program
        self.build = Builder(program)
        self.start = start
        self.found = found
        self.details = details
        self.name = details.members[0]
        self.like = info(found.total)

    def run(self) -> None:
        start, found, build = self.start, self.found, self.build
        numbers = self._numbers()
        early_rows = self._rows(found.early, numbers, "early", behind=numbers)
        lookup_rows = self._rows(found.lookup, numbers, "lookup", behind=found.lookup)
        with build.after(lookup_rows):
            spec = tensor_spec(early_rows)
            args = (early_rows, lookup_rows)
            rows = build.call(aten.add.Tensor, args, spec=spec, like=self.like, name=f"rows/{self.name}/sum")
        again = self._reduce_again(self._on_wire(rows, behind=rows))
        early = self._on_wire(found.early, behind=early_rows)
        start.args = (early, *start.args[1:])
        max(early, early_rows).append(start)
        whole = wait_of(start)
        users = list(whole.users)
        with build.before(min(users)):
            like = NodeInfo("update", source=self.like.source)
            name = f"put_rows.{self.name}"
            put = build.call(put_rows_, (whole, numbers, again), spec=info(whole).spec, like=like, name=name)
        for user in users:
            user.replace_input_with(whole, put)
        erase_upwards(self.program, found.total if found.cast is None else found.cast)

    def _numbers(self) -> fx.Node:
        """Of the rows that any rank has looked up: sent in the forward, and there when the early part is."""
        build, node = self.build, self.found.numbers
        name = f"rows/{self.name}/numbers"
        ranks = self.program.mesh.size(group_of(self.start))
        like = NodeInfo("forward", module=info(node).module, source=self.like.source)
        last = self.program.last_input if node.op == "placeholder" else node
        with build.after(last):
            last = node = build.reshape(node, [tensor_spec(node).numel], name)
        info(node).phase = "forward"  # also where that of an input is "input"
        if tensor_spec(node).dtype != torch.int64:
            with build.after(last):
                last = node = build.cast(node, torch.int64, f"{name}.i64")
        spec = TensorSpec.flat(tensor_spec(node).numel * ranks, tensor_spec(node))
        collective = CollectiveInfo(
            "all_gather",
            group=group_of(self.start),
            dtype=spec.dtype,
            nbytes=spec.nbytes,
            members=(name,),
            sequence=self.details.sequence,
            role="rows",
        )
        with build.after(last):
            target, args = c10d.all_gather_into_tensor.default, (node, ranks, group_of(self.start))
            start = build.call(target, args, spec=spec, like=like, name=f"{name}/all_gather", collective=collective)
        with build.after(self.found.early):
            return build.call(WAIT, (start,), spec=spec, like=info(self.found.early), name=f"{name}/wait")

    def _rows(self, value: fx.Node, numbers: fx.Node, which: str, behind: fx.Node) -> fx.Node:
        spec = tensor_spec(value)
        rows = spec.with_shape((tensor_spec(numbers).numel, *spec.shape[1:]))
        name = f"rows/{self.name}/{which}"
        with self.build.after(behind):
            args = (value, 0, numbers)
            return self.build.call(aten.index_select.default, args, spec=rows, like=info(value), name=name)

    def _on_wire(self, value: fx.Node, behind: fx.Node) -> fx.Node:
        """In the dtype of the wire."""
        if self.found.cast is None:
            return value
        with self.build.after(behind):
            return self.build.cast(value, self.details.dtype, f"{info(value).name}/{dtype_name(self.details.dtype)}")

    def _reduce_again(self, rows: fx.Node) -> fx.Node:
        """The wait for the sum of these rows over the ranks, beside that of the early part."""
        member, spec = rows_of(self.name), tensor_spec(rows)
        collective = replace(self.details, nbytes=spec.nbytes, members=(member,))
        with self.build.after(rows):
            start = self.build.call(
                c10d.all_reduce.default,
                (rows, *self.start.args[1:]),
                spec=spec,
                like=info(self.start),
                name=f"reduce/{member}/all_reduce",
                collective=collective,
                phase="backward",
            )
        with self.build.after(wait_of(self.start)):
            return self.build.wait(start, f"reduce/{member}/wait")
