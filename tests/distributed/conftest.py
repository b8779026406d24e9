"""One pool of rank processes per test process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.distributed.harness import Ranks


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.dist)
            item.add_marker(pytest.mark.xdist_group("dist"))


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    pool = Ranks()
    yield pool
    pool.close()
