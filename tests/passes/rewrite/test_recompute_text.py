"""What `recompute` makes of a few lines of text, and what it leaves."""

from commfuse_fx.passes.rewrite.recompute import Recompute
from tests.passes.cases import check


def reduced(gradient: str) -> str:
    """The lines that reduce a gradient over two ranks, and return it."""
    group = "{group=dp(2) op=sum dtype=f32 bytes=64 members=[w]}"
    return f"""
    bwd %/all_reduce: f32[4,4] = _c10d_functional.all_reduce_(%/{gradient}, sum, dp)  {group}
    bwd %/wait: f32[4,4] = _c10d_functional.wait_tensor(%/all_reduce)
    return [%/sum.0, %/wait]
    """


CHAIN = """
    in  %w: f32[4,4] = parameter
    in  %x: f32[4,4] = input
    fwd %/mm.0: f32[4,4] = aten.mm(%x, %w)
    fwd %/mul.0: f32[4,4] = aten.mul.Tensor(%/mm.0, %/mm.0)
    fwd %/neg.0: f32[4,4] = aten.neg(%/mul.0)
    fwd %/mul.1: f32[4,4] = aten.mul.Tensor(%/mm.0, %/neg.0)
    fwd %/sum.0: f32[] = aten.sum(%/mul.1)
    bwd %/grad.mul.0: f32[4,4] = aten.mul.Tensor(%/neg.0, 2)
    bwd %/grad.mul.1: f32[4,4] = aten.mul.Tensor(%/grad.mul.0, %/mul.0)
    bwd %/grad.t.0: f32[4,4](1,4) = aten.t(%x)
    bwd %/grad.mm.0: f32[4,4] = aten.mm(%/grad.t.0, %/grad.mul.1)
""" + reduced("grad.mm.0")


def test_values_of_elements_are_computed_again_from_the_one_that_is_kept() -> None:
    made = check(
        CHAIN,
        Recompute(at_least=64, on_cpu=True),
        """
        in  %w: f32[4,4] = parameter
        in  %x: f32[4,4] = input
        fwd %/mm.0: f32[4,4] = aten.mm(%x, %w)
        fwd %/mul.0: f32[4,4] = aten.mul.Tensor(%/mm.0, %/mm.0)
        fwd %/neg.0: f32[4,4] = aten.neg(%/mul.0)
        fwd %/mul.1: f32[4,4] = aten.mul.Tensor(%/mm.0, %/neg.0)
        fwd %/sum.0: f32[] = aten.sum(%/mul.1)
        bwd %/neg.0/again: f32[4,4] = aten.neg(%/mul.0)
        bwd %/grad.mul.0: f32[4,4] = aten.mul.Tensor(%/neg.0/again, 2)
        bwd %/grad.mul.1: f32[4,4] = aten.mul.Tensor(%/grad.mul.0, %/mul.0)
        bwd %/grad.t.0: f32[4,4](1,4) = aten.t(%x)
        bwd %/grad.mm.0: f32[4,4] = aten.mm(%/grad.t.0, %/grad.mul.1)
        """
        + reduced("grad.mm.0"),
    )
    [note] = made.notes
    assert note.reason == "64 bytes are not kept from the forward"


def test_what_a_library_reads_is_kept() -> None:
    """Of these, `abs` is an operand of a product: it has to be in memory either way, and serves the other user, too."""
    before = """
        in  %w: f32[4,4] = parameter
        in  %x: f32[4,4] = input
        fwd %/mm.0: f32[4,4] = aten.mm(%x, %w)
        fwd %/mul.0: f32[4,4] = aten.mul.Tensor(%/mm.0, %/mm.0)
        fwd %/abs.0: f32[4,4] = aten.abs(%/mul.0)
        fwd %/neg.0: f32[4,4] = aten.neg(%/abs.0)
        fwd %/t.0: f32[4,4](1,4) = aten.t(%/abs.0)
        fwd %/sum.0: f32[] = aten.sum(%/neg.0)
        bwd %/grad.mul.0: f32[4,4] = aten.mul.Tensor(%/neg.0, 2)
        bwd %/grad.mm.0: f32[4,4] = aten.mm(%/t.0, %/grad.mul.0)
        """ + reduced("grad.mm.0")
    check(
        before,
        Recompute(at_least=64, on_cpu=True),
        """
        in  %w: f32[4,4] = parameter
        in  %x: f32[4,4] = input
        fwd %/mm.0: f32[4,4] = aten.mm(%x, %w)
        fwd %/mul.0: f32[4,4] = aten.mul.Tensor(%/mm.0, %/mm.0)
        fwd %/abs.0: f32[4,4] = aten.abs(%/mul.0)
        fwd %/neg.0: f32[4,4] = aten.neg(%/abs.0)
        fwd %/sum.0: f32[] = aten.sum(%/neg.0)
        bwd %/neg.0/again: f32[4,4] = aten.neg(%/abs.0)
        bwd %/grad.mul.0: f32[4,4] = aten.mul.Tensor(%/neg.0/again, 2)
        bwd %/t.0/again: f32[4,4](1,4) = aten.t(%/abs.0)
        bwd %/grad.mm.0: f32[4,4] = aten.mm(%/t.0/again, %/grad.mul.0)
        """
        + reduced("grad.mm.0"),
    )


