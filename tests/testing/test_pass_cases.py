"""`assert_pass`: what it says of a pass that does something else than expected."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

import commfuse_fx as cf
from commfuse_fx.ir.core.meta import info
from commfuse_fx.ir.core.program import Program
from commfuse_fx.passes.declaration import NO_PRICES, PassContext, PricedPass
from commfuse_fx.testing import assert_pass, parse_program

BEFORE = """
    in  %x: f32[4] = input
    fwd %neg: f32[4] = aten.neg(%x)
    fwd %dot: f32[] = aten.dot(%x, %neg)
    return [%dot]
"""
AFTER = BEFORE.replace("%neg", "%other")


def rename(program: Program) -> bool:
    node = next(node for node in program.graph.nodes if info(node).name == "neg")
    info(node).name = "other"
    return True


def test_what_the_pass_has_made_is_returned_and_a_given_program_stays() -> None:
    program = parse_program(BEFORE)
    made = assert_pass(program, rename, AFTER)
    assert [info(node).name for node in made.graph.nodes][1] == "other"
    assert_pass(program, lambda program: False, None)


def test_lines_that_differ_are_shown() -> None:
    with pytest.raises(AssertionError, match="makes another program than expected") as caught:
        assert_pass(BEFORE, rename, None)
    assert "-fwd %neg: f32[4] = aten.neg(%x)\n" in str(caught.value)
    assert "+fwd %other: f32[4] = aten.neg(%x)\n" in str(caught.value)


def nothing(program: Program) -> bool:
    return True


def in_secret(program: Program) -> bool:
    rename(program)
    return False


@pytest.mark.parametrize(
    ("apply", "after", "said"),
    [(nothing, None, "returned True, and nothing changed"), (in_secret, AFTER, "returned False, and lines changed")],
)
def test_a_pass_says_whether_it_has_changed_anything(
    apply: Callable[[Program], bool], after: str | None, said: str
) -> None:
    with pytest.raises(AssertionError, match=said):
        assert_pass(BEFORE, apply, after)


def test_what_is_no_valid_program_is_refused() -> None:
    def twice(program: Program) -> bool:
        for node in program.graph.nodes:
            info(node).name = "same"
        return True

    with pytest.raises(cf.VerificationError, match="not unique"):
        assert_pass(BEFORE, twice, AFTER)


@dataclass(frozen=True)
class Cheapest(PricedPass):
    """Renames the first node where computing costs something."""

    name = "cheapest"
    numerics = "bitwise"

    def __call__(self, program: Program, context: PassContext = NO_PRICES) -> bool:
        neg = next(node for node in program.graph.nodes if info(node).name == "neg")
        return context.costs.compute_seconds(neg) > 0 and rename(program)


def test_a_pass_that_asks_for_costs_gets_those_of_the_cluster_in_the_header() -> None:
    assert_pass(f"# cluster: gloo-1gbit\n{BEFORE}", Cheapest(), AFTER)
    with pytest.raises(cf.ConfigValueError, match="compiled without a cluster"):
        assert_pass(BEFORE, Cheapest(), AFTER)


def test_something_that_is_no_pass_is_refused() -> None:
    with pytest.raises(cf.ConfigTypeError, match="apply is 'rename'; give a pass"):
        assert_pass(BEFORE, "rename", AFTER)  # type: ignore[arg-type]
