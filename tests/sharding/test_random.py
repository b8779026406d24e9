"""Counter-based random numbers: parts of one whole for any division, and numbers that look random."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from commfuse_fx.ir.core.meta import TensorSpec
from commfuse_fx.ir.core.placement import Shard
from commfuse_fx.kernels import position_bits
from commfuse_fx.kernels.position_random import (
    bernoulli_at,
    bernoulli_of_at,
    dropout_at,
    exponential_at,
    normal_at,
    randint_at,
    randperm_at,
    shift,
    uniform_at,
)
from commfuse_fx.kernels.random_replacements import counter_based
from commfuse_fx.sharding.rules.prove import check_call, describe
from commfuse_fx.sharding.rules.writing.call import INDEX, Ref, Result, Step, call_of
from commfuse_fx.sharding.rules.writing.rule_registry import compute_strategies

aten = torch.ops.aten
F32 = torch.float32


def whole(shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return (0,) * len(shape), shape


def uniform(shape: tuple[int, ...], seed: Any = 1, call: int = 0, dtype: torch.dtype = F32) -> torch.Tensor:
    return uniform_at(shape, 0.0, 1.0, seed, call, *whole(shape), dtype, "cpu")


MAKERS: dict[str, Callable[..., torch.Tensor]] = {
    "uniform": lambda shape, starts, all_: uniform_at(shape, -1.0, 3.0, 5, 2, starts, all_, F32, "cpu"),
    "uniform64": lambda shape, starts, all_: uniform_at(shape, 0.0, 1.0, 5, 2, starts, all_, torch.float64, "cpu"),
    "normal": lambda shape, starts, all_: normal_at(shape, 1.0, 2.0, 5, 2, starts, all_, F32, "cpu"),
    "exponential": lambda shape, starts, all_: exponential_at(shape, 1.0, 5, 2, starts, all_, F32, "cpu"),
    "bernoulli": lambda shape, starts, all_: bernoulli_at(shape, 0.3, 5, 2, starts, all_, F32, "cpu"),
    "randint": lambda shape, starts, all_: randint_at(shape, -5, 100, 5, 2, starts, all_, torch.int64, "cpu"),
    "randint63": lambda shape, starts, all_: randint_at(shape, 0, 2**62, 5, 2, starts, all_, torch.int64, "cpu"),
    "dropout": lambda shape, starts, all_: dropout_at(torch.ones(shape), 0.3, 5, 2, starts, all_)[0],
}


@pytest.mark.parametrize("name", MAKERS)
def test_parts_are_parts_of_the_whole(name: str) -> None:
    make, shape = MAKERS[name], (4, 6, 8)
    full = make(shape, *whole(shape))
    for divided in product((1, 2), (1, 3), (1, 4)):
        size = tuple(n // ways for n, ways in zip(shape, divided, strict=True))
        for at in product(*(range(ways) for ways in divided)):
            starts = tuple(i * n for i, n in zip(at, size, strict=True))
            part = full[tuple(slice(s, s + n) for s, n in zip(starts, size, strict=True))]
            assert torch.equal(make(size, starts, shape), part)


@pytest.mark.parametrize("name", ["bernoulli", "uniform64"])
@pytest.mark.parametrize(
    "shape", [(5, 7, 9), (3, 1, 1025), (7, 3), (3, 7), (1, 2500), (2500,), (33, 17, 1), (2, 3, 5, 7)], ids=str
)
def test_odd_parts_at_odd_places(name: str, shape: tuple[int, ...]) -> None:
    make = MAKERS[name]
    full = make(shape, *whole(shape))
    for ends in product(*(((0, 1), (0, n), (n // 3, n), (n // 2, n - n // 4)) for n in shape)):
        part = full[tuple(slice(*each) for each in ends)]
        assert torch.equal(make(tuple(part.shape), tuple(start for start, _ in ends), shape), part), ends


@pytest.mark.parametrize("shape", [(), (1,), (5,), (1, 1, 3), (3, 1, 4), (0, 4), (2, 0)])
def test_odd_shapes(shape: tuple[int, ...]) -> None:
    found = uniform(shape)
    assert found.shape == shape
    assert torch.equal(found.flatten(), uniform((*shape, 1)).flatten())
    assert len(found.unique()) == found.numel()


def test_positions_beyond_31_and_32_bits() -> None:
    """Small parts of tensors that nobody could hold: neighbours agree where parts overlap, far places differ."""
    for columns in (2**31 - 8, 2**31 + 8, 2**33):
        all_ = (3, columns)
        parts = {
            (row, start): uniform_at((1, 64), 0.0, 1.0, 1, 0, (row, start), all_, F32, "cpu")
            for row in (0, 2)
            for start in (0, columns - 96, columns - 64)
        }
        for row in (0, 2):
            assert torch.equal(parts[row, columns - 96][:, 32:], parts[row, columns - 64][:, :32])
        values = [parts[row, start] for row in (0, 2) for start in (0, columns - 64)]
        assert len({tuple(value.flatten().tolist()) for value in values}) == 4
    ends = torch.cat([uniform_at((4096,), 0.0, 1.0, 1, 0, (k << 32,), (1 << 40,), F32, "cpu") for k in range(32)])
    assert abs(float(ends.mean()) - 0.5) < 0.005
    assert float(torch.corrcoef(ends.view(32, 4096)).fill_diagonal_(0).abs().max()) < 0.08


def test_positions() -> None:
    place = (torch.int64, torch.device("cpu"))
    assert position_bits._positions((4,), (2**32 - 2,), (2**40,), 5, *place).tolist() == [
        2**32 + i for i in (3, 4, 5, 6)
    ]
    assert position_bits._positions((2, 3), (1, 5), (4, 10), 0, *place).tolist() == [15, 16, 17, 25, 26, 27]
    assert position_bits._positions((), (), (), 7, *place).tolist() == [7]


@pytest.mark.parametrize("seed", [0, 1, 2**40 + 3, -7, 2**63 + 5])
def test_seed_as_number_and_as_tensor(seed: int) -> None:
    signed = seed if seed < 2**63 else seed - 2**64
    assert torch.equal(uniform((50,), seed), uniform((50,), torch.tensor(signed)))


def test_keys_follow_splitmix64() -> None:
    """First outputs for seed 1234567, as published with the generator's reference implementation."""
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    for stream, value in enumerate(expected):
        low, high = position_bits._keys(1234567, 0, stream)
        assert (int(high) % 2**32) * 2**32 + int(low) % 2**32 == value


