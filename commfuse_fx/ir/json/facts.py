"""What a saved graph says besides its nodes: parameters, the optimizer, updates."""

from __future__ import annotations

from typing import Any

from commfuse_fx.ir.core.placement import Placement
from commfuse_fx.ir.core.program import OptimizerGroup, OptimizerInfo, Parameter, Segment, Update
from commfuse_fx.ir.ops.values import ValueReader


class FactReader(ValueReader):
    """Raises ConfigValueError, naming document and place."""

    def params(self, records: list[dict[str, Any]], place: str) -> dict[str, Parameter]:
        """By name, in the order of the records."""
        found: dict[str, Parameter] = {}
        for i, record in enumerate(records):
            param = self._param(record, f"{place}[{i}]")
            if param.name in found:
                raise self.error(f"{place}[{i}]", f"there are two parameters of the name {param.name[:80]!r}")
            found[param.name] = param
        return found

    def _param(self, record: dict[str, Any], place: str) -> Parameter:
        whole = self.get(record, "whole", dict, place, None)
        identity = record.get("fusion_id")
        return Parameter(
            name=self.get(record, "name", str, place),
            spec=self.tensor(self.get(record, "spec", dict, place), f"{place}.spec"),
            trainable=self.get(record, "trainable", bool, place),
            sequence=self.get(record, "sequence", int, place),
            fusion_id=None if identity is None else self.typed(identity, int, f"{place}.fusion_id"),
            layerwise_parallel=self.get(record, "layerwise_parallel", bool, place),
            movable=self.get(record, "movable", bool, place),
            is_block=self.get(record, "is_block", bool, place),
            shares=tuple(self.items(record, "shares", str, place)) if "shares" in record else (),
            layout=tuple(
                self._layout(pair, f"{place}.layout[{i}]")
                for i, pair in enumerate(self.items(record, "layout", list, place))
            ),
            whole=None if whole is None else self.tensor(whole, f"{place}.whole"),
            parallel_optimizer=self.get(record, "parallel_optimizer", bool, place, True),
            shard=self.get(record, "shard", str, place, ""),
            rows_alone=self.get(record, "rows_alone", bool, place, False),
            owner=self.get(record, "owner", int, place) if "owner" in record else None,
        )

    def _layout(self, pair: list[Any], place: str) -> tuple[str, Placement]:
        if len(pair) != 2:
            raise self.error(place, "this is no [group, placement]")
        return self.typed(pair[0], str, place), self.placement(pair[1], place)

    def optimizer(self, record: dict[str, Any], place: str) -> OptimizerInfo:
        groups = self.items(record, "groups", dict, place)
        return OptimizerInfo(
            self.get(record, "rule", str, place),
            self.get(record, "class_name", str, place),
            tuple(self._group(group, f"{place}.groups[{i}]") for i, group in enumerate(groups)),
            self.get(record, "why_opaque", str, place),
        )

    def _group(self, record: dict[str, Any], place: str) -> OptimizerGroup:
        flags = self.get(record, "flags", dict, place)
        for name, flag in flags.items():
            self.typed(flag, bool, f"{place}.flags.{name[:80]}")
        return OptimizerGroup(tuple(self.items(record, "params", str, place)), tuple(flags.items()))

    def update(self, record: dict[str, Any], place: str) -> Update:
        segments = self.items(record, "segments", dict, place)
        return Update(
            self.get(record, "rule", str, place),
            self.get(record, "group", int, place),
            [self._segment(segment, f"{place}.segments[{i}]") for i, segment in enumerate(segments)],
        )

    def _segment(self, record: dict[str, Any], place: str) -> Segment:
        members: list[tuple[str, int]] = []
        for i, pair in enumerate(self.items(record, "members", list, place)):
            where = f"{place}.members[{i}]"
            if len(pair) != 2:
                raise self.error(where, "this is no [parameter, offset]")
            members.append((self.typed(pair[0], str, where), self.typed(pair[1], int, where)))
        if not members:
            raise self.error(place, "a segment has members")
        return Segment(tuple(members), self.get(record, "numel", int, place))
