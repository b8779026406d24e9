"""Which nodes `inductor_regions` puts into regions, and which it leaves out."""

import pytest

from commfuse_fx.passes.kernels.inductor_regions import InductorRegions
from tests.passes.cases import check

STEP = """
    in  %w: f32[4] = parameter
    in  %v: f32[2,4] = parameter
    in  %x: f32[2,4] = input
    fwd %/mul.0: f32[2,4] = aten.mul.Tensor(%x, %w)
    fwd %/tanh.0: f32[2,4] = aten.tanh(%/mul.0)
    fwd %/sum.0: f32[] = aten.sum(%/tanh.0)
    bwd %/grad.mul.0: f32[2,4] = aten.mul.Tensor(%/tanh.0, %x)
    bwd %/grad.sum.0: f32[4] = aten.sum.dim_IntList(%/grad.mul.0, [0])
    bwd %reduce/w/all_reduce: f32[4] = _c10d_functional.all_reduce(%/grad.sum.0, sum, dp)  {group=dp(2) op=sum dtype=f32 bytes=16 members=[w]}
    bwd %/grad.neg.0: f32[2,4] = aten.neg(%/grad.mul.0)
    bwd %/grad.exp.0: f32[2,4] = aten.exp(%/grad.neg.0)
    bwd %reduce/w/wait: f32[4] = _c10d_functional.wait_tensor(%reduce/w/all_reduce)
    return [%/sum.0, %reduce/w/wait, %/grad.exp.0]
"""


LONG = "mul.0 tanh.0 sum.0 grad.mul.0 grad.sum.0"


def marked(text: str, *regions: str, rounded: str = "") -> str:
    """The text, in which the lines of each region's nodes carry its number. rounded: the numbers of such regions."""
    number = {
        name: f"{i}, rounded" if str(i) in rounded else i for i, names in enumerate(regions) for name in names.split()
    }
    lines = [(line, line.split(":")[0].rpartition("%/")[2]) for line in text.strip().splitlines()]
    return "\n".join(line + (f"  {{region {number[name]}}}" if name in number else "") for line, name in lines)


def test_regions_end_where_collectives_start_and_are_waited_for() -> None:
    check(STEP, InductorRegions(), marked(STEP, LONG, "grad.neg.0 grad.exp.0"))


def test_on_a_cpu_the_kernels_of_batch_norm_are_left_as_they_are() -> None:
    text = """
        in  %x: f32[4,2,3,3] = input
        fwd %/exp.0: f32[4,2,3,3] = aten.exp(%x)
        fwd %/neg.0: f32[4,2,3,3] = aten.neg(%/exp.0)
        fwd %/norm.0: (f32[4,2,3,3], f32[2], f32[2]) = aten.native_batch_norm(%/neg.0, None, None, None, None, True, 0.1, 1e-05)
        fwd %/getitem.0: f32[4,2,3,3] = getitem(%/norm.0, 0)
        fwd %/sin.0: f32[4,2,3,3] = aten.sin(%/getitem.0)
        fwd %/sum.0: f32[] = aten.sum(%/sin.0)
        return [%/sum.0]
    """
    check(text, InductorRegions(), marked(text, "exp.0 neg.0", "sin.0 sum.0"))


def test_few_ops_are_no_region() -> None:
    check(STEP, InductorRegions(at_least=3), marked(STEP, LONG))
    check(STEP, InductorRegions(at_least=6), None)


PRODUCTS = """
    in  %w: f32[4,4] = parameter
    in  %b: f32[4] = parameter
    in  %x: f32[2,4] = input
    fwd %/view.0: f32[2,4] = aten.view(%x, [2, 4])
    fwd %/relu.0: f32[2,4] = aten.relu(%/view.0)
    fwd %/mm.0: f32[2,4] = aten.mm(%/relu.0, %w)
    fwd %/tanh.0: f32[2,4] = aten.tanh(%/mm.0)
    fwd %/mm.1: f32[2,4] = aten.mm(%/tanh.0, %w)
    fwd %/sum.0: f32[] = aten.sum(%/mm.1)
    bwd %/grad.sum.0: f32[4] = aten.sum.dim_IntList(%x, [0])
    bwd %/grad.mm.0: f32[4,4] = aten.mm(%w, %w)
    return [%/sum.0, %/grad.mm.0, %/grad.sum.0]
"""


