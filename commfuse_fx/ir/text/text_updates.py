"""What canonical text says of updates: their segments, their state, and the flags of the optimizer."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from commfuse_fx.ir.core.functions import optimizer_step
from commfuse_fx.ir.core.meta import TensorSpec, info, tensor_spec
from commfuse_fx.ir.core.naming import op_label
from commfuse_fx.ir.core.program import OptimizerGroup, OptimizerInfo, Program, Segment, Source, Update
from commfuse_fx.ir.rows.shard_rows import gives_rows, is_parameter, parameter_of_rows, spec_of_rows
from commfuse_fx.ir.text.text_values import Unfinished
from commfuse_fx.ir.updates.updates import is_scalar

FLAGS: Mapping[str, tuple[str, ...]] = {
    "adam": ("amsgrad", "maximize", "decoupled"),
    "adamw": ("amsgrad", "maximize", "decoupled"),
    "sgd": ("momentum", "nesterov", "maximize"),
    "adagrad": ("maximize",),
    "rmsprop": ("momentum", "centered", "maximize", "weight_decay"),
    **dict.fromkeys(("nadam", "radam"), ("decoupled", "maximize")),
    **dict.fromkeys(("adamax", "adadelta", "asgd", "rprop"), ("maximize",)),
}
"""The flags of each rule, in the order in which the optimizer's groups have them."""

_CLASSES = {
    "adam": "Adam",
    "adamw": "AdamW",
    "sgd": "SGD",
    "adagrad": "Adagrad",
    "rmsprop": "RMSprop",
    "nadam": "NAdam",
    "radam": "RAdam",
    "adamax": "Adamax",
    "adadelta": "Adadelta",
    "asgd": "ASGD",
    "rprop": "Rprop",
}

_SHOWN_BY = {
    "amsgrad": "max_exp_avg_sq",
    "momentum": "momentum_buffer",
    "centered": "grad_avg",
    "weight_decay": "weight_decay",
}
"""Flag -> the input that an update has where it is True."""

_MEMBER = re.compile(r"(?:^|, )(.+?)@(\d{1,18})(?=, |$)")


def flat_members(text: str) -> tuple[tuple[str, int], ...]:
    """The members of `[a@0, b@64]`. Raises ValueError."""
    found = tuple((name, int(offset)) for name, offset in _MEMBER.findall(text.removeprefix("[").removesuffix("]")))
    if not found or text != f"[{', '.join(f'{name}@{offset}' for name, offset in found)}]":
        raise ValueError(f"{text[:80]!r} are no members such as [a@0, b@64]")
    return found


