"""The Python blocks of README.md and docs/ run, what pages quote of their output is real, and links lead somewhere."""

from __future__ import annotations

import contextlib
import io
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

import commfuse_fx as cf
from commfuse_fx.planning.pipeline.pass_table import TABLE

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
WITH_PYTHON = [page for page in PAGES if "```python" in page.read_text()]
WITH_EXCERPT = [page for page in PAGES if "```text" in page.read_text()]
WITH_OUTPUT = [page for page in PAGES if "```output" in page.read_text()]
WITH_SOURCES = ("commfuse_fx", "passes", "tests", "docs")
QUOTED = r'docs/decisions\.md, "([^"\n]+)"'
"""How a docstring names a decision."""


@pytest.fixture(autouse=True)
def _as_found(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Blocks run as a reader runs them. They may start a world of one, set the context and change log levels."""
    monkeypatch.delenv("COMMFUSE_VERIFY", raising=False)
    root, ours = logging.getLogger(), logging.getLogger("commfuse_fx")
    levels, handlers = (root.level, ours.level), list(root.handlers)
    yield
    root.setLevel(levels[0])
    ours.setLevel(levels[1])
    root.handlers[:] = handlers
    cf.reset_auto_parallel_context()
    if dist.is_initialized():
        dist.destroy_process_group()


def blocks(page: Path, language: str) -> list[tuple[int, str]]:
    """(line number, text) of the fenced blocks of one language."""
    text = page.read_text()
    found = re.finditer(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [(text.count("\n", 0, match.start(1)), match.group(1)) for match in found]


def run(page: Path) -> tuple[dict[str, object], str]:
    """Run a page's blocks one after another in one namespace; returns the namespace and what they print."""
    namespace: dict[str, object] = {"__name__": "__docs__"}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        for line, source in blocks(page, "python"):
            # Empty lines in front, so that errors name the line of the page.
            exec(compile("\n" * line + source, str(page), "exec", dont_inherit=True), namespace)
    return namespace, printed.getvalue()


@pytest.mark.parametrize("page", WITH_PYTHON, ids=lambda page: page.name)
def test_python_blocks_run_and_print_what_the_page_quotes(page: Path) -> None:
    namespace, printed = run(page)
    if page in WITH_EXCERPT:
        check_excerpts(page, namespace["lowered"])
    check_output(page, printed.splitlines())


def check_excerpts(page: Path, lowered: object) -> None:
    """What a page quotes of the text of `lowered`."""
    assert isinstance(lowered, cf.Lowered)
    real = lowered.text().splitlines()
    for _, excerpt in blocks(page, "text"):
        lines = excerpt.splitlines()
        missing = [line for line in lines if line not in real]
        assert not missing, f"{page.name} quotes lines that the tool does not print: {missing}"
        assert [line for line in real if line in lines] == lines, "the excerpt is not in the order of the text"


def check_output(page: Path, real: list[str]) -> None:
    """What a page quotes of what its blocks print."""
    for number, output in blocks(page, "output"):
        lines = output.splitlines()
        missing = [line for line in lines if line not in real]
        assert lines and not missing, f"{page.name}:{number}: the page's blocks do not print {missing}"
        rest = iter(real)
        assert all(line in rest for line in lines), (
            f"{page.name}:{number}: the lines are not in the order of the output"
        )


@pytest.mark.parametrize("page", [*WITH_EXCERPT, *WITH_OUTPUT], ids=lambda page: page.name)
def test_pages_that_quote_have_blocks_to_run(page: Path) -> None:
    assert page in WITH_PYTHON


def prose(page: Path) -> str:
    """What is not code."""
    return re.sub(r"^```.*?^```$|`[^`\n]*`", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """What links may end with, by GitHub's rule."""
    blocks = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return {re.sub(r"[^\w -]", "", each.lower()).replace(" ", "-") for each in re.findall(r"(?m)^#+ +(.*)$", blocks)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for path, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]+))?\)", prose(page)):
        target = page.parent / path if path else page
        assert target.is_file(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors(target), f"{page.name} links to {path}#{anchor}"


def test_the_table_of_passes_is_that_of_the_code() -> None:
    text = (ROOT / "docs" / "writing-a-pass.md").read_text()
    (table,) = re.findall(r"^\| stage \| pass \|.*\n\|[-|]+\n((?:\|.*\n)+)", text, re.MULTILINE)
    stage, rows = "", []
    for row in table.splitlines():
        first, name = (cell.strip() for cell in row.split("|")[1:3])
        stage = first or stage
        rows.append((stage, name))
    real = [(stage, item.name) for stage, items in TABLE.items() for item in items]
    assert rows == real


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_pages_name_exist(page: Path) -> None:
    named = re.findall(r"(?<![\w/.-])((?:commfuse_fx|examples|benchmarks|docs)/[\w./-]+\w)", page.read_text())
    assert [path for path in named if not (ROOT / path).exists()] == []


def decisions() -> dict[str, str]:
    """The paragraph of each decision, by its heading."""
    text = (ROOT / "docs" / "decisions.md").read_text()
    return {heading: " ".join(body.split()) for heading, body in re.findall(r"(?m)^### (.*)\n((?:(?!#).*\n?)+)", text)}


def place(name: str) -> Path | None:
    """The file of this name, which begins inside of the package or at the root of the repository."""
    return next((path for path in (ROOT / "commfuse_fx" / name, ROOT / name) if path.is_file()), None)


def bound(paragraph: str) -> list[str]:
    """The files that a decision binds: its last sentence lists them."""
    listed = re.search(r"It binds (`[^`]+`(?:, `[^`]+`)*)\.$", paragraph)
    return re.findall(r"`([^`]+)`", listed.group(1)) if listed else []


def test_each_decision_names_files_that_it_binds() -> None:
    found = decisions()
    assert len(found) == (ROOT / "docs" / "decisions.md").read_text().count("\n### ") > 0
    assert [heading for heading, paragraph in found.items() if not bound(paragraph)] == []
    named = [name for paragraph in found.values() for name in re.findall(r"`([\w./]+\.\w+)`", paragraph)]
    files = [name for name in named if "/" in name or name.endswith(".py")]
    assert [name for name in files if place(name) is None] == []


def test_code_quotes_the_decisions_that_bind_it_and_no_others() -> None:
    sources = {path.resolve() for folder in WITH_SOURCES for path in (ROOT / folder).rglob("*.py")}
    quoted = {(path, heading) for path in sources for heading in re.findall(QUOTED, path.read_text())}
    binding = {
        (path.resolve(), heading)
        for heading, paragraph in decisions().items()
        for path in map(place, bound(paragraph))
        if path is not None
    }
    assert {heading for _, heading in quoted} - decisions().keys() == set()
    assert sorted(quoted ^ binding) == []
