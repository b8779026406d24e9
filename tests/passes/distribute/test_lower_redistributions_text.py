"""What `lower_redistributions` makes of a few lines of text, and what it leaves."""

from commfuse_fx.passes.distribute.lower_redistributions import LowerRedistributions
from tests.passes.cases import check


def test_sums_over_two_axes_are_one_all_reduce() -> None:
    check(
        """
        # mesh: dp=2xtp=2
        # parallel_mode: semi_auto
        in  %x: f32[4] = input
        fwd %/sum.0: f32[] = aten.sum(%x)
        fwd %/sum.0/sum: f32[] = sum_partial(%/sum.0, tp, sum)
        fwd %/sum.0/sum.0: f32[] = sum_partial(%/sum.0/sum, dp, sum)
        return [%/sum.0/sum.0]
        """,
        LowerRedistributions(),
        """
        in  %x: f32[4] = input
        fwd %/sum.0: f32[] = aten.sum(%x)
        fwd %/sum.0/sum.0/all_reduce: f32[] = _c10d_functional.all_reduce(%/sum.0, sum, dp,tp)  {group=dp,tp(4) op=sum dtype=f32 bytes=4 members=[/sum.0/sum.0]}
        fwd %/sum.0/sum.0/wait: f32[] = _c10d_functional.wait_tensor(%/sum.0/sum.0/all_reduce)
        return [%/sum.0/sum.0/wait]
        """,
    )


def test_parts_along_columns_are_gathered_and_put_in_order() -> None:
    check(
        """
        # parallel_mode: semi_auto
        in  %x: f32[2,4] = input
        fwd %/gather: f32[2,8] = gather_parts(%x, dp, 2, 1, 1)
        fwd %/part: f32[2,4] = sum_and_divide(%/gather, dp, 2, 1, 1)
        fwd %/exchange: f32[1,8] = exchange_parts(%/part, dp, 2, 1, 0)
        fwd %/sum.0: f32[] = aten.sum(%/exchange)
        return [%/sum.0]
        """,
        LowerRedistributions(),
        """
        in  %x: f32[2,4] = input
        fwd %/gather/flat: f32[8] = aten.view(%x, [8])
        fwd %/gather/all_gather: f32[16] = _c10d_functional.all_gather_into_tensor(%/gather/flat, 2, dp)  {group=dp(2) dtype=f32 bytes=64 members=[/gather]}
        fwd %/gather/wait: f32[16] = _c10d_functional.wait_tensor(%/gather/all_gather)
        fwd %/gather/parts: f32[2,2,1,4] = aten.view(%/gather/wait, [2, 2, 1, 4])
        fwd %/gather/in_order: f32[2,1,2,4](4,4,8,1) = aten.permute(%/gather/parts, [1, 2, 0, 3])
        fwd %/gather/in_order.contiguous: f32[2,1,2,4] = aten.clone(%/gather/in_order, memory_format=contiguous_format)
        fwd %/gather/whole: f32[2,8] = aten.view(%/gather/in_order.contiguous, [2, 8])
        fwd %/part/parts: f32[2,1,2,4] = aten.view(%/gather/whole, [2, 1, 2, 4])
        fwd %/part/by_rank: f32[2,2,1,4](4,8,8,1) = aten.permute(%/part/parts, [2, 0, 1, 3])
        fwd %/part/by_rank.contiguous: f32[2,2,1,4] = aten.clone(%/part/by_rank, memory_format=contiguous_format)
        fwd %/part/flat: f32[16] = aten.view(%/part/by_rank.contiguous, [16])
        fwd %/part/reduce_scatter: f32[8] = _c10d_functional.reduce_scatter_tensor(%/part/flat, sum, 2, dp)  {group=dp(2) op=sum dtype=f32 bytes=64 members=[/part]}
        fwd %/part/wait: f32[8] = _c10d_functional.wait_tensor(%/part/reduce_scatter)
        fwd %/part/part: f32[2,4] = aten.view(%/part/wait, [2, 4])
        fwd %/exchange/flat: f32[8] = aten.view(%/part/part, [8])
        fwd %/exchange/all_to_all: f32[8] = _c10d_functional.all_to_all_single(%/exchange/flat, [4, 4], [4, 4], dp)  {group=dp(2) dtype=f32 bytes=32 members=[/exchange]}
        fwd %/exchange/wait: f32[8] = _c10d_functional.wait_tensor(%/exchange/all_to_all)
        fwd %/exchange/parts: f32[2,1,4] = aten.view(%/exchange/wait, [2, 1, 4])
        fwd %/exchange/in_order: f32[1,2,4] = aten.permute(%/exchange/parts, [1, 0, 2])
        fwd %/exchange/whole: f32[1,8] = aten.view(%/exchange/in_order, [1, 8])
        fwd %/sum.0: f32[] = aten.sum(%/exchange/whole)
        return [%/sum.0]
        """,
    )


def test_a_graph_without_changes_of_layout_stays() -> None:
    check(
        """
        in  %x: f32[4] = input
        fwd %/sum.0: f32[] = aten.sum(%x)
        return [%/sum.0]
        """,
        LowerRedistributions(),
        None,
    )
