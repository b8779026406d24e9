"""Write the marks of a model as plain data for JSON, and read them. Places are as in mark nodes."""

from __future__ import annotations

from typing import Any

from commfuse_fx.errors import ConfigTypeError, ConfigValueError
from commfuse_fx.sharding.marking.marks import MarkedModule, MarkedParameter, Marks, ModuleMark, ParameterMark
from commfuse_fx.sharding.marking.strategy import TensorStrategy, decode, encode
from commfuse_fx.support.json_fields import Fields


def marks_to_dict(marks: Marks) -> dict[str, Any]:
    """The marks as a dict of plain data. Strategies are texts, as `strategy.encode` writes them."""
    return {
        "modules": [_module(marked) for marked in marks.modules],
        "parameters": [
            {
                "name": marked.name,
                "shape": list(marked.shape),
                "strategy": encode(marked.mark.strategy),
                "place": marked.mark.place,
            }
            for marked in marks.parameters
        ],
    }


def marks_from_dict(data: Any, where: str) -> Marks:
    """The inverse of `marks_to_dict`. Raises ConfigValueError, which names `where` and the place."""
    return _Reader(where).marks(data)


def _module(marked: MarkedModule) -> dict[str, Any]:
    mark = marked.mark
    return {
        "path": marked.path,
        "index": marked.index,
        "kind": marked.kind,
        "parameters": [[name, list(shape)] for name, shape in marked.parameters],
        "inputs": [[key, encode(strategy)] for key, strategy in mark.inputs],
        "outputs": [None if strategy is None else encode(strategy) for strategy in mark.outputs],
        "own": [[name, encode(strategy)] for name, strategy in mark.parameters],
        "gradient": mark.gradient,
        "place": mark.place,
        **({"cross_batch": True} if mark.cross_batch else {}),
    }


class _Reader(Fields):
    def marks(self, data: Any) -> Marks:
        record = self.typed(data, dict, "marks")
        modules = self.items(record, "modules", dict, "marks")
        parameters = self.items(record, "parameters", dict, "marks")
        return Marks(
            tuple(self.module(each, f"marks.modules[{i}]") for i, each in enumerate(modules)),
            tuple(self.parameter(each, f"marks.parameters[{i}]") for i, each in enumerate(parameters)),
        )

    def parameter(self, record: dict[str, Any], place: str) -> MarkedParameter:
        mark = ParameterMark(self.strategy(record.get("strategy"), place), self.get(record, "place", str, place))
        return MarkedParameter(self.get(record, "name", str, place), self.shape(record.get("shape"), place), mark)

    def module(self, record: dict[str, Any], place: str) -> MarkedModule:
        mark = ModuleMark(
            tuple((key, self.strategy(value, place)) for key, value in self.pairs(record, "inputs", (int, str), place)),
            tuple(
                None if value is None else self.strategy(value, place)
                for value in self.get(record, "outputs", list, place)
            ),
            tuple((key, self.strategy(value, place)) for key, value in self.pairs(record, "own", (str,), place)),
            self.get(record, "gradient", bool, place),
            self.get(record, "place", str, place),
            self.get(record, "cross_batch", bool, place) if "cross_batch" in record else False,
        )
        return MarkedModule(
            self.get(record, "path", str, place),
            self.get(record, "index", int, place),
            self.get(record, "kind", str, place),
            mark,
            tuple((key, self.shape(value, place)) for key, value in self.pairs(record, "parameters", (str,), place)),
        )

    def pairs(
        self, record: dict[str, Any], key: str, kinds: tuple[type[Any], ...], place: str
    ) -> list[tuple[Any, Any]]:
        found: list[tuple[Any, Any]] = []
        for pair in self.items(record, key, list, place):
            if len(pair) != 2 or not isinstance(pair[0], kinds) or isinstance(pair[0], bool):
                raise self.error(f"{place}.{key}", "these are no pairs of a name and a value")
            found.append((pair[0], pair[1]))
        return found

    def shape(self, value: Any, place: str) -> tuple[int, ...]:
        sizes = self.typed(value, list, f"{place}.shape")
        return tuple(self.typed(size, int, f"{place}.shape") for size in sizes)

    def strategy(self, value: Any, place: str) -> TensorStrategy:
        text = self.typed(value, str, place)
        try:
            found = decode(text)
            if encode(found) == text:
                return found
        except (ConfigTypeError, ConfigValueError, ValueError, SyntaxError, TypeError, LookupError):
            pass
        except (RecursionError, MemoryError):  # how Python refuses deep nesting
            pass
        raise self.error(place, f"{text[:80]!r} is no strategy")
