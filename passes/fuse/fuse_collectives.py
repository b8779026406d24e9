"""Merge collectives of one kind, group, reduce op, dtype, device and phase into one node each.

The buckets are decided in `commfuse_fx.solvers.buckets.assign_buckets`; here they are applied: flatten, concat, one
collective, one wait, split, restore shapes.

Why: docs/decisions.md, "A merge that would close a cycle is split, not refused".
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import fx

from commfuse_fx.config.fusion_config import AUTO_THRESHOLD_MIB, FusionConfig, KindFusion
from commfuse_fx.ir.core.builder import Builder
from commfuse_fx.ir.core.collectives import FUSIBLE_KINDS, collective_of, kind_of, role_of, root_of, wait_of
from commfuse_fx.ir.core.dependence import Dependence
from commfuse_fx.ir.core.edit import replace_all, replace_members
from commfuse_fx.ir.core.merge import Merge, before_merged
from commfuse_fx.ir.core.meta import info, tensor_spec
from commfuse_fx.ir.core.order import nearest_above, stable_sort
from commfuse_fx.ir.core.program import Program
from commfuse_fx.passes.declaration import NO_PRICES, PassContext, PricedPass, Situation, Variants
from commfuse_fx.solvers.buckets.assign_buckets import Bucketing, Member, Policy, assign_buckets
from commfuse_fx.solvers.buckets.step_problem import group_collectives

log = logging.getLogger("commfuse_fx.passes.fuse_collectives")


FIXED_MIB = (AUTO_THRESHOLD_MIB, 25, 1)
"""Sizes of buckets that mode "optimal" is compared with, besides no fusion and all in one: what users get without
asking. That is the threshold of mode "auto", and DistributedDataParallel's 25 MiB, of which the first bucket has 1."""

OF_DDP_MIB = 25
"""The size of DistributedDataParallel's buckets."""

ONE_BUCKET_MIB = 1 << 20
"""A size that no model reaches."""

_AS_OF = {"reduce": "reduce_scatter", "broadcast": "all_gather"}
"""Kinds that have no options of their own: where one rank owns a parameter, these do what the others do for rows."""

Buckets = tuple[tuple[str, ...], ...]
"""The members of each bucket, all of them sorted."""


@dataclass(frozen=True)
class FuseCollectives(PricedPass):
    """Buckets are those that comm_fusion asks for. Prices decide in mode "optimal".

    mib: size of the buckets in MiB where the mode is "optimal"; 0: nothing is fused. None: they are searched for.
    across_steps: whether buckets are searched for a schedule across steps.
    Bitwise neutral for groups of two; else within reduction order.
    """

    name = "fuse_collectives"
    numerics = "reordered"
    requires = ("lowered", "reduced", "updated")
    ensures = ("fused",)

    mib: int | None = None
    across_steps: bool = False

    @classmethod
    def when(cls, situation: Situation) -> FuseCollectives | None:
        is_cut_within = situation.variant.get("cut_within", False)
        mib = situation.variant.get("fused_mib", None)
        if situation.config.comm_fusion.is_optimal and not situation.by_cost:
            mib = OF_DDP_MIB  # prices would follow from what this rank computes
        return cls(mib, situation.across_steps and not is_cut_within)

    @classmethod
    def candidates(cls, situation: Situation, program: Program, found: Variants) -> Variants:
        if not situation.config.comm_fusion.is_optimal:
            return found
        cut_within = (found.searched[0].but(cut_within=True),) if situation.across_steps else ()
        fixed = (each.but(fused_mib=mib) for mib in (ONE_BUCKET_MIB, *FIXED_MIB, 0) for each in found.fixed)
        return Variants((*found.searched, *cut_within), tuple(fixed))

    def outcome(self, before: Program, after: Program | None, known: Mapping[str, Hashable]) -> Hashable:
        """The members of its buckets."""
        return self.buckets(before) if after is None else buckets_of(after)

    def __call__(self, program: Program, context: PassContext = NO_PRICES) -> bool:
        modified = _merge_repeated(program)
        starts = _fusible(program)
        before = Dependence(program.graph, program.aliases()).direct
        bucketing = self._bucketing(program, starts, before, context)
        self._report(program, bucketing)
        position = {node: i for i, node in enumerate(program.graph.nodes)}
        build = Builder(program)
        merges: list[Merge] = []
        results: dict[fx.Node, fx.Node] = {}
        for bucket in bucketing.buckets:
            if len(bucket) > 1:
                merge = Merge(build, [starts[i] for i in bucket], f"bucket.{len(merges)}", position)
                results.update(zip(merge.waits, merge.run(), strict=True))
                merges.append(merge)
        if merges:
            before = before_merged(before, merges)
            _replace_waits(program, results)
            replace_members(program, results)
            stable_sort(program.graph, position, before)
        return modified or bool(merges)

    def buckets(self, program: Program) -> Buckets:
        """What `buckets_of` finds once this has run, where nothing is searched for."""
        starts = _fusible(program)
        found = self._bucketing(program, starts, Dependence(program.graph, program.aliases()).direct, NO_PRICES).buckets
        return _in_order([name for i in bucket for name in collective_of(starts[i]).members] for bucket in found)

    def _fusion(self, program: Program) -> FusionConfig:
        fusion = program.config.comm_fusion
        if self.mib is None:
            return fusion
        if self.mib == 0:
            return replace(fusion, openstate=False)
        return fusion.in_place_of_optimal(KindFusion("size", self.mib))

    def _bucketing(
        self,
        program: Program,
        starts: Sequence[fx.Node],
        before: Mapping[fx.Node, Sequence[fx.Node]],
        context: PassContext,
    ) -> Bucketing:
        fusion = self._fusion(program)
        members = [_member(node) for node in starts]
        groups = self._optimal_groups(program, fusion, starts, members, context) if fusion.is_optimal else {}
        numbers = {id(member): groups.get(start) for member, start in zip(members, starts, strict=True)}
        return assign_buckets(
            members,
            nearest_above(before, starts),
            lambda member: _policy_of(fusion, member, numbers[id(member)]),
            numbered=_numbered(program, starts),
        )

    def _optimal_groups(
        self,
        program: Program,
        fusion: FusionConfig,
        starts: Sequence[fx.Node],
        members: Sequence[Member],
        context: PassContext,
    ) -> Mapping[fx.Node, int]:
        """Bucket numbers for the collectives that mode "optimal" decides about."""
        by_key: dict[Hashable, list[fx.Node]] = {}
        for start in starts:
            if role_of(start) == "buffer" or collective_of(start).fusion_id is not None:
                continue
            if fusion.for_kind(_option_of(start)).mode == "optimal":
                by_key.setdefault(_key(start), []).append(start)
        searched = dict.fromkeys(start for each in by_key.values() for start in each)
        others = [i for i, start in enumerate(starts) if start not in searched]
        given = assign_buckets(
            [members[i] for i in others],
            [()] * len(others),
            lambda member: _policy_of(fusion, member, None),
            numbered=_numbered(program, starts),
        )
        buckets = [[starts[others[i]] for i in bucket] for bucket in given.buckets]
        grouping = group_collectives(program, by_key, context.costs, self.across_steps, buckets)
        for subject, reason in grouping.reasons:
            program.note("fusion", subject, reason)
        return grouping.number

    def _report(self, program: Program, bucketing: Bucketing) -> None:
        for conflict in bucketing.conflicts:
            path = " -> ".join(conflict.path)
            program.note(
                "not merged",
                f"{conflict.first} with {conflict.second}",
                f"the second depends on the first: {path}",
            )
        if bucketing.ignored_cuts and program.training:
            cuts = ", ".join(map(str, bucketing.ignored_cuts))
            log.warning("comm_fusion index %s is at or past the number of all_reduces and is ignored", cuts)
            program.note("ignored", f"index {cuts}", "it is at or past the number of all_reduces")