def test_where_no_two_ops_can_share_a_kernel_there_is_no_region() -> None:
    text = PRODUCTS.replace("aten.relu(%/view.0)", "aten.relu(%b)").replace("relu.0: f32[2,4]", "relu.0: f32[4]")
    text = text.replace("aten.mm(%/relu.0, %w)", "aten.mm(%x, %w)")
    made = check(text, InductorRegions(), None)
    (note,) = made.notes
    assert (note.subject, note.reason.split(",")[0]) == ("/view.0", "nodes from here on run op by op")


def test_two_ops_that_read_the_same_can_share_a_kernel() -> None:
    nodes = "view.0 relu.0 mm.0 tanh.0 mm.1 sum.0 grad.sum.0 grad.mm.0"
    check(PRODUCTS, InductorRegions(), marked(PRODUCTS, nodes))


def test_what_is_added_to_a_product_can_share_its_kernel() -> None:
    text = PRODUCTS.replace("grad.sum.0: f32[4] = aten.sum.dim_IntList(%x, [0])", "grad.sum.0: f32[4] = aten.neg(%b)")
    check(text, InductorRegions(), None)
    text = text.replace("aten.tanh(%/mm.0)", "aten.add.Tensor(%/mm.0, %b)")
    check(text, InductorRegions(), marked(text, "view.0 relu.0 mm.0 tanh.0 mm.1 sum.0 grad.sum.0 grad.mm.0"))


BUCKET = """
    in  %w: f32[6] = parameter
    in  %v: f32[2] = parameter
    in  %x: f32[2,4] = input
    fwd %/mul.0: f32[2,4] = aten.mul.Tensor(%x, %x)
    fwd %/sum.0: f32[] = aten.sum(%/mul.0)
    bwd %bucket.0/storage: f32[6] = aten.empty.memory_format([6], dtype=f32, device=cpu)
    bwd %bucket.0/place.a: f32[1,4] = aten.as_strided(%bucket.0/storage, [1, 4], [4, 1], 0)
    bwd %bucket.0/place.b: f32[2] = aten.as_strided(%bucket.0/storage, [2], [1], 4)
    bwd %/write.0: f32[1,4] = aten.sum.IntList_out(%x, [0], True, out=%bucket.0/place.a)
    bwd %/grad.sum.0: f32[2] = aten.sum.dim_IntList(%x, [1])
    bwd %/write.1: f32[2] = aten.copy_(%bucket.0/place.b, %/grad.sum.0)
    bwd %/grad.exp.0: f32[2] = aten.exp(%/grad.sum.0)
    bwd %/read.0: f32[6] = aten.neg(%bucket.0/storage)
    bwd %/grad.tanh.0: f32[6] = aten.tanh(%/read.0)
    return [%/sum.0, %/grad.tanh.0, %/grad.exp.0]
"""


def test_a_region_fills_memory_and_what_reads_it_is_in_another_one() -> None:
    regions = "mul.0 sum.0 write.0 grad.sum.0 write.1 grad.exp.0", "read.0 grad.tanh.0"
    check(BUCKET, InductorRegions(), marked(BUCKET, *regions))


def test_places_that_overlap_are_filled_in_two_regions() -> None:
    text = BUCKET.replace("[2], [1], 4)", "[2], [1], 3)").replace("[6]", "[5]")
    made = check(
        text,
        InductorRegions(),
        marked(text, "mul.0 sum.0 write.0 grad.sum.0", "write.1 grad.exp.0", "read.0 grad.tanh.0"),
    )
    assert [note.subject for note in made.notes] == ["/mul.0", "/write.1", "/read.0"]


LAYERS = """
    in  %w: f32[4] = parameter
    in  %x: f32[2,4] = input
    fwd %embed/mul.0: f32[2,4] = aten.mul.Tensor(%x, %w)
    fwd %embed/neg.0: f32[2,4] = aten.neg(%embed/mul.0)
    fwd %layers.0.up/exp.0: f32[2,4] = aten.exp(%embed/neg.0)
    fwd %layers.0.down/neg.0: f32[2,4] = aten.neg(%layers.0.up/exp.0)
    fwd %layers.1.up/exp.0: f32[2,4] = aten.exp(%layers.0.down/neg.0)
    fwd %layers.1.down/neg.0: f32[2,4] = aten.neg(%layers.1.up/exp.0)
    fwd %head/sum.0: f32[] = aten.sum(%layers.1.down/neg.0)
    fwd %head/neg.0: f32[] = aten.neg(%head/sum.0)
    bwd %layers.1/grad.mul.0: f32[2,4] = aten.mul.Tensor(%layers.1.down/neg.0, %x)
    bwd %layers.1/grad.sum.0: f32[4] = aten.sum.dim_IntList(%layers.1/grad.mul.0, [0])
    return [%head/neg.0, %layers.1/grad.sum.0]
"""


