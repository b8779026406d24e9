"""docs/scripts/iframe-worker.js gives pages that are opened as files the Worker in which the site's search box runs."""

from __future__ import annotations

from pathlib import Path

from selenium.webdriver import Chrome

SCRIPT = Path(__file__).resolve().parents[2] / "docs" / "scripts" / "iframe-worker.js"
PAGE = """<!doctype html><meta charset="utf-8"><script src="iframe-worker.js"></script><body><script>
  window.worker = new Worker("folder/worker.js");
  worker.addEventListener("message", (event) => { document.title = event.data; });
  worker.postMessage("asked");
</script>"""


def test_a_page_that_is_opened_as_a_file_talks_with_a_worker(chrome: Chrome, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "iframe-worker.js").write_text(SCRIPT.read_text())
    (tmp_path / "folder" / "worker.js").write_text(
        'addEventListener("message", (event) => postMessage(event.data + " and answered"));'
    )
    (tmp_path / "page.html").write_text(PAGE)
    chrome.get_log("browser")  # What tests before have left.
    chrome.get((tmp_path / "page.html").as_uri())
    title = chrome.execute_async_script(
        """const done = arguments[0];
        const look = () => document.title ? done(document.title) : setTimeout(look, 5);
        look();"""
    )
    assert title == "asked and answered"
    assert chrome.get_log("browser") == []
    chrome.execute_script("worker.terminate()")
    assert chrome.execute_script("return document.querySelectorAll('iframe').length") == 0
