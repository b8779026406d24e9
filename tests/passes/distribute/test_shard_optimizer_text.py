"""What `shard_optimizer` makes of a few lines of text, and what it leaves."""

import pytest

from commfuse_fx.errors import ConfigValueError
from commfuse_fx.ir.updates.update_sharing import WHOLE
from commfuse_fx.passes.distribute.shard_optimizer import ShardOptimizer
from tests.passes.cases import check, read

STEP = """
    in  %a: f32[13,2] = parameter
    in  %b: f32[16] = parameter
    in  %x: f32[2] = input
    fwd %/mv.0: f32[13] = aten.mv(%a, %x)
    fwd %/sum.0: f32[] = aten.sum(%/mv.0)
    fwd %/sum.1: f32[] = aten.sum(%b)
    fwd %/mul.0: f32[] = aten.mul.Tensor(%/sum.0, %/sum.1)
    bwd %/grad.expand.0: f32[13,2](0,1) = aten.expand(%x, [13, 2])
    bwd %/grad.mul.0: f32[13,2] = aten.mul.Tensor(%/grad.expand.0, %/sum.1)
    bwd %reduce/a/all_reduce: f32[13,2] = _c10d_functional.all_reduce(%/grad.mul.0, avg, dp)  {group=dp(2) op=avg dtype=f32 bytes=104 members=[a]}
    bwd %/grad.expand.1: f32[16](0) = aten.expand(%/sum.0, [16])
    bwd %/grad.clone.0: f32[16] = aten.clone(%/grad.expand.1, memory_format=contiguous_format)
    bwd %reduce/b/all_reduce: f32[16] = _c10d_functional.all_reduce(%/grad.clone.0, avg, dp)  {group=dp(2) op=avg dtype=f32 bytes=64 members=[b]}
    bwd %reduce/a/wait: f32[13,2] = _c10d_functional.wait_tensor(%reduce/a/all_reduce)
    bwd %reduce/b/wait: f32[16] = _c10d_functional.wait_tensor(%reduce/b/all_reduce)
    return [%/mul.0, %reduce/a/wait, %reduce/b/wait]
"""
REDUCED = f"# optimizer: SGD (sgd)\n{STEP}"


def test_each_rank_gets_the_rows_that_it_updates_padded_where_they_do_not_divide() -> None:
    made = check(
        REDUCED,
        ShardOptimizer(0, pad=True),
        """
        in  %a: f32[13,2] = parameter
        in  %b: f32[16] = parameter
        in  %x: f32[2] = input
        fwd %/mv.0: f32[13] = aten.mv(%a, %x)
        fwd %/sum.0: f32[] = aten.sum(%/mv.0)
        fwd %/sum.1: f32[] = aten.sum(%b)
        fwd %/mul.0: f32[] = aten.mul.Tensor(%/sum.0, %/sum.1)
        bwd %/grad.expand.0: f32[13,2](0,1) = aten.expand(%x, [13, 2])
        bwd %/grad.mul.0: f32[13,2] = aten.mul.Tensor(%/grad.expand.0, %/sum.1)
        bwd %shard/a/padded_gradient: f32[14,2] = aten.constant_pad_nd(%/grad.mul.0, [0, 0, 0, 1])
        bwd %reduce/a/reduce_scatter: f32[7,2] = _c10d_functional.reduce_scatter_tensor(%shard/a/padded_gradient, avg, 2, dp)  {group=dp(2) op=avg dtype=f32 bytes=104 members=[a]}
        bwd %/grad.expand.1: f32[16](0) = aten.expand(%/sum.0, [16])
        bwd %/grad.clone.0: f32[16] = aten.clone(%/grad.expand.1, memory_format=contiguous_format)
        bwd %reduce/b/reduce_scatter: f32[8] = _c10d_functional.reduce_scatter_tensor(%/grad.clone.0, avg, 2, dp)  {group=dp(2) op=avg dtype=f32 bytes=64 members=[b]}
        bwd %reduce/a/wait: f32[7,2] = _c10d_functional.wait_tensor(%reduce/a/reduce_scatter)
        bwd %reduce/b/wait: f32[8] = _c10d_functional.wait_tensor(%reduce/b/reduce_scatter)
        return [%/mul.0, %reduce/a/wait, %reduce/b/wait]
        """,
        gradients=["a", "b"],
    )
    assert {name: param.shard for name, param in made.params.items()} == {"a": "dp", "b": "dp"}