def test_with_by_layer_regions_end_with_layers() -> None:
    lines = LAYERS.strip().splitlines()
    first = lines.index(next(line for line in lines if "mul.0:" in line))
    after = [
        line if i < first or i == len(lines) - 1 else f"{line}  {{region {(i - first) // 2}}}"
        for i, line in enumerate(lines)
    ]
    check(LAYERS, InductorRegions(by_layer=True), "\n".join(after))


AGAIN = """
    in  %w: f32[4] = parameter
    in  %x: f32[2,4] = input
    fwd %/view.0: f32[8] = aten.view(%x, [8])
    fwd %/exp.0: f32[8] = aten.exp(%/view.0)
    fwd %/neg.0: f32[8] = aten.neg(%/exp.0)
    fwd %/sum.0: f32[] = aten.sum(%/neg.0)
    bwd %/grad.neg.0: f32[2,4] = aten.neg(%x)
    bwd %/grad.view.0: f32[8] = aten.view(%x, [8])
    bwd %/grad.exp.0: f32[8] = aten.exp(%/grad.view.0)
    bwd %/grad.sum.0: f32[] = aten.sum(%/grad.exp.0)
    bwd %/grad.sum.1: f32[4] = aten.sum.dim_IntList(%/grad.neg.0, [0])
    bwd %/grad.add.0: f32[4] = aten.add.Tensor(%/grad.sum.0, %/grad.sum.1)
    return [%/sum.0, %/grad.add.0]
"""


def test_what_a_checkpoint_computes_again_is_in_another_region() -> None:
    first, second = "view.0 exp.0 neg.0 sum.0 grad.neg.0 grad.view.0", "grad.exp.0 grad.sum.0 grad.sum.1 grad.add.0"
    check(AGAIN, InductorRegions(), marked(AGAIN, first, second))


PLACE = """
    in  %w: f32[4] = parameter
    in  %x: f32[2,4] = input
    fwd %axis_index/dp: - = axis_index(dp)
    fwd %/exp.0: f32[2,4] = aten.exp(%x)
    fwd %/neg.0: f32[2,4] = aten.neg(%/exp.0)
    fwd %/mul.0: f32[2,4] = aten.mul.Tensor(%/neg.0, %axis_index/dp)
    fwd %/mul.1: f32[2,4] = aten.mul.Tensor(%/mul.0, %w)
    fwd %/sum.0: f32[] = aten.sum(%/mul.1)
    return [%/sum.0]
"""


def test_what_depends_on_the_rank_is_in_no_region() -> None:
    """So that no number of a rank is in the code that all ranks share."""
    check(PLACE, InductorRegions(), marked(PLACE, "exp.0 neg.0", "mul.1 sum.0"))


COMPARED = """
    in  %x: bf16[2,4] = input
    fwd %/neg.0: bf16[2,4] = aten.neg(%x)
    fwd %/amax.0: bf16[2,1] = aten.amax(%/neg.0, [1], True)
    fwd %/eq.0: b8[2,4] = aten.eq.Tensor(%/neg.0, %/amax.0)
    fwd %/mul.0: bf16[2,4] = aten.mul.Tensor(%x, %/eq.0)
    fwd %/sum.0: bf16[] = aten.sum(%/mul.0)
    return [%/sum.0]
"""


def test_what_is_computed_is_stored_before_it_is_compared() -> None:
    check(COMPARED, InductorRegions(), marked(COMPARED, "neg.0 amax.0", "eq.0 mul.0 sum.0", rounded="0"))
    numbers = COMPARED.replace("bf16", "i64")
    check(numbers, InductorRegions(), marked(numbers, "neg.0 amax.0 eq.0 mul.0 sum.0"))


