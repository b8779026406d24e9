"""What `overlap` makes of a few lines of text, and what it leaves."""

import pytest

from commfuse_fx.passes.schedule.overlap import Overlap
from tests.passes.cases import check

STEP = """
    in  %a: f32[4] = parameter
    in  %b: f32[4] = parameter
    fwd %/dot.0: f32[] = aten.dot(%a, %b)
    bwd %/grad.mul.0: f32[4] = aten.mul.Tensor(%a, %/dot.0)
    bwd %/grad.mul.1: f32[4] = aten.mul.Tensor(%b, %/dot.0)
    bwd %reduce/b/all_reduce: f32[4] = _c10d_functional.all_reduce(%/grad.mul.0, sum, dp)  {group=dp(2) op=sum dtype=f32 bytes=16 members=[b]}
    bwd %reduce/b/wait: f32[4] = _c10d_functional.wait_tensor(%reduce/b/all_reduce)
    bwd %reduce/a/all_reduce: f32[4] = _c10d_functional.all_reduce(%/grad.mul.1, sum, dp)  {group=dp(2) op=sum dtype=f32 bytes=16 members=[a]}
    bwd %reduce/a/wait: f32[4] = _c10d_functional.wait_tensor(%reduce/a/all_reduce)
    return [%/dot.0, %reduce/a/wait, %reduce/b/wait]
"""


def test_a_collective_starts_when_its_input_is_there_and_is_waited_for_when_it_is_needed() -> None:
    check(
        STEP,
        Overlap(),
        """
        in  %a: f32[4] = parameter
        in  %b: f32[4] = parameter
        fwd %/dot.0: f32[] = aten.dot(%a, %b)
        bwd %/grad.mul.0: f32[4] = aten.mul.Tensor(%a, %/dot.0)
        bwd %reduce/b/all_reduce: f32[4] = _c10d_functional.all_reduce(%/grad.mul.0, sum, dp)  {group=dp(2) op=sum dtype=f32 bytes=16 members=[b]}
        bwd %/grad.mul.1: f32[4] = aten.mul.Tensor(%b, %/dot.0)
        bwd %reduce/a/all_reduce: f32[4] = _c10d_functional.all_reduce(%/grad.mul.1, sum, dp)  {group=dp(2) op=sum dtype=f32 bytes=16 members=[a]}
        bwd %reduce/b/wait: f32[4] = _c10d_functional.wait_tensor(%reduce/b/all_reduce)
        bwd %reduce/a/wait: f32[4] = _c10d_functional.wait_tensor(%reduce/a/all_reduce)
        return [%/dot.0, %reduce/a/wait, %reduce/b/wait]
        """,
    )


def test_what_reads_a_result_comes_behind_its_wait() -> None:
    check(
        """
        in  %x: f32[4] = input
        fwd %/all_reduce: f32[4] = _c10d_functional.all_reduce(%x, sum, dp)  {group=dp(2) op=sum dtype=f32 bytes=16 members=[x]}
        fwd %/neg.0: f32[4] = aten.neg(%x)
        fwd %/wait: f32[4] = _c10d_functional.wait_tensor(%/all_reduce)
        fwd %/dot.0: f32[] = aten.dot(%/wait, %/neg.0)
        return [%/dot.0]
        """,
        Overlap(),
        None,
    )


GATHERS = """
    in  %a: f32[4] = parameter
    in  %b: f32[4] = parameter
    fwd %/dot.0: f32[] = aten.dot(%a, %b)
    upd %/narrow.0: f32[2] = aten.narrow(%a, 0, 0, 2)
    upd %shard/a/all_gather: f32[4] = _c10d_functional.all_gather_into_tensor(%/narrow.0, 2, dp)  {group=dp(2) dtype=f32 bytes=16 members=[a]}
    upd %shard/a/wait: f32[4] = _c10d_functional.wait_tensor(%shard/a/all_gather)
    upd %shard/a/write: f32[4] = aten.copy_(%a, %shard/a/wait)
    upd %/narrow.1: f32[2] = aten.narrow(%b, 0, 0, 2)
    upd %shard/b/all_gather: f32[4] = _c10d_functional.all_gather_into_tensor(%/narrow.1, 2, dp)  {group=dp(2) dtype=f32 bytes=16 members=[b]}
    upd %shard/b/wait: f32[4] = _c10d_functional.wait_tensor(%shard/b/all_gather)
    upd %shard/b/write: f32[4] = aten.copy_(%b, %shard/b/wait)
    return [%/dot.0]
"""


def test_the_next_parameter_is_on_its_way_when_one_that_was_updated_is_there() -> None:
    lines = [line.strip() for line in GATHERS.splitlines() if line.strip()]
    after = [*lines[:5], *lines[7:9], *lines[5:7], *lines[9:]]
    check(GATHERS, Overlap(), "\n".join(after))


USED = """
    in  %a: f32[2] = parameter
    in  %b: f32[2] = parameter
    in  %x: f32[4] = input
    fwd %/mul.0: f32[4] = aten.mul.Tensor(%x, %x)
    fwd %a/all_gather: f32[4] = _c10d_functional.all_gather_into_tensor(%a, 2, dp)  {group=dp(2) dtype=f32 bytes=16 members=[a]}
    fwd %a/wait: f32[4] = _c10d_functional.wait_tensor(%a/all_gather)
    fwd %/mul.1: f32[4] = aten.mul.Tensor(%/mul.0, %a/wait)
    fwd %b/flat: f32[2] = aten.view(%b, [2])
    fwd %b/all_gather: f32[4] = _c10d_functional.all_gather_into_tensor(%b/flat, 2, dp)  {group=dp(2) dtype=f32 bytes=16 members=[b]}
    fwd %b/wait: f32[4] = _c10d_functional.wait_tensor(%b/all_gather)
    fwd %/dot.0: f32[] = aten.dot(%/mul.1, %b/wait)
    return [%/dot.0]
"""


@pytest.mark.parametrize("made", ["aten.view(%b, [2])", "aten.clone(%b)"])
def test_the_next_parameter_is_on_its_way_while_one_is_used(made: str) -> None:
    """Also where a view of it is sent, or what is computed of it alone, as a cast."""
    before = USED.replace("aten.view(%b, [2])", made)
    *inputs, mul, gather, wait, use, flat, following, behind, dot, end = [
        line.strip() for line in before.splitlines() if line.strip()
    ]
    check(before, Overlap(), "\n".join([*inputs, gather, mul, wait, flat, following, use, behind, dot, end]))
