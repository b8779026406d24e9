"""Work and traffic of ops, against formulas written out by hand."""

from __future__ import annotations

import dataclasses
import operator

import pytest
import torch
from torch import fx

import commfuse_fx as cf
from commfuse_fx.cost.model import CostModel, profile_key, update_elements
from commfuse_fx.cost.roofline import flops_and_bytes, flops_rate, is_free, roofline_seconds
from commfuse_fx.errors import ConfigTypeError, ConfigValueError
from commfuse_fx.ir.core.functions import axis_index, optimizer_step
from commfuse_fx.ir.core.meta import TensorSpec, info
from commfuse_fx.ir.ops.redistribution import own_part
from commfuse_fx.sharding.rules.ops.softmax import maximum_of_part
from tests.cost.graphs import CLUSTER, CORE, Graph, aten, f32
from tests.models import CASES, Case


def test_matrix_products() -> None:
    g = Graph()
    a, b, bias = g.input("a", f32(3, 5)), g.input("b", f32(5, 7)), g.input("bias", f32(7))
    mm = g.op("mm", a, b, target=aten.mm.default, spec=f32(3, 7))
    assert flops_and_bytes(mm) == (2 * 3 * 5 * 7, 4 * (15 + 35 + 21))
    addmm = g.op("addmm", bias, a, b, target=aten.addmm.default, spec=f32(3, 7))
    assert flops_and_bytes(addmm) == (2 * 3 * 5 * 7, 4 * (7 + 15 + 35 + 21))
    x, y, z = g.input("x", f32(2, 3, 5)), g.input("y", f32(2, 5, 7)), g.input("z", f32(2, 3, 7))
    bmm = g.op("bmm", x, y, target=aten.bmm.default, spec=f32(2, 3, 7))
    assert flops_and_bytes(bmm) == (2 * 2 * 3 * 5 * 7, 4 * (30 + 70 + 42))
    baddbmm = g.op("baddbmm", z, x, y, target=aten.baddbmm.default, spec=f32(2, 3, 7))
    assert flops_and_bytes(baddbmm)[0] == 2 * 2 * 3 * 5 * 7


def test_a_product_into_given_memory_does_not_read_it() -> None:
    g = Graph()
    a, b, out = g.input("a", f32(3, 5)), g.input("b", f32(5, 7)), g.input("out", f32(3, 7))
    node = g.graph.call_function(aten.mm.out, (a, b), {"out": out})
    node.meta["commfuse"] = dataclasses.replace(info(a), spec=f32(3, 7), name="into")
    assert flops_and_bytes(node) == (2 * 3 * 5 * 7, 4 * (15 + 35 + 21))


