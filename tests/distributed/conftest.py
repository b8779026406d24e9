"""What needs real ranks is marked. With --dist loadgroup all of it runs in one test process, which starts them once."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

# Scheduling classes of threads are Linux's.
collect_ignore = [] if sys.platform == "linux" else ["test_socket_threads.py"]

# Inductor needs a C++ compiler.
if shutil.which(os.environ.get("CXX", "g++")) is None:
    if os.environ.get("COMMFUSE_REQUIRE_COMPILER") == "1":
        raise RuntimeError("COMMFUSE_REQUIRE_COMPILER=1, but there is no g++; install it or unset the variable")
    collect_ignore.append("test_inductor_on_ranks.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = f"{Path(__file__).parent}{os.sep}"
    for item in items:
        if str(item.path).startswith(here):
            item.add_marker(pytest.mark.dist)
            item.add_marker(pytest.mark.xdist_group("dist"))
