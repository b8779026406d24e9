"""What `scatter_storage` makes of a few lines of text, and what it leaves."""

from commfuse_fx.ir.core.verify import verify
from commfuse_fx.passes.fuse.flatten_storage import FlattenStorage
from commfuse_fx.passes.fuse.scatter_storage import ScatterStorage
from tests.passes.cases import assert_same, check, outcome, read

STEP = """
    in  %a: f32[4,8] = parameter
    in  %b: f32[2,8] = parameter
    fwd %/sum.0: f32[] = aten.sum(%a)
    fwd %/sum.1: f32[] = aten.sum(%b)
    fwd %/mul.0: f32[] = aten.mul.Tensor(%/sum.0, %/sum.1)
    bwd %/grad.expand.0: f32[2,8](0,0) = aten.expand(%/sum.0, [2, 8])
    bwd %/grad.mul.0: f32[4,8] = aten.mul.Tensor(%a, %/sum.1)
    bwd %bucket.0/flatten.0: f32[16](0) = aten.reshape(%/grad.expand.0, [-1])
    bwd %bucket.0/flatten.1: f32[32] = aten.view(%/grad.mul.0, [-1])
    bwd %bucket.0/concat: f32[48] = aten.cat([%bucket.0/flatten.0, %bucket.0/flatten.1], 0)
    bwd %bucket.0/reduce_scatter: f32[24] = commfuse.reduce_scatter_members(%bucket.0/concat, sum, 2, dp, [8, 16])  {group=dp(2) op=sum dtype=f32 bytes=192 members=[b, a]}
    bwd %bucket.0/wait: f32[24] = _c10d_functional.wait_tensor(%bucket.0/reduce_scatter)
    bwd %bucket.0/split: (f32[8], f32[16]) = aten.split_with_sizes(%bucket.0/wait, [8, 16], 0)
    bwd %bucket.0/part.0: f32[8] = getitem(%bucket.0/split, 0)
    bwd %bucket.0/part.1: f32[16] = getitem(%bucket.0/split, 1)
    bwd %bucket.0/restore.0: f32[1,8] = aten.view(%bucket.0/part.0, [1, 8])
    bwd %bucket.0/restore.1: f32[2,8] = aten.view(%bucket.0/part.1, [2, 8])
    bwd %/sum.3: f32[] = aten.sum(%bucket.0/restore.0)
    bwd %/sum.2: f32[] = aten.sum(%bucket.0/restore.1)
    bwd %/add.0: f32[] = aten.add.Tensor(%/sum.3, %/sum.2)
    return [%/add.0]
"""


def test_gradients_are_computed_where_they_are_sent_from_or_copied_there() -> None:
    check(
        STEP,
        ScatterStorage(),
        """
        in  %a: f32[4,8] = parameter
        in  %b: f32[2,8] = parameter
        fwd %/sum.0: f32[] = aten.sum(%a)
        fwd %/sum.1: f32[] = aten.sum(%b)
        fwd %/mul.0: f32[] = aten.mul.Tensor(%/sum.0, %/sum.1)
        bwd %bucket.0/storage: f32[48] = aten.empty.memory_format([48], dtype=f32, device=cpu)
        bwd %/grad.expand.0: f32[2,8](0,0) = aten.expand(%/sum.0, [2, 8])
        bwd %bucket.0/place.b: f32[2,8] = aten.as_strided(%bucket.0/storage, [2, 8], [8, 1], 0)
        bwd %bucket.0/write.b: f32[2,8] = aten.copy_(%bucket.0/place.b, %/grad.expand.0)
        bwd %bucket.0/place.a: f32[4,8] = aten.as_strided(%bucket.0/storage, [4, 8], [8, 1], 16)
        bwd %bucket.0/write.a: f32[4,8] = aten.mul.out(%a, %/sum.1, out=%bucket.0/place.a)
        bwd %bucket.0/reduce_scatter: f32[24] = commfuse.reduce_scatter_members(%bucket.0/storage, sum, 2, dp, [8, 16])  {group=dp(2) op=sum dtype=f32 bytes=192 members=[b, a]}
        bwd %bucket.0/wait: f32[24] = _c10d_functional.wait_tensor(%bucket.0/reduce_scatter)
        bwd %bucket.0/split: (f32[8], f32[16]) = aten.split_with_sizes(%bucket.0/wait, [8, 16], 0)
        bwd %bucket.0/part.0: f32[8] = getitem(%bucket.0/split, 0)
        bwd %bucket.0/part.1: f32[16] = getitem(%bucket.0/split, 1)
        bwd %bucket.0/restore.0: f32[1,8] = aten.view(%bucket.0/part.0, [1, 8])
        bwd %bucket.0/restore.1: f32[2,8] = aten.view(%bucket.0/part.1, [2, 8])
        bwd %/sum.3: f32[] = aten.sum(%bucket.0/restore.0)
        bwd %/sum.2: f32[] = aten.sum(%bucket.0/restore.1)
        bwd %/add.0: f32[] = aten.add.Tensor(%/sum.3, %/sum.2)
        return [%/add.0]
        """,
    )