def test_mixer_is_lowbias32() -> None:
    """Against the mixer on Python integers."""

    def lowbias32(x: int) -> int:
        x ^= x >> 16
        x = x * 0x7FEB352D % 2**32
        x ^= x >> 15
        x = x * 0x846CA68B % 2**32
        return x ^ (x >> 16)

    values = [0, 1, 2, 77, 2**31 - 1, 2**31, 2**32 - 1, 123456789]
    x = torch.tensor([v - 2**32 if v >= 2**31 else v for v in values], dtype=torch.int32)
    scratch = torch.empty_like(x)
    found = position_bits._finish_(position_bits._mix_(x, scratch), scratch)
    assert [int(v) % 2**32 for v in found] == [lowbias32(v) for v in values]


# Quality. Bounds are about five standard deviations; the numbers are fixed, so no run fails by chance.

N = 1 << 18


@pytest.mark.parametrize("seed", [0, 1, 12345])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_uniform_numbers_are_uniform(seed: int, dtype: torch.dtype) -> None:
    u = uniform((N,), seed, 3, dtype).double()
    assert u.min() >= 0 and u.max() < 1
    assert abs(float(u.mean()) - 0.5) < 5 / (12 * N) ** 0.5
    assert abs(float(u.var()) - 1 / 12) < 5 * (1 / 180 / N) ** 0.5
    counts = torch.histc(u, 256, 0, 1)
    chi2 = float(((counts - N / 256) ** 2).sum() / (N / 256))
    assert abs(chi2 - 255) < 5 * (2 * 255) ** 0.5


def test_low_bits_are_random_too() -> None:
    bits = position_bits.random_bits((N,), 1, 0, 0, (0,), (N,), torch.device("cpu"))
    for bit in range(32):
        ones = float(((bits >> bit) & 1).double().mean())
        assert abs(ones - 0.5) < 5 * 0.5 / N**0.5