def test_rows_of_neighbours_are_summed_over_the_other_ranks() -> None:
    over = STEP.replace("dp(2)", "dp.0,dp.1(4)").replace("avg, dp)", "avg, dp.0,dp.1)")
    made = check(
        f"# mesh: dp.0=2xdp.1=2\n# optimizer: SGD (sgd)\n{over}",
        ShardOptimizer(0, ranks=2),
        """
        in  %a: f32[13,2] = parameter
        in  %b: f32[16] = parameter
        in  %x: f32[2] = input
        fwd %/mv.0: f32[13] = aten.mv(%a, %x)
        fwd %/sum.0: f32[] = aten.sum(%/mv.0)
        fwd %/sum.1: f32[] = aten.sum(%b)
        fwd %/mul.0: f32[] = aten.mul.Tensor(%/sum.0, %/sum.1)
        bwd %/grad.expand.0: f32[13,2](0,1) = aten.expand(%x, [13, 2])
        bwd %/grad.mul.0: f32[13,2] = aten.mul.Tensor(%/grad.expand.0, %/sum.1)
        bwd %reduce/a/all_reduce: f32[13,2] = _c10d_functional.all_reduce(%/grad.mul.0, avg, dp.0,dp.1)  {group=dp.0,dp.1(4) op=avg dtype=f32 bytes=104 members=[a]}
        bwd %/grad.expand.1: f32[16](0) = aten.expand(%/sum.0, [16])
        bwd %/grad.clone.0: f32[16] = aten.clone(%/grad.expand.1, memory_format=contiguous_format)
        bwd %reduce/b/reduce_scatter: f32[8] = _c10d_functional.reduce_scatter_tensor(%/grad.clone.0, avg, 2, dp.1)  {group=dp.1(2) op=avg dtype=f32 bytes=64 members=[b]}
        bwd %reduce/a/wait: f32[13,2] = _c10d_functional.wait_tensor(%reduce/a/all_reduce)
        bwd %reduce/b/rows: f32[8] = _c10d_functional.wait_tensor(%reduce/b/reduce_scatter)
        bwd %reduce/b/rows/all_reduce: f32[8] = _c10d_functional.all_reduce(%reduce/b/rows, avg, dp.0)  {group=dp.0(2) op=avg dtype=f32 bytes=32 members=[b]}
        bwd %reduce/b/wait: f32[8] = _c10d_functional.wait_tensor(%reduce/b/rows/all_reduce)
        return [%/mul.0, %reduce/a/wait, %reduce/b/wait]
        """,
        gradients=["a", "b"],
    )
    assert {name: param.shard for name, param in made.params.items()} == {"a": "", "b": "dp.1"}


def test_one_rank_alone_divides_nothing() -> None:
    made = check(REDUCED, ShardOptimizer(0, ranks=1), None, gradients=["a", "b"])
    assert [note.reason for note in made.notes] == ["optimizer_weight_shard_size=1 leaves it to each rank"] * 2


