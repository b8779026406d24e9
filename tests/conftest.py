from __future__ import annotations

import gc
import os

import pytest

from tests.distributed.rank_server import FOLDER, RankServers

pytest_plugins = ["pytester"]

gc.disable()  # until the tests are collected: imports make many objects and no garbage


def pytest_configure(config: pytest.Config) -> None:
    """A process that only hands out tests to others does without torch: the others wait until it has started. What all
    of them share starts here."""
    os.environ["COMMFUSE_CACHE"] = "0"  # what one test has come to is none of another one's business
    # Else Inductor compiles and loads a library for each instruction set of the processor, to see that this works.
    os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
    hands_out = getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput")
    if hands_out:
        servers = RankServers()
        os.environ[FOLDER] = servers.folder
        config.add_cleanup(servers.close)
    else:
        config.pluginmanager.import_plugin("tests.fixtures")
