"""With COMMFUSE_VERIFY=1 the captured program is verified, once, before any pass has seen it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import commfuse_fx as cf
from commfuse_fx.capture import joint
from commfuse_fx.capture.build import write_back
from commfuse_fx.errors import VerificationError
from commfuse_fx.ir.core.program import Program
from commfuse_fx.planning import compile_call


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self) -> tuple[torch.Tensor, torch.Tensor]:
        return (self.weight * 2).sum(), (self.weight * 3).sum()


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    monkeypatch.setattr(compile_call, "verify", lambda program, after: found.append(after))
    return found


def test_a_step_and_a_module_are_verified_as_captured(seen: list[str]) -> None:
    cf.compile(Two(), form="step", has_aux=True)()
    assert seen[0] == "capture" and seen.count("capture") == 1
    seen.clear()
    outputs = cf.compile(Two())()
    assert seen[0] == "capture" and seen.count("capture") == 1
    seen.clear()
    outputs[0].backward()
    assert seen[0] == "leave_out" and "capture" not in seen


def test_nothing_is_verified_without_being_asked(seen: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COMMFUSE_VERIFY")
    cf.compile(Two())()[0].backward()
    assert not seen


def test_a_wrong_capture_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(program: Program, *args: Any, **kwargs: Any) -> None:
        write_back(program, *args, **kwargs)
        program.sources.clear()

    monkeypatch.setattr(joint, "write_back", wrong)
    with pytest.raises(VerificationError, match="after pass capture: node weight: is an input without a source"):
        cf.compile(Two())()
