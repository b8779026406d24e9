"""What needs real ranks is marked. With --dist loadgroup all of it runs in one test process, which starts them once."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

# Scheduling classes of threads are Linux's.
collect_ignore = [] if sys.platform == "linux" else ["test_socket_threads.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.dist)
            item.add_marker(pytest.mark.xdist_group("dist"))
