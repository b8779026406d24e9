"""How programs of two ranks end: with a step that is closed or live, and with a rank that leaves and one that is told.

The programs run before the first test, and this module looks up how they have ended.
"""

from __future__ import annotations

import pytest
import torch

from tests.gpu import ending_ranks

pytestmark = pytest.mark.gpu

WAYS = (*ending_ranks.WAYS, *ending_ranks.AFTER_VOTE)


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ending_ranks.Ended]:
    return ending_ranks.run(torch.device("cuda", 0), tmp_path_factory.mktemp("ends"), WAYS)


@pytest.mark.parametrize("way", WAYS)
def test_how_programs_end(way: str, ended: dict[str, ending_ranks.Ended]) -> None:
    ending_ranks.check(way, ended[way])