@pytest.mark.parametrize("lag", [1, 2, 3, 16, 512, 1024, 4096])
def test_neighbours_and_rows_do_not_correlate(lag: int) -> None:
    u = uniform((N,)).double() - 0.5
    correlation = float((u[lag:] * u[:-lag]).mean() * 12)
    assert abs(correlation) < 5 / N**0.5
    mask = dropout_at(torch.ones(N), 0.5, 1, 0, *whole((N,)))[1].double() - 0.5
    assert abs(float((mask[lag:] * mask[:-lag]).mean() * 4)) < 5 / N**0.5


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("shape", [(N,), (512, 512), (N // 4, 4), (4, N // 4)], ids=str)
def test_masks_of_rows_and_columns_do_not_correlate(shape: tuple[int, ...], p: float) -> None:
    """A number is a hash of a sum of one of its row and one of its column, which must not show in four corners."""
    mask = (bernoulli_at(shape, p, 3, 1, *whole(shape), torch.float64, "cpu") - p) / (p * (1 - p)) ** 0.5
    pairs, table = mask.view(-1, 2), mask.view(-1, shape[-1])
    along = [(pairs[:, 0], pairs[:, 1]), (pairs[:-1, 1], pairs[1:, 0])]
    for lag in (1, 2, 3):
        along += [(table[:, lag:], table[:, :-lag]), (table[lag:], table[:-lag])]
        edges = table[lag:] * table[:-lag]
        along.append((edges[:, lag:], edges[:, :-lag]))
    for one, other in along:
        assert abs(float((one * other).sum())) <= 5 * max(one.numel(), 1) ** 0.5


def test_all_columns_are_independent() -> None:
    """Numbers of two columns have the same distance in all rows before the last round, which has to hide it.

    Squares of the correlations are 1 / rows on the average; half a round makes them 1.15 times that.
    """
    rows, columns = 1 << 18, 64
    mask = bernoulli_at((rows, columns), 0.5, 3, 1, *whole((rows, columns)), F32, "cpu").mul_(2).sub_(1)
    squares = (mask.T @ mask).square().div_(rows)[torch.ones(columns, columns).triu(1).bool()]
    assert abs(float(squares.mean()) - 1) < 4 * (2 / len(squares)) ** 0.5 and float(squares.max()) < 5**2


@pytest.mark.parametrize("shape", [(1 << 23,), (2048, 4096)], ids=str)
@pytest.mark.parametrize("p", [1e-6, 1.5 / 65536, 0.1, 0.5, 1 - 1.5 / 65536])
def test_share_of_ones(shape: tuple[int, ...], p: float) -> None:
    ones = float(bernoulli_at(shape, p, 3, 1, *whole(shape), torch.bool, "cpu").sum())
    count = 1 << 23
    assert abs(ones - count * p) < 5 * (count * p * (1 - p)) ** 0.5


def test_calls_and_seeds_do_not_correlate() -> None:
    size = 1 << 14
    rows = [uniform((size,), seed, call) for seed in (0, 1, 2, 3, 1 << 32, 7 << 40) for call in range(8)]
    correlation = torch.corrcoef(torch.stack(rows).double()).fill_diagonal_(0)
    assert float(correlation.abs().max()) < 5 / size**0.5


@pytest.mark.parametrize("shape", [(1 << 16,), (256, 256), (1024, 64)], ids=str)
def test_no_call_permutes_the_numbers_of_another(shape: tuple[int, ...]) -> None:
    """Numbers of one call or two are equal only by chance: n² / 2³³ pairs in one call, n² / 2³² of two calls."""
    bits = position_bits.random_bits
    size = 1 << 16
    calls = [bits(shape, 1, call, 0, *whole(shape), torch.device("cpu")).flatten() for call in range(24)]
    shared = [int(torch.isin(a, b).sum()) for i, a in enumerate(calls) for b in calls[:i]]
    assert max(shared) < 16 and abs(sum(shared) / len(shared) - size**2 / 2**32) < 0.3
    assert sum(size - len(call.unique()) for call in calls) < 30


def test_normal_numbers_are_normal() -> None:
    for dtype in (torch.float32, torch.float64):
        z = normal_at((N,), 0.0, 1.0, 1, 0, *whole((N,)), dtype, "cpu").double()
        for power, moment, spread in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
            assert abs(float((z**power).mean()) - moment) < 5 * (spread / N) ** 0.5
        assert 4.2 < float(z.abs().max()) < 6
        assert bool(torch.isfinite(z).all())
    z = normal_at((N,), 3.0, 0.5, 1, 0, *whole((N,)), F32, "cpu")
    assert abs(float(z.mean()) - 3) < 0.005 and abs(float(z.std()) - 0.5) < 0.005


def test_exponential_numbers() -> None:
    e = exponential_at((N,), 2.0, 1, 0, *whole((N,)), F32, "cpu")
    assert float(e.min()) > 0 and bool(torch.isfinite(e.log()).all())
    assert abs(float(e.mean()) - 0.5) < 5 * 0.5 / N**0.5
    assert abs(float((e > 1).double().mean()) - 0.1353) < 0.004


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_dropout(p: float) -> None:
    x = torch.randn(N, generator=torch.Generator().manual_seed(0))
    out, mask = dropout_at(x, p, 1, 0, *whole((N,)))
    assert mask.dtype == torch.bool and out.dtype == x.dtype
    assert abs(float(mask.double().mean()) - (1 - p)) <= 5 * (p * (1 - p) / N) ** 0.5
    scale = 0.0 if p == 1 else 1 / (1 - p)
    assert torch.equal(out, x * mask * scale)
    assert torch.equal(out, aten.native_dropout_backward.default(x, mask, scale))


@pytest.mark.parametrize("p", [0.0, 0.2, 1.0])
def test_bernoulli(p: float) -> None:
    found = bernoulli_at((N,), p, 1, 0, *whole((N,)), F32, "cpu")
    assert set(found.unique().tolist()) <= {0.0, 1.0}
    assert abs(float(found.mean()) - p) <= 5 * (p * (1 - p) / N) ** 0.5
    probability = torch.linspace(0, 1, 5, dtype=torch.float64).repeat_interleave(N // 4)
    drawn = bernoulli_of_at(probability, 1, 0, *whole(tuple(probability.shape)))
    means = drawn.view(5, -1).mean(1)
    assert means[0] == 0 and means[4] == 1
    assert float((means - torch.linspace(0, 1, 5).double()).abs().max()) < 5 * 0.5 / (N / 4) ** 0.5


@pytest.mark.parametrize("dtype, digits", [(torch.float16, 11), (torch.bfloat16, 8)])
def test_narrow_types_never_reach_one(dtype: torch.dtype, digits: int) -> None:
    u = uniform((N,), dtype=dtype)
    assert u.dtype == dtype and float(u.max()) == 1 - 2.0**-digits and float(u.min()) == 0
    scaled = uniform_at((N,), 1.0, 2.0, 1, 0, *whole((N,)), dtype, "cpu")
    assert float(scaled.min()) >= 1 and float(scaled.max()) < 2


def test_integers() -> None:
    found = randint_at((N,), -3, 4, 1, 0, *whole((N,)), torch.int64, "cpu")
    counts = torch.bincount(found + 3)
    assert counts.shape == (7,) and float((counts - N / 7).abs().max()) < 5 * (N / 7) ** 0.5
    wide = randint_at((N,), 0, 2**62, 1, 0, *whole((N,)), torch.int64, "cpu").double() / 2**62
    assert abs(float(wide.mean()) - 0.5) < 5 / (12 * N) ** 0.5 and float(wide.max()) > 0.9999
    narrow = randint_at((N,), 0, 2**31, 1, 0, *whole((N,)), torch.int64, "cpu").double() / 2**31
    assert abs(float(narrow.mean()) - 0.5) < 5 / (12 * N) ** 0.5


def test_permutation() -> None:
    found = randperm_at(1000, 1, 0, torch.int64, "cpu")
    assert torch.equal(found.sort().values, torch.arange(1000))
    assert abs(float(torch.corrcoef(torch.stack([found.double(), torch.arange(1000).double()]))[0, 1])) < 0.15
    assert not torch.equal(found, randperm_at(1000, 2, 0, torch.int64, "cpu"))


# Rules

RULED = [
    (uniform_at, [(4, 8), 0.0, 1.0], [F32, "cpu"]),
    (normal_at, [(4, 8), 0.0, 1.0], [F32, "cpu"]),
    (exponential_at, [(4, 8), 1.0], [F32, "cpu"]),
    (bernoulli_at, [(4, 8), 0.4], [F32, "cpu"]),
    (randint_at, [(4, 8), 0, 100], [torch.int64, "cpu"]),
    (dropout_at, [torch.arange(32.0).view(4, 8), 0.3], []),
    (bernoulli_of_at, [torch.linspace(0, 1, 32).view(4, 8)], []),
]


@pytest.mark.parametrize("ways", [2, 4])
@pytest.mark.parametrize("starts, all_", [((0, 0), (4, 8)), ((4, 16), (12, 32))])
@pytest.mark.parametrize("target, before, after", RULED, ids=[target.__name__ for target, _, _ in RULED])
def test_rules(
    ways: int, starts: tuple[int, ...], all_: tuple[int, ...], target: Any, before: list[Any], after: list[Any]
) -> None:
    call, tensors = call_of(target, [*before, torch.tensor(9), 3, starts, all_, *after], ways=ways)
    assert check_call(call, tensors) == []
    given = "S({0}), R" if isinstance(before[0], torch.Tensor) else "R"
    outputs = ", ".join(["S({0})"] * len(call.outputs))
    have = [describe(strategy) for strategy in compute_strategies(call)]
    assert have[1:] == [f"{given.format(d)} -> {outputs.format(d)}" for d in (0, 1)]


def test_starts_of_an_earlier_axis_may_be_anything() -> None:
    """After one axis is divided, a start is a value of the graph, which the next axis passes on or adds to."""
    call, _ = call_of(dropout_at, [torch.ones(4, 8), 0.3, torch.tensor(9), 3, (0, 0), (4, 16)])
    start = object()
    later = type(call)(call.target, (*call.args[:4], (0, start), (4, 16)), (), call.inputs, call.outputs, 2)
    rows, columns = compute_strategies(later)[1:]
    assert rows.inputs[0] == Shard(0)
    assert rows.steps[0] == Step(shift, (0, INDEX, 2))
    assert rows.steps[1] == Step(dropout_at, (Ref(0), 0.3, Ref(1), 3, (Result(0), start), (4, 16)))
    assert columns.steps[0] == Step(shift, (start, INDEX, 4))
    assert columns.steps[1] == Step(dropout_at, (Ref(0), 0.3, Ref(1), 3, (0, Result(0)), (4, 16)))


def test_two_axes_one_after_the_other() -> None:
    """Both axes divide the same dimension: starts add up."""
    shape = (8, 3)
    full = uniform(shape, 4, 1)
    found = []
    for a, b in product(range(2), range(2)):
        start = shift(shift(0, a, 4), b, 2)
        found.append(uniform_at((2, 3), 0.0, 1.0, 4, 1, (start, 0), shape, F32, "cpu"))
    assert torch.equal(torch.cat(found), full)


@pytest.mark.parametrize("ways", [2, 4])
def test_dropout_backward_rule(ways: int) -> None:
    mask = torch.rand(4, 8, generator=torch.Generator().manual_seed(0)) < 0.5
    args = [torch.arange(32.0, dtype=torch.float64).view(4, 8), mask, 2.0]
    call, tensors = call_of(aten.native_dropout_backward.default, args, ways=ways)
    assert check_call(call, tensors) == []
    have = [describe(strategy) for strategy in compute_strategies(call)]
    for wanted in ("R, R -> R", "S(0), S(0) -> S(0)", "S(1), S(1) -> S(1)", "P, R -> P"):
        assert wanted in have


# Replacing torch's ops

X = torch.full((4, 6), 0.5)
REPLACED: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
    (aten.native_dropout.default, (X, 0.3, True), {}),
    (aten.native_dropout.default, (X, 0.3, None), {}),
    (aten.rand.default, ([4, 6],), {"dtype": torch.float64}),
    (aten.rand_like.default, (X,), {}),
    (aten.uniform.default, (X, -1.0, 2.0), {}),
    (aten.randn.default, ([4, 6],), {}),
    (aten.randn_like.default, (X,), {"dtype": torch.bfloat16}),
    (aten.normal_functional.default, (X, 1.0, 2.0), {}),
    (aten.normal.float_float, (1.0, 2.0, [4, 6]), {}),
    (aten.exponential.default, (X,), {"lambd": 3.0}),
    (aten.bernoulli.p, (X, 0.25), {}),
    (aten.bernoulli.default, (X,), {}),
    (aten.randint.default, (10, [4, 6]), {}),
    (aten.randint.low, (-10, 10, [4, 6]), {"dtype": torch.int32}),
    (aten.randint_like.default, (X, 10), {}),
    (aten.randint_like.low_dtype, (X, 5, 10), {}),
    (aten.random.to, (X, 10), {}),
    (getattr(aten.random, "from"), (X, 5, 10), {}),
    (aten.randperm.default, (24,), {}),
]


@pytest.mark.parametrize("target, args, kwargs", REPLACED, ids=[str(target) for target, _, _ in REPLACED])
def test_replacements_have_the_results_of_the_op(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    replacement = counter_based(target)
    assert replacement is not None
    call, tensors = call_of(target, args, kwargs)
    given = {name: tensors[value.index] if isinstance(value, Ref) else value for name, value in call.bound().items()}
    spec = call.outputs[0]
    assert spec is not None
    converted = replacement.convert(given, spec, torch.tensor(3), 5)
    assert converted is not None
    out = replacement.function(*converted)
    results = out if isinstance(out, tuple) else (out,)
    assert [TensorSpec.of(result) for result in results] == list(call.outputs)
    assert replacement.function.commfuse_pure  # type: ignore[attr-defined]
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(arg) if isinstance(arg, torch.Tensor) else arg for arg in converted]
        out = replacement.function(*fake)
        assert [TensorSpec.of(r) for r in (out if isinstance(out, tuple) else (out,))] == list(call.outputs)


def test_calls_that_stay() -> None:
    spec = TensorSpec.of(X)
    dropout = counter_based(aten.native_dropout.default)
    assert dropout is not None
    assert dropout.convert({"input": X, "p": 0.3, "train": False}, spec, 0, 0) is None
    own = counter_based(aten.bernoulli.p)
    assert own is not None
    assert own.convert({"self": X, "p": 0.3, "generator": torch.Generator()}, spec, 0, 0) is None
    open_end = counter_based(getattr(aten.random, "from"))
    assert open_end is not None
    assert open_end.convert({"self": X, "from": 5, "to": None, "generator": None}, spec, 0, 0) is None
    assert counter_based(aten.add.Tensor) is None


def test_inputs_stay_as_they_are() -> None:
    x, seed = torch.ones(64), torch.tensor(11)
    dropout_at(x, 0.5, seed, 0, *whole((64,)))
    assert torch.equal(x, torch.ones(64)) and int(seed) == 11
    probability = torch.full((64,), 0.5)
    bernoulli_of_at(probability, seed, 0, *whole((64,)))
    assert torch.equal(probability, torch.full((64,), 0.5))


SHAPES = [(3, 50, 70), (2, 3000), (3000,), (1200, 2)]


@pytest.mark.parametrize("start", [0, (1 << 31) - 1500], ids=["positions of 32 bits", "positions of 64 bits"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("at_once", [100, 1500])
def test_what_is_mixed_at_once_does_not_show(
    shape: tuple[int, ...], start: int, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts = (start, *[0] * (len(shape) - 1))
    rest = (5, 1, starts, (start + shape[0] + 1, *shape[1:]))
    x = torch.randn(shape)

    def draw() -> list[torch.Tensor]:
        bits = position_bits.random_bits(shape, 5, 1, 2, *rest[2:], torch.device("cpu"))
        return [bits, bernoulli_at(shape, 0.3, *rest, F32, "cpu"), *dropout_at(x, 0.3, *rest)]

    found = draw()
    monkeypatch.setattr(position_bits, "_AT_ONCE", at_once)
    assert all(torch.equal(one, other) for one, other in zip(found, draw(), strict=True))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
def test_a_trace_draws_the_same_in_one_piece(shape: tuple[int, ...], p: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trace reads no seed: the keys are tensors, and numbers are written into the ops."""
    monkeypatch.setattr(position_bits, "_AT_ONCE", 512)
    place = whole(shape)

    def draw(x: torch.Tensor, seed: torch.Tensor) -> list[torch.Tensor]:
        return [*dropout_at(x, p, seed, 4, *place), bernoulli_at(shape, p, seed, 5, *place, F32, "cpu")]

    x, seed = torch.randn(shape), torch.tensor(2**40 + 3)
    traced = make_fx(draw, tracing_mode="fake")(x, seed)
    assert sum(node.target is aten.lt_.Scalar for node in traced.graph.nodes) == (2 if p == 0.3 else 1)
    assert all(torch.equal(one, other) for one, other in zip(draw(x, seed), traced(x, seed), strict=True))


def test_dropout_of_a_transposed_tensor() -> None:
    """The mask is that of the tensor's elements, and the result lies as the tensor does."""
    x = torch.randn(6, 4)
    out, mask = dropout_at(x, 0.3, 1, 0, *whole((6, 4)))
    turned, same = dropout_at(x.t().contiguous().t(), 0.3, 1, 0, *whole((6, 4)))
    assert torch.equal(out, turned) and torch.equal(mask, same) and turned.stride() == (1, 6)
