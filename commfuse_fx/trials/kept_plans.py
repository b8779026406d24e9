"""Profiles with plans that stayed in earlier runs, in a folder of files. One rank reads and writes them.

COMMFUSE_CACHE names the folder, and "0" turns it off. A file's name is a digest of all that a plan depends on.

Why: docs/decisions.md, "What stays is the name of a plan and the figures that it follows from".
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from commfuse_fx.config.compile_config import CompileConfig
from commfuse_fx.errors import CommFuseError
from commfuse_fx.ir.core.program import Program
from commfuse_fx.ir.text.write_text import canonical_text
from commfuse_fx.machine.source import costs_label
from commfuse_fx.machine.step_profile import StepProfile
from commfuse_fx.support.logs import logger
from commfuse_fx.support.writing import write_whole

VARIABLE = "COMMFUSE_CACHE"
OFF = "0"

log = logger("plan")


class KeptPlans:
    """The kept plan of one step.

    captured: the graph of the step. asked: the options of the user. machine: the kind of the ranks' machines.
    """

    def __init__(self, captured: Program, asked: CompileConfig, machine: str) -> None:
        local = os.environ.get("LOCAL_WORLD_SIZE", "")  # of torchrun: how ranks lie on hosts
        figures = None if asked.figures is None else costs_label(asked.figures)
        tried = asked.is_auto, asked.tries_across_steps, asked.comm_fusion.is_given, figures
        options = tried, asked.unmeasured.header()
        text = "\n".join((canonical_text(captured), repr(options), machine, local))
        folder = _folder()
        name = f"plan-{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"
        self.path = None if folder is None else folder / name

    def read(self, world: int, model: str) -> StepProfile | None:
        """The profile and its plan; None if there is none, or none that can be read, which is a warning.

        world, model: as `StepProfile.check` takes them.
        """
        if self.path is None or not os.path.exists(self.path):  # False also where the folder cannot be looked into
            return None
        try:
            found = StepProfile.load(self.path)
            found.check(world, model)
        except CommFuseError as error:
            log.warning("a kept plan is ignored, and will be written again: %s", error)
            return None
        return found

    def write(self, profile: StepProfile) -> None:
        """Keep the profile with its plan. A folder that cannot be written is a warning, and is not tried again."""
        if self.path is None:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self.path, profile.to_json())
        except OSError as error:
            self.path = None
            log.warning("the plan is not kept for the next run (%s names the folder, 0 is none): %s", VARIABLE, error)


def _folder() -> Path | None:
    named = os.environ.get(VARIABLE, "")
    if named == OFF:
        return None
    if named:
        return Path(named)
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "commfuse"
    except RuntimeError:  # no home
        return None
