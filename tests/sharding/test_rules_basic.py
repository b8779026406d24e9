"""Every strategy of the basic ops gives what the op gives: run on the parts of all ranks, and compared."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from commfuse_fx.ir.core.placement import P, R, S, take
from commfuse_fx.sharding.rules.ops.pointwise import pointwise_rule
from commfuse_fx.sharding.rules.ops.views import reshapings
from commfuse_fx.sharding.rules.prove import check_call, check_strategy, describe
from commfuse_fx.sharding.rules.writing.call import OpCall, Step, Strategy, call_of
from commfuse_fx.sharding.rules.writing.rule_registry import compute_strategies, find_rule
from tests.sharding.calls import Case, Tensor, aten, x
from tests.sharding.calls_elementwise import pointwise_cases
from tests.sharding.calls_indexing import factory_cases, indexing_cases
from tests.sharding.calls_shapes import joining_cases, slicing_cases, view_cases
from tests.sharding.calls_sums import matmul_cases, reduction_cases

CASES = [
    each
    for cases in (
        pointwise_cases,
        view_cases,
        slicing_cases,
        joining_cases,
        matmul_cases,
        reduction_cases,
        indexing_cases,
        factory_cases,
    )
    for each in cases()
]


@pytest.mark.parametrize("ways", [2, 4])
@pytest.mark.parametrize("one", CASES, ids=[f"{i}-{one.id}" for i, one in enumerate(CASES)])
def test_every_strategy_gives_what_the_op_gives(one: Case, ways: int) -> None:
    call, tensors = call_of(one.target, one.args, one.kwargs, ways)
    wide = all(tensor.dtype != torch.float32 for tensor in tensors) and one.kwargs.get("dtype") != torch.float32
    tolerance = 1e-10 if wide else 1e-5
    assert check_call(call, tensors, tolerance, tolerance) == []
    found = [describe(strategy) for strategy in compute_strategies(call)]
    expected = [each for each in one.having if _divides(each, call)]
    assert not [each for each in expected if each not in found], found
    assert not [each for each in one.without if each in found]
    if ways == 2:
        assert expected == list(one.having)


def _divides(text: str, call: OpCall) -> bool:
    """Whether all sizes are large enough for a strategy that is written out."""
    inputs, outputs = (part.split(", ") for part in text.split(" -> "))
    pairs = [*zip(inputs, call.inputs, strict=True), *zip(outputs, call.outputs, strict=True)]
    for placed, spec in pairs:
        if placed.startswith("S"):
            dim, _, blocks = placed[2:-1].partition(";")
            if spec is None or spec.shape[int(dim)] % (call.ways * int(blocks or 1)):
                return False
    return True


shapes = st.lists(st.sampled_from([1, 2, 3, 4, 6, 8, 12]), min_size=1, max_size=4)


@st.composite
def shape_pairs(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Two shapes of equally many elements: the factors of one, put together in other groups."""
    before = draw(shapes)
    factors = [factor for size in before for factor in _primes(size)]
    if draw(st.booleans()):
        factors = draw(st.permutations(factors))
    cuts = sorted(draw(st.lists(st.integers(0, len(factors)), max_size=4)))
    bounds = zip([0, *cuts], [*cuts, len(factors)], strict=True)
    return before, [prod(factors[begin:end]) for begin, end in bounds]


