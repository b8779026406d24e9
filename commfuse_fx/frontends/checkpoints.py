"""Saving and loading what a step needs to go on, on all ranks together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from commfuse_fx.frontends.session import Session
from commfuse_fx.frontends.step_state import StepState
from commfuse_fx.runtime.checkpoint.held import Stored
from commfuse_fx.runtime.checkpoint.plain_values import replaced
from commfuse_fx.runtime.checkpoint.state_in_memory import StateInMemory


class Checkpoints:
    """Saves and loads the state of one step."""

    def __init__(self, state: StepState, session: Session) -> None:
        self._state = state
        self._session = session

    def load_state_dict(self, given: Mapping[str, Any]) -> None:
        """As `CompiledStep.load_state_dict`."""
        what = "step.load_state_dict()"
        self._session.check_open()
        self._session.check_process()
        with self._session.together.doing(what) as meeting:
            error: Exception | None = None
            try:
                source = StateInMemory(given)
                tensors = source.read(self._state.places_in(source.values))
                found = replaced(
                    source.values, lambda _, each: tensors[each.name] if isinstance(each, Stored) else each
                )
                undo = self._state.put_by_methods(found)
            except Exception as caught:
                error = caught
            try:
                meeting.agree(what, error)
            except BaseException:
                if error is None:
                    undo()
                raise
            self._state.put(found)
