"""What `fuse_collectives` makes of a few lines of text, and what it leaves."""

from commfuse_fx.passes.fuse.fuse_collectives import FuseCollectives
from tests.passes.cases import check

REDUCED = """
    in  %a: f32[16] = parameter
    in  %b: f32[4,4] = parameter
    fwd %/view.0: f32[16] = aten.view(%b, [16])
    fwd %/dot.0: f32[] = aten.dot(%a, %/view.0)
    bwd %/grad.mul.0: f32[4,4] = aten.mul.Tensor(%b, %/dot.0)
    bwd %reduce/b/all_reduce: f32[4,4] = _c10d_functional.all_reduce(%/grad.mul.0, avg, dp)  {group=dp(2) op=avg dtype=f32 bytes=64 members=[b]}
    bwd %/grad.mul.1: f32[16] = aten.mul.Tensor(%a, %/dot.0)
    bwd %reduce/a/all_reduce: f32[16] = _c10d_functional.all_reduce(%/grad.mul.1, avg, dp)  {group=dp(2) op=avg dtype=f32 bytes=64 members=[a]}
    bwd %reduce/b/wait: f32[4,4] = _c10d_functional.wait_tensor(%reduce/b/all_reduce)
    bwd %reduce/a/wait: f32[16] = _c10d_functional.wait_tensor(%reduce/a/all_reduce)
    return [%/dot.0, %reduce/a/wait, %reduce/b/wait]
"""


def test_gradients_of_one_key_are_reduced_in_one_bucket() -> None:
    check(
        REDUCED,
        FuseCollectives(),
        """
        in  %a: f32[16] = parameter
        in  %b: f32[4,4] = parameter
        fwd %/view.0: f32[16] = aten.view(%b, [16])
        fwd %/dot.0: f32[] = aten.dot(%a, %/view.0)
        bwd %/grad.mul.0: f32[4,4] = aten.mul.Tensor(%b, %/dot.0)
        bwd %/grad.mul.1: f32[16] = aten.mul.Tensor(%a, %/dot.0)
        bwd %bucket.0/flatten.0: f32[16] = aten.view(%/grad.mul.0, [-1])
        bwd %bucket.0/flatten.1: f32[16] = aten.view(%/grad.mul.1, [-1])
        bwd %bucket.0/concat: f32[32] = aten.cat([%bucket.0/flatten.0, %bucket.0/flatten.1], 0)
        bwd %bucket.0/all_reduce: f32[32] = _c10d_functional.all_reduce(%bucket.0/concat, avg, dp)  {group=dp(2) op=avg dtype=f32 bytes=128 members=[b, a]}
        bwd %bucket.0/wait: f32[32] = _c10d_functional.wait_tensor(%bucket.0/all_reduce)
        bwd %bucket.0/split: (f32[16], f32[16]) = aten.split_with_sizes(%bucket.0/wait, [16, 16], 0)
        bwd %bucket.0/part.0: f32[16] = getitem(%bucket.0/split, 0)
        bwd %bucket.0/part.1: f32[16] = getitem(%bucket.0/split, 1)
        bwd %bucket.0/restore.0: f32[4,4] = aten.view(%bucket.0/part.0, [4, 4])
        bwd %bucket.0/restore.1: f32[16] = aten.view(%bucket.0/part.1, [16])
        return [%/dot.0, %bucket.0/restore.1, %bucket.0/restore.0]
        """,
    )


def test_what_differs_in_its_reduction_stays_apart() -> None:
    check(
        REDUCED.replace("%/grad.mul.1, avg", "%/grad.mul.1, sum").replace(
            "op=avg dtype=f32 bytes=64 members=[a]", "op=sum dtype=f32 bytes=64 members=[a]"
        ),
        FuseCollectives(),
        None,
    )
    check(REDUCED, FuseCollectives(mib=0), None)
    check(f"# comm_fusion.openstate: False\n{REDUCED}", FuseCollectives(), None)
    check(f"# comm_fusion.allreduce: index 1\n{REDUCED}", FuseCollectives(), None)


OWNED = REDUCED.replace("/all_reduce", "/reduce").replace("_c10d_functional.all_reduce(", "commfuse.reduce(")


