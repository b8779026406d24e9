"""A hook of MkDocs: README.md, CHANGELOG.md and the examples become pages, and links to them lead there.

Why: docs/decisions.md, "The reference is made from docstrings without sections".
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"

MOVED = {
    "README.md": "index.md",
    "CHANGELOG.md": "changes.md",
    "examples/ci_graph_diff/README.md": "examples/ci_graph_diff.md",
    **{f"examples/{path.name}": f"examples/{path.stem}.md" for path in EXAMPLES.glob("*.py")},
}
"""File of the repository -> page of the site. What lies in docs/ keeps its path."""

NOTE = "In the repository this page is a list of names; `make docs` puts their docstrings in.\n\n"
"""What pages of the reference say, and what is not true of the site."""

_LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)#\s]+)")


def on_files(files: Files, config: Any) -> Files:
    for source, page in MOVED.items():
        text = (ROOT / source).read_text()
        if source.endswith(".py"):
            text = f"# {source}\n\n```python\n{text}```\n"
        files.append(File.generated(config, page, content=moved_links(text, source, page)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    uri = page.file.src_uri
    return markdown if uri in MOVED.values() else moved_links(markdown.replace(NOTE, ""), f"docs/{uri}", uri)


def moved_links(markdown: str, source: str, page: str) -> str:
    """Links are relative to where the text lies in the repository; make them relative to its page."""

    def link(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), match.group(1)))
        moved = MOVED.get(target, target.removeprefix("docs/"))
        return posixpath.relpath(moved, posixpath.dirname(page) or ".")

    fenced = re.split(r"(^```.*?^```$|`[^`\n]*`)", markdown, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if part.startswith("`") else _LINK.sub(link, part) for part in fenced)
