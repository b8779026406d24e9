"""The final graph in the DOT language of Graphviz."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from commfuse_fx.inspect.explain.writers import writers
from commfuse_fx.ir.core.collectives import collective_of, is_wait
from commfuse_fx.ir.core.meta import PHASES, dtype_name, info
from commfuse_fx.ir.core.naming import op_name
from commfuse_fx.ir.core.program import Program
from commfuse_fx.ir.text.write_text import spec_text

MOST_DRAWN = 200
"""Of a graph with more nodes than this the compute is folded until as few are drawn, where that is possible."""

_MEMBERS_SHOWN = 6

_NAME_LENGTH = 60

_COLOURS = {"input": "#e3e7eb", "forward": "#cfe3f7", "backward": "#a9c8e8", "update": "#d5dade"}

_HEAD = (
    "digraph step {",
    "  rankdir=TB; ranksep=0.35; nodesep=0.2;",
    '  graph [fontname="sans-serif", fontsize=12, style=rounded, color="#9aa5b1"];',
    '  node [shape=box, style=filled, fontname="sans-serif", fontsize=10, color="#59636e", height=0.3];',
    '  edge [color="#59636e", arrowsize=0.6];',
)


@dataclass(frozen=True)
class _Box:
    """What is drawn as one node: one node of the graph, or several of one module, whose path is `place`."""

    nodes: tuple[fx.Node, ...]
    place: str = ""

    @property
    def first(self) -> fx.Node:
        return self.nodes[0]


def to_dot(program: Program) -> str:
    """The graph as a DOT digraph for `dot -Tsvg`: clusters by phase and top module, an edge from each value to the
    nodes that take it. Collectives are hexagons with kind, group, bytes and members, the waits for them octagons;
    dashed edges lead to a collective from the nodes that write into the memory it sends.

    A graph of more than 200 nodes stays drawable this way: computations of one module that follow each other are one
    node, which says how many they are, and inputs are left out. Where that leaves more than 200, modules count as the
    module that holds them, as often as needed. Collectives and waits always stand alone. The text is the same at every
    run and on every rank.
    """
    boxes = [_Box((node,)) for node in program.graph.nodes]
    deepest = max((_depth(node) for node in program.graph.nodes), default=0)
    for depth in range(deepest, 0, -1):
        if len(boxes) > MOST_DRAWN:
            boxes = _folded(program, depth)
    lines = list(_HEAD)
    for number, phase in enumerate(PHASES):
        mine = [(i, box) for i, box in enumerate(boxes) if info(box.first).phase == phase]
        if mine:
            lines.extend(_phase(program, number, phase, mine))
    lines.extend(_edges(program, boxes))
    return "\n".join([*lines, "}"]) + "\n"


def _stands_alone(node: fx.Node) -> bool:
    return info(node).collective is not None or is_wait(node) or node.op == "output"


def _depth(node: fx.Node) -> int:
    return len(info(node).module.split("."))


def _folded(program: Program, depth: int) -> list[_Box]:
    """Compute by runs of one module, whose path counts up to a depth; without inputs."""
    runs: list[list[fx.Node]] = []
    for node in program.graph.nodes:
        if info(node).phase == "input":
            continue
        if runs and _continues(runs[-1], node, depth):
            runs[-1].append(node)
        else:
            runs.append([node])
    return [_Box(tuple(nodes), _place(nodes, depth)) for nodes in runs]


def _continues(run: list[fx.Node], node: fx.Node, depth: int) -> bool:
    if _stands_alone(node) or _stands_alone(run[0]) or info(run[0]).phase != info(node).phase:
        return False
    # What passes have put between the nodes of a module, such as views of buckets, goes along.
    return not info(node).module or _place(run, depth) in ("", _place([node], depth))


def _place(nodes: Sequence[fx.Node], depth: int) -> str:
    """The module of a run: that of its first node that has one."""
    module = next((info(node).module for node in nodes if info(node).module), "")
    return ".".join(module.split(".")[:depth])


def _top(program: Program, node: fx.Node) -> str:
    """The cluster of a node inside of its phase; "" for none."""
    details = info(node)
    if details.module:
        return details.module.partition(".")[0]
    source = program.sources.get(node)
    if source is not None:
        if source.owner >= 0:
            return f"update.{source.owner}"
        return source.name.partition(".")[0] if source.kind in ("parameter", "buffer") else ""
    return details.name.partition("/")[0] if "/" in details.name else ""


def _phase(program: Program, number: int, phase: str, boxes: Sequence[tuple[int, _Box]]) -> Iterator[str]:
    tops: dict[str, list[str]] = {}
    for i, box in boxes:
        top = box.place.partition(".")[0] or _top(program, box.first)
        tops.setdefault(top, []).append(f"n{i} {_attributes(program, box)};")
    yield f"  subgraph cluster_{number} {{"
    yield f"    label={quoted(phase)};"
    for place, (top, drawn) in enumerate(tops.items()):
        if not top or len(drawn) == 1:
            yield from (f"    {line}" for line in drawn)
            continue
        yield f"    subgraph cluster_{number}_{place} {{"
        yield f"      label={quoted(_short(top))};"
        yield from (f"      {line}" for line in drawn)
        yield "    }"
    yield "  }"


def _attributes(program: Program, box: _Box) -> str:
    node = box.first
    details = info(node)
    if details.collective is not None:
        label = _collective_label(program, node)
        return f'[shape=hexagon, penwidth=2, fillcolor="#f5b895", label={quoted(label)}]'
    if is_wait(node):
        return f'[shape=octagon, fillcolor="#fbe0cf", label={quoted(_short(details.name))}]'
    if node.op == "output":
        return '[shape=oval, fillcolor="#ffffff", label="return"]'
    shape = "ellipse" if details.phase == "input" else "box"
    return f'[shape={shape}, fillcolor="{_COLOURS[details.phase]}", label={quoted(_label(program, box))}]'


def _label(program: Program, box: _Box) -> str:
    if len(box.nodes) == 1:
        details = info(box.first)
        return f"{_short(details.name)}\n{_short(spec_text(details.spec))}"
    ops = list(dict.fromkeys(op_name(node.target).removeprefix("aten.") for node in box.nodes))
    more = ", ..." if len(ops) > 3 else ""
    return f"{_short(box.place or _top(program, box.first))}\n{len(box.nodes)} nodes: {', '.join(ops[:3])}{more}"


def _collective_label(program: Program, node: fx.Node) -> str:
    details = collective_of(node)
    what = f"{details.kind} {details.reduce_op or ''}".rstrip()
    size = program.mesh.size(details.group)
    members = [_short(name) for name in details.members[:_MEMBERS_SHOWN]]
    if len(details.members) > _MEMBERS_SHOWN:
        members.append(f"and {len(details.members) - _MEMBERS_SHOWN} more")
    head = f"{what} on {details.group}({size}), {details.nbytes} bytes, {dtype_name(details.dtype)}"
    return "\n".join([_short(info(node).name), head, *members])


def _edges(program: Program, boxes: Sequence[_Box]) -> Iterator[str]:
    place = {node: i for i, box in enumerate(boxes) for node in box.nodes}
    written_by = writers(program)
    for i, box in enumerate(boxes):
        taken = dict.fromkeys(value for node in box.nodes for value in node.all_input_nodes)
        sources = _places(place, taken, i)
        yield from (f"  n{source} -> n{i};" for source in sources)
        if info(box.first).collective is not None:
            writes = _places(place, written_by[box.first], i)
            yield from (f"  n{source} -> n{i} [style=dashed];" for source in writes if source not in sources)


def _places(place: Mapping[fx.Node, int], nodes: Iterable[fx.Node], without: int) -> dict[int, None]:
    found = dict.fromkeys(place[node] for node in nodes if node in place)
    found.pop(without, None)
    return found


def _short(text: str) -> str:
    return text if len(text) <= _NAME_LENGTH else f"{text[:20]}...{text[-(_NAME_LENGTH - 23) :]}"


def quoted(text: str) -> str:
    """A DOT string that shows exactly this text; line breaks are kept."""
    for char, escaped in (("&", "&amp;"), ("\\", "\\\\"), ('"', '\\"'), ("\r", " "), ("\n", "\\n")):
        text = text.replace(char, escaped)
    return f'"{text}"'
