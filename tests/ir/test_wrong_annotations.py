"""What runs in the next step, and pieces of buckets: verification refuses annotations that cannot be right."""

from __future__ import annotations

import pytest

import commfuse_fx as cf
from commfuse_fx.testing import parse_program

DEFERRED = """
    in  %a: f32[16] = parameter
    in  %b: f32[16] = parameter
    fwd %/neg.0: f32[16] = aten.neg(%b)
    fwd %/dot.0: f32[] = aten.dot(%a, %/neg.0)
    fwd %/abs.0: f32[] = aten.abs(%/dot.0)
    bwd %a/storage: f32[16] = aten.empty.memory_format([16], dtype=f32, device=cpu)  {kept between steps}
    bwd %a/write: f32[16] = aten.mul.out(%/neg.0, %/dot.0, out=%a/storage)
    bwd %a/start: f32[16] = _c10d_functional.all_reduce_(%a/storage, sum, dp)  {group=dp(2) op=sum dtype=f32 bytes=64 members=[a]}
    bwd %b/storage: f32[16] = aten.empty.memory_format([16], dtype=f32, device=cpu)  {kept between steps}
    bwd %b/write: f32[16] = aten.mul.out(%a, %/dot.0, out=%b/storage)
    bwd %b/start: f32[16] = _c10d_functional.all_reduce_(%b/storage, sum, dp)  {group=dp(2) op=sum dtype=f32 bytes=64 members=[b]}
    bwd %b/wait: f32[16] = _c10d_functional.wait_tensor(%b/start)  {in the next step, before %/neg.0}
    upd %b/apply: f32[16] = aten.sub_.Tensor(%b, %b/wait)  {in the next step, before %/neg.0}
    bwd %a/wait: f32[16] = _c10d_functional.wait_tensor(%a/start)  {in the next step, before %/dot.0}
    upd %a/apply: f32[16] = aten.sub_.Tensor(%a, %a/wait)  {in the next step, before %/dot.0}
    return [%/abs.0]
"""

SENT = """
    in  %x: f32[16] = input
    fwd %storage: f32[32] = aten.empty.memory_format([32], dtype=f32, device=cpu)
    fwd %first: f32[16] = aten.as_strided(%storage, [16], [1], 0)
    fwd %write.0: f32[16] = aten.copy_(%first, %x)  {sends start [0:16]}
    fwd %second: f32[16] = aten.as_strided(%storage, [16], [1], 16)
    fwd %write.1: f32[16] = aten.copy_(%second, %x)
    fwd %start: f32[32] = _c10d_functional.all_reduce_(%storage, sum, dp)  {group=dp(2) op=sum dtype=f32 bytes=128 members=[x]}  {sends the rest: [16:32]}
    fwd %wait: f32[32] = _c10d_functional.wait_tensor(%start)
    fwd %sum.0: f32[] = aten.sum(%wait)
    return [%sum.0]
"""


def refused(text: str) -> str:
    """What verification says of a program that is to be wrong."""
    with pytest.raises(cf.ConfigValueError, match="correct the text") as caught:
        parse_program(text)
    return str(caught.value)


@pytest.mark.parametrize("text", [DEFERRED, SENT])
def test_the_programs_are_right_as_they_are(text: str) -> None:
    parse_program(text)


def test_an_update_after_the_first_reader_is_refused() -> None:
    text = DEFERRED.replace("before %/neg.0", "before %/abs.0").replace("before %/dot.0", "before %/abs.0")
    assert "b/apply: changes what /neg.0 of the next step reads before it has run" in refused(text)


def test_an_update_after_its_bucket_is_overwritten_is_refused() -> None:
    text = DEFERRED.replace(
        "(%a/start)  {in the next step, before %/dot.0", "(%a/start)  {in the next step, before %b/start"
    )
    text = text.replace(
        "aten.sub_.Tensor(%a, %a/wait)  {in the next step, before %/dot.0",
        "aten.neg(%a/wait)  {in the next step, before %b/start",
    )
    assert "reads memory that a/write of the next step has overwritten" in refused(text)


def test_a_deferred_node_before_others_is_refused() -> None:
    lines = DEFERRED.splitlines()
    lines.insert(9, lines.pop(14))
    assert "a/wait: runs in the next step but stands before nodes that run in this one" in refused("\n".join(lines))


def test_anchors_out_of_order_are_refused() -> None:
    text = DEFERRED.replace("before %/dot.0", "before %/swap.0").replace("before %/neg.0", "before %/dot.0")
    text = text.replace("before %/swap.0", "before %/neg.0").replace("aten.neg(%b)", "aten.neg(%a)")
    text = text.replace("aten.dot(%a, %/neg.0)", "aten.dot(%b, %/neg.0)")
    assert "runs in the next step before a node that stands before it here" in refused(text)


def test_an_anchor_that_is_deferred_itself_is_refused() -> None:
    text = DEFERRED.replace(
        "(%a, %a/wait)  {in the next step, before %/dot.0", "(%a, %a/wait)  {in the next step, before %b/wait"
    )
    assert "is to run before b/wait, which is deferred itself" in refused(text)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("  {sends start [0:16]}", "", "is sent in pieces, and sends nothing of [0:16]"),
        ("rest: [16:32]", "rest: [16:32] [0:16]", "is sent in pieces, and sends twice [0:16]"),
        ("rest: [16:32]", "rest: [16:31]", "is sent in pieces that end at 31 of 32 elements"),
    ],
    ids=["a gap", "twice", "too short"],
)
def test_pieces_that_are_not_the_whole_bucket_are_refused(old: str, new: str, said: str) -> None:
    assert said in refused(SENT.replace(old, new))
