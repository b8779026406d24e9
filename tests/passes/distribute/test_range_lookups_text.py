"""What `range_lookups` makes of a few lines of text, and what it leaves."""

from commfuse_fx.passes.distribute.range_lookups import RangeLookups
from tests.passes.cases import check

LOOKUP = """
    in  %x: f32[2,3] = input
    fwd %/arange.0: i64[2] = aten.arange(2, device=cpu, pin_memory=False)
    fwd %/unsqueeze.0: i64[1,2] = aten.unsqueeze(%/arange.0, 0)
    fwd %/arange.1: i64[3] = aten.arange(3, device=cpu, pin_memory=False)
    fwd %/unsqueeze.1: i64[3,1] = aten.unsqueeze(%/arange.1, 1)
    fwd %/index.0: f32[3,2] = aten.index.Tensor(%x, [%/unsqueeze.0, %/unsqueeze.1])
    fwd %/sum.0: f32[] = aten.sum(%/index.0)
    return [%/sum.0]
"""


def test_a_lookup_of_all_places_in_order_is_a_permutation() -> None:
    check(
        LOOKUP,
        RangeLookups(),
        """
        in  %x: f32[2,3] = input
        fwd %/index.0/permute: f32[3,2](1,3) = aten.permute(%x, [1, 0])
        fwd %/index.0/view: f32[3,2](1,3) = aten.reshape(%/index.0/permute, [3, 2])
        fwd %/sum.0: f32[] = aten.sum(%/index.0/view)
        return [%/sum.0]
        """,
    )


def test_a_lookup_of_other_places_stays() -> None:
    check(
        LOOKUP.replace(
            "%/unsqueeze.0: i64[1,2] = aten.unsqueeze(%/arange.0, 0)",
            "%/unsqueeze.0: i64[1,2] = aten.full([1, 2], 1, dtype=i64)",
        ),
        RangeLookups(),
        None,
    )
    check(LOOKUP.replace("%x, [%/unsqueeze.0,", "%x, [None,").replace("f32[3,2]", "f32[2,3,1]"), RangeLookups(), None)