class UpdateReader:
    """Finds the updates of a program. flats: the members of flat storage, by its input."""

    def __init__(self, program: Program, flats: Mapping[fx.Node, tuple[tuple[str, int], ...]]) -> None:
        self.program = program
        self.flats = flats
        self.nodes: dict[int, list[fx.Node]] = {}
        for node in program.graph.nodes:
            prefix, slash, _ = info(node).name.partition("/")
            if node.op == "call_function" and slash and prefix.startswith("update."):
                self.nodes.setdefault(int(prefix.removeprefix("update.")), []).append(node)

    def read(self, optimizer: tuple[str, str] | None, given: Mapping[str, bool]) -> None:
        """Write updates, optimizer and the sources of flat storage into the program. Raises ValueError."""
        if sorted(self.nodes) != list(range(len(self.nodes))):
            raise ValueError(f"updates have the numbers {sorted(self.nodes)}; number them from 0")
        if optimizer is None and self.nodes:
            rules = [self._label(node) for node in self.nodes[0]]
            rule = next((rule for rule in FLAGS if rule in rules), None)
            if rule is None:
                raise ValueError(
                    "the rule of update.0 is not known; write `# optimizer: AdamW (adamw)` above the nodes"
                )
            optimizer = _CLASSES[rule], rule
        if optimizer is None or not self.program.training:
            return
        class_name, rule = optimizer
        if rule not in (*FLAGS, "opaque"):
            raise ValueError(f"optimizer has the rule {rule[:40]!r}; use one of {', '.join(FLAGS)}, opaque")
        groups: dict[tuple[tuple[str, object], ...], list[str]] = {}
        for number in sorted(self.nodes):
            flags = self._flags(number, rule, given)
            numbers = dict.fromkeys([*groups, flags])
            update = Update(rule, [*numbers].index(flags), self._segments(number))
            self.program.updates.append(update)
            names = [name for segment in update.segments for name, _ in segment.members]
            groups.setdefault(flags, []).extend(names)
        if not groups:
            flags = self._flags(-1, rule, given) if rule != "opaque" else ()
            groups[flags] = self._handed_to_step() or list(self.program.grads)
        why = "it has no rule in the compiler" if rule == "opaque" else ""
        order = [*self.program.params]
        found = tuple(OptimizerGroup(tuple(sorted(names, key=order.index)), flags) for flags, names in groups.items())
        self.program.optimizer = OptimizerInfo(rule, class_name, found, why)

    def finish_state(self) -> None:
        """Write down the specs of all tensors of a state of which the text has only the first."""
        for node, source in self.program.sources.items():
            details = info(node)
            if not isinstance(details.spec, Unfinished):
                continue
            segments = self.program.updates[source.owner].segments
            if is_scalar(source.name):
                details.spec = (details.spec[0],) * details.spec.total
            elif len(segments) == details.spec.total:
                details.spec = tuple(map(self._spec, segments))

    def _label(self, node: fx.Node) -> str:
        return info(node).name.partition("/")[2]

    def _handed_to_step(self) -> list[str]:
        """The parameters that the optimizer's own step() is called on."""
        for node in self.program.graph.nodes:
            if node.target is optimizer_step:
                return [self.program.sources[param].name for param in node.args[0]]
        return []

    def _segments(self, number: int) -> list[Segment]:
        for node in self.nodes[number]:
            for arg in node.args:
                if isinstance(arg, list) and arg and all(map(self._is_parameter, arg)):
                    if op_label(node.target).startswith("plain_"):
                        self._keep_in_place(arg)
                    return [self._segment(param, number) for param in arg]
        raise ValueError(f"update.{number} has no list of parameters")

    def _is_parameter(self, node: Any) -> bool:
        if not isinstance(node, fx.Node) or not is_parameter(node):
            return False
        return gives_rows(node) or node in self.flats or self.program.sources[node].kind == "parameter"

    def _keep_in_place(self, params: Sequence[fx.Node]) -> None:
        """These are updated by an op that is right for memory which is no block of its own."""
        for node in params:
            name = self.program.sources[node].name
            self.program.params[name] = replace(self.program.params[name], movable=False, is_block=False)

    def _segment(self, param: fx.Node, number: int) -> Segment:
        members = self.flats.get(param)
        if gives_rows(param):
            members = ((parameter_of_rows(param), 0),)
        elif members is None:
            members = ((self.program.sources[param].name, 0),)
        else:
            self.program.add_source(param, Source("flat", members[0][0], number))
        numel = self.program.params[members[0][0]].spec.numel if gives_rows(param) else tensor_spec(param).numel
        return Segment(members, numel)

    def _spec(self, segment: Segment) -> TensorSpec:
        param = self.program.params[segment.members[0][0]]
        spec = spec_of_rows(param, self.program.mesh)
        return TensorSpec.flat(segment.numel, spec) if segment.is_flat else spec

    def _flags(self, number: int, rule: str, given: Mapping[str, bool]) -> tuple[tuple[str, object], ...]:
        """What the nodes and the inputs of an update show, then what is given, then False."""
        nodes = self.nodes.get(number, [])
        inputs = [source.name for source in self.program.sources.values() if source.owner == number >= 0]
        labels = [self._label(node) for node in nodes]
        shown: dict[str, bool] = {}
        for flag in FLAGS[rule]:
            written = [node.kwargs[flag] for node in nodes if isinstance(node.kwargs.get(flag), bool)]
            if written:
                shown[flag] = bool(written[0])
            elif nodes:
                shown[flag] = flag in labels or _SHOWN_BY.get(flag) in inputs
        flags = {**dict.fromkeys(FLAGS[rule], False), **shown, **(given if not nodes else {})}
        unknown = next((name for name in flags if name not in FLAGS[rule]), None)
        if unknown is not None:
            raise ValueError(f"flags has {unknown[:40]!r}; {rule} has {', '.join(FLAGS[rule])}")
        if rule == "adamw":
            flags["decoupled"] = True
        return tuple(flags.items())
