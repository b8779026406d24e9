"""Look which ops see numbers of half precision that Inductor has not rounded: `python -m tests.runtime.half_jumps`.

Every op of torch's own list (OpInfo) gets x * 10 + 1 in half precision. Eager PyTorch rounds that to an integer or
half of one, where jumps of most ops are; before rounding it lies on either side. Results and gradients are compared.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import types
import unittest
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._inductor import config as inductor_config
from torch.utils._pytree import tree_leaves, tree_map

import commfuse_fx as cf
from commfuse_fx.ir.core.meta import info

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
TOGETHER = 20
"""Cases that are compiled together, as each compile takes seconds."""

LARGEST = 500
"""Elements of a tensor in a case."""

OFTEN = (0.0, 1.0, -1.0, 0.5, -0.5, 6.0, 3.0, -3.0)
"""Where ops have their jumps by default."""

FACTOR, SHIFT = 10.0, 1.0


@dataclass
class Case:
    """An op with arguments. inputs, signs: what stands for its tensors of half precision is (input * 10 + 1) * sign."""

    name: str
    run: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]
    inputs: list[torch.Tensor]
    signs: list[torch.Tensor]

    def placed(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [(x * FACTOR + SHIFT) * sign for x, sign in zip(inputs, self.signs, strict=True)]


class Places:
    """Numbers of which (x * 10 + 1) * sign is rounded to a multiple of 1/2, by that multiple.

    found: multiple -> pairs of x and sign that lie below it before rounding, and of those that lie above.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
        x = x[x.isfinite() & (x.float().abs() < 2)]
        rounded, exact = x * FACTOR + SHIFT, x.double() * FACTOR + SHIFT
        chosen = (rounded.float() * 2 == (rounded.float() * 2).round()) & (rounded.double() != exact)
        self.found: dict[float, tuple[list[Signed], list[Signed]]] = {}
        for place, number, before in zip(*(each[chosen].tolist() for each in (rounded, x, exact)), strict=True):
            for sign in (1.0, -1.0):
                sides = self.found.setdefault(sign * place, ([], []))
                sides[sign * before > sign * place].append((number, sign))
        self.values = sorted(place for place, sides in self.found.items() if all(sides))

    def inputs_like(self, tensor: torch.Tensor, turn: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What is rounded to the places next to a tensor's elements, or where jumps often are, on both sides in turns.

        turn: on which side it begins.
        """
        numbers = []
        values = tensor.detach().float().flatten().tolist()
        allowed = [place for place in self.values if place > 0] if min(values) > 0 else self.values
        often = [place for place in OFTEN if place in allowed]
        for count, value in enumerate(values):
            near = min(allowed, key=lambda each: abs(each - value) if value == value else each)
            place = near if count % 3 == 0 else often[count // 3 % len(often)]
            side = self.found[place][(count + turn) % 2]
            numbers.append(side[count // 2 % len(side)])
        both = torch.tensor(numbers, dtype=tensor.dtype)
        return both[:, 0].reshape(tensor.shape), both[:, 1].reshape(tensor.shape)


Signed = tuple[float, float]


def cases_of(op: Any, dtype: torch.dtype, places: Places, at_most: int) -> Iterator[Case]:
    samples = itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=False), 12)
    usable = [each for each in samples if 0 < _elements(each) <= LARGEST]
    for number, sample in enumerate(usable[:: max(1, len(usable) // at_most)][:at_most]):
        arguments = (sample.input, sample.args, sample.kwargs)
        found = [leaf for leaf in tree_leaves(arguments) if _is_half(leaf) and leaf.numel()]
        made = [places.inputs_like(leaf, turn) for turn, leaf in enumerate(found)]
        if made:
            name = f"{op.formatted_name} {number}"
            yield Case(name, _runner(op.op, arguments), [x for x, _ in made], [sign for _, sign in made])


def _elements(sample: Any) -> int:
    found = [leaf.numel() for leaf in tree_leaves((sample.input, sample.args, sample.kwargs)) if _is_half(leaf)]
    return max(found, default=0)


def _is_half(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dtype in DTYPES.values()


def _runner(op: Callable[..., Any], arguments: Any) -> Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]:
    def run(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        left = iter(inputs)
        given, args, kwargs = tree_map(lambda leaf: next(left) if _is_half(leaf) and leaf.numel() else leaf, arguments)
        return [leaf for leaf in tree_leaves(op(given, *args, **kwargs)) if isinstance(leaf, torch.Tensor)]

    return run


class Cases(nn.Module):
    """A loss of all results of several cases, and these."""

    def __init__(self, cases: Sequence[Case]) -> None:
        super().__init__()
        self.cases = cases
        self.inputs = nn.ParameterList([nn.Parameter(each) for case in cases for each in case.inputs])

    def forward(self) -> tuple[torch.Tensor, list[list[torch.Tensor]]]:
        left = iter(self.inputs)
        placed = [case.placed([next(left) for _ in case.inputs]) for case in self.cases]
        results = [case.run(inputs) for case, inputs in zip(self.cases, placed, strict=True)]
        return weighed(tree_leaves([placed, results])), results


def weighed(results: Sequence[torch.Tensor]) -> torch.Tensor:
    """A sum with other weights for neighbours."""
    loss = torch.zeros((), dtype=torch.float64)
    for result in results:
        if result.requires_grad and result.is_floating_point():
            weights = torch.arange(1.0, 1.0 + result.numel()).view(result.shape).remainder(7) + 1
            loss = loss + (result * weights.to(result.dtype)).double().sum()
    return loss


Found = list[tuple[torch.Tensor, ...]]


def jumps(case: Case) -> list[str]:
    """How results and gradients in double precision differ between rounded inputs and those right beside them."""
    rounded = [each.double() for each in case.placed(case.inputs)]
    exact = case.placed([each.double() for each in case.inputs])
    beside = [at + (number - at) * 1e-6 for at, number in zip(rounded, exact, strict=True)]
    pairs = [*zip(_results(case, beside), _results(case, rounded), strict=True)]
    same_shape = [pair for pair in pairs if pair[0].shape == pair[1].shape]
    if len(same_shape) < len(pairs):
        return ["other shapes"]
    finite = [one.isfinite() & other.isfinite() for one, other in pairs]
    have, want = ([pair[side].where(at, 0) for pair, at in zip(pairs, finite, strict=True)] for side in (0, 1))
    return differences(have, want)


def _results(case: Case, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    torch.manual_seed(0)
    inputs = [each.detach().requires_grad_() for each in inputs]
    results = case.run(inputs)
    loss = weighed(results)
    grads = torch.autograd.grad(loss, inputs, allow_unused=True) if loss.requires_grad else ()
    return [*(each.detach() for each in results), *(each for each in grads if each is not None)]


def is_rounded(case: Case) -> bool:
    """Whether whatever the op gets is rounded in the plan of a step."""
    program = cf.compile(Cases([case]), backend="inductor", form="step", has_aux=True).lower().program
    for node in program.graph.nodes:
        if node.op == "placeholder" and program.sources[node].kind == "parameter":
            (scaled,) = [user for user in node.users if info(user).phase == "forward"]
            if info(scaled).region is not None and not info(scaled).rounded:
                return False
    return True


def computed(cases: Sequence[Case], compiled: bool) -> Found:
    """By case the results, and the gradients of the inputs."""
    model = Cases(cases)
    torch.manual_seed(0)
    if compiled:
        _, results = cf.compile(model, backend="inductor", form="step", has_aux=True)()
    else:
        loss, results = model()
        if loss.requires_grad:
            loss.backward()
    left = iter(model.inputs)
    gradients = [[next(left).grad for _ in case.inputs] for case in cases]
    return [
        (*(each.detach() for each in result), *(torch.zeros(()) if each is None else each for each in grads))
        for result, grads in zip(results, gradients, strict=True)
    ]


def differences(have: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> list[str]:
    """What differs by more than rounding: a jump."""
    found = []
    for number, (one, other) in enumerate(zip(have, want, strict=True)):
        if one.shape != other.shape or one.dtype != other.dtype:
            found.append(f"{number}: {one.dtype} {tuple(one.shape)} for {other.dtype} {tuple(other.shape)}")
            continue
        one, other = (torch.view_as_real(each) if each.is_complex() else each for each in (one, other))
        exactly = not one.is_floating_point()
        one, other = one.double(), other.double()
        finite = other.isfinite()
        scale = float(other[finite].abs().max()) if finite.any() else 0.0
        off = ~torch.isclose(
            one, other, rtol=0.0 if exactly else 0.03, atol=0.0 if exactly else max(0.01 * scale, 1e-6), equal_nan=True
        )
        if off.any():
            place = int(off.flatten().nonzero()[0])
            pair = f"{float(one.flatten()[place]):.4g} for {float(other.flatten()[place]):.4g}"
            found.append(f"{number}: {int(off.sum())} of {off.numel()}, {pair}")
    return found


def compare(cases: Sequence[Case]) -> Iterator[tuple[str, list[str]]]:
    """Each case with what differs; halves of what cannot be compiled together by themselves."""
    try:
        have, want = computed(cases, compiled=True), computed(cases, compiled=False)
    except Exception as error:
        if len(cases) == 1:
            yield cases[0].name, [f"raises {type(error).__name__}: {str(error).strip().splitlines()[:1]}"]
            return
        for some in (cases[: len(cases) // 2], cases[len(cases) // 2 :]):
            yield from compare(some)
        return
    for case, one, other in zip(cases, have, want, strict=True):
        yield case.name, differences(one, other)


def all_cases(dtype: torch.dtype, names: Sequence[str], at_most: int) -> Iterator[Case]:
    """Those of ops that draw nothing, and of which eager PyTorch computes something in double precision."""
    # torch's list imports a tool of its own tests, which nothing here calls.
    sys.modules.setdefault("expecttest", types.ModuleType("expecttest")).TestCase = unittest.TestCase  # type: ignore[attr-defined]
    from torch.testing._internal.common_methods_invocations import op_db

    places = Places(dtype)
    for op in op_db:
        if dtype not in op.dtypes or (names and op.name not in names) or "empty" in op.name:
            continue
        with suppress(Exception):  # of samples that cannot be made without a GPU, and the like
            for case in cases_of(op, dtype, places, at_most):
                inputs = [each.double() for each in case.inputs]
                if not differences(_results(case, inputs), _results(case, inputs)):
                    yield case


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", choices=list(DTYPES), default="bfloat16")
    parser.add_argument("--ops", nargs="+", default=())
    parser.add_argument("--samples", type=int, default=2, help="of each op")
    parser.add_argument("--quick", action="store_true", help="let the C++ compiler optimize nothing")
    parser.add_argument("--compile", action="store_true", help="compile cases with a jump, and compare the results")
    given = parser.parse_args()
    cases = [*all_cases(DTYPES[given.dtype], given.ops, given.samples)]
    found = {case.name: jumps(case) for case in cases}
    failed = 0
    cases = [case for case in cases if found[case.name]]
    for case in [] if given.compile else cases:
        try:
            rounded = is_rounded(case)
        except cf.CommFuseError as error:  # an op that no step takes
            print(f"{case.name}: refused, {str(error).splitlines()[0][:100]}")
            continue
        failed += not rounded
        print(f"{case.name}: {'; '.join(found[case.name])}{'' if rounded else ' NOT ROUNDED'}", flush=True)
    print(f"{len(cases)} of {len(found)} cases have a jump, {failed} are not rounded", flush=True)
    if not given.compile:
        return int(failed > 0)
    with inductor_config.patch({"aot_inductor.debug_compile": given.quick}):
        for begin in range(0, len(cases), TOGETHER):
            for name, text in compare(cases[begin : begin + TOGETHER]):
                if text:
                    failed += 1
                    print(f"{name}: {'; '.join(text)}", flush=True)
    print(f"{failed} of {len(cases)} cases differ")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
