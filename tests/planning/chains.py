"""Steps of linear layers as a capture gives them, written as text: much cheaper than to trace a model."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import pairwise

from commfuse_fx.ir.core.program import Program
from commfuse_fx.testing import parse_program


@cache
def chain(widths: Sequence[int], batch: int, ranks: int, bias: bool = True) -> Program:
    """Layers of these widths one after another, tanh behind each, and SGD. Do not change it: take a copy."""
    layers = list(enumerate(pairwise(widths)))
    inputs, forward, backward = [], [], []
    value = "x"
    for i, (width, out) in layers:
        shape, result = f"f32[{out},{width}]", f"f32[{batch},{out}]"
        inputs.append(f"in  %{i}.weight: {shape} = parameter")
        forward.append(f"fwd %{i}/t.0: f32[{width},{out}](1,{width}) = aten.t(%{i}.weight)")
        if bias:
            inputs.append(f"in  %{i}.bias: f32[{out}] = parameter")
            forward.append(f"fwd %{i}/out.0: {result} = aten.addmm(%{i}.bias, %{value}, %{i}/t.0)")
        else:
            forward.append(f"fwd %{i}/out.0: {result} = aten.mm(%{value}, %{i}/t.0)")
        forward.append(f"fwd %{i}/tanh.0: {result} = aten.tanh(%{i}/out.0)")
        value = f"{i}/tanh.0"
    forward.append(f"fwd %/sum.0: f32[] = aten.sum(%{value})")
    last = f"f32[{batch},{widths[-1]}](0,0)"
    backward.append(f"bwd %/grad.expand.0: {last} = aten.expand(%/sum.0, [{batch}, {widths[-1]}])")
    given = "/grad.expand.0"
    for i, (width, out) in reversed(layers):
        result, before = f"f32[{batch},{out}]", f"{i - 1}/tanh.0" if i else "x"
        backward += [
            f"bwd %{i}/grad.tanh.0: {result} = aten.tanh_backward(%{given}, %{i}/tanh.0)",
            f"bwd %{i}/grad.t.0: f32[{out},{batch}](1,{out}) = aten.t(%{i}/grad.tanh.0)",
            f"bwd %{i}/grad.weight: f32[{out},{width}] = aten.mm(%{i}/grad.t.0, %{before})",
        ]
        if bias:
            backward.append(f"bwd %{i}/grad.sum.0: f32[1,{out}] = aten.sum.dim_IntList(%{i}/grad.tanh.0, [0], True)")
            backward.append(f"bwd %{i}/grad.bias: f32[{out}] = aten.view(%{i}/grad.sum.0, [{out}])")
        if i:
            backward.append(f"bwd %{i}/grad.mm.0: f32[{batch},{width}] = aten.mm(%{i}/grad.tanh.0, %{i}.weight)")
        given = f"{i}/grad.mm.0"
    returned = [f"%{i}/grad.{name}" for i, _ in layers for name in ("weight", "bias")[: 1 + bias]]
    return parse_program(
        "\n".join(
            [
                f"# world: {ranks}",
                "# optimizer: SGD (sgd)",
                *inputs,
                f"in  %x: f32[{batch},{widths[0]}] = input",
                *forward,
                *backward,
                f"return [%/sum.0, {', '.join(returned)}]",
            ]
        )
    )
