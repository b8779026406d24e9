"""These tests are collected only where there is Chromium with its driver.

With COMMFUSE_REQUIRE_BROWSER=1 in the environment their absence is an error.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

BROWSER = shutil.which("chromium")
DRIVER = shutil.which("chromedriver")
FOUND = BROWSER is not None and DRIVER is not None

if os.environ.get("COMMFUSE_REQUIRE_BROWSER") == "1" and not FOUND:
    raise RuntimeError(
        f"COMMFUSE_REQUIRE_BROWSER=1, but chromium is {BROWSER} and chromedriver is {DRIVER}; "
        "install both (on Debian: apt-get install chromium chromium-driver) or unset it"
    )

collect_ignore_glob = [] if FOUND else ["test_*.py"]

_OPTIONS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1366,850",
)


@pytest.fixture(scope="session")
def chrome(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    """One browser with an empty profile. Selenium is told where both programs are, so that it fetches none."""
    from selenium.webdriver import Chrome, ChromeOptions, ChromeService

    profile: Path = tmp_path_factory.mktemp("profile")
    options = ChromeOptions()
    options.binary_location = BROWSER
    for option in (*_OPTIONS, f"--user-data-dir={profile}"):
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = Chrome(options=options, service=ChromeService(DRIVER))
    yield browser
    browser.quit()
