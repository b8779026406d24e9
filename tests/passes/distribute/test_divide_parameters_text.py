"""What `divide_parameters` makes of a few lines of text, and what it leaves."""

from dataclasses import replace

import pytest

from commfuse_fx.errors import NotAvailableError
from commfuse_fx.ir.text.write_text import canonical_text
from commfuse_fx.passes.distribute.divide_parameters import DivideParameters
from tests.passes.cases import check, read

HEADER = """
    # enable_parallel_optimizer: True
    # parallel_optimizer_config: parallel_optimizer_threshold=0, pad=True, level=3
"""
FORWARD = """
    in  %w: f32[3,2] = parameter
    in  %v: f32[2,2] = parameter
    in  %row: f32[1,2] = parameter
    in  %x: f32[2,3] = input
    fwd %/mm.0: f32[2,2] = aten.mm(%x, %w)
    fwd %/mm.1: f32[2,2] = aten.mm(%/mm.0, %v)
    fwd %outputs: (f32[2,2]) = hand_over([%/mm.1])
    bwd %output.grad: f32[2,2] = getitem(%outputs, 0)
    bwd %/grad.t.0: f32[2,2](1,2) = aten.t(%v)
    bwd %/grad.mm.0: f32[2,2] = aten.mm(%output.grad, %/grad.t.0)
    bwd %/grad.t.1: f32[3,2](1,3) = aten.t(%x)
    bwd %/grad.mm.1: f32[3,2] = aten.mm(%/grad.t.1, %/grad.mm.0)
"""
REDUCED = f"""{HEADER}{FORWARD}
    bwd %reduce/w/all_reduce: f32[3,2] = _c10d_functional.all_reduce(%/grad.mm.1, avg, dp)  {{group=dp(2) op=avg dtype=f32 bytes=24 members=[w]}}
    bwd %reduce/w/wait: f32[3,2] = _c10d_functional.wait_tensor(%reduce/w/all_reduce)
    return [%outputs, %reduce/w/wait]
"""
LOCAL = f"{HEADER}{FORWARD}    return [%outputs, %/grad.mm.1]\n"


def test_both_halves_gather_what_they_use_and_a_reduced_gradient_is_scattered() -> None:
    made = check(
        REDUCED,
        DivideParameters(),
        """
        in  %w: f32[2,2] = parameter
        in  %v: f32[1,2] = parameter
        in  %row: f32[1,2] = parameter
        in  %x: f32[2,3] = input
        fwd %shard/w/all_gather: f32[4,2] = _c10d_functional.all_gather_into_tensor(%w, 2, dp)  {group=dp(2) dtype=f32 bytes=24 members=[w]}
        fwd %shard/w/wait: f32[4,2] = _c10d_functional.wait_tensor(%shard/w/all_gather)
        fwd %shard/w/without_padding: f32[3,2] = aten.narrow(%shard/w/wait, 0, 0, 3)
        fwd %/mm.0: f32[2,2] = aten.mm(%x, %shard/w/without_padding)
        fwd %shard/v/all_gather: f32[2,2] = _c10d_functional.all_gather_into_tensor(%v, 2, dp)  {group=dp(2) dtype=f32 bytes=16 members=[v]}
        fwd %shard/v/wait: f32[2,2] = _c10d_functional.wait_tensor(%shard/v/all_gather)
        fwd %/mm.1: f32[2,2] = aten.mm(%/mm.0, %shard/v/wait)
        fwd %outputs: (f32[2,2]) = hand_over([%/mm.1])
        bwd %output.grad: f32[2,2] = getitem(%outputs, 0)
        bwd %shard/v/again/all_gather: f32[2,2] = _c10d_functional.all_gather_into_tensor(%v, 2, dp)  {group=dp(2) dtype=f32 bytes=16 members=[v]}
        bwd %shard/v/again/wait: f32[2,2] = _c10d_functional.wait_tensor(%shard/v/again/all_gather)
        bwd %/grad.t.0: f32[2,2](1,2) = aten.t(%shard/v/again/wait)
        bwd %/grad.mm.0: f32[2,2] = aten.mm(%output.grad, %/grad.t.0)
        bwd %/grad.t.1: f32[3,2](1,3) = aten.t(%x)
        bwd %/grad.mm.1: f32[3,2] = aten.mm(%/grad.t.1, %/grad.mm.0)
        bwd %shard/w/padded_gradient: f32[4,2] = aten.constant_pad_nd(%/grad.mm.1, [0, 0, 0, 1])
        bwd %reduce/w/reduce_scatter: f32[2,2] = _c10d_functional.reduce_scatter_tensor(%shard/w/padded_gradient, avg, 2, dp)  {group=dp(2) op=avg dtype=f32 bytes=24 members=[w]}
        bwd %reduce/w/wait: f32[2,2] = _c10d_functional.wait_tensor(%reduce/w/reduce_scatter)
        return [%outputs, %reduce/w/wait]
        """,
        gradients=["w"],
    )
    reasons = {note.subject: note.reason for note in made.notes}
    assert reasons["w"] == "2 ranks over dp update 2 rows each" and reasons["row"] == "it has one row"
    assert [name for name, param in made.params.items() if param.rows_alone] == ["w", "v"]


def test_a_gradient_of_one_rank_alone_stays_whole() -> None:
    program = read(LOCAL, gradients=["w"])
    assert DivideParameters()(program)
    text = canonical_text(program)
    assert "%w: f32[2,2]" in text and "return [%outputs, %/grad.mm.1]" in text and "%/grad.mm.1: f32[3,2]" in text


def test_a_gradient_that_a_whole_parameter_has_as_well_is_not_scattered() -> None:
    text = REDUCED.replace("%row: f32[1,2]", "%row: f32[3,2]").replace("wait]", "wait, %reduce/w/wait]")
    program = read(text.replace("members=[w]", "members=[w, row]"), gradients=["w", "row"])
    program.params["row"] = replace(program.params["row"], parallel_optimizer=False)
    assert DivideParameters()(program)
    assert "reduce_scatter" not in canonical_text(program) and program.params["w"].rows_alone


def test_a_step_is_left_to_shard_optimizer() -> None:
    check(
        f"""{HEADER}
        in  %w: f32[4] = parameter
        in  %x: f32[4] = input
        fwd %/dot.0: f32[] = aten.dot(%w, %x)
        bwd %reduce/w/all_reduce: f32[4] = _c10d_functional.all_reduce(%x, sum, dp)  {{group=dp(2) op=sum dtype=f32 bytes=16 members=[w]}}
        bwd %reduce/w/wait: f32[4] = _c10d_functional.wait_tensor(%reduce/w/all_reduce)
        return [%/dot.0, %reduce/w/wait]
        """,
        DivideParameters(),
        None,
        gradients=["w"],
    )


def test_a_parameter_that_the_model_writes_is_refused() -> None:
    text = LOCAL.replace("    fwd %/mm.0", "    fwd %/mul.0: f32[3,2] = aten.mul_.Tensor(%w, 2)\n    fwd %/mm.0")
    with pytest.raises(NotAvailableError, match="parameter w is written by the model itself"):
        DivideParameters()(read(text, gradients=["w"]))