def _policy_of(fusion: FusionConfig, member: Member, group: int | None) -> Policy:
    assert isinstance(member.key, tuple)
    if member.key[0] == "buffer":  # they are ready together, and no kind of comm_fusion is theirs
        return Policy(fusion.openstate, None, None, group=0)
    kind = fusion.for_kind(member.key[0])
    return Policy(fusion.openstate, kind.threshold_bytes, kind.cuts, group)


def buckets_of(program: Program) -> Buckets:
    """The members of every collective that may be fused."""
    return _in_order(collective_of(node).members for node in _fusible(program))


def _in_order(buckets: Iterable[Sequence[str]]) -> Buckets:
    return tuple(sorted(tuple(sorted(bucket)) for bucket in buckets))


def _fusible(program: Program) -> list[fx.Node]:
    starts = program.collectives()
    return [start for start in starts if kind_of(start) in FUSIBLE_KINDS or role_of(start) in ("buffer", "parameter")]


def _replace_waits(program: Program, results: Mapping[fx.Node, fx.Node]) -> None:
    """Let everybody use these results instead of the waits, and erase the waits with their starts."""
    replace_all(program, results)
    for wait in results:
        start = wait.all_input_nodes[0]
        program.graph.erase_node(wait)
        program.graph.erase_node(start)


def _numbered(program: Program, starts: Sequence[fx.Node]) -> int:
    """How many all_reduces count for index cuts, those included that are not there as the optimizer does not hold their
    parameters."""
    reduced = sum(kind_of(start) == "all_reduce" for start in starts)
    if program.optimizer is None:
        return reduced
    held = dict.fromkeys(name for group in program.optimizer.groups for name in group.params)
    return reduced + sum(param.trainable and name not in held for name, param in program.params.items())


def _key(node: fx.Node) -> tuple[Hashable, ...]:
    details = collective_of(node)
    device = tensor_spec(node).device
    # Compute waits for a change of layout: it must not wait for gradients.
    is_urgent = details.role == "redistribution"
    where = (details.group, root_of(node), device, info(node).phase)
    return (_option_of(node), details.kind, details.reduce_op, details.dtype, is_urgent, *where)


def _option_of(node: fx.Node) -> str:
    """The kind whose options in comm_fusion hold for a collective; "buffer" for one of buffers, which has none."""
    if role_of(node) == "buffer":
        return "buffer"
    return _AS_OF.get(kind_of(node), kind_of(node))


def _member(node: fx.Node) -> Member:
    details = collective_of(node)
    return Member(details.members[0], _key(node), details.nbytes, details.fusion_id, details.sequence)


def _merge_repeated(program: Program) -> bool:
    """A tensor that is reduced twice with the same key is reduced once."""
    first: dict[tuple[object, ...], fx.Node] = {}
    results: dict[fx.Node, fx.Node] = {}
    for node in program.collectives():
        key = (node.args[0], node.target, node.args[1:], _key(node), collective_of(node).fusion_id)
        seen = first.setdefault(key, node)
        if seen is not node:
            results[wait_of(node)] = wait_of(seen)
    if results:
        before = Dependence(program.graph, program.aliases()).direct
        position = {node: i for i, node in enumerate(program.graph.nodes)}
        for wait, kept in results.items():  # what used the former may stand ahead of the latter
            position[kept] = min(position[kept], position[wait])
        _replace_waits(program, results)
        stable_sort(program.graph, position, before)
    return bool(results)
