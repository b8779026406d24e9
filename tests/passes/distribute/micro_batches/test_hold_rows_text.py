"""What `hold_rows` makes of a few lines of text, and what it leaves."""

from dataclasses import replace

from commfuse_fx.ir.core.program import Program
from commfuse_fx.passes.declaration import Pass
from commfuse_fx.passes.distribute.micro_batches.hold_rows import HoldRows
from tests.passes.cases import Applied, check

INPUTS = """
    in  %a: f32[4] = parameter
    in  %b: f32[4] = parameter
    in  %a.grad: f32[4] = gradient
    in  %b.grad: f32[4] = gradient
"""
DOT = """
    fwd %/dot.0: f32[] = aten.dot(%a, %b)
    bwd %/grad.mul.0: f32[4] = aten.mul.Tensor(%b, %/dot.0)
"""
SCATTER = "  {group=dp(2) op=avg dtype=f32 bytes=16 members=[a]}"
REDUCE = "  {group=dp(2) op=avg dtype=f32 bytes=16 members=[b]}"


def divided(made: Pass, shard: str = "dp", owner: int | None = None) -> Applied:
    """Ranks update rows of a, or one of them updates it, and all update b."""

    def apply(program: Program) -> bool:
        program.params["a"] = replace(program.params["a"], shard=shard, owner=owner)
        return made(program)

    return Applied(made, apply)


EARLY = f"""
    {INPUTS}
    {DOT}
    bwd %reduce/a/reduce_scatter: f32[2] = _c10d_functional.reduce_scatter_tensor(%/grad.mul.0, avg, 2, dp){SCATTER}
    bwd %/grad.mul.1: f32[4] = aten.mul.Tensor(%a, %/dot.0)
    bwd %reduce/b/all_reduce: f32[4] = _c10d_functional.all_reduce(%/grad.mul.1, avg, dp){REDUCE}
    bwd %reduce/a/wait: f32[2] = _c10d_functional.wait_tensor(%reduce/a/reduce_scatter)
    bwd %reduce/b/wait: f32[4] = _c10d_functional.wait_tensor(%reduce/b/all_reduce)
    upd %reduce/a/hold: f32[4] = aten.add_.Tensor(%a.grad, %/grad.mul.0)
    upd %reduce/b/hold: f32[4] = aten.add_.Tensor(%b.grad, %/grad.mul.1)
    return [%/dot.0, %reduce/a/wait, %reduce/b/wait]
"""


def test_a_micro_batch_adds_the_rows_that_it_gets() -> None:
    check(
        EARLY,
        divided(HoldRows(updates=False)),
        f"""
        {INPUTS.replace("%a.grad: f32[4]", "%a.grad: f32[2]")}
        {DOT}
        bwd %reduce/a/reduce_scatter: f32[2] = _c10d_functional.reduce_scatter_tensor(%/grad.mul.0, avg, 2, dp){SCATTER}
        bwd %/grad.mul.1: f32[4] = aten.mul.Tensor(%a, %/dot.0)
        bwd %reduce/b/all_reduce: f32[4] = _c10d_functional.all_reduce(%/grad.mul.1, avg, dp){REDUCE}
        bwd %reduce/a/wait: f32[2] = _c10d_functional.wait_tensor(%reduce/a/reduce_scatter)
        bwd %reduce/b/wait: f32[4] = _c10d_functional.wait_tensor(%reduce/b/all_reduce)
        upd %reduce/b/hold: f32[4] = aten.add_.Tensor(%b.grad, %/grad.mul.1)
        upd %reduce/a/hold: f32[2] = aten.add_.Tensor(%a.grad, %reduce/a/wait)
        return [%/dot.0, %reduce/a/wait, %reduce/b/wait]
        """,
        gradients=["a", "b"],
    )


def test_the_last_micro_batch_adds_what_is_held_to_its_rows() -> None:
    check(
        f"""
        {INPUTS}
        {DOT}
        bwd %reduce/a/sum: f32[4] = aten.add.Tensor(%a.grad, %/grad.mul.0)
        bwd %reduce/a/reduce_scatter: f32[2] = _c10d_functional.reduce_scatter_tensor(%reduce/a/sum, avg, 2, dp){SCATTER}
        bwd %/grad.mul.1: f32[4] = aten.mul.Tensor(%a, %/dot.0)
        bwd %reduce/b/sum: f32[4] = aten.add.Tensor(%b.grad, %/grad.mul.1)
        bwd %reduce/b/all_reduce: f32[4] = _c10d_functional.all_reduce(%reduce/b/sum, avg, dp){REDUCE}
        bwd %reduce/a/wait: f32[2] = _c10d_functional.wait_tensor(%reduce/a/reduce_scatter)
        bwd %reduce/b/wait: f32[4] = _c10d_functional.wait_tensor(%reduce/b/all_reduce)
        return [%/dot.0, %reduce/a/wait, %reduce/b/wait]
        """,
        divided(HoldRows()),
        f"""
        {INPUTS.replace("%a.grad: f32[4]", "%a.grad: f32[2]")}
        {DOT}
        bwd %reduce/a/reduce_scatter: f32[2] = _c10d_functional.reduce_scatter_tensor(%/grad.mul.0, avg, 2, dp){SCATTER}
        bwd %/grad.mul.1: f32[4] = aten.mul.Tensor(%a, %/dot.0)
        bwd %reduce/b/sum: f32[4] = aten.add.Tensor(%b.grad, %/grad.mul.1)
        bwd %reduce/b/all_reduce: f32[4] = _c10d_functional.all_reduce(%reduce/b/sum, avg, dp){REDUCE}
        bwd %reduce/a/wait: f32[2] = _c10d_functional.wait_tensor(%reduce/a/reduce_scatter)
        bwd %reduce/a/sum: f32[2] = aten.add.Tensor(%a.grad, %reduce/a/wait)
        bwd %reduce/b/wait: f32[4] = _c10d_functional.wait_tensor(%reduce/b/all_reduce)
        return [%/dot.0, %reduce/a/sum, %reduce/b/wait]
        """,
        gradients=["a", "b"],
    )


def test_an_owner_holds_the_sum() -> None:
    reduce = "bwd %reduce/a/reduce: f32[4] = commfuse.reduce(%/grad.mul.0, avg, 1, dp)"
    check(
        f"""
        {INPUTS}
        {DOT}
        {reduce}{SCATTER}
        bwd %reduce/a/wait: f32[4] = _c10d_functional.wait_tensor(%reduce/a/reduce)
        upd %reduce/a/hold: f32[4] = aten.add_.Tensor(%a.grad, %/grad.mul.0)
        upd %shard/a/gradient: f32[4] = commfuse.of_owner(%reduce/a/wait, 1, 2, dp)
        return [%/dot.0, %shard/a/gradient]
        """,
        divided(HoldRows(updates=False), owner=1),
        f"""
        {INPUTS}
        {DOT}
        {reduce}{SCATTER}
        bwd %reduce/a/wait: f32[4] = _c10d_functional.wait_tensor(%reduce/a/reduce)
        upd %shard/a/gradient: f32[4] = commfuse.of_owner(%reduce/a/wait, 1, 2, dp)
        upd %reduce/a/hold: f32[4] = aten.add_.Tensor(%a.grad, %shard/a/gradient)
        return [%/dot.0, %shard/a/gradient]
        """,
        gradients=["a"],
    )


def test_whole_updates_keep_whole_sums() -> None:
    check(EARLY, divided(HoldRows(updates=False), shard=""), None, gradients=["a", "b"])
