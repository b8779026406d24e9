"""Products of matrices and vectors."""

from __future__ import annotations

from collections.abc import Sequence
from string import ascii_letters

from commfuse_fx.ir.core.placement import P, Placement, R
from commfuse_fx.sharding.rules.writing.call import OpCall, Ref, Result, Step, Strategy
from commfuse_fx.sharding.rules.writing.common import (
    along,
    aten,
    first_only,
    own_dim,
    place,
    shape_of,
    summed,
)
from commfuse_fx.sharding.rules.writing.rule_registry import rule

_LETTERS = {
    aten.mm.default: ("mk", "kn", "mn"),
    aten.bmm.default: ("bmk", "bkn", "bmn"),
    aten.mv.default: ("mk", "k", "m"),
    aten.dot.default: ("k", "k", ""),
    aten.vdot.default: ("k", "k", ""),
    aten.addmm.default: ("mk", "kn", "mn"),
    aten.baddbmm.default: ("bmk", "bkn", "bmn"),
    aten.addmv.default: ("mk", "k", "m"),
}


@rule(aten.mm.default, aten.bmm.default, aten.mv.default, aten.dot.default, aten.vdot.default)
def _product(call: OpCall) -> Sequence[Strategy]:
    first, second, result = _LETTERS[call.target]
    return _products(call, first, second, result)


@rule(aten.matmul.default)
def _matmul(call: OpCall) -> Sequence[Strategy]:
    """matmul follows numpy: vectors stand for matrices, and leading dimensions are broadcast."""
    ranks = [len(spec.shape) for spec in call.inputs]
    result = shape_of(call)
    rows, columns = ("m" if ranks[0] > 1 else ""), ("n" if ranks[1] > 1 else "")
    leading = _leading(len(result) - len(rows + columns))
    batches = [spec.shape[: max(len(spec.shape) - 2, 0)] for spec in call.inputs]
    first = _broadcast(batches[0], result[: len(leading)], leading) + rows + "k"
    second = _broadcast(batches[1], result[: len(leading)], leading) + "k" + columns
    return _products(call, first, second, leading + rows + columns)


def _leading(count: int) -> str:
    return "".join(letter for letter in ascii_letters if letter not in "kmn")[:count]


def _broadcast(shape: Sequence[int], whole: Sequence[int], letters: str) -> str:
    """The letters of an input's leading dimensions; a dot stands for one that is broadcast."""
    skipped = len(whole) - len(shape)
    return "".join(
        letters[skipped + i] if own_dim(shape, skipped + i, whole) is not None else "." for i in range(len(shape))
    )


def _products(call: OpCall, first: str, second: str, result: str) -> list[Strategy]:
    """Equal letters are equal dimensions, which are divided together; those that the result lacks are summed over."""
    found = [summed(call, (P, R)), summed(call, (R, P))]
    for letter in dict.fromkeys(first + second):
        if letter == ".":
            continue
        places = (_at(first, letter), _at(second, letter))
        if letter in result:
            found += along(call, places, (result.index(letter),))
        else:
            found += [summed(call, [place(dim, n) for dim in places]) for n in call.blocks]
    return found


def _at(letters: str, letter: str) -> int | None:
    return letters.index(letter) if letter in letters else None


_GROUPED = {
    (2, 3): ("mk", "gkn", "mn"),
    (3, 2): ("gmk", "kn", "mn"),
    (2, 2): ("mk", "kn", "gmn"),
    (3, 3): ("gmk", "gkn", "gmn"),
}
"""The letters of the factors and the result, by the numbers of dimensions of the factors."""

_RAGGED = {(2, 3): "m", (3, 2): "n", (2, 2): "k", (3, 3): ""}
"""The dimension along which the rows, columns or summands of all groups lie in one tensor.

It cannot be divided, because where a group begins is known only when the step runs."""


@rule(aten._grouped_mm.default)
def _grouped_product(call: OpCall) -> Sequence[Strategy]:
    ranks = (len(call.inputs[0].shape), len(call.inputs[1].shape))
    first, second, result = _GROUPED[ranks]
    if any(given is not None for given in (call.arg(3, "bias"), call.arg(4, "out_dtype"))):
        return []
    others = (R,) * (len(call.inputs) - 2)
    found = [summed(call, (P, R, *others)), summed(call, (R, P, *others))]
    for letter in dict.fromkeys(first + second):
        places = (_at(first, letter), _at(second, letter))
        if letter == _RAGGED[ranks] or (letter == "g" and ranks != (3, 3)):
            continue
        inputs = (place(places[0]), place(places[1]), *others)
        found.append(Strategy((place(result.index(letter)),), inputs) if letter in result else summed(call, inputs))
    return found


@rule(aten.addmm.default, aten.baddbmm.default, aten.addmv.default)
def _add_product(call: OpCall) -> Sequence[Strategy]:
    first, second, result = _LETTERS[call.target]
    return _with_addend(call, 0, (1, 2), (first, second, result))


@rule(aten.linear.default)
def _linear(call: OpCall) -> Sequence[Strategy]:
    rank, columns = len(call.inputs[0].shape), len(call.inputs[1].shape) > 1
    leading = _leading(rank - 1)
    letters = (leading + "k", "nk" if columns else "k", leading + ("n" if columns else ""))
    if len(call.inputs) == 2:
        return _products(call, *letters)
    return _with_addend(call, 2, (0, 1), letters)


def _with_addend(call: OpCall, addend: int, factors: tuple[int, int], letters: tuple[str, str, str]) -> list[Strategy]:
    """A product to which input `addend` is added, once: where the product is a partial sum, by the first rank."""
    first, second, result = letters
    whole = shape_of(call)
    bias = call.inputs[addend].shape

    def inputs(added: Placement, one: Placement, other: Placement) -> tuple[Placement, ...]:
        placed = {addend: added, factors[0]: one, factors[1]: other}
        return tuple(placed[i] for i in range(3))

    once = (first_only(addend), Step(call.target, _replaced(call, addend), call.kwargs))
    found: list[Strategy] = []

    def sums(one: Placement, other: Placement) -> None:
        found.append(summed(call, inputs(R, one, other), once))
        found.append(summed(call, inputs(P, one, other)))

    sums(P, R)
    sums(R, P)
    for letter in dict.fromkeys(first + second):
        one, other = _at(first, letter), _at(second, letter)
        for n in call.blocks:
            if letter not in result:
                sums(place(one, n), place(other, n))
                continue
            dim = result.index(letter)
            placed = inputs(place(own_dim(bias, dim, whole), n), place(one, n), place(other, n))
            found.append(Strategy((place(dim, n),), placed))
    return found


def _replaced(call: OpCall, index: int) -> tuple[object, ...]:
    """The arguments, with the result of the first step in place of an input."""
    return tuple(Result(0) if arg == Ref(index) else arg for arg in call.args)