def test_what_goes_to_one_owner_is_reduced_in_one_bucket() -> None:
    to_one = OWNED.replace("avg, dp)", "avg, 1, dp)")
    made = check(
        to_one,
        FuseCollectives(),
        """
        in  %a: f32[16] = parameter
        in  %b: f32[4,4] = parameter
        fwd %/view.0: f32[16] = aten.view(%b, [16])
        fwd %/dot.0: f32[] = aten.dot(%a, %/view.0)
        bwd %/grad.mul.0: f32[4,4] = aten.mul.Tensor(%b, %/dot.0)
        bwd %/grad.mul.1: f32[16] = aten.mul.Tensor(%a, %/dot.0)
        bwd %bucket.0/flatten.0: f32[16] = aten.view(%/grad.mul.0, [-1])
        bwd %bucket.0/flatten.1: f32[16] = aten.view(%/grad.mul.1, [-1])
        bwd %bucket.0/concat: f32[32] = aten.cat([%bucket.0/flatten.0, %bucket.0/flatten.1], 0)
        bwd %bucket.0/reduce: f32[32] = commfuse.reduce(%bucket.0/concat, avg, 1, dp)  {group=dp(2) op=avg dtype=f32 bytes=128 members=[b, a]}
        bwd %bucket.0/wait: f32[32] = _c10d_functional.wait_tensor(%bucket.0/reduce)
        bwd %bucket.0/split: (f32[16], f32[16]) = aten.split_with_sizes(%bucket.0/wait, [16, 16], 0)
        bwd %bucket.0/part.0: f32[16] = getitem(%bucket.0/split, 0)
        bwd %bucket.0/part.1: f32[16] = getitem(%bucket.0/split, 1)
        bwd %bucket.0/restore.0: f32[4,4] = aten.view(%bucket.0/part.0, [4, 4])
        bwd %bucket.0/restore.1: f32[16] = aten.view(%bucket.0/part.1, [16])
        return [%/dot.0, %bucket.0/restore.1, %bucket.0/restore.0]
        """,
        numerics="defines",
    )
    assert {param.owner for param in made.params.values()} == {1}
    to_two = to_one.replace("mul.0, avg, 1", "mul.0, avg, 0")
    for apart in (to_two, f"# comm_fusion.openstate: False\n{to_one}"):
        check(apart, FuseCollectives(), None, numerics="defines")


def test_the_parts_of_a_gather_are_put_together_rank_by_rank() -> None:
    check(
        """
        in  %x: f32[2,3] = input
        in  %y: f32[4] = input
        fwd %x/all_gather: f32[4,3] = _c10d_functional.all_gather_into_tensor(%x, 2, dp)  {group=dp(2) dtype=f32 bytes=48 members=[x]}
        fwd %y/all_gather: f32[8] = _c10d_functional.all_gather_into_tensor(%y, 2, dp)  {group=dp(2) dtype=f32 bytes=32 members=[y]}
        fwd %x/wait: f32[4,3] = _c10d_functional.wait_tensor(%x/all_gather)
        fwd %y/wait: f32[8] = _c10d_functional.wait_tensor(%y/all_gather)
        fwd %/sum.0: f32[] = aten.sum(%x/wait)
        fwd %/sum.1: f32[] = aten.sum(%y/wait)
        fwd %/add.0: f32[] = aten.add.Tensor(%/sum.0, %/sum.1)
        return [%/add.0]
        """,
        FuseCollectives(),
        """
        in  %x: f32[2,3] = input
        in  %y: f32[4] = input
        fwd %bucket.0/flatten.0: f32[6] = aten.view(%x, [-1])
        fwd %bucket.0/flatten.1: f32[4] = aten.view(%y, [-1])
        fwd %bucket.0/concat: f32[10] = aten.cat([%bucket.0/flatten.0, %bucket.0/flatten.1], 0)
        fwd %bucket.0/all_gather: f32[20] = commfuse.all_gather_members(%bucket.0/concat, 2, dp, [6, 4])  {group=dp(2) dtype=f32 bytes=80 members=[x, y]}
        fwd %bucket.0/wait: f32[20] = _c10d_functional.wait_tensor(%bucket.0/all_gather)
        fwd %bucket.0/split: (f32[12], f32[8]) = aten.split_with_sizes(%bucket.0/wait, [12, 8], 0)
        fwd %bucket.0/part.0: f32[12] = getitem(%bucket.0/split, 0)
        fwd %bucket.0/part.1: f32[8] = getitem(%bucket.0/split, 1)
        fwd %bucket.0/restore.0: f32[4,3] = aten.view(%bucket.0/part.0, [4, 3])
        fwd %bucket.0/restore.1: f32[8] = aten.view(%bucket.0/part.1, [8])
        fwd %/sum.0: f32[] = aten.sum(%bucket.0/restore.0)
        fwd %/sum.1: f32[] = aten.sum(%bucket.0/restore.1)
        fwd %/add.0: f32[] = aten.add.Tensor(%/sum.0, %/sum.1)
        return [%/add.0]
        """,
    )


