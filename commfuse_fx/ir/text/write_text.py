"""Canonical text of a program: byte-identical over runs, ranks and hash seeds. One line per node.

Where ranks have parameters or buffers of their own, of any shape, the header names these, and each rank has its text.

Why: docs/decisions.md, "Text, not objects, is what is compared".
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from commfuse_fx.ir.core.collectives import IN_PLACE
from commfuse_fx.ir.core.halves import split
from commfuse_fx.ir.core.meta import CollectiveInfo, NodeInfo, Spec, TensorSpec, dtype_name, info
from commfuse_fx.ir.core.naming import PHASE_TAG, op_name
from commfuse_fx.ir.core.program import Program
from commfuse_fx.support.long_lists import shortened

SCHEMA = 1


def header(program: Program) -> list[tuple[str, str]]:
    """(name, value) pairs that identify what was compiled, for whom and how."""
    config = program.config
    lines = [
        ("schema", str(SCHEMA)),
        ("torch", program.torch_version),
        ("world", str(program.mesh.world)),
        ("mesh", str(program.mesh)),
        ("step", "train" if program.training else "eval"),
        *config.header(),
    ]
    if program.has_two_halves:
        lines.append(("form", "module, computed by autograd" if program.by_autograd else "module"))
    if program.aux:
        lines.append(("aux", ", ".join(program.aux)))
    if own := (*program.params_of_each_rank, *program.own_buffers):
        named = ", ".join(shortened(own, 8, "{} others"))
        lines.append(("of_each_rank", f"{named} (layerwise_parallel: other ranks may have another text)"))
    if program.optimizer is not None:
        lines.append(("optimizer", f"{program.optimizer.class_name} ({program.optimizer.rule})"))
    return lines


def canonical_text(program: Program, activations: bool = True) -> str:
    """The header, and one line per node.

    program: the program to write.
    activations: False leaves out sizes that depend on the batch: two ranks may differ in those and still run
        the same collectives. Lines correspond one to one with the full text.
    """
    lines = [f"# {name}: {value}" for name, value in header(program)]
    writer = _Writer(program, activations)
    lines.extend(writer.line(node) for node in program.graph.nodes)
    return "\n".join(lines) + "\n"


def communication_text(program: Program) -> str:
    """What ranks that captured the same graph have to agree about besides: what is sent, in which order and layout, and
    what the updates do. Other compute is left out, since passes may arrange it by the size of the batch.
    """
    writer = _CommunicationWriter(program)
    nodes = list(program.graph.nodes)
    inputs = [writer.line(node) for node in nodes if node.op == "placeholder" and program.sources[node].kind != "input"]
    sends = [writer.line(node) for node in nodes if _sends(node)]
    updates = sorted(writer.line(node) for node in nodes if node.op == "call_function" and info(node).phase == "update")
    return "\n".join((*inputs, *sends, *updates)) + "\n"


def gradients_text(program: Program) -> str:
    """The parameters that have a gradient, one per line: with the shape, unless each rank has its own."""
    own = program.params_of_each_rank
    lines = [
        f"gradient of {name}: {'layerwise_parallel' if name in own else param.spec}"
        for name, param in program.params.items()
        if name in program.grads
    ]
    return "\n".join(lines) + "\n"


def sent_text(program: Program) -> str:
    """What is sent, in which order and how: all that ranks which compute different things have to agree about."""
    writer = _CommunicationWriter(program)
    return "\n".join(writer.line(node) for node in program.graph.nodes if _sends(node)) + "\n"


def sent_in_forward_text(program: Program) -> str:
    """The same of the first half of a program of two."""
    writer = _CommunicationWriter(program)
    return "\n".join(writer.line(node) for node in split(program)[0] if _sends(node)) + "\n"


def node_reference(node: fx.Node) -> str:
    return f"%{info(node).name}"


def collective_text(details: CollectiveInfo, size: int) -> str:
    """`group=dp(2) op=sum bytes=128 fusion_id=1 members=[a, b]`."""
    parts = [f"group={details.group}({size})"]
    if details.reduce_op:
        parts.append(f"op={details.reduce_op}")
    parts.append(f"dtype={dtype_name(details.dtype)}")
    parts.append(f"bytes={details.nbytes}")
    if details.fusion_id is not None:
        parts.append(f"fusion_id={details.fusion_id}")
    parts.append(f"members=[{', '.join(details.members)}]")
    return " ".join(parts)


def spec_text(spec: Spec) -> str:
    if isinstance(spec, TensorSpec):
        return str(spec)
    if spec is None:
        return "-"
    texts = [spec_text(item) for item in spec]
    if len(texts) > 4:
        return f"({', '.join(texts[:3])}, ... {len(texts)})"
    return f"({', '.join(texts)})"


class _Writer:
    def __init__(self, program: Program, activations: bool) -> None:
        self.program = program
        self.activations = activations
        self.segments = {
            (owner, segment.members[0][0]): segment
            for owner, update in enumerate(program.updates)
            for segment in update.segments
        }

    def line(self, node: fx.Node) -> str:
        details = info(node)
        if node.op == "placeholder":
            return self._input(node, details)
        if node.op == "output":
            return f"return {self._value(node.args[0])}"
        if node.op == "get_attr":
            return f"in  {node_reference(node)}: {self._spec(details)} = constant"
        text = f"{PHASE_TAG[details.phase]} {node_reference(node)}: {self._spec(details)} = {self._call(node)}"
        if details.collective is not None:
            size = self.program.mesh.size(details.collective.group)
            text += f"  {{{collective_text(details.collective, size)}}}"
        if details.kept:
            text += "  {kept between steps}"
        if details.region is not None:
            text += f"  {{region {details.region}{', rounded' if details.rounded else ''}}}"
        if details.once:
            text += "  {computed once}"
        if details.next_step is not None:
            text += f"  {{in the next step, before {node_reference(details.next_step)}}}"
        return text + _sent_text(details)

    def _input(self, node: fx.Node, details: NodeInfo) -> str:
        source = self.program.sources[node]
        text = f"in  {node_reference(node)}: "
        if source.kind == "hyper":
            return text + "number = hyper-parameter of the optimizer"
        if source.kind == "input":
            # With full_batch every rank is handed the same tensors.
            same = self.activations or self.program.config.full_batch
            return text + f"{spec_text(details.spec) if same else '*'} = input"
        text += f"{spec_text(details.spec)} = {source.kind}"
        if source.kind == "parameter":
            text += self._memory(source.name)
        if source.kind == "flat":
            text += f" {self._segment(source.owner, source.name)}"
        if source.kind == "state" and isinstance(details.spec, tuple):
            text += f" of {len(details.spec)} tensor(s)"
        return text

    def _memory(self, name: str) -> str:
        """What keeps a parameter where it is, but for gaps, which its strides show."""
        param = self.program.params[name]
        if param.shares:
            return f" shared with [{', '.join(param.shares)}]"
        return " in a larger storage" if param.is_block and not param.movable else ""

    def _segment(self, owner: int, name: str) -> str:
        members = self.segments[owner, name].members
        return f"[{', '.join(f'{member}@{offset}' for member, offset in members)}]"

    def _spec(self, details: NodeInfo) -> str:
        if self.activations or details.collective is not None or details.phase == "update":
            return spec_text(details.spec)
        return "*"

    def _call(self, node: fx.Node) -> str:
        values = [self._value(arg) for arg in node.args]
        values.extend(f"{key}={self._value(value)}" for key, value in node.kwargs.items())
        return f"{self._op(node)}({', '.join(values)})"

    def _op(self, node: fx.Node) -> str:
        return op_name(node.target)

    def _value(self, value: Any) -> str:
        if isinstance(value, fx.Node):
            return node_reference(value)
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(self._value(item) for item in value)}]"
        if isinstance(value, torch.dtype):
            return dtype_name(value)
        if isinstance(value, bool) or value is None:
            return str(value)
        if isinstance(value, int):
            return str(value) if self.activations else "*"
        if isinstance(value, str):
            return value
        return str(value).removeprefix("torch.")


_OUT_OF_PLACE: dict[Any, Any] = {in_place: plain for plain, in_place in IN_PLACE.items()}


class _CommunicationWriter(_Writer):
    """Lines that name no compute: its names depend on what passes made of it. Whether a collective allocates memory is
    each rank's own."""

    def __init__(self, program: Program) -> None:
        super().__init__(program, activations=False)
        self.sent_before: dict[fx.Node, int] = {}  # how many nodes that send stand before each
        count = 0
        for node in program.graph.nodes:
            self.sent_before[node] = count
            count += _sends(node)

    def line(self, node: fx.Node) -> str:
        details = info(node)
        if node.op == "placeholder":
            return self._input(node, details)
        text = f"{PHASE_TAG[details.phase]} {node_reference(node)}: {self._spec(details)} = {self._call(node)}"
        if not _sends(node):
            return text
        if details.collective is not None:
            size = self.program.mesh.size(details.collective.group)
            text += f"  {{{collective_text(details.collective, size)}}}"
        else:
            text = f"{PHASE_TAG[details.phase]} *"
        text += _sent_text(details)
        if details.next_step is not None:
            text += f"  {{in the next step, behind {self.sent_before[details.next_step]} that send}}"
        return text

    def _op(self, node: fx.Node) -> str:
        return op_name(_OUT_OF_PLACE.get(node.target, node.target))

    def _value(self, value: Any) -> str:
        if isinstance(value, fx.Node) and value.op == "call_function":
            details = info(value)
            return node_reference(value) if details.collective is not None or details.phase == "update" else "*"
        return super()._value(value)


def _sends(node: fx.Node) -> bool:
    """Whether a node puts something on the wire."""
    return node.op == "call_function" and bool(info(node).collective is not None or info(node).sends)


def _sent_text(details: NodeInfo) -> str:
    """What a node sends of a bucket that leaves in pieces."""
    text = f"  {{sends the rest: {' '.join(map(str, details.rest))}}}" if details.rest else ""
    return text + "".join(f"  {{sends {info(start).name} {stretch}}}" for start, stretch in details.sends)
