"""The report in a real browser: what it shows, how it is worked with, and that nothing in it is executed or fetched."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver import ActionChains, Chrome, Keys
from selenium.webdriver.common.by import By

import commfuse_fx as cf
from commfuse_fx.inspect.report.page import page, report
from tests.browser import pages


@cache
def exposed() -> cf.Lowered:
    return pages.exposed()


MAKERS: dict[str, Callable[[], str]] = {
    "exposed": lambda: report(exposed()),
    "measured": lambda: report(exposed(), None, pages.recorded(exposed())),
    "divided": lambda: report(pages.divided()),
    "hostile": lambda: report(pages.hostile()),
    "alone": lambda: report(pages.alone()),
    "large": lambda: page(pages.large()),
    "empty": lambda: page(pages.large(layers=0)),
}

Open = Callable[[str], Chrome]


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("reports")

    @cache
    def write(name: str) -> Path:
        path: Path = folder / f"{name}.html"
        path.write_text(MAKERS[name](), encoding="utf-8")
        return path

    return write


@pytest.fixture
def open_page(chrome: Chrome, written: Callable[[str], Path]) -> Open:
    def opened(name: str) -> Chrome:
        chrome.get_log("browser")  # What tests before have left.
        chrome.get(written(name).as_uri())
        assert chrome.get_log("browser") == []
        return chrome

    return opened


def visible_rows(chrome: Chrome) -> list[str]:
    """What the rows of the tree are called, from the top."""
    script = "return [...document.querySelectorAll('#tree [role=treeitem]')].filter(r => r.offsetParent)"
    titles: list[str] = chrome.execute_script(f"{script}.map(r => r.querySelector('.title').title)")
    return titles


def text(chrome: Chrome, selector: str) -> str:
    return chrome.find_element(By.CSS_SELECTOR, selector).text


def rows(chrome: Chrome) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = chrome.execute_script("return collectives")
    return found


def click(chrome: Chrome, xpath: str) -> None:
    """Click the first such element, away from the bar that stays at the top."""
    element = chrome.find_element(By.XPATH, xpath)
    chrome.execute_script("arguments[0].scrollIntoView({block: 'center'})", element)
    element.click()


def column(chrome: Chrome, number: int) -> list[str]:
    cells = chrome.find_elements(By.CSS_SELECTOR, f"#collectives tbody td:nth-child({number})")
    return [cell.text for cell in cells]


def test_it_fetches_nothing_and_may_not(open_page: Open) -> None:
    chrome = open_page("exposed")
    assert chrome.execute_script("return performance.getEntriesByType('resource').map(e => e.name)") == []
    assert chrome.find_elements(By.CSS_SELECTOR, "script[src], link[rel=stylesheet], iframe, img, object") == []
    chrome.set_script_timeout(5)
    blocked = chrome.execute_async_script(
        "const done = arguments[0];"
        "document.addEventListener('securitypolicyviolation', e => done(e.effectiveDirective), {once: true});"
        "fetch('http://127.0.0.1:9/').catch(() => 0);"
    )
    assert blocked == "connect-src"


def test_head_and_passes_say_what_was_compiled(open_page: Open) -> None:
    chrome = open_page("exposed")
    lowered = exposed()
    summary = text(chrome, "#summary")
    step = lowered.simulate()
    assert lowered.fingerprint in summary
    assert "cluster gloo-1gbit" in summary and "dp=2" in summary and "SGD (sgd)" in summary
    assert f"{step.step_seconds * 1e3:.3f} ms" in summary and f"{step.exposed_seconds * 1e3:.3f} ms" in summary
    assert f"gap {step.gap * 100:.1f} %" in summary
    passes = [row.text.split() for row in chrome.find_elements(By.CSS_SELECTOR, "#passes tbody tr")]
    assert [(row[1], row[2]) for row in passes] == [
        (name, "yes" if stage.modified else "no") for name, stage in lowered.stages.items()
    ]


def test_tree_opens_by_mouse_and_keys(open_page: Open) -> None:
    chrome = open_page("exposed")
    assert visible_rows(chrome) == ["input", "forward", "backward", "update"]
    assert chrome.execute_script("return document.querySelectorAll('#tree .leaf').length") == 0
    chrome.find_element(By.CSS_SELECTOR, '#tree [title="forward"]').click()
    assert visible_rows(chrome)[1:4] == ["forward", "0", "1"]
    # Down to module 0, open it, into its first node, and show that.
    ActionChains(chrome).send_keys(Keys.TAB).perform()
    chrome.execute_script("focusRow(tree.rows.get(tree.roots[1]).row)")
    ActionChains(chrome).send_keys(Keys.DOWN, Keys.RIGHT, Keys.RIGHT, Keys.ENTER).perform()
    assert visible_rows(chrome)[2:5] == ["0", "0/t.0", "0/addmm.0"]
    details = text(chrome, "#tree .details")
    assert "aten.t" in details and "0.weight" in details and "0/addmm.0" in details
    # A link in the details leads to a node of a closed group.
    chrome.find_element(By.CSS_SELECTOR, '#tree .details button[title="0.weight"]').click()
    assert chrome.find_element(By.CSS_SELECTOR, "#tree .selected .title").get_attribute("title") == "0.weight"
    ActionChains(chrome).send_keys(Keys.LEFT, Keys.LEFT).perform()
    assert "0.weight" not in visible_rows(chrome)


def test_search_finds_nodes_ops_and_parameters(open_page: Open) -> None:
    chrome = open_page("exposed")
    ActionChains(chrome).send_keys("/").perform()
    query = chrome.find_element(By.ID, "query")
    assert chrome.switch_to.active_element == query
    query.send_keys("ADDMM")
    assert text(chrome, "#count") == "4 matches"
    assert len(chrome.find_elements(By.CSS_SELECTOR, "#matches button")) == 4
    found = []
    for _ in range(5):
        query.send_keys(Keys.ENTER)
        found.append(chrome.find_element(By.CSS_SELECTOR, "#tree .selected .title").get_attribute("title"))
    assert found == ["0/addmm.0", "2/addmm.0", "4/addmm.0", "6/addmm.0", "0/addmm.0"]
    assert text(chrome, "#count") == "1 of 4 matches"
    query.send_keys(Keys.ESCAPE)
    assert query.get_attribute("value") == "" and text(chrome, "#count") == ""
    # A parameter leads to the collective that carries it, too.
    query.send_keys("2.bias")
    titles = [each.get_attribute("title") for each in chrome.find_elements(By.CSS_SELECTOR, "#matches button")]
    (carrier,) = [row["name"] for row in rows(chrome) if "2.bias" in row["members"]]
    assert "2.bias" in titles and carrier in titles
    query.send_keys("x" * 20)
    assert text(chrome, "#count") == "0 matches"


def place_of(chrome: Chrome, name: str) -> tuple[int, int]:
    """Where the transfer of a collective is, from the middle of the canvas."""
    x, y = chrome.execute_script(
        "for (const lane of timeline.lanes) for (const bar of lane.bars)"
        " if (bar.kind === 'communication' && bar.label === arguments[0]) {"
        "  const box = barBox(lane, bar);"
        "  return [box.x + box.width / 2 - timeline.width / 2, box.y + box.height / 2 - canvasHeight() / 2]; }",
        name,
    )
    return round(x), round(y)


def test_pointing_at_an_exposed_collective_says_why(open_page: Open) -> None:
    chrome = open_page("exposed")
    each = next(each for each in exposed().simulate().collectives if each.exposed > 0)
    assert each.reason
    canvas = chrome.find_element(By.ID, "lanes")
    ActionChains(chrome).move_to_element_with_offset(canvas, *place_of(chrome, each.name)).perform()
    hint = text(chrome, "#hint")
    assert each.name in hint and f"exposed: {each.reason}" in hint
    assert f"{each.begin * 1e3:.3f} – {each.end * 1e3:.3f} ms" in hint
    assert f"{each.hidden * 1e3:.3f} ms hidden" in hint or "µs hidden" in hint
    # The same by keys.
    ActionChains(chrome).click().perform()
    chrome.execute_script("timeline.focused = null")
    ActionChains(chrome).send_keys("e").perform()
    assert f"exposed: {each.reason}" in chrome.find_element(By.ID, "reading").get_attribute("textContent")


def test_timeline_zooms_and_moves(open_page: Open) -> None:
    chrome = open_page("exposed")
    canvas = chrome.find_element(By.ID, "lanes")

    def shown() -> tuple[float, float]:
        begin, end = chrome.execute_script("return [timeline.begin, timeline.end]")
        return begin, end

    begin, whole = shown()
    assert begin == 0 and whole == pytest.approx(exposed().simulate().step_seconds)
    chrome.execute_script("timeline.canvas.focus()")
    ActionChains(chrome).send_keys("+").perform()
    begin, end = shown()
    assert end - begin == pytest.approx(whole / 1.5)
    ActionChains(chrome).drag_and_drop_by_offset(canvas, 60, 0).perform()
    assert shown()[0] < begin and shown()[1] - shown()[0] == pytest.approx(end - begin)
    ActionChains(chrome).send_keys("0").perform()
    assert shown() == (0, pytest.approx(whole))
    chrome.find_element(By.XPATH, "//button[text()='+']").click()
    assert shown()[1] - shown()[0] == pytest.approx(whole / 1.5)


def test_collectives_sort_and_lead_to_the_graph(open_page: Open) -> None:
    chrome = open_page("exposed")
    collectives = exposed().collectives
    assert [int(cell) for cell in column(chrome, 1)] == [0, 1, 2]
    payload = chrome.find_element(By.XPATH, "//section[@id='collectives']//th[button='payload']")
    for direction, down in (("descending", True), ("ascending", False)):
        payload.find_element(By.TAG_NAME, "button").click()
        assert payload.get_attribute("aria-sort") == direction
        order = sorted(range(3), key=lambda i: collectives[i].bytes, reverse=down)
        assert [int(cell) for cell in column(chrome, 1)] == order
    click(chrome, "//section[@id='collectives']//td/button[contains(., 'members')]")
    assert re.fullmatch(r"\d+\.(weight|bias)", text(chrome, "#collectives tr.members li"))
    name = rows(chrome)[1]["name"]
    click(chrome, f"//section[@id='collectives']//button[text()='{name}']")
    assert chrome.find_element(By.CSS_SELECTOR, "#tree .selected .title").get_attribute("title") == name
    assert chrome.execute_script("return timeline.focused.bar.label") == name
    assert "memory written by" in text(chrome, "#tree .details")


def test_fusion_shows_before_and_after(open_page: Open) -> None:
    chrome = open_page("exposed")
    collectives = exposed().collectives
    assert text(chrome, "#fusion-totals").startswith(f"8 collectives → {len(collectives)} ")
    groups = chrome.find_elements(By.CSS_SELECTOR, "#fusion .fused:not(.heads)")
    assert any(each.fused for each in collectives)
    for group, each in zip(groups, collectives, strict=True):
        names = [pair.text.split("\n")[0] for pair in group.find_elements(By.CLASS_NAME, "pair")]
        assert names[:-1] == each.members


def test_measured_steps_lie_below(open_page: Open) -> None:
    chrome = open_page("measured")
    lanes = "return timeline.lanes.map(lane => [lane.title, lane.bars.length, lane.top])"
    (_, _, compute), (_, sent, group), (title, measured, below) = chrome.execute_script(lanes)
    assert compute < group < below and (title, measured) == ("measured step 1", sent)
    first = "return timeline.lanes.map(lane => lane.bars[0].begin)"
    assert chrome.execute_script(first)[1] == pytest.approx(chrome.execute_script(first)[2])
    choice = chrome.find_element(By.CSS_SELECTOR, "#timeline select")
    choice.send_keys(Keys.UP)
    assert chrome.execute_script(lanes)[2][0] == "measured step 0"


def test_names_are_text(open_page: Open) -> None:
    chrome = open_page("hostile")
    for name in pages.HOSTILE:
        query = chrome.find_element(By.ID, "query")
        chrome.execute_script("clearSearch(); part('query').value = arguments[0]; findMatches()", name)
        query.send_keys(Keys.ENTER)
        assert chrome.execute_script("return nodes[selected].name") == name
        shown = chrome.find_element(By.CSS_SELECTOR, "#tree .details dd").get_attribute("textContent")
        assert shown == name
    click(chrome, "//section[@id='collectives']//td/button[contains(., 'members')]")
    items = chrome.find_elements(By.CSS_SELECTOR, "#collectives tr.members li")
    assert sorted(item.get_attribute("textContent") or "" for item in items) == sorted(pages.HOSTILE)
    assert chrome.execute_script("return typeof hacked") == "undefined"
    assert chrome.find_elements(By.CSS_SELECTOR, "img, main b b, main script") == []
    assert chrome.get_log("browser") == []


def test_5000_nodes_make_few_elements(open_page: Open) -> None:
    chrome = open_page("large")

    def elements(within: str) -> Any:
        return chrome.execute_script("return document.querySelectorAll(arguments[0]).length", f"{within} *")

    assert chrome.execute_script("return nodes.length") == 5000
    assert elements("#tree") < 50 and elements("body") < 10_000
    chrome.find_element(By.CSS_SELECTOR, '#tree [title="backward"]').click()
    chrome.find_element(By.CSS_SELECTOR, '#tree [title="blocks"]').click()
    # 625 modules come in ranges of 100.
    assert visible_rows(chrome)[2:] == [f"{i} … {min(i + 99, 624)}" for i in range(0, 625, 100)]
    assert elements("#tree") < 200
    query = chrome.find_element(By.ID, "query")
    query.send_keys("blocks.333/mm.3", Keys.ENTER)
    assert chrome.find_element(By.CSS_SELECTOR, "#tree .selected .title").is_displayed()
    assert chrome.execute_script("return nodes[selected].name") == "blocks.333/mm.3"
    assert elements("#tree") < 2500
    assert len(column(chrome, 1)) <= 201


def test_a_step_without_collectives(open_page: Open) -> None:
    chrome = open_page("alone")
    for part in ("collectives", "fusion"):
        assert text(chrome, f"#{part} .empty") == "The step has no collectives."
    assert chrome.execute_script("return timeline.lanes.map(lane => lane.title)") == ["compute"]
    ActionChains(chrome).send_keys("/", "addmm", Keys.ENTER).perform()
    assert chrome.execute_script("return nodes[selected].op") == "aten.addmm"


def test_an_empty_graph(open_page: Open) -> None:
    chrome = open_page("empty")
    for part, said in (("graph", "The graph is empty."), ("timeline", "Nothing runs in this step.")):
        assert text(chrome, f"#{part} .empty") == said
    chrome.find_element(By.ID, "query").send_keys("x", Keys.ENTER)
    assert text(chrome, "#count") == "0 matches"
    assert chrome.get_log("browser") == []


def test_dark_and_print_have_their_own_colours(open_page: Open) -> None:
    chrome = open_page("exposed")
    seen: dict[str, list[str]] = {}
    colours = "return [getComputedStyle(document.body).backgroundColor, timeline.colours.forward]"
    media: dict[str, dict[str, Any]] = {
        name: {"media": "", "features": [{"name": "prefers-color-scheme", "value": name}]} for name in ("light", "dark")
    }
    media["print"] = {"media": "print", "features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    try:
        for name, medium in media.items():
            chrome.execute_cdp_cmd("Emulation.setEmulatedMedia", medium)
            # The page hears of it after the next frame.
            chrome.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")
            seen[name] = chrome.execute_script(colours)
    finally:
        chrome.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "", "features": []})
    assert seen["light"][0] != seen["dark"][0] and seen["light"][1] != seen["dark"][1]
    assert seen["print"] == ["rgb(255, 255, 255)", seen["light"][1]]


def test_layouts_are_a_picture(open_page: Open) -> None:
    chrome = open_page("divided")
    rows = chrome.find_elements(By.CSS_SELECTOR, "#layout-image g.layout")
    texts = [[each.text for each in row.find_elements(By.TAG_NAME, "text")] for row in rows]
    assert ["0-3.0.weight", "f32[64,16]", "R", "S(0)", "4 × 2.00 KiB of 4.00 KiB"] in texts
    assert ["→ 0-3.0", "f32[8,64]", "S(0)", "S(1)", "4 × 512 B of 2.00 KiB"] in texts
    (marked,) = (row for row, text in zip(rows, texts, strict=True) if text[0] == "0-3.2.weight")
    title = marked.find_element(By.TAG_NAME, "title").get_attribute("textContent")
    assert title.splitlines()[1:] == [
        "R on dp: whole",
        "S(1) on tp: dimension 1 in 2 parts",
        "4.00 KiB whole, 2.00 KiB on a rank; 4 of these",
    ]
    legend = chrome.find_element(By.ID, "layout-legend").text
    assert "S(1): along dimension 1" in legend and "P: " not in legend
    colours = {each.value_of_css_property("fill") for each in chrome.find_elements(By.CSS_SELECTOR, "rect.cell")}
    assert len(colours) == 3
    assert not open_page("exposed").find_elements(By.ID, "layouts")
