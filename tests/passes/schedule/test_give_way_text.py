"""What `give_way` makes of a few lines of text, and what it leaves."""

from commfuse_fx.ir.core.meta import info
from commfuse_fx.passes.schedule.give_way import GiveWay
from tests.passes.cases import check

STEP = """
    in  %x: f32[256,256] = input
    fwd %x/all_reduce: f32[256,256] = _c10d_functional.all_reduce(%x, sum, dp)  {group=dp(2) op=sum dtype=f32 bytes=262144 members=[x]}
    fwd %/mm.0: f32[256,256] = aten.mm(%x, %x)
    fwd %/mm.1: f32[256,256] = aten.mm(%/mm.0, %x)
    fwd %/mm.2: f32[256,256] = aten.mm(%/mm.1, %x)
    fwd %x/wait: f32[256,256] = _c10d_functional.wait_tensor(%x/all_reduce)
    fwd %/mm.3: f32[256,256] = aten.mm(%/mm.2, %x/wait)
    fwd %/sum.0: f32[] = aten.sum(%/mm.3)
    return [%/sum.0]
"""


def test_a_collective_in_flight_gets_the_core_between_long_nodes_and_the_text_stays() -> None:
    made = check(STEP, GiveWay(), STEP)
    assert [info(node).name for node in made.graph.nodes if info(node).gives_way] == ["/mm.2"]


def test_short_nodes_need_no_turns() -> None:
    check(STEP.replace("[256,256]", "[4,4]").replace("bytes=262144", "bytes=64"), GiveWay(), None)
