"""What a recorded timeline says of its spans."""

from __future__ import annotations

import pytest

from commfuse_fx.machine.timeline import Span, Timeline


def test_a_step_that_is_woken_late_was_not_blocked_for_longer_than_its_collective_flew() -> None:
    timeline = Timeline()
    timeline.steps.append([Span("b.0", "", issued=1.0, done=1.2, wait_entered=1.0, wait_left=1.5)])
    assert timeline.exposed == pytest.approx(0.5)
    assert timeline.in_flight == pytest.approx(0.5)


def test_what_ended_before_its_wait_was_in_flight_until_then() -> None:
    timeline = Timeline()
    timeline.steps.append([Span("b.0", "", issued=1.0, done=1.2, wait_entered=1.4, wait_left=1.5)])
    assert timeline.in_flight == pytest.approx(0.2)
    late = Span("b.1", "", issued=1.0, done=1.6, wait_entered=1.4, wait_left=1.5)  # its report comes late
    assert late.in_flight == pytest.approx(0.5)
