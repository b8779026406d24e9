"""What a rank says whose vote nobody answers: no more than is known, with the seconds that it has waited."""

from __future__ import annotations

import pytest

from commfuse_fx.runtime.ranks.lost_votes import explain_lost_votes

CLOSED = "[pair.cc:534] Connection closed by peer [127.0.0.1]:2"
LATE = "[unbound_buffer.cc:81] Timed out waiting 40000ms for recv operation to complete"


@pytest.mark.parametrize(
    ("cause", "silent", "waited", "said", "unsaid"),
    [
        (
            CLOSED,
            [1],
            3.21,
            "no vote has come from rank 1, and the connection to that rank has closed after 3.2 s",
            "time-out",
        ),
        ("read: Connection reset by peer", [], 0, "votes have not come, and the connection to a rank has", "time-out"),
        ("Broken pipe", [1, 3], 7, "no vote has come from ranks 1, 3, and the connection to one of them", "alone"),
        (CLOSED, list(range(1, 31)), 7, "ranks 1, 2, 3, 4, 5, 6, 7, 8, 22 others, and", "9"),
        (LATE, [1], 40.1, "from rank 1 within 40 s (the time-out is 40 s), and no connection has closed", "ended"),
        ("Wait timeout", [], 41, "votes have not come within 41 s (the time-out is 40 s)", "ended"),
        (
            "left the step: rank 1: MemoryError",
            [2],
            1.5,
            "after 1.5 s: another rank has left an earlier step",
            "batches",
        ),
        ("something else", [1], 2, "no vote has come from rank 1 after 2.0 s. Nothing was updated. Look at", "ended"),
    ],
)
def test_what_is_said_of_votes_that_have_not_come(
    cause: str, silent: list[int], waited: float, said: str, unsaid: str
) -> None:
    text = explain_lost_votes(cause, silent, waited, 40.0, "", ())
    assert said in text and unsaid not in text


def test_what_this_rank_does_and_what_others_have_told_is_named() -> None:
    text = explain_lost_votes(LATE, [1], 40, 40, "an evaluation", ["Rank 1 has come alone to read"])
    assert "This rank has come to an evaluation, which all ranks do together." in text
    assert "Nothing was updated. Rank 1 has come alone to read. " in text
    assert "such as an evaluation, save() or state_dict()" in text


def test_a_rank_that_is_lost_behind_a_step_leaves_a_complete_one() -> None:
    text = explain_lost_votes(CLOSED, [], 1.0, 40.0, "", (), "The step itself is complete on this rank")
    assert ". The step itself is complete on this rank. " in text and "Nothing was updated" not in text
