"""What `share_update` makes of a few lines of text, and what it leaves."""

import pytest

from commfuse_fx.errors import ConfigValueError
from commfuse_fx.ir.text.write_text import canonical_text
from commfuse_fx.passes.distribute.share_update import ShareUpdate
from commfuse_fx.passes.rewrite.update_parameters import UpdateParameters
from tests.passes.cases import check, read

GIVEN = """
    in  %a: f32[13,2] = parameter
    in  %b: f32[16] = parameter
    in  %input.0.a: f32[13,2] = input
    in  %input.0.b: f32[16] = input
    fwd %loss: f32[] = aten.full([], 0.0, dtype=f32, device=cpu)
    return [%loss, %input.0.a, %input.0.b]
"""
UPDATE = f"# optimizer: SGD (sgd)\n{GIVEN}"
GRADIENTS = {"gradients": ["a", "b"]}


def test_each_rank_takes_the_rows_that_it_updates_padded_where_they_do_not_divide() -> None:
    program = read(UPDATE, **GRADIENTS)
    assert ShareUpdate(0, pad=True)(program)
    assert {name: param.shard for name, param in program.params.items()} == {"a": "dp", "b": "dp"}
    assert [note.reason for note in program.notes] == [f"2 ranks over dp update {rows} rows each" for rows in (7, 8)]
    UpdateParameters()(program)
    text = canonical_text(program)
    assert "%shard/a/padded_gradient: f32[14,2] = aten.constant_pad_nd(%input.0.a, [0, 0, 0, 1])" in text
    assert "%shard/a/gradient: f32[7,2] = aten.narrow(%shard/a/padded_gradient, 0, %shard/begin.7/dp, 7)" in text
    assert "%shard/b/gradient: f32[8] = aten.narrow(%input.0.b, 0, %shard/begin.8/dp, 8)" in text
    assert "([%shard/a/rows, %shard/b/rows], [%shard/a/gradient, %shard/b/gradient]" in text


def test_the_rank_that_owns_a_parameter_gets_its_gradient() -> None:
    made = check(
        UPDATE,
        ShareUpdate(0, mode="broadcast"),
        """
        in  %a: f32[13,2] = parameter
        in  %b: f32[16] = parameter
        in  %input.0.a: f32[13,2] = input
        in  %input.0.b: f32[16] = input
        fwd %loss: f32[] = aten.full([], 0.0, dtype=f32, device=cpu)
        upd %shard/a/gradient: f32[13,2] = commfuse.of_owner(%input.0.a, 0, 2, dp)
        upd %shard/b/gradient: f32[16] = commfuse.of_owner(%input.0.b, 1, 2, dp)
        return [%loss, %shard/a/gradient, %shard/b/gradient]
        """,
        **GRADIENTS,
    )
    assert {name: (param.shard, param.owner) for name, param in made.params.items()} == {"a": ("dp", 0), "b": ("dp", 1)}


def test_a_parameter_without_a_gradient_is_shared_as_well() -> None:
    program = read(UPDATE, **GRADIENTS)
    del program.grads["a"]
    ShareUpdate(0, pad=True)(program)
    assert {name: param.shard for name, param in program.params.items()} == {"a": "dp", "b": "dp"}


def test_what_is_small_or_does_not_divide_is_updated_by_every_rank() -> None:
    check(UPDATE, ShareUpdate(), None, **GRADIENTS)
    made = check(UPDATE, ShareUpdate(0, ranks=1), None, **GRADIENTS)
    assert [note.reason for note in made.notes] == ["optimizer_weight_shard_size=1 leaves it to each rank"] * 2
    program = read(UPDATE, **GRADIENTS)
    ShareUpdate(0)(program)
    assert {name: param.shard for name, param in program.params.items()} == {"a": "", "b": "dp"}


def test_an_optimizer_without_a_rule_is_refused() -> None:
    program = read(f"# optimizer: Lamb (opaque)\n{GIVEN}", **GRADIENTS)
    with pytest.raises(ConfigValueError, match="ShardedOptimizer with Lamb: it has no rule"):
        ShareUpdate(0)(program)
