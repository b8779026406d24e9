"""What `cast_before_gather` makes of a few lines of text, and what it leaves."""

import pytest

from commfuse_fx.passes.distribute.cast_before_gather import CastBeforeGather
from tests.passes.cases import check

GATHER = "  {group=dp(2) dtype=f32 bytes=104 members=[a]}"
STEP = f"""
    in  %a: f32[7,2] = parameter
    in  %x: bf16[2] = input
    fwd %shard/a/all_gather: f32[14,2] = _c10d_functional.all_gather_into_tensor(%a, 2, dp){GATHER}
    fwd %shard/a/wait: f32[14,2] = _c10d_functional.wait_tensor(%shard/a/all_gather)
    fwd %shard/a/without_padding: f32[13,2] = aten.narrow(%shard/a/wait, 0, 0, 13)
    fwd %/_to_copy.0: bf16[13,2] = aten._to_copy(%shard/a/without_padding, dtype=bf16)
    fwd %/mv.0: bf16[13] = aten.mv(%/_to_copy.0, %x)
    fwd %/sum.0: bf16[] = aten.sum(%/mv.0)
    return [%/sum.0]
"""


def test_rows_are_cast_and_half_of_the_bytes_are_gathered() -> None:
    check(
        STEP,
        CastBeforeGather(),
        """
        in  %a: f32[7,2] = parameter
        in  %x: bf16[2] = input
        fwd %shard/a/bf16: bf16[7,2] = aten._to_copy(%a, dtype=bf16)
        fwd %shard/a/all_gather: bf16[14,2] = _c10d_functional.all_gather_into_tensor(%shard/a/bf16, 2, dp)  {group=dp(2) dtype=bf16 bytes=52 members=[a]}
        fwd %shard/a/wait: bf16[14,2] = _c10d_functional.wait_tensor(%shard/a/all_gather)
        fwd %shard/a/without_padding: bf16[13,2] = aten.narrow(%shard/a/wait, 0, 0, 13)
        fwd %/mv.0: bf16[13] = aten.mv(%shard/a/without_padding, %x)
        fwd %/sum.0: bf16[] = aten.sum(%/mv.0)
        return [%/sum.0]
        """,
    )


def test_two_casts_of_what_was_gathered_become_one() -> None:
    twice = STEP.replace(
        "    fwd %/sum.0: bf16[] = aten.sum(%/mv.0)\n",
        """    fwd %/_to_copy.1: bf16[13,2] = aten._to_copy(%shard/a/without_padding, dtype=bf16)
    fwd %/mv.1: bf16[13] = aten.mv(%/_to_copy.1, %x)
    fwd %/dot.0: bf16[] = aten.dot(%/mv.0, %/mv.1)
""",
    ).replace("return [%/sum.0]", "return [%/dot.0]")
    check(
        twice,
        CastBeforeGather(),
        """
        in  %a: f32[7,2] = parameter
        in  %x: bf16[2] = input
        fwd %shard/a/bf16: bf16[7,2] = aten._to_copy(%a, dtype=bf16)
        fwd %shard/a/all_gather: bf16[14,2] = _c10d_functional.all_gather_into_tensor(%shard/a/bf16, 2, dp)  {group=dp(2) dtype=bf16 bytes=52 members=[a]}
        fwd %shard/a/wait: bf16[14,2] = _c10d_functional.wait_tensor(%shard/a/all_gather)
        fwd %shard/a/without_padding: bf16[13,2] = aten.narrow(%shard/a/wait, 0, 0, 13)
        fwd %/mv.0: bf16[13] = aten.mv(%shard/a/without_padding, %x)
        fwd %/mv.1: bf16[13] = aten.mv(%shard/a/without_padding, %x)
        fwd %/dot.0: bf16[] = aten.dot(%/mv.0, %/mv.1)
        return [%/dot.0]
        """,
    )


@pytest.mark.parametrize(
    "text",
    [
        # Something else needs all digits.
        STEP.replace(
            "    fwd %/sum.0: bf16[] = aten.sum(%/mv.0)\n    return [%/sum.0]",
            "    fwd %/sum.0: f32[] = aten.sum(%shard/a/without_padding)\n"
            "    fwd %/sum.1: bf16[] = aten.sum(%/mv.0)\n"
            "    fwd %/mul.0: f32[] = aten.mul.Tensor(%/sum.0, %/sum.1)\n    return [%/mul.0]",
        ),
        # The cast makes more bytes.
        STEP.replace("bf16", "f64"),
    ],
    ids=["used otherwise", "wider"],
)
def test_what_is_used_otherwise_is_gathered_as_it_is(text: str) -> None:
    check(text, CastBeforeGather(), None)
