"""A training step on its way through the compiler: the graph plus what its inputs and outputs mean."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from commfuse_fx.config.compile_config import CompileConfig
from commfuse_fx.ir.core.functions import hand_over
from commfuse_fx.ir.core.mesh import Mesh
from commfuse_fx.ir.core.meta import TensorSpec, has_info, info, set_info
from commfuse_fx.ir.core.naming import Names
from commfuse_fx.ir.core.placement import Placement, R


@dataclass(frozen=True)
class Parameter:
    """What the compiler knows of one parameter.

    `sequence` is its position among those that require gradients. `is_block`: its memory has no gaps and no other
    tensor of the model has elements in it; a parameter that is none is updated by ops that are right for any strides.
    `movable`: it is a block and fills its storage, so it can become part of flat storage; a part of a larger storage
    stays where whoever holds the rest expects it. `shares`: the parameters and buffers that have elements in common
    with it. `layout`: (group of mesh axes, placement) pairs by which it is divided among ranks, applied in order: the
    first divides the whole tensor, the next the parts. `spec` is then that of a rank's part, and `whole` that of the
    tensor that the user sees. `parallel_optimizer`: whether its update may be divided among ranks. `shard`: the group
    of mesh axes over which it is divided; "": every rank updates all that it has of the parameter. Ranks then update
    equal numbers of rows (of the first dimension) in the order of the group, the last ones padded where they do not
    divide. `rows_alone`: ranks also keep these rows alone; then that is the last entry of `layout`, and `shard` is "".
    Only in an evaluation that has still to gather them where it uses them, `shard` has it in place of `layout`.
    `owner`: the position in the group `shard` of the rank that updates all of it, in place of rows on every rank.
    """

    name: str
    spec: TensorSpec
    trainable: bool
    sequence: int = -1
    fusion_id: int | None = None
    layerwise_parallel: bool = False
    movable: bool = True
    is_block: bool = True
    shares: tuple[str, ...] = ()
    layout: tuple[tuple[str, Placement], ...] = ()
    whole: TensorSpec | None = None
    parallel_optimizer: bool = True
    shard: str = ""
    rows_alone: bool = False
    owner: int | None = None

    @property
    def layout_by_marks(self) -> tuple[tuple[str, Placement], ...]:
        """The layout without what the parallel optimizer has added."""
        return self.layout[:-1] if self.rows_alone and not self.shard else self.layout

    def placement_on(self, group: str) -> Placement:
        """How a rank keeps it, as far as the ranks of this group are concerned."""
        for divided, placement in self.layout:
            if divided == group:
                return placement
        return R


@dataclass(frozen=True)
class Source:
    """Where the runtime finds the value of a placeholder.

    kind: "parameter" | "buffer" | "input" (a leaf of the call's arguments) | "flat" (flat storage of
    several parameters) | "state" (a list of optimizer state tensors) | "hyper" (a number read from the
    optimizer at every step) | "seed" (a number that all ranks share, another one at every step) | "gradient"
    (what the parameter's `.grad` holds when the backward begins). `owner` is the update that a flat, state or hyper
    belongs to.
    """

    kind: str
    name: str
    owner: int = -1


@dataclass(frozen=True)
class Segment:
    """Parameters that lie one after another in flat storage and are updated as one tensor.

    `members` are (parameter name, offset in elements). A segment of one member is the parameter itself.
    """

    members: tuple[tuple[str, int], ...]
    numel: int

    @property
    def is_flat(self) -> bool:
        return len(self.members) > 1


@dataclass
class Update:
    """One parameter update node: its rule, its param group and the segments of its lists, in order."""

    rule: str
    group: int
    segments: list[Segment]


@dataclass(frozen=True)
class Note:
    """A note is one line of `explain()`: a pass says what it has decided about whom, and why.

    topic: the heading that the line stands under.
    subject: the node or the parameter that the note is about.
    reason: what was decided, and why.
    """

    topic: str
    subject: str
    reason: str


@dataclass(frozen=True)
class ModuleResult:
    """What a module computes in the forward of a divided graph, and how it lies.

    module: its path. value: dtype and shape of the whole tensor. nbytes: its bytes.
    layout: pairs of an axis group and a placement, as in "dp: S(0); tp: R".
    """

    module: str
    value: str
    nbytes: int
    layout: str


Layouts = Mapping[str, tuple[tuple[str, Placement], ...]]
"""Name of a parameter -> (group of mesh axes, placement) pairs, as in `Parameter.layout`."""

SKIPPED = "skipped passes"
"""Topic of notes that say which passes autograd's computing leaves no work for."""

LAYOUT = "layout"
"""Topic of notes that say how a parameter lies on one group of mesh axes."""


@dataclass(frozen=True)
class Redistribution:
    """A redistribution is a change of layout that a division has put into the graph.

    name: of the node.
    group: the mesh axes over which the layout changes.
    have, wanted: the placements before and after.
    nbytes: of the tensor before the division.
    cause: who needs the tensor so.
    """

    name: str
    group: str
    have: str
    wanted: str
    nbytes: int
    cause: str


@dataclass
class Program:
    """A program is one graph with what its inputs and outputs mean. Passes transform programs.

    graph: the torch.fx graph.
    mesh: the ranks as a grid.
    config: the options of the compile.
    params: what is known of each parameter, by name.
    sources: what each placeholder stands for.
    training: whether it has a backward and an update.
    loss: the node of the loss. In a program of two halves, whose backward the caller starts, the call of `hand_over`
        that ends the forward half.
    aux: what the graph returns besides the loss and the gradients, by name.
    aux_nest: how the auxiliary outputs of a step nest (`capture.tree.Structure`).
    constants: tensors that the trace has met, by name.
    batch_axes: the group of mesh axes over which inputs are divided; "": none.
    batch_inputs: paths of the call's tensors that full_batch cuts, or that have the batch as their first dimension
        where the step is divided.
    own_buffers: names of buffers that are each rank's own, by their mark.
    marks: what users say of layouts (`sharding.marking.marks.Marks`). None: nobody has looked for marks.
    strategies: how it lies on a mesh (`sharding.dividing.strategies.Strategies`): those that were given, and when it
        has been divided, those that were searched. None: there are none.
    search_seconds: what a search of strategies has priced the step at; None: nothing was searched.
    layouts: layouts of parameters that an earlier graph of the same step has decided, or None.
    by_autograd: why autograd computes the gradients, op by op, and hands them to the second half one by one; "": the
        program computes them.
    saved: of a module whose forward has been planned, the names of the values that it saves; None: this plan decides.
    torch_version: of the torch whose ops the graph calls.
    """

    graph: fx.Graph
    mesh: Mesh
    config: CompileConfig
    params: dict[str, Parameter]
    sources: dict[fx.Node, Source]
    training: bool
    loss: fx.Node
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    names: Names = field(default_factory=Names)
    grads: dict[str, fx.Node] = field(default_factory=dict)
    aux: dict[str, fx.Node] = field(default_factory=dict)
    aux_nest: Any = None
    optimizer: OptimizerInfo | None = None
    updates: list[Update] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    redistributions: list[Redistribution] = field(default_factory=list)
    module_results: list[ModuleResult] = field(default_factory=list)
    batch_axes: str = ""
    batch_inputs: tuple[str, ...] = ()
    own_buffers: tuple[str, ...] = ()
    marks: Any = None
    strategies: Any = None
    search_seconds: float | None = None
    layouts: Layouts | None = None
    by_autograd: str = ""
    saved: tuple[str, ...] | None = None
    torch_version: str = torch.__version__.split("+")[0]

    def __post_init__(self) -> None:
        self._by_source = {source: node for node, source in self.sources.items()}

    def copy(self) -> Program:
        """An independent program with the same content."""
        graph = fx.Graph()
        same: dict[fx.Node, fx.Node] = {}
        for old in self.graph.nodes:
            # fx looks through all that it is given along with the op for symbolic numbers, of which there are none.
            new = same[old] = graph.create_node(old.op, old.target, name=old.name, type_expr=old.type)
            new._update_args_kwargs(map_arg(old.args, same.__getitem__), map_arg(old.kwargs, same.__getitem__))
            new.meta.update(old.meta)
        for old, new in same.items():
            set_info(new, info(old).copy(same))
        return replace(
            self,
            graph=graph,
            constants=dict(self.constants),
            params=dict(self.params),
            sources={same[node]: source for node, source in self.sources.items()},
            loss=same[self.loss],
            grads={name: same[node] for name, node in self.grads.items()},
            aux={name: same[node] for name, node in self.aux.items()},
            names=self.names.copy(),
            updates=[replace(update, segments=list(update.segments)) for update in self.updates],
            notes=list(self.notes),
            redistributions=list(self.redistributions),
            module_results=list(self.module_results),
        )

    def replace_graph(self, graph: fx.Graph, inputs: Mapping[fx.Node, fx.Node]) -> None:
        """Go on with another graph, whose inputs `inputs[old]` mean what the old ones meant. The caller sets loss and
        gradients."""
        self.graph = graph
        self.sources = {inputs[node]: source for node, source in self.sources.items()}
        self._by_source = {source: node for node, source in self.sources.items()}

    def note(self, topic: str, subject: str, reason: str) -> None:
        """Add a line to what `explain()` says."""
        self.notes.append(Note(topic, subject, reason))

    @property
    def params_of_each_rank(self) -> tuple[str, ...]:
        """The names of parameters that each rank has its own of, where the user divides the model."""
        if self.config.parallel_mode != "hybrid_parallel":
            return ()
        return tuple(name for name, param in self.params.items() if param.layerwise_parallel)

    def placeholder(self, kind: str, name: str, owner: int = -1) -> fx.Node | None:
        """The placeholder with this source, if the graph has it."""
        return self._by_source.get(Source(kind, name, owner))

    def add_source(self, node: fx.Node, source: Source) -> None:
        """Say what a placeholder stands for."""
        if node in self.sources:
            del self._by_source[self.sources[node]]
        self.sources[node] = source
        self._by_source[source] = node

    def remove_source(self, node: fx.Node) -> None:
        """Forget a placeholder that is about to be erased."""
        del self._by_source[self.sources.pop(node)]

    def aliases(self) -> dict[fx.Node, fx.Node]:
        """Placeholders that share memory with another one: members of flat storage, views of step counts, and
        parameters and buffers that the user has made to share it."""
        shared: dict[fx.Node, fx.Node] = {}
        by_source = self._by_source
        segments = {
            (owner, segment.members[0][0]): segment
            for owner, update in enumerate(self.updates)
            for segment in update.segments
            if segment.is_flat
        }
        for source, node in by_source.items():
            if source.kind == "flat":
                for name, _ in segments[source.owner, source.name].members:
                    shared[by_source[Source("parameter", name)]] = node
            if source.kind == "state" and source.name == "step":
                shared[node] = by_source[Source("state", "steps", source.owner)]
            if source.kind == "parameter" and (others := self.params[source.name].shares):
                group = [node, *(each for name in others if (each := self._named(name)) is not None)]
                shared.update(dict.fromkeys(group[1:], group[0]) if min(group) is node else {})
        return shared

    def _named(self, name: str) -> fx.Node | None:
        """The placeholder of a parameter or buffer."""
        found = (self._by_source.get(Source(kind, name)) for kind in ("parameter", "buffer"))
        return next((node for node in found if node is not None), None)

    @property
    def last_input(self) -> fx.Node:
        """The last placeholder; new ones are inserted after it."""
        assert self.sources, "a training step has inputs"
        # Inputs stand side by side at the begin of the graph; what became one last stands at their end, or near it.
        last = next(reversed(self.sources))
        while last.next.op == "placeholder":
            last = last.next
        return last

    @property
    def output(self) -> fx.Node:
        """The node that returns the results."""
        node: fx.Node = self.graph.output_node()
        return node

    def set_output(self) -> None:
        """Make the graph return the loss, the gradients and the rest as they are now."""
        self.output.args = (self.returned,)

    @property
    def returned(self) -> tuple[fx.Node, ...]:
        """What the graph returns."""
        return (self.loss, *self.grads.values(), *self.aux.values())

    @property
    def has_two_halves(self) -> bool:
        """Whether the forward hands its outputs to the caller, who starts the backward."""
        return self.loss.target is hand_over

    def collectives(self) -> Iterator[fx.Node]:
        """The nodes that start a collective, in issue order."""
        for node in self.graph.nodes:
            if node.op == "call_function" and has_info(node) and info(node).collective is not None:
                yield node


@dataclass(frozen=True)
class OptimizerGroup:
    """One param group: its parameters (those of the model, in its order) and its structural flags."""

    params: tuple[str, ...]
    flags: tuple[tuple[str, object], ...] = ()


@dataclass(frozen=True)
class OptimizerInfo:
    """The user's optimizer as the compiler sees it.

    `rule` is the name of a known elementwise update rule, or "opaque": the optimizer's own step() is called.
    """

    rule: str
    class_name: str
    groups: tuple[OptimizerGroup, ...]
    why_opaque: str = ""
