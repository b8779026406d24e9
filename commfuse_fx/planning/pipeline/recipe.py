"""The passes that a compile runs: those of the table that run in its situation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from commfuse_fx.errors import ConfigValueError, VerificationError
from commfuse_fx.passes.declaration import Pass, PassContext, Situation
from commfuse_fx.planning.pipeline.pass_table import TABLE
from commfuse_fx.planning.pipeline.pipeline import PassPipeline


def check_skipped(names: Sequence[str]) -> None:
    """Raise ConfigValueError for a name of `skip_passes` that is no pass, or one that says what is computed."""
    known = {each.name: each for passes in TABLE.values() for each in passes}
    may_be_skipped = [name for name, each in known.items() if each.numerics != "defines"]
    for name in names:
        if name not in may_be_skipped:
            why = "which says what is computed" if name in known else "which is no pass"
            raise ConfigValueError(
                f"skip_passes (or COMMFUSE_SKIP) has {name!r}, {why}; give some of {', '.join(may_be_skipped)}"
            )


def build_pipeline(situation: Situation, context: PassContext | None = None) -> PassPipeline:
    """The passes of one compile, in order. context: by default that of the configured cluster.

    Raises ConfigValueError where `skip_passes` leaves out a pass that another one needs.
    """
    context = PassContext.of(situation.config) if context is None else context
    skipped = situation.config.skip_passes
    made = (
        each.when(situation)
        for passes in TABLE.values()
        for each in passes
        if not (each.needs_sizes and situation.by_autograd) and each.name not in skipped
    )
    passes = tuple(item for item in made if item is not None)
    try:
        return PassPipeline(passes, context=context, variant=situation.variant)
    except VerificationError as error:
        if not skipped:
            raise
        raise ConfigValueError(
            f"skip_passes={skipped}: {error}; skip that pass as well, or run what it needs"
        ) from None


def skipped_passes(situation: Situation) -> list[type[Pass]]:
    """The passes that do not run because autograd computes, and would run otherwise."""
    if not situation.by_autograd:
        return []
    compiled = replace(situation, by_autograd=False)
    needing = (each for passes in TABLE.values() for each in passes if each.needs_sizes)
    return [each for each in needing if each.when(compiled) is not None]
