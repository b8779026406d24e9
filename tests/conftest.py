from __future__ import annotations

import pytest

pytest_plugins = ["pytester"]


def pytest_configure(config: pytest.Config) -> None:
    """A process that only hands out tests to others does without torch: the others wait until it has started."""
    hands_out = getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput")
    if not hands_out:
        config.pluginmanager.import_plugin("tests.fixtures")