HALF = """
    in  %w: f32[4] = parameter
    in  %v: f16[4] = parameter
    in  %x: f16[4] = input
    fwd %/mul.0: f16[4] = aten.mul.Tensor(%x, 10.0)
    fwd %/add.0: f16[4] = aten.add.Tensor(%/mul.0, 1.0)
    fwd %/copy.0: f32[4] = aten._to_copy(%/add.0, dtype=f32)
    fwd %/mul.1: f32[4] = aten.mul.Tensor(%/copy.0, %w)
    fwd %/op.0: f32[4] = aten.{}(%/mul.1)
    fwd %/copy.1: f16[4] = aten._to_copy(%/op.0, dtype=f16)
    fwd %/mul.2: f16[4] = aten.mul.Tensor(%/copy.1, 2.0)
    fwd %/sum.0: f16[] = aten.sum(%/mul.2)
    bwd %reduce/w/all_reduce: f32[4] = _c10d_functional.all_reduce(%/mul.1, sum, dp)  {{group=dp(2) op=sum dtype=f32 bytes=16 members=[w]}}
    bwd %/grad.mul.0: f16[4] = aten.mul.Tensor(%x, 3.0)
    bwd %/grad.mul.1: f16[4] = aten.mul.Tensor(%/grad.mul.0, 3.0)
    bwd %reduce/w/wait: f32[4] = _c10d_functional.wait_tensor(%reduce/w/all_reduce)
    return [%/sum.0, %reduce/w/wait, %/grad.mul.1]
"""


@pytest.mark.parametrize("op", ["floor", "sign", "tanh"])
def test_numbers_that_decide_something_later_are_rounded_and_no_others(op: str) -> None:
    """Through whatever lies between, in whatever region."""
    text = HALF.format(op)
    regions = "mul.0 add.0 copy.0 mul.1 op.0 copy.1 mul.2 sum.0", "grad.mul.0 grad.mul.1"
    made = check(text, InductorRegions(), marked(text, *regions, rounded="" if op == "tanh" else "0"))
    assert any("rounded as op by op, for /op.0" in note.reason for note in made.notes) == (op != "tanh")


@pytest.mark.parametrize(
    ("op", "wrong", "right"),
    [
        ("avg_pool2d_backward(%/neg.0, %x, [1, 1], [1, 1], [0, 0], {}, True, None)", "True", "False"),
        ("upsample_nearest2d(%/neg.0, [4, 4], {})", "1.2", "None"),
        ("div.Scalar_mode(%/neg.0, 0.1, rounding_mode={})", "floor", "trunc"),
        ("diagonal_scatter(%/neg.0, {}, 0, 2, 3)", "%y", None),
    ],
)
def test_what_inductor_computes_otherwise_is_in_no_region(op: str, wrong: str, right: str | None) -> None:
    text = f"""
        in  %x: f64[2,3,4,4] = input
        in  %y: f64[2,3,4] = input
        fwd %/exp.0: f64[2,3,4,4] = aten.exp(%x)
        fwd %/neg.0: f64[2,3,4,4] = aten.neg(%/exp.0)
        fwd %/op.0: f64[2,3,4,4] = aten.{op}
        fwd %/sin.0: f64[2,3,4,4] = aten.sin(%/op.0)
        fwd %/sum.0: f64[] = aten.sum(%/sin.0)
        return [%/sum.0]
    """
    check(text.format(wrong), InductorRegions(), marked(text.format(wrong), "exp.0 neg.0", "sin.0 sum.0"))
    if right:
        check(text.format(right), InductorRegions(), marked(text.format(right), "exp.0 neg.0 op.0 sin.0 sum.0"))


def test_products_of_experts_are_in_no_region() -> None:
    """Inductor refuses them in float32."""
    text = """
        in  %x: bf16[8,16] = input
        in  %w: bf16[2,16,8] = input
        fwd %/ends.0: i32[2] = aten.full([2], 8, dtype=i32, device=cpu)
        fwd %/exp.0: bf16[8,16] = aten.exp(%x)
        fwd %/neg.0: bf16[8,16] = aten.neg(%/exp.0)
        fwd %/mm.0: bf16[8,8] = aten._grouped_mm(%/neg.0, %w, %/ends.0)
        fwd %/sin.0: bf16[8,8] = aten.sin(%/mm.0)
        fwd %/sum.0: bf16[] = aten.sum(%/sin.0)
        return [%/sum.0]
    """
    check(text, InductorRegions(), marked(text, "ends.0 exp.0 neg.0", "sin.0 sum.0"))