def test_rows_of_several_tensors_are_scattered_by_one_message() -> None:
    check(
        """
        in  %x: f32[4,3] = input
        in  %y: f32[8] = input
        bwd %x/reduce_scatter: f32[2,3] = _c10d_functional.reduce_scatter_tensor(%x, sum, 2, dp)  {group=dp(2) op=sum dtype=f32 bytes=48 members=[x]}
        bwd %y/reduce_scatter: f32[4] = _c10d_functional.reduce_scatter_tensor(%y, sum, 2, dp)  {group=dp(2) op=sum dtype=f32 bytes=32 members=[y]}
        bwd %x/wait: f32[2,3] = _c10d_functional.wait_tensor(%x/reduce_scatter)
        bwd %y/wait: f32[4] = _c10d_functional.wait_tensor(%y/reduce_scatter)
        bwd %/sum.0: f32[] = aten.sum(%x/wait)
        bwd %/sum.1: f32[] = aten.sum(%y/wait)
        bwd %/mul.0: f32[] = aten.mul.Tensor(%/sum.0, %/sum.1)
        return [%/mul.0]
        """,
        FuseCollectives(),
        """
        in  %x: f32[4,3] = input
        in  %y: f32[8] = input
        bwd %bucket.0/flatten.0: f32[12] = aten.view(%x, [-1])
        bwd %bucket.0/flatten.1: f32[8] = aten.view(%y, [-1])
        bwd %bucket.0/concat: f32[20] = aten.cat([%bucket.0/flatten.0, %bucket.0/flatten.1], 0)
        bwd %bucket.0/reduce_scatter: f32[10] = commfuse.reduce_scatter_members(%bucket.0/concat, sum, 2, dp, [6, 4])  {group=dp(2) op=sum dtype=f32 bytes=80 members=[x, y]}
        bwd %bucket.0/wait: f32[10] = _c10d_functional.wait_tensor(%bucket.0/reduce_scatter)
        bwd %bucket.0/split: (f32[6], f32[4]) = aten.split_with_sizes(%bucket.0/wait, [6, 4], 0)
        bwd %bucket.0/part.0: f32[6] = getitem(%bucket.0/split, 0)
        bwd %bucket.0/part.1: f32[4] = getitem(%bucket.0/split, 1)
        bwd %bucket.0/restore.0: f32[2,3] = aten.view(%bucket.0/part.0, [2, 3])
        bwd %bucket.0/restore.1: f32[4] = aten.view(%bucket.0/part.1, [4])
        bwd %/sum.0: f32[] = aten.sum(%bucket.0/restore.0)
        bwd %/sum.1: f32[] = aten.sum(%bucket.0/restore.1)
        bwd %/mul.0: f32[] = aten.mul.Tensor(%/sum.0, %/sum.1)
        return [%/mul.0]
        """,
    )


def test_what_uses_the_second_of_two_equal_reductions_may_stand_ahead_of_the_first_wait() -> None:
    check(
        """
        in  %x: f32[4] = input
        fwd %x.0/all_reduce: f32[4] = _c10d_functional.all_reduce(%x, sum, dp)  {group=dp(2) op=sum dtype=f32 bytes=16 members=[x.0]}
        fwd %x.1/all_reduce: f32[4] = _c10d_functional.all_reduce(%x, sum, dp)  {group=dp(2) op=sum dtype=f32 bytes=16 members=[x.1]}
        fwd %x.1/wait: f32[4] = _c10d_functional.wait_tensor(%x.1/all_reduce)
        fwd %/sum.0: f32[] = aten.sum(%x.1/wait)
        fwd %x.0/wait: f32[4] = _c10d_functional.wait_tensor(%x.0/all_reduce)
        fwd %/mul.0: f32[4] = aten.mul.Tensor(%x.0/wait, %/sum.0)
        return [%/mul.0]
        """,
        FuseCollectives(),
        """
        in  %x: f32[4] = input
        fwd %x.0/all_reduce: f32[4] = _c10d_functional.all_reduce(%x, sum, dp)  {group=dp(2) op=sum dtype=f32 bytes=16 members=[x.0]}
        fwd %x.0/wait: f32[4] = _c10d_functional.wait_tensor(%x.0/all_reduce)
        fwd %/sum.0: f32[] = aten.sum(%x.0/wait)
        fwd %/mul.0: f32[4] = aten.mul.Tensor(%x.0/wait, %/sum.0)
        return [%/mul.0]
        """,
    )


def test_a_tensor_that_is_reduced_twice_is_reduced_once() -> None:
    check(
        """
        in  %x: f32[4] = input
        fwd %x.0/all_reduce: f32[4] = _c10d_functional.all_reduce(%x, sum, dp)  {group=dp(2) op=sum dtype=f32 bytes=16 members=[x.0]}
        fwd %x.1/all_reduce: f32[4] = _c10d_functional.all_reduce(%x, sum, dp)  {group=dp(2) op=sum dtype=f32 bytes=16 members=[x.1]}
        fwd %x.0/wait: f32[4] = _c10d_functional.wait_tensor(%x.0/all_reduce)
        fwd %x.1/wait: f32[4] = _c10d_functional.wait_tensor(%x.1/all_reduce)
        fwd %/dot.0: f32[] = aten.dot(%x.0/wait, %x.1/wait)
        return [%/dot.0]
        """,
        FuseCollectives(),
        """
        in  %x: f32[4] = input
        fwd %x.0/all_reduce: f32[4] = _c10d_functional.all_reduce(%x, sum, dp)  {group=dp(2) op=sum dtype=f32 bytes=16 members=[x.0]}
        fwd %x.0/wait: f32[4] = _c10d_functional.wait_tensor(%x.0/all_reduce)
        fwd %/dot.0: f32[] = aten.dot(%x.0/wait, %x.0/wait)
        return [%/dot.0]
        """,
    )