def _primes(size: int) -> list[int]:
    for factor in (2, 3):
        if size % factor == 0:
            return [factor, *_primes(size // factor)]
    return []


@settings(max_examples=150, deadline=None, derandomize=True)
@given(shape_pairs(), st.sampled_from([2, 3, 4]))
def test_parts_of_any_view_are_views_of_parts(pair: tuple[list[int], list[int]], ways: int) -> None:
    before, after = pair
    call, tensors = call_of(aten.view.default, (torch.arange(float(prod(before))).view(before), after), ways=ways)
    assert check_call(call, tensors) == []
    # Whatever parts hold the same elements in both shapes is found.
    found = reshapings(before, after, ways, (1, 2, 3))
    flat = torch.arange(prod(before))
    for one in _shards(before, ways):
        for other in _shards(after, ways):
            same = torch.equal(_part(flat.view(before), one, ways), _part(flat.view(after), other, ways))
            assert same == ((one, other) in found)


def _shards(shape: list[int], ways: int) -> list[Any]:
    return [S(dim, n) for dim, size in enumerate(shape) for n in (1, 2, 3) if size % (ways * n) == 0]


def _part(tensor: Tensor, placement: Any, ways: int) -> Tensor:
    return take(tensor, placement, ways, ways - 1).flatten()


def test_a_wrong_strategy_is_caught() -> None:
    call, tensors = call_of(aten.relu.default, (x(8, 24),))
    assert "is off by" in check_strategy(call, Strategy((P,), (P,)), tensors)
    call, tensors = call_of(aten.addmm.default, (x(24), x(8, 24), x(24, 24)))
    assert "is off by" in check_strategy(call, Strategy((P,), (R, S(1), S(0))), tensors)
    call, tensors = call_of(aten.view.default, (x(8, 24), [8, 3, 8]))
    assert "raises" in check_strategy(call, Strategy((S(2),), (S(1),)), tensors)


@pytest.mark.parametrize(
    "target, args, blocks, expected",
    [
        (aten.relu.default, (x(8, 24),), 4, "S(0;4) -> S(0;4)"),
        (aten.mm.default, (x(48, 8), x(8, 8)), 8, "S(0;8), R -> S(0;8)"),
        (aten.view.default, (x(8, 6, 4), [48, 4]), 1, "S(1) -> S(0;8)"),
        (aten.view.default, (x(48, 4), [8, 6, 4]), 8, "S(0;8) -> S(1)"),
        (aten.split.Tensor, (x(8, 48), 16, 1), 6, "S(1;6) -> S(1;2), S(1;2), S(1;2)"),
        (aten.slice.Tensor, (x(8, 48), 1, 0, 32), 6, "S(1;6) -> S(1;4)"),
        (aten.slice_backward.default, (x(8, 32), [8, 48], 1, 0, 32, 1), 4, "S(1;4) -> S(1;6)"),
        (aten.cat.default, ([x(8, 32), x(8, 16)], 1), 4, "S(1;4), S(1;2) -> S(1;6)"),
        (aten.glu.default, (x(8, 48), 1), 4, "S(1;4) -> S(1;2)"),
    ],
)
def test_numbers_of_blocks_come_from_the_call(target: Any, args: tuple[Any, ...], blocks: int, expected: str) -> None:
    call, tensors = call_of(target, args)
    call = replace(call, blocks=(1, blocks))
    assert expected in [describe(strategy) for strategy in compute_strategies(call)]
    assert check_call(call, tensors) == []


def test_steps_are_ops_with_rules() -> None:
    """So that what one axis of a mesh has divided can be divided along the next."""
    calls = [call_of(one.target, one.args, one.kwargs)[0] for one in CASES]
    targets = [
        step.target
        for call in calls
        for strategy in compute_strategies(call)
        for step in strategy.steps
        if isinstance(step, Step)
    ]
    assert len(set(targets)) > 30
    assert [target for target in dict.fromkeys(targets) if find_rule(target) is None] == []


def test_ops_that_write_or_draw_are_not_taken_for_pointwise() -> None:
    for target in (aten.add_.Tensor, aten.relu_.default, aten.add.out, aten._foreach_add.List, aten.uniform.default):
        assert pointwise_rule(target) is None
    assert pointwise_rule(aten.cosh.default) is not None


def test_every_tagged_op_has_strategies_that_hold() -> None:
    """Whatever PyTorch tags as pointwise and takes one to three tensors of numbers in (0.1, 0.9)."""
    values = [torch.linspace(0.1, 0.9, size, dtype=torch.float64) for size in (32, 8, 4)]
    tensors = (values[0].view(4, 8), values[1], values[2].view(4, 1))
    checked = {1: 0, 2: 0, 3: 0}
    for target in _tagged():
        required = [argument for argument in target._schema.arguments if not argument.has_default_value()]
        if not all(str(argument.type) == "Tensor" for argument in required):
            continue
        try:
            call, taken = call_of(target, tensors[: len(required)])
        except RuntimeError:  # an op on integers, or one that does not broadcast
            continue
        assert check_call(call, taken, 1e-12, 1e-12) == []
        ways = {describe(strategy) for strategy in compute_strategies(call)}
        outputs = ", ".join(["S(1)"] * len(call.outputs))
        assert f"{', '.join(['S(1)', 'S(0)', 'R'][: len(required)])} -> {outputs}" in ways, target
        checked[len(required)] += 1
    assert checked[1] > 80 and checked[2] > 30 and checked[3] >= 3, checked


def _tagged() -> Iterator[Any]:
    # Not dir(aten), which knows the ops that somebody has used before.
    names = {schema.name: None for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("aten::")}
    for name in sorted(names):
        packet = getattr(aten, name.removeprefix("aten::"), None)
        for overload in packet.overloads() if hasattr(packet, "overloads") else ():
            target = getattr(packet, overload)
            if pointwise_rule(target) is not None:
                yield target