def test_what_is_no_gradient_or_fills_no_cache_lines_is_sent_from_a_concatenation() -> None:
    check(STEP.replace("[b, a]", "[u, v]"), ScatterStorage(), None)
    odd = STEP.replace("2,8]", "2,7]", 2).replace("[2, 8])\n", "[2, 7])\n", 1)
    for one, other in (("[16](0)", "[14](0)"), ("f32[48]", "f32[46]"), ("f32[24]", "f32[23]"), ("[8, 16]", "[7, 16]")):
        odd = odd.replace(one, other)
    odd = odd.replace("f32[8]", "f32[7]").replace("f32[1,8]", "f32[1,7]").replace("[1, 8]", "[1, 7]")
    check(odd.replace("bytes=192", "bytes=184"), ScatterStorage(), None)


def test_a_bucket_sends_what_another_one_has_summed_into_storage() -> None:
    """Over "tp" by an all_reduce, and then over "dp" by a reduce_scatter."""
    program = read(
        """
        # mesh: dp=2xtp=2
        in  %a: f32[16] = parameter
        in  %b: f32[16] = parameter
        fwd %/dot.0: f32[] = aten.dot(%a, %b)
        bwd %/grad.mul.0: f32[16] = aten.mul.Tensor(%b, %/dot.0)
        bwd %/grad.mul.1: f32[16] = aten.mul.Tensor(%a, %/dot.0)
        bwd %bucket.0/flatten.0: f32[16] = aten.view(%/grad.mul.0, [-1])
        bwd %bucket.0/flatten.1: f32[16] = aten.view(%/grad.mul.1, [-1])
        bwd %bucket.0/concat: f32[32] = aten.cat([%bucket.0/flatten.0, %bucket.0/flatten.1], 0)
        bwd %bucket.0/all_reduce: f32[32] = _c10d_functional.all_reduce(%bucket.0/concat, sum, tp)  {group=tp(2) op=sum dtype=f32 bytes=128 members=[a, b]}
        bwd %bucket.0/wait: f32[32] = _c10d_functional.wait_tensor(%bucket.0/all_reduce)
        bwd %bucket.0/split: (f32[16], f32[16]) = aten.split_with_sizes(%bucket.0/wait, [16, 16], 0)
        bwd %bucket.0/part.0: f32[16] = getitem(%bucket.0/split, 0)
        bwd %bucket.0/part.1: f32[16] = getitem(%bucket.0/split, 1)
        bwd %bucket.0/restore.0: f32[16] = aten.view(%bucket.0/part.0, [16])
        bwd %bucket.0/restore.1: f32[16] = aten.view(%bucket.0/part.1, [16])
        bwd %bucket.1/flatten.0: f32[16] = aten.view(%bucket.0/restore.0, [-1])
        bwd %bucket.1/flatten.1: f32[16] = aten.view(%bucket.0/restore.1, [-1])
        bwd %bucket.1/concat: f32[32] = aten.cat([%bucket.1/flatten.0, %bucket.1/flatten.1], 0)
        bwd %bucket.1/reduce_scatter: f32[16] = commfuse.reduce_scatter_members(%bucket.1/concat, sum, 2, dp, [8, 8])  {group=dp(2) op=sum dtype=f32 bytes=128 members=[a, b]}
        bwd %bucket.1/wait: f32[16] = _c10d_functional.wait_tensor(%bucket.1/reduce_scatter)
        bwd %bucket.1/split: (f32[8], f32[8]) = aten.split_with_sizes(%bucket.1/wait, [8, 8], 0)
        bwd %bucket.1/part.0: f32[8] = getitem(%bucket.1/split, 0)
        bwd %bucket.1/part.1: f32[8] = getitem(%bucket.1/split, 1)
        bwd %bucket.1/restore.0: f32[8] = aten.view(%bucket.1/part.0, [8])
        bwd %bucket.1/restore.1: f32[8] = aten.view(%bucket.1/part.1, [8])
        bwd %/dot.1: f32[] = aten.dot(%bucket.1/restore.0, %bucket.1/restore.1)
        return [%/dot.1]
        """
    )
    before = outcome(program)
    assert FlattenStorage()(program) and ScatterStorage()(program)
    verify(program, "both")
    assert_same(before, outcome(program), True)
