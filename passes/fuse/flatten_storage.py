"""Let fused gradient buckets live in flat storage, so that concat and split cost nothing.

Gradients are written into their place in the bucket, by the op that computes them where it can write
its result there, else by a copy. The collective runs in place. Parameters of one bucket, param group
and dtype lie in flat storage in the same order, and are updated as one tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import fx

from commfuse_fx.ir.core.builder import Builder, aten
from commfuse_fx.ir.core.collectives import IN_PLACE, collective_of, kind_of, role_of, wait_of
from commfuse_fx.ir.core.edit import erase_upwards, remove_dead_nodes, replace_all, replace_members
from commfuse_fx.ir.core.meta import Part, Stretch, TensorSpec, info, tensor_spec
from commfuse_fx.ir.core.naming import parameter_of
from commfuse_fx.ir.core.program import Parameter, Program, Segment
from commfuse_fx.ir.ops.gradient_places import ALIGNMENT, allocate, source_of, write, writes_into
from commfuse_fx.ir.updates.flat_updates import FlatRun, use_flat_parameters
from commfuse_fx.ir.updates.updates import gradients_of, unclipped, update_nodes
from commfuse_fx.passes.declaration import Pass, Situation, Variants
from commfuse_fx.solvers.buckets.pieces import PIECE


@dataclass
class _Member:
    name: str
    value: fx.Node  # the gradient as it enters the collective
    result: fx.Node  # the reduced gradient
    spec: TensorSpec  # its place in the bucket: wire dtype, strides of the parameter
    place: tuple[int, int] | None  # (update, position in its lists) if flat storage can serve that update
    offset: int = 0
    padded: int = 0  # elements up to the next member


@dataclass
class _Run:
    """Members that are updated together: one stretch of the bucket."""

    owner: int | None
    members: list[_Member] = field(default_factory=list)
    offset: int = 0
    numel: int = 0
    padded_from: int | None = None  # some padding lies behind this offset

    @property
    def is_flat(self) -> bool:
        return self.owner is not None and len(self.members) > 1

    def in_bucket(self, reduced: fx.Node) -> FlatRun:
        positions = tuple(member.place[1] for member in self.members if member.place)
        members = tuple((member.name, member.offset - self.offset) for member in self.members)
        return FlatRun(positions, Segment(members, self.numel), reduced, self.offset)


@dataclass(frozen=True)
class FlattenStorage(Pass):
    """`flat_updates` False keeps parameters apart: their step counts differ, so one step cannot serve them all.

    `singles`: gradients that are reduced alone get storage of their own as well, so that it can be kept between
    steps, sent in pieces, and waited for in the next step: those of at least `least` bytes, and others where that takes
    no op more (None: only these).
    """

    name = "flatten_storage"
    numerics = "reordered"
    requires = ("fused",)
    ensures = ("flat",)

    flat_updates: bool = True
    singles: bool = False
    least: int | None = 0

    @classmethod
    def when(cls, situation: Situation) -> FlattenStorage | None:
        singles = situation.by_cost and situation.variant.get("stored", True)
        # All that can be deferred is given storage, or what may be sent in pieces.
        least = 0 if situation.across_steps else PIECE + 1 if situation.schedules else None
        return cls(situation.flat_updates, singles, least)

    @classmethod
    def candidates(cls, situation: Situation, program: Program, found: Variants) -> Variants:
        last = found.searched[-1]
        apart = (last.but(stored=False),) if situation.schedules else ()
        return replace(found, fixed=(*found.searched, *apart))

    def outcome(self, before: Program, after: Program | None, known: Mapping[str, Hashable]) -> Hashable:
        """The gradients that are reduced alone and get storage of their own."""
        buckets = known["fused"]
        assert isinstance(buckets, tuple)
        alone = [collective_of(start).members for start in self.alone(before)]
        return tuple(members for members in alone if members in buckets)

    def __call__(self, program: Program) -> bool:
        for start in self.alone(program):
            info(start).parts = (_own_part(start),)
        buckets = [node for node in program.collectives() if info(node).parts and _sums_gradients(program, node)]
        if not buckets:
            return False
        places = _update_places(program) if self.flat_updates else {}
        position = {node: i for i, node in enumerate(program.graph.nodes)}
        flat: dict[int, list[FlatRun]] = {}
        results: dict[fx.Node, fx.Node] = {}
        for start in buckets:
            bucket = _Bucket(Builder(program), start, places, position)
            wait = bucket.rewrite()
            for run in bucket.runs:
                if run.is_flat and run.owner is not None:
                    flat.setdefault(run.owner, []).append(run.in_bucket(wait))
            results.update(bucket.results)
        replace_all(program, results)
        replace_members(program, results)
        for result in results:
            erase_upwards(program, result)
        nodes = update_nodes(program)
        for owner, runs in flat.items():
            use_flat_parameters(Builder(program), owner, runs, nodes[owner])
        remove_dead_nodes(program)
        return True

    def alone(self, program: Program) -> list[fx.Node]:
        """The starts of gradients that are reduced alone and get storage of their own."""
        found: list[fx.Node] = []
        for start in program.collectives() if self.singles else ():
            details = info(start)
            if details.parts or details.collective is None or not _sums_gradients(program, start):
                continue
            if all(parameter_of(name) in program.params for name in details.collective.members):
                enough = self.least is not None and details.collective.nbytes >= self.least
                if enough or _costs_nothing(program, start):
                    found.append(start)
        return found


def _own_part(start: fx.Node) -> Part:
    """Of a gradient that is reduced alone, as a bucket of one member."""
    value = start.args[0]
    assert isinstance(value, fx.Node)
    return Part(collective_of(start).members, value, wait_of(start))


def _costs_nothing(program: Program, start: fx.Node) -> bool:
    """Whether a bucket of this gradient alone is as many ops as the gradient by itself: the op that computes it writes
    into the bucket, or a cast does."""
    if not program.updates:
        return False  # its storage would be allocated in every step
    member = _member_of(program, _own_part(start), None)
    itemsize = min(member.spec.itemsize, program.params[parameter_of(member.name)].spec.itemsize)
    if member.spec.numel % (ALIGNMENT // itemsize):
        return False  # padding is zeroed
    source = source_of(member.value, member.spec)
    return tensor_spec(source).dtype != member.spec.dtype or writes_into(source, member.spec)


def _sums_gradients(program: Program, start: fx.Node) -> bool:
    """Whether gradients are summed that nothing else has summed before: rows of some have been scattered."""
    params = [program.params.get(name) for name in collective_of(start).members]
    is_of_rows = any(param is not None and param.shard for param in params)
    return role_of(start) == "gradient" and kind_of(start) == "all_reduce" and not is_of_rows


def _update_places(program: Program) -> dict[fx.Node, tuple[int, int]]:
    """Reduced gradient -> (update, position in its lists), for parameters whose memory can be moved."""
    places: dict[fx.Node, tuple[int, int]] = {}
    nodes = update_nodes(program)
    for owner, update in enumerate(program.updates):
        grads = gradients_of(nodes[owner])
        for position, segment in enumerate(update.segments):
            name = segment.members[0][0]
            if not program.params[name].movable:
                program.note("not flat", name, _why_not_moved(program.params[name]))
                continue
            grad = unclipped(grads[position])
            places[grad] = (owner, position)
            if grad.target is aten._to_copy.default and len(grad.all_input_nodes[0].users) == 1:
                places[grad.all_input_nodes[0]] = (owner, position)
    return places


def _why_not_moved(param: Parameter) -> str:
    if param.is_block:
        return "it is part of a larger storage, which others may hold: it stays there"
    return (
        "it shares memory with another tensor or has gaps between its elements: it is updated by itself, as "
        "torch.optim does without fused=True"
    )


def _layout(members: Sequence[_Member], param_itemsize: dict[str, int]) -> list[_Run]:
    """Group members by update; inside, sizes that keep the alignment come first, so that padding gathers at the end."""
    runs: dict[int | None, _Run] = {}
    for member in members:
        owner = member.place[0] if member.place else None
        runs.setdefault(owner, _Run(owner)).members.append(member)
    offset = 0
    for run in runs.values():
        smallest = min(min(m.spec.itemsize, param_itemsize[m.name]) for m in run.members)
        unit = ALIGNMENT // smallest
        run.members.sort(key=lambda member: member.spec.numel % unit != 0)
        run.offset = offset
        for member in run.members:
            member.offset = offset
            offset += member.spec.numel
            if offset % unit:
                run.padded_from = member.offset if run.padded_from is None else run.padded_from
                offset += unit - offset % unit
            member.padded = offset - member.offset
        run.numel = offset - run.offset
    return list(runs.values())


def _member_of(program: Program, part: Part, place: tuple[int, int] | None) -> _Member:
    # A collective of the user's own may share the bucket; then there is no parameter.
    param = program.params.get(part.names[0])
    like = param.spec if param else tensor_spec(part.value)
    layout = like if like.is_dense else like.with_shape(like.shape)
    spec = layout.with_dtype(tensor_spec(part.value).dtype)
    return _Member(part.names[0], part.value, part.result, spec, place)


class _Bucket:
    """Rewrites one fused gradient all_reduce into flat storage."""

    def __init__(
        self,
        build: Builder,
        start: fx.Node,
        places: dict[fx.Node, tuple[int, int]],
        position: dict[fx.Node, int],
    ) -> None:
        self.build = build
        self.program = build.program
        self.start = start
        self.wait = wait_of(start)
        self.position = position
        self.label = info(start).name.rsplit("/", 1)[0]
        self.members = [_member_of(self.program, part, places.get(part.result)) for part in info(start).parts]
        self.results: dict[fx.Node, fx.Node] = {}  # what takes the place of each member's result
        params = self.program.params
        itemsize = {m.name: params.get(m.name, m).spec.itemsize for m in self.members}
        self.runs = _layout(self.members, itemsize)
        self.spec = TensorSpec.flat(self.runs[-1].offset + self.runs[-1].numel, tensor_spec(start))

    def rewrite(self) -> fx.Node:
        """Returns the wait, which yields the reduced flat storage."""
        sources = [source_of(member.value, member.spec) for member in self.members]
        first = min(sources, key=self.position.__getitem__)
        storage = self._allocate(first)
        writes = tuple(
            (
                write(self.build, source, storage, member.spec, member.offset, self._names(member)),
                Stretch(member.offset, member.offset + member.padded),
            )
            for member, source in zip(self.members, sources, strict=True)
        )
        details = info(self.start)
        with self.build.before(self.start):
            start = self.build.call(
                IN_PLACE[self.start.target],  # type: ignore[index]
                (storage, *self.start.args[1:]),
                spec=self.spec,
                like=details,
                name=f"{self.label}/in_place",
                collective=details.collective,
                writes=writes,
            )
        with self.build.before(self.wait):
            wait = self.build.wait(start, f"{self.label}/reduced")
            for member in self.members:
                name = f"{self.label}/reduced.{member.name}"
                self.results[member.result] = self.build.strided(wait, member.spec, member.offset, name)
        return wait

    def _allocate(self, first: fx.Node) -> fx.Node:
        """The flat storage, made just before the first gradient; padding is zeroed so that it stays harmless."""
        like, name = info(self.start), f"{self.label}/storage"
        # Without an optimizer the user keeps the gradients, and with them this memory.
        storage = allocate(self.build, self.spec, first, like, name, kept=bool(self.program.updates))
        with self.build.before(first):
            for number, run in enumerate(self.runs):
                if run.padded_from is not None:
                    tail = TensorSpec.flat(run.offset + run.numel - run.padded_from, self.spec)
                    name = f"{self.label}/padding.{number}"
                    view = self.build.strided(storage, tail, run.padded_from, name)
                    self.build.call(aten.zero_.default, (view,), spec=tail, like=like, name=f"{name}.zero")
        return storage

    def _names(self, member: _Member) -> Callable[[str], str]:
        return lambda what: f"{self.label}/{what}.{member.name}"
