"""What `counter_random` makes of a few lines of text, and what it leaves."""

from commfuse_fx.passes.distribute.counter_random import CounterRandom
from tests.passes.cases import check


def test_draws_get_a_seed_and_numbers_of_their_own() -> None:
    check(
        """
        # parallel_mode: semi_auto
        in  %x: f32[4,4] = input
        fwd %/native_dropout.0: (f32[4,4], b8[4,4]) = aten.native_dropout(%x, 0.5, True)
        fwd %/getitem.0: f32[4,4] = getitem(%/native_dropout.0, 0)
        fwd %/rand_like.0: f32[4,4] = aten.rand_like(%/getitem.0, pin_memory=False)
        fwd %/mul.0: f32[4,4] = aten.mul.Tensor(%/getitem.0, %/rand_like.0)
        fwd %/sum.0: f32[] = aten.sum(%/mul.0)
        return [%/sum.0]
        """,
        CounterRandom(),
        """
        in  %x: f32[4,4] = input
        in  %seed: - = seed
        fwd %/native_dropout.0/dropout_at: (f32[4,4], b8[4,4]) = dropout_at(%x, 0.5, %seed, 0, [0, 0], [4, 4])
        fwd %/getitem.0: f32[4,4] = getitem(%/native_dropout.0/dropout_at, 0)
        fwd %/rand_like.0/uniform_at: f32[4,4] = uniform_at([4, 4], 0.0, 1.0, %seed, 1, [0, 0], [4, 4], f32, cpu)
        fwd %/mul.0: f32[4,4] = aten.mul.Tensor(%/getitem.0, %/rand_like.0/uniform_at)
        fwd %/sum.0: f32[] = aten.sum(%/mul.0)
        return [%/sum.0]
        """,
    )


def test_an_op_without_a_counterpart_stays() -> None:
    check(
        """
        in  %x: f32[4] = input
        fwd %/multinomial.0: i64[2] = aten.multinomial(%x, 2)
        fwd %/_to_copy.0: f32[2] = aten._to_copy(%/multinomial.0, dtype=f32)
        fwd %/sum.0: f32[] = aten.sum(%/_to_copy.0)
        return [%/sum.0]
        """,
        CounterRandom(),
        None,
    )
