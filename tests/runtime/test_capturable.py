"""What of a program keeps a step out of a CUDA graph. Programs are from text, so no GPU is needed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from commfuse_fx.ir.core.meta import info, tensor_spec
from commfuse_fx.ir.core.program import Program
from commfuse_fx.ir.text.parse_text import parse_program
from commfuse_fx.runtime.execute.cuda_graphs.capturable import obstacle

PLAIN = """
    in  %w: f32[4,4] = parameter
    in  %x: f32[2,4] = input
    fwd %/mm.0: f32[2,4] = aten.mm(%x, %w)
    fwd %/sum.0: f32[] = aten.sum(%/mm.0)
    return [%/sum.0]
"""
WRITES = PLAIN.replace("aten.mm(%x, %w)", "aten.mm(%/relu_.0, %w)").replace(
    "    fwd %/mm.0", "    fwd %/relu_.0: f32[2,4] = aten.relu_(%x)\n    fwd %/mm.0"
)
READS = PLAIN.replace(
    "    fwd %/sum.0: f32[] = aten.sum(%/mm.0)",
    "    fwd %/masked.0: f32[8] = aten.masked_select(%/mm.0, %/gt.0)\n    fwd %/sum.0: f32[] = aten.sum(%/masked.0)",
).replace("    fwd %/masked.0", "    fwd %/gt.0: b8[2,4] = aten.gt(%/mm.0, 0)\n    fwd %/masked.0")
SELECTS = """
    in  %w: f32[4,4] = parameter
    in  %x: i64[3] = input
    fwd %/index.0: f32[3,4] = aten.index.Tensor(%w, [%x])
    fwd %/sum.0: f32[] = aten.sum(%/index.0)
    return [%/sum.0]
"""
SELECTS_BY_MASK = SELECTS.replace("%x: i64[3] = input", "%x: b8[4] = input")
WRITES_SELECTED = """
    in  %w: f32[4,4] = parameter
    in  %x: i64[3] = input
    in  %value: f32[] = input
    fwd %/index_put.0: f32[4,4] = aten.index_put(%w, [%x], %value)
    fwd %/sum.0: f32[] = aten.sum(%/index_put.0)
    return [%/sum.0]
"""
WRITES_BY_MASK = WRITES_SELECTED.replace("%x: i64[3] = input", "%x: b8[4] = input")
WRITES_A_NUMBER = WRITES_BY_MASK.replace("in  %value: f32[] = input", "in  %constant: f32[] = constant").replace(
    "    fwd %/index", "    fwd %/lift.0: f32[] = aten.lift_fresh_copy(%constant)  {computed once}\n    fwd %/index"
)
WRITES_A_NUMBER = WRITES_A_NUMBER.replace("%value", "%/lift.0")
OVERLAPS = PLAIN.replace("in  %x: f32[2,4] =", "in  %x: f32[2,4](0,1) =")
MOVES = PLAIN.replace("aten.mm(%x, %w)", "aten.mm(%/to.0, %w)").replace(
    "    fwd %/mm.0", "    fwd %/to.0: f32[2,4] = aten._to_copy(%x, device=cuda)\n    fwd %/mm.0"
)


LIFTS = """
    in  %constant: f32[] = constant
    in  %x: f32[2,4] = input
    fwd %/lift_fresh_copy.0: f32[] = aten.lift_fresh_copy(%constant)  {computed once}
    fwd %/add.0: f32[2,4] = aten.add(%x, %/lift_fresh_copy.0)
    fwd %/sum.0: f32[] = aten.sum(%/add.0)
    return [%/sum.0]
"""


def program(text: str) -> Program:
    return parse_program(text, device="cuda:0")


def on_cpu(given: Program, *names: str, device: str = "cpu") -> Program:
    for node in given.graph.nodes:
        if info(node).name in names:
            info(node).spec = replace(tensor_spec(node), device=device)
    return given


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (program(PLAIN), ""),
        (program(WRITES), "the model writes to its input x"),
        (program(READS), "the host waits for the result of /masked.0"),
        (program(SELECTS), ""),
        (program(SELECTS_BY_MASK), "the host waits for the result of /index.0"),
        (program(WRITES_SELECTED), ""),
        (program(WRITES_BY_MASK), "the host waits for the result of /index_put.0"),
        (on_cpu(program(WRITES_A_NUMBER), "constant", "/lift.0"), ""),
        (program(OVERLAPS), "elements of the input x share memory"),
        (on_cpu(program(LIFTS), "constant", "/lift_fresh_copy.0"), ""),
        (on_cpu(program(LIFTS).copy(), "/add.0", device="meta"), ""),
        (on_cpu(program(PLAIN), "/mm.0"), "/mm.0 is on cpu, not on cuda"),
        (on_cpu(program(PLAIN), "x"), "x is on cpu, not on cuda"),
        (on_cpu(program(MOVES), "x"), ""),
        (parse_program(PLAIN), "w is on cpu, not on cuda"),
    ],
    ids=[
        "plain",
        "writes",
        "reads",
        "selects",
        "mask",
        "writes",
        "writes by mask",
        "a number",
        "overlaps",
        "once",
        "meta",
        "value",
        "input",
        "moved",
        "cpu",
    ],
)
def test_obstacles(given: Program, why: str) -> None:
    assert obstacle(given, "cuda") == why


def test_a_value_on_cpu_that_is_computed_once_is_no_obstacle() -> None:
    given = on_cpu(program(PLAIN), "/mm.0")
    info(next(node for node in given.graph.nodes if info(node).name == "/mm.0")).once = True
    assert obstacle(given, "cuda") == ""


def test_two_devices() -> None:
    given = program(PLAIN)
    info(next(iter(given.graph.nodes))).spec = replace(tensor_spec(next(iter(given.graph.nodes))), device="cuda:1")
    assert obstacle(given, "cuda") == "the step is on several devices, cuda:1, cuda:0"


@pytest.mark.parametrize("divided", [{"shard": "dp"}, {"rows_alone": True}])
def test_parts_of_a_parallel_optimizer(divided: dict[str, Any]) -> None:
    given = program(PLAIN)
    given.params["w"] = replace(given.params["w"], **divided)
    assert obstacle(given, "cuda").startswith("enable_parallel_optimizer=True keeps parts")