@pytest.mark.parametrize(("groups", "transposed"), [(1, False), (2, False), (1, True), (2, True)])
def test_convolution_agrees_with_torch(groups: int, transposed: bool) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    x = torch.randn(2, 4, 9, 8, requires_grad=True)
    weight = torch.randn(4 if transposed else 6, (6 if transposed else 4) // groups, 3, 2, requires_grad=True)
    args = (None, [2, 1], [1, 0], [1, 1], transposed, [0, 0], groups)
    with FlopCounterMode(display=False) as counted:
        out = torch.convolution(x, weight, *args)
    g = Graph()
    nodes = [g.input(name, TensorSpec.of(value)) for name, value in (("x", x), ("w", weight), ("grad", out))]
    forward = g.op("conv", nodes[0], nodes[1], *args, target=aten.convolution.default, spec=TensorSpec.of(out))
    flops, traffic = flops_and_bytes(forward)
    assert flops == counted.get_total_flops()
    assert traffic == 4 * (x.numel() + weight.numel() + out.numel())
    for mask, times in (([True, True, False], 2), ([False, True, True], 1), ([False, False, True], 0)):
        backward = g.op(
            f"backward{mask}", nodes[2], nodes[0], nodes[1], [6], *args[1:], mask,
            target=aten.convolution_backward.default, spec=(None, TensorSpec.of(weight), None),
        )  # fmt: skip
        assert flops_and_bytes(backward)[0] == times * flops


def test_attention() -> None:
    g = Graph()
    q, k, v = (g.input(name, f32(2, 3, length, 16)) for name, length in (("q", 5), ("k", 7), ("v", 7)))
    target = aten._scaled_dot_product_flash_attention_for_cpu.default
    spec = (f32(2, 3, 5, 16), f32(2, 3, 5))
    product = 2 * 2 * 3 * 5 * 7 * 16
    node = g.op("attention", q, k, v, target=target, spec=spec)
    assert flops_and_bytes(node) == (2 * product, 4 * (480 + 2 * 672 + 480 + 30))
    causal = g.op("causal", q, k, v, 0.0, True, target=target, spec=spec)
    assert flops_and_bytes(causal)[0] == product
    out, lse = (
        g.op("out", node, 0, target=operator.getitem, spec=spec[0]),
        g.op("lse", node, 1, target=operator.getitem),
    )
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    grads = (f32(2, 3, 5, 16), f32(2, 3, 7, 16), f32(2, 3, 7, 16))
    node = g.op("backward", out, q, k, v, out, lse, 0.0, False, target=backward, spec=grads)
    assert flops_and_bytes(node)[0] == 5 * product


def test_elementwise_ops_read_and_write() -> None:
    g = Graph()
    a, b = g.input("a", f32(10)), g.input("b", f32(10))
    assert flops_and_bytes(g.op("add", a, b, spec=f32(10))) == (0, 120)
    assert flops_and_bytes(g.op("add_", a, b, target=aten.add_.Tensor, spec=f32(10))) == (0, 120)
    assert flops_and_bytes(g.op("double", a, a, spec=f32(10))) == (0, 80), "one argument is read once"
    assert flops_and_bytes(g.op("copy", a, b, target=aten.copy_.default, spec=f32(10))) == (0, 80)
    assert flops_and_bytes(g.op("zero", a, target=aten.zero_.default, spec=f32(10))) == (0, 40)
    expanded = g.op("expand", a, [5, 10], target=aten.expand.default, spec=TensorSpec((5, 10), torch.float32, (0, 1)))
    assert flops_and_bytes(expanded) == (0, 0)
    assert flops_and_bytes(g.op("sum", expanded, expanded, spec=f32(5, 10))) == (0, 40 + 200)


def test_an_embedding_reads_the_rows_it_picks() -> None:
    g = Graph()
    table, rows = g.input("table", f32(1000, 8)), g.input("rows", TensorSpec((3,), torch.int64, (1,)))
    node = g.op("embed", table, rows, target=aten.embedding.default, spec=f32(3, 8))
    assert flops_and_bytes(node) == (0, 96 + 24 + 96)


def test_lists_of_an_update() -> None:
    g = Graph()
    params, grads = [g.input("p", f32(10)), g.input("q", f32(6))], [g.input("gp", f32(10)), g.input("gq", f32(6))]
    momentum = g.input("momentum", (f32(10), f32(6)))
    target = aten._foreach_addcdiv_.Scalar
    node = g.op("update", params, grads, momentum, 1, target=target, phase="update")
    assert flops_and_bytes(node) == (0, 4 * (3 * 16 + 16))
    assert update_elements(node) == 16
    scaled = g.op("scale", momentum, 0.9, target=aten._foreach_mul_.Scalar, phase="update")
    assert flops_and_bytes(scaled) == (0, 4 * 2 * 16)
    assert update_elements(scaled) == 16
    opaque = g.op("step", params, grads, target=optimizer_step, phase="update")
    info(opaque).spec = None
    assert flops_and_bytes(opaque) == (0, 4 * (2 * 16 + 16))


def test_what_is_free() -> None:
    g = Graph()
    a, number = g.input("a", f32(4, 4)), g.input("number")
    start = g.start("reduce", a)
    free = [
        a,
        start,
        g.wait(start),
        g.op("view", a, [16], target=aten.view.default),
        g.op("unsafe", a, [16], target=aten._unsafe_view.default),
        g.op("item", a, 0, target=operator.getitem),
        g.op("rank", "dp", target=axis_index),
        g.op("minus", 1, number, target=operator.sub),
    ]
    info(free[-2]).spec = None
    for node in free:
        assert is_free(node) and flops_and_bytes(node) == (0, 0) and roofline_seconds(node, CORE) == 0
    memory = g.op("memory", [16], target=aten.empty.memory_format)
    assert not is_free(memory)
    assert flops_and_bytes(memory) == (0, 0) and roofline_seconds(memory, CORE) == CORE.op_overhead
    info(memory).kept = True
    assert roofline_seconds(memory, CORE) == 0


def test_functions_of_the_compiler_take_as_long_as_their_tensors_say() -> None:
    g = Graph()
    rows = g.input("rows", f32(4, 8))
    own = g.op("own", rows, 0, 2, 0, 1, target=own_part)
    assert is_free(own)
    largest = g.op("largest", rows, -1, target=maximum_of_part)
    info(largest).spec = f32(4, 1)
    assert flops_and_bytes(largest) == (0, 4 * (32 + 4))
    assert roofline_seconds(largest, CORE) > 0


def _mm(dtype: torch.dtype, size: int) -> fx.Node:
    g = Graph()
    a = g.input("a", f32(size, size).with_dtype(dtype))
    return g.op("mm", a, a, target=aten.mm.default, spec=f32(size, size).with_dtype(dtype))


def test_the_largest_of_work_traffic_and_overhead() -> None:
    assert roofline_seconds(_mm(torch.float32, 2), CORE) == CORE.op_overhead
    assert roofline_seconds(_mm(torch.float32, 1000), CORE) == 2e9 / 60e9
    g = Graph()
    a = g.input("a", f32(10**6))
    assert roofline_seconds(g.op("add", a, a, spec=f32(10**6)), CORE) == 8e6 / 10e9


@pytest.mark.parametrize(
    ("dtype", "rates", "want"),
    [
        (torch.float64, {"f64": 1.0, "f32": 2.0}, 1.0),
        (torch.bfloat16, {"f32": 2.0, "f16": 4.0}, 4.0),
        (torch.float16, {"f32": 2.0, "f64": 1.0}, 2.0),
        (torch.complex128, {"f32": 2.0, "f64": 1.0}, 1.0),
        (torch.float64, {"bf16": 8.0, "f16": 4.0}, 4.0),
    ],
)
def test_a_dtype_without_a_rate_gets_the_nearest(dtype: torch.dtype, rates: dict[str, float], want: float) -> None:
    assert flops_rate(_mm(dtype, 4), dataclasses.replace(CORE, flops=rates)) == want


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_node_of_every_model_has_a_price(case: Case) -> None:
    model = case.model(torch.float32)
    optimizer = torch.optim.RMSprop(model.parameters(), centered=True, momentum=0.9)
    step = cf.compile(model, loss_fn=case.loss_fn, optimizer=optimizer, device_num=8, global_rank=0)
    program = step.lower(*case.batches(1, dtype=torch.float32)[0]).program
    products = 0
    for node in program.graph.nodes:
        flops, traffic = flops_and_bytes(node)
        seconds = roofline_seconds(node, CORE)
        assert (seconds == 0) == (is_free(node) or info(node).kept)
        assert seconds >= max(flops / 60e9, traffic / 10e9)
        products += flops > 0
    assert products >= 2


def test_measured_times_come_first() -> None:
    node = _mm(torch.float32, 1000)
    assert CostModel(CLUSTER).compute_seconds(node) == roofline_seconds(node, CORE)
    assert CostModel(CLUSTER, {"mm": 0.25}).compute_seconds(node) == 0.25
    info(node).origin = "layer/mm.0"
    assert profile_key(node) == "layer/mm.0"
    assert CostModel(CLUSTER, {"mm": 0.25, "layer/mm.0": 0.5}).compute_seconds(node) == 0.5


def test_updates_are_measured_per_element() -> None:
    g = Graph()
    params, grads = [g.input("p", f32(10))], [g.input("gp", f32(10))]
    target = aten._foreach_add_.List
    node = g.op("update", params, grads, target=target, phase="update")
    per_element = {"update.per_element/_foreach_add_": 0.5}
    assert CostModel(CLUSTER, per_element).compute_seconds(node) == pytest.approx(5.0 + CLUSTER.device.op_overhead)
    # Not its own time: how much an update works on changes with fusion.
    assert CostModel(CLUSTER, {**per_element, "update": 1.0}).compute_seconds(node) > 5.0
    assert CostModel(CLUSTER, {"update": 1.0}).compute_seconds(node) == 1.0
    elsewhere = g.op("accumulate", params, grads, target=target)
    assert CostModel(CLUSTER, per_element).compute_seconds(elsewhere) == roofline_seconds(elsewhere, CORE)


def test_bad_measurements_are_refused() -> None:
    with pytest.raises(ConfigValueError, match="mm"):
        CostModel(CLUSTER, {"mm": -1.0})
    with pytest.raises(ConfigTypeError, match="node_seconds"):
        CostModel(CLUSTER, [1.0])  # type: ignore[arg-type]