def test_one_rank_alone_gets_the_gradient_of_a_parameter_that_it_owns() -> None:
    made = check(
        REDUCED,
        ShardOptimizer(0, mode="broadcast"),
        """
        in  %a: f32[13,2] = parameter
        in  %b: f32[16] = parameter
        in  %x: f32[2] = input
        fwd %/mv.0: f32[13] = aten.mv(%a, %x)
        fwd %/sum.0: f32[] = aten.sum(%/mv.0)
        fwd %/sum.1: f32[] = aten.sum(%b)
        fwd %/mul.0: f32[] = aten.mul.Tensor(%/sum.0, %/sum.1)
        bwd %/grad.expand.0: f32[13,2](0,1) = aten.expand(%x, [13, 2])
        bwd %/grad.mul.0: f32[13,2] = aten.mul.Tensor(%/grad.expand.0, %/sum.1)
        bwd %reduce/a/reduce: f32[13,2] = commfuse.reduce(%/grad.mul.0, avg, 0, dp)  {group=dp(2) op=avg dtype=f32 bytes=104 members=[a]}
        bwd %/grad.expand.1: f32[16](0) = aten.expand(%/sum.0, [16])
        bwd %/grad.clone.0: f32[16] = aten.clone(%/grad.expand.1, memory_format=contiguous_format)
        bwd %reduce/b/reduce: f32[16] = commfuse.reduce(%/grad.clone.0, avg, 1, dp)  {group=dp(2) op=avg dtype=f32 bytes=64 members=[b]}
        bwd %reduce/a/wait: f32[13,2] = _c10d_functional.wait_tensor(%reduce/a/reduce)
        bwd %reduce/b/wait: f32[16] = _c10d_functional.wait_tensor(%reduce/b/reduce)
        upd %shard/a/gradient: f32[13,2] = commfuse.of_owner(%reduce/a/wait, 0, 2, dp)
        upd %shard/b/gradient: f32[16] = commfuse.of_owner(%reduce/b/wait, 1, 2, dp)
        return [%/mul.0, %shard/a/gradient, %shard/b/gradient]
        """,
        gradients=["a", "b"],
    )
    assert {name: (param.shard, param.owner) for name, param in made.params.items()} == {"a": ("dp", 0), "b": ("dp", 1)}
    assert [note.reason for note in made.notes] == [f"rank {owner} over dp updates it" for owner in (0, 1)]


def test_without_padding_only_rows_that_divide() -> None:
    made = check(
        REDUCED,
        ShardOptimizer(0),
        """
        in  %a: f32[13,2] = parameter
        in  %b: f32[16] = parameter
        in  %x: f32[2] = input
        fwd %/mv.0: f32[13] = aten.mv(%a, %x)
        fwd %/sum.0: f32[] = aten.sum(%/mv.0)
        fwd %/sum.1: f32[] = aten.sum(%b)
        fwd %/mul.0: f32[] = aten.mul.Tensor(%/sum.0, %/sum.1)
        bwd %/grad.expand.0: f32[13,2](0,1) = aten.expand(%x, [13, 2])
        bwd %/grad.mul.0: f32[13,2] = aten.mul.Tensor(%/grad.expand.0, %/sum.1)
        bwd %reduce/a/all_reduce: f32[13,2] = _c10d_functional.all_reduce(%/grad.mul.0, avg, dp)  {group=dp(2) op=avg dtype=f32 bytes=104 members=[a]}
        bwd %/grad.expand.1: f32[16](0) = aten.expand(%/sum.0, [16])
        bwd %/grad.clone.0: f32[16] = aten.clone(%/grad.expand.1, memory_format=contiguous_format)
        bwd %reduce/b/reduce_scatter: f32[8] = _c10d_functional.reduce_scatter_tensor(%/grad.clone.0, avg, 2, dp)  {group=dp(2) op=avg dtype=f32 bytes=64 members=[b]}
        bwd %reduce/a/wait: f32[13,2] = _c10d_functional.wait_tensor(%reduce/a/all_reduce)
        bwd %reduce/b/wait: f32[8] = _c10d_functional.wait_tensor(%reduce/b/reduce_scatter)
        return [%/mul.0, %reduce/a/wait, %reduce/b/wait]
        """,
        gradients=["a", "b"],
    )
    (note,) = [note for note in made.notes if note.topic == WHOLE]
    assert note.subject == "a" and "13 does not divide by 2 ranks" in note.reason


@pytest.mark.parametrize("given", [{}, {"threshold": 1}])
def test_parameters_below_the_threshold_are_updated_by_every_rank(given: dict[str, int]) -> None:
    made = check(REDUCED, ShardOptimizer(**given), None, gradients=["a", "b"])
    assert [note.subject for note in made.notes] == ["a", "b"]
    assert all(f"parallel_optimizer_threshold={given.get('threshold', 64)}" in note.reason for note in made.notes)


def test_a_step_without_an_optimizer_is_left() -> None:
    check(STEP, ShardOptimizer(0), None, gradients=["a", "b"])


def test_an_optimizer_without_a_rule_is_refused() -> None:
    program = read(f"# optimizer: Lamb (opaque)\n{STEP}", gradients=["a", "b"])
    with pytest.raises(ConfigValueError, match="enable_parallel_optimizer=True with Lamb: it has no rule"):
        ShardOptimizer(0)(program)
