"""What `drop_gradients` makes of a few lines of text, and what it leaves."""

from commfuse_fx.passes.distribute.micro_batches.drop_gradients import DropGradients
from tests.passes.cases import check
from tests.passes.distribute.micro_batches.test_hold_rows_text import DOT, INPUTS, REDUCE, SCATTER


def test_what_nobody_has_added_is_not_reduced() -> None:
    held = """
        upd %reduce/a/hold: f32[2] = aten.add_.Tensor(%a.grad, %reduce/a/wait)
        upd %reduce/b/hold: f32[4] = aten.add_.Tensor(%b.grad, %/grad.mul.1)
    """
    rows = f"""
        {INPUTS.replace("%a.grad: f32[4]", "%a.grad: f32[2]")}
        {DOT}
        bwd %reduce/a/reduce_scatter: f32[2] = _c10d_functional.reduce_scatter_tensor(%/grad.mul.0, avg, 2, dp){SCATTER}
        bwd %/grad.mul.1: f32[4] = aten.mul.Tensor(%a, %/dot.0)
    """
    arrived = "bwd %reduce/a/wait: f32[2] = _c10d_functional.wait_tensor(%reduce/a/reduce_scatter)"
    check(
        f"""
        {rows}
        bwd %reduce/b/all_reduce: f32[4] = _c10d_functional.all_reduce(%/grad.mul.1, avg, dp){REDUCE}
        {arrived}
        bwd %reduce/b/wait: f32[4] = _c10d_functional.wait_tensor(%reduce/b/all_reduce)
        {held}
        return [%/dot.0, %reduce/a/wait, %reduce/b/wait]
        """,
        DropGradients(),
        f"{rows}{arrived}{held}return [%/dot.0]",
        gradients=["a", "b"],
    )


def test_an_evaluation_has_no_gradients() -> None:
    check(f"# step: eval\n{INPUTS}{DOT.splitlines()[1]}\nreturn [%/dot.0]", DropGradients(), None)