def test_sums_random_numbers_and_small_gains_stay() -> None:
    check(CHAIN, Recompute(at_least=65, on_cpu=True), None)
    check(
        """
        in  %w: f32[4,4] = parameter
        in  %x: f32[4,4] = input
        fwd %/mm.0: f32[4,4] = aten.mm(%x, %w)
        fwd %/cumsum.0: f32[4,4] = aten.cumsum(%/mm.0, 0)
        fwd %/rand_like.0: f32[4,4] = aten.rand_like(%/mm.0, pin_memory=False)
        fwd %/mul.0: f32[4,4] = aten.mul.Tensor(%/cumsum.0, %/rand_like.0)
        fwd %/sum.0: f32[] = aten.sum(%/mul.0)
        bwd %/grad.mul.0: f32[4,4] = aten.mul.Tensor(%/cumsum.0, %/rand_like.0)
        """
        + reduced("grad.mul.0"),
        Recompute(at_least=1, on_cpu=True),
        None,
    )


def test_without_collectives_one_region_holds_all_and_its_compiler_decides() -> None:
    alone = [line for line in CHAIN.splitlines() if "all_reduce" not in line and "return" not in line]
    check("\n".join([*alone, "    return [%/sum.0, %/grad.mm.0]"]), Recompute(at_least=1, on_cpu=True), None)


def test_on_a_cpu_everything_is_kept() -> None:
    check(CHAIN, Recompute(at_least=1), None)


def test_parameters_that_the_backward_does_not_read_stay_unread() -> None:
    """Their user may change them between the two."""
    check(
        """
        in  %w: f32[4,4] = parameter
        in  %x: f32[4,4] = input
        fwd %/mul.0: f32[4,4] = aten.mul.Tensor(%x, %w)
        fwd %/sin.0: f32[4,4] = aten.sin(%/mul.0)
        fwd %/cos.0: f32[4,4] = aten.cos(%/mul.0)
        fwd %/sum.0: f32[] = aten.sum(%/sin.0)
        bwd %/grad.mul.0: f32[4,4] = aten.mul.Tensor(%/cos.0, 2)
        """
        + reduced("grad.mul.0"),
        Recompute(at_least=1, on_cpu=True),
        None,
    )


def test_of_what_dropout_draws_truth_values_are_kept() -> None:
    check(
        """
        in  %w: f32[4,4] = parameter
        in  %x: f32[4,4] = input
        fwd %/mm.0: f32[4,4] = aten.mm(%x, %w)
        fwd %/empty_like.0: f32[4,4] = aten.empty_like(%/mm.0, pin_memory=False)
        fwd %/bernoulli.0: f32[4,4] = aten.bernoulli.p(%/empty_like.0, 0.5)
        fwd %/div.0: f32[4,4] = aten.div.Scalar(%/bernoulli.0, 0.5)
        fwd %/mul.0: f32[4,4] = aten.mul.Tensor(%/mm.0, %/div.0)
        fwd %/sum.0: f32[] = aten.sum(%/mul.0)
        bwd %/grad.mul.0: f32[4,4] = aten.mul.Tensor(%/div.0, 2)
        bwd %/grad.t.0: f32[4,4](1,4) = aten.t(%x)
        bwd %/grad.mm.0: f32[4,4] = aten.mm(%/grad.t.0, %/grad.mul.0)
        """
        + reduced("grad.mm.0"),
        Recompute(at_least=48, on_cpu=True),
        """
        in  %w: f32[4,4] = parameter
        in  %x: f32[4,4] = input
        fwd %/mm.0: f32[4,4] = aten.mm(%x, %w)
        fwd %/empty_like.0: f32[4,4] = aten.empty_like(%/mm.0, pin_memory=False)
        fwd %/bernoulli.0: f32[4,4] = aten.bernoulli.p(%/empty_like.0, 0.5)
        fwd %/bernoulli.0/kept: b8[4,4] = aten._to_copy(%/bernoulli.0, dtype=b8)
        fwd %/div.0: f32[4,4] = aten.div.Scalar(%/bernoulli.0, 0.5)
        fwd %/mul.0: f32[4,4] = aten.mul.Tensor(%/mm.0, %/div.0)
        fwd %/sum.0: f32[] = aten.sum(%/mul.0)
        bwd %/bernoulli.0/again: f32[4,4] = aten._to_copy(%/bernoulli.0/kept, dtype=f32)
        bwd %/div.0/again: f32[4,4] = aten.div.Scalar(%/bernoulli.0/again, 0.5)
        bwd %/grad.mul.0: f32[4,4] = aten.mul.Tensor(%/div.0/again, 2)
        bwd %/grad.t.0: f32[4,4](1,4) = aten.t(%x)
        bwd %/grad.mm.0: f32[4,4] = aten.mm(%/grad.t.0, %/grad.mul.0)
        """
        + reduced("grad.mm.0"),
    )
