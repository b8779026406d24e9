"""Saving and loading what a step needs to go on, on all ranks together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from commfuse_fx.calls.session import Session
from commfuse_fx.checkpoints.checkpoint_reader import CheckpointReader
from commfuse_fx.checkpoints.checkpoint_writer import CheckpointWriter
from commfuse_fx.checkpoints.damage import damage_told
from commfuse_fx.checkpoints.extras import Extras
from commfuse_fx.checkpoints.held import filled
from commfuse_fx.checkpoints.random_state import RankGenerators
from commfuse_fx.checkpoints.saving import Saving
from commfuse_fx.checkpoints.state_in_memory import StateInMemory
from commfuse_fx.checkpoints.step_state import StepState
from commfuse_fx.cost.priced import model_fingerprint
from commfuse_fx.errors import CheckpointError, ConfigValueError
from commfuse_fx.machine.step_profile import StepProfile
from commfuse_fx.runtime.execute.interrupts import interrupts_deferred
from commfuse_fx.runtime.ranks.before_destroy import before_destroy
from commfuse_fx.runtime.ranks.meeting import Meeting
from commfuse_fx.support.checks import check_bool, show
from commfuse_fx.support.documents import document_data, document_of_data
from commfuse_fx.support.logs import logger

log = logger("runtime")

Undo = Callable[[], None]


class Checkpoints:
    """Saves and loads the state of one step."""

    def __init__(self, model: nn.Module, state: StepState, session: Session) -> None:
        self._model = model
        self._state = state
        self._session = session
        self._running: Saving | None = None
        self._waits_at_the_end = False

    def save(self, folder: object, extra: object, asynchronous: object) -> Saving:
        """As `CompiledStep.save`."""
        self.wait()
        what = f"step.save({show(folder)})"
        with self._session.together.doing(what) as meeting:
            writer = CheckpointWriter(meeting, what, folder, lambda: self._held(extra, asynchronous))
            if not asynchronous:
                writer.write()
                return Saving()
            writer.copy()
        if self._session.agreement is not None and not self._waits_at_the_end:
            before_destroy(self.finish)
            self._waits_at_the_end = True
        self._running = Saving(writer.write)
        return self._running

    def load(self, folder: object, extra: object) -> dict[str, Any]:
        """As `CompiledStep.load`."""
        extras = Extras(None)

        def read(meeting: Meeting, undo: list[Undo]) -> tuple[dict[str, Any], int]:
            nonlocal extras
            extras = Extras(extra)
            content = f"the content of the checkpoint in {show(folder)}"
            with damage_told(content):
                reader = CheckpointReader(folder, meeting.rank, meeting.size)
                extras.check(reader.values["extra"])
                reader.check_world(self._state.of_single_ranks())
                found = reader.read(self._state.places_in(reader.state))
                found["plan"] = self._plan(found["plan"])
                identity = reader.identity
            undo.append(self._state.put_by_methods(found))
            undo.append(extras.put(found["extra"]))
            with damage_told(content):
                undo.append(RankGenerators(self._model).put(found["random"]))
            return found, identity

        found = self._load(f"step.load({show(folder)})", read)
        if self._session.replan is not None and found["plan"] is not None:
            self._session.replan.go_on_with(found["plan"])
        return extras.rest(found["extra"])

    def load_state_dict(self, given: object) -> None:
        """As `CompiledStep.load_state_dict`."""

        def read(_: Meeting, undo: list[Undo]) -> tuple[dict[str, Any], int]:
            with damage_told("the state"):
                source = StateInMemory(given)
                tensors = source.read(self._state.places_in(source.values))
                found: dict[str, Any] = filled(source.values, tensors)
            undo.append(self._state.put_by_methods(found))
            return found, 0

        self._load("step.load_state_dict()", read)

    def wait(self) -> None:
        """Wait for a save that runs. Raises what kept it from its end, if nobody has seen that yet."""
        running, self._running = self._running, None
        if running is not None:
            running.wait()

    def finish(self) -> None:
        """Wait for a save that runs, well or not: its error is for the next save, or for who waits for it."""
        if self._running is not None:
            self._running.finish()

    def _held(self, extra: object, asynchronous: object) -> dict[str, Any]:
        check_bool(asynchronous, "asynchronous")
        profile = None if self._session.replan is None else self._session.replan.profile_to_keep
        return {
            **self._state.held(),
            "random": RankGenerators(self._model).held(),
            "plan": None if profile is None else document_data(profile),
            "extra": Extras(extra).held(),
        }

    def _load(self, what: str, read: Callable[[Meeting, list[Undo]], tuple[dict[str, Any], int]]) -> dict[str, Any]:
        """Let all ranks read a state, and go on from it if none of them has failed.

        read: gives the state, and a number that tells checkpoints apart. It may change what can be taken back, and adds
        how to its second argument.
        """
        self.finish()  # the ranks meet in one place
        with self._session.together.doing(what) as meeting:
            found: dict[str, Any] = {}
            identity = 0
            undo: list[Undo] = []
            error: Exception | None = None
            try:
                try:
                    found, identity = read(meeting, undo)
                except Exception as caught:
                    error = caught
                _check_same(meeting, what, meeting.agree(what, error, identity))
                with interrupts_deferred():
                    self._state.put(found)
                    undo.clear()
            except BaseException:
                for each in reversed(undo):
                    each()
                raise
            return found

    def _plan(self, saved: Any) -> StepProfile | None:
        """The plan of the run that was saved, if it is one for as many ranks as here."""
        if saved is None:
            return None
        profile = document_of_data(StepProfile, saved, "the plan in the checkpoint")
        fingerprint = model_fingerprint(dict(self._model.named_parameters()))
        try:
            profile.check(self._session.planner.mesh.world, fingerprint)
        except ConfigValueError as error:
            log.info("the plan in the checkpoint is not used: %s", error)
            return None
        return profile


def _check_same(meeting: Meeting, what: str, identities: list[int]) -> None:
    """Raises CheckpointError, on all ranks, where they have read different checkpoints."""
    other = next((rank for rank, each in enumerate(identities) if each != identities[0]), None)
    if other is not None:
        error = CheckpointError(
            f"{what}: ranks 0 and {other} have found different checkpoints there, and nothing is loaded. Give a folder "
            "that all ranks share; if another program saves to it now, load again"
        )
        meeting.agree(what, error)
