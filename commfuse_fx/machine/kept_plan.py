"""What a run has measured and chosen, for the next run of the same step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from commfuse_fx.machine.step_profile import StepProfile
from commfuse_fx.support.checks import check_text
from commfuse_fx.support.documents import Document, check_keys, document_data, document_of_data, made_of


@dataclass(frozen=True, kw_only=True)
class KeptPlan(Document, kind="kept plan"):
    """The plan that a step has come to stay with.

    plan: its name among the alternatives. profile: what it was made from.

    Raises ConfigTypeError or ConfigValueError, which name the field.
    """

    plan: str
    profile: StepProfile

    def __post_init__(self) -> None:
        check_text(self.plan, "plan")

    def _body(self) -> Mapping[str, Any]:
        return {"plan": self.plan, "profile": document_data(self.profile)}

    @classmethod
    def _from_body(cls, body: Mapping[str, Any], where: str) -> KeptPlan:
        check_keys(body, where, ("plan", "profile"))
        profile = document_of_data(StepProfile, body["profile"], f"{where}: profile")
        return made_of(cls, {**body, "profile": profile}, where)
