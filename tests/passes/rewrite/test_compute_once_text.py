"""What `compute_once` marks in a few lines of text, and what it leaves."""

import torch

from commfuse_fx.passes.rewrite.compute_once import ComputeOnce
from tests.passes.cases import check

MASKED = """
    in  %w: f32[2] = parameter
    in  %x: f32[2] = input
    in  %constant: f32[] = constant
    fwd %/mul.0: f32[2] = aten.mul.Tensor(%x, %w)
    fwd %/zeros_like.0: f32[2] = aten.zeros_like(%/mul.0, pin_memory=False)
    fwd %/arange.0: i64[2] = aten.arange(2, device=cpu, pin_memory=False)
    fwd %/gt.0: b8[2] = aten.gt.Scalar(%/arange.0, 0)
    fwd %/lift_fresh_copy.0: f32[] = aten.lift_fresh_copy(%constant)
    fwd %/where.0: f32[2] = aten.where.self(%/gt.0, %/lift_fresh_copy.0, %/zeros_like.0)
    fwd %/add.0: f32[2] = aten.add.Tensor(%x, %/where.0)
    fwd %/unsqueeze.0: f32[1,2] = aten.unsqueeze(%/where.0, 0)
    fwd %/add.1: f32[1,2] = aten.add.Tensor(%/add.0, %/unsqueeze.0)
    fwd %/mul.1: f32[1,2] = aten.mul.Tensor(%/add.1, %w)
    fwd %/sum.0: f32[] = aten.sum(%/mul.1)
    return [%/sum.0]
"""
VALUES = {"constant": torch.tensor(-3.0)}


def test_masks_are_computed_once_without_the_values_whose_shape_they_ask_for() -> None:
    made = check(
        MASKED,
        ComputeOnce(at_most=8),
        """
        in  %w: f32[2] = parameter
        in  %x: f32[2] = input
        in  %constant: f32[] = constant
        fwd %/zeros_like.0: f32[2] = aten.full([2], 0, dtype=f32, device=cpu, pin_memory=False)  {computed once}
        fwd %/arange.0: i64[2] = aten.arange(2, device=cpu, pin_memory=False)  {computed once}
        fwd %/gt.0: b8[2] = aten.gt.Scalar(%/arange.0, 0)  {computed once}
        fwd %/lift_fresh_copy.0: f32[] = aten.lift_fresh_copy(%constant)  {computed once}
        fwd %/where.0: f32[2] = aten.where.self(%/gt.0, %/lift_fresh_copy.0, %/zeros_like.0)  {computed once}
        fwd %/add.0: f32[2] = aten.add.Tensor(%x, %/where.0)
        fwd %/unsqueeze.0: f32[1,2] = aten.unsqueeze(%/where.0, 0)  {computed once}
        fwd %/add.1: f32[1,2] = aten.add.Tensor(%/add.0, %/unsqueeze.0)
        fwd %/mul.1: f32[1,2] = aten.mul.Tensor(%/add.1, %w)
        fwd %/sum.0: f32[] = aten.sum(%/mul.1)
        return [%/sum.0]
        """,
        constants=VALUES,
    )
    assert [(note.topic, note.subject) for note in made.notes] == [("computed once", "/where.0")]


def test_what_does_not_fit_is_computed_in_every_step_and_so_is_what_depends_on_it() -> None:
    made = check(
        MASKED,
        ComputeOnce(at_most=7),
        MASKED.replace(
            "%/gt.0: b8[2] = aten.gt.Scalar(%/arange.0, 0)",
            "%/gt.0: b8[2] = aten.gt.Scalar(%/arange.0, 0)  {computed once}",
        )
        .replace("arange(2, device=cpu, pin_memory=False)", "arange(2, device=cpu, pin_memory=False)  {computed once}")
        .replace("lift_fresh_copy(%constant)", "lift_fresh_copy(%constant)  {computed once}"),
        constants=VALUES,
    )
    assert [note.subject for note in made.notes if note.topic == "computed in every step"] == [
        "/where.0",
        "/zeros_like.0",
    ]


def test_what_is_sent_written_drawn_or_handed_out_is_left() -> None:
    check(
        """
        in  %w: f32[2] = parameter
        in  %v: f32[2] = parameter
        in  %count: f32[2] = buffer
        fwd %/full.0: f32[2] = aten.full([2], 1.0, device=cpu, pin_memory=False)
        fwd %/full.1: f32[2] = aten.full([2], 2.0, device=cpu, pin_memory=False)
        fwd %/full.2: f32[2] = aten.full([2], 3.0, device=cpu, pin_memory=False)
        fwd %/rand.0: f32[2] = aten.rand([2], device=cpu, pin_memory=False)
        fwd %/add_.0: f32[2] = aten.add_.Tensor(%/full.1, %w)
        fwd %/dot.0: f32[] = aten.dot(%/full.1, %/rand.0)
        bwd %/grad.full.0: f32[2] = aten.full([2], 1.0, device=cpu, pin_memory=False)
        bwd %reduce/w/all_reduce: f32[2] = _c10d_functional.all_reduce(%/grad.full.0, sum, dp)  {group=dp(2) op=sum dtype=f32 bytes=8 members=[w]}
        bwd %reduce/w/wait: f32[2] = _c10d_functional.wait_tensor(%reduce/w/all_reduce)
        upd %update/count: f32[2] = aten.copy_(%count, %/full.2)
        return [%/dot.0, %reduce/w/wait, %/full.0]
        """,
        ComputeOnce(),
        None,
    )


def test_equal_values_of_forward_and_backward_are_kept_once() -> None:
    check(
        """
        in  %w: f32[4] = parameter
        fwd %/arange.0: f32[4] = aten.arange(4, dtype=f32, device=cpu, pin_memory=False)
        fwd %/neg.0: f32[4] = aten.neg(%/arange.0)
        fwd %/dot.0: f32[] = aten.dot(%w, %/neg.0)
        bwd %/grad.arange.0: f32[4] = aten.arange(4, dtype=f32, device=cpu, pin_memory=False)
        bwd %/grad.neg.0: f32[4] = aten.neg(%/grad.arange.0)
        bwd %/grad.mul.0: f32[4] = aten.mul.Tensor(%/dot.0, %/grad.neg.0)
        return [%/dot.0, %/grad.mul.0]
        """,
        ComputeOnce(at_most=16),
        """
        in  %w: f32[4] = parameter
        fwd %/arange.0: f32[4] = aten.arange(4, dtype=f32, device=cpu, pin_memory=False)  {computed once}
        fwd %/neg.0: f32[4] = aten.neg(%/arange.0)  {computed once}
        fwd %/dot.0: f32[] = aten.dot(%w, %/neg.0)
        bwd %/grad.mul.0: f32[4] = aten.mul.Tensor(%/dot.0, %/neg.0)
        return [%/dot.0, %/grad.mul.0]
        """,
    )
