"""What `cf.diff` returns: the differences of two graphs, and how they are shown."""

from __future__ import annotations

from commfuse_fx.inspect.diff import render
from commfuse_fx.inspect.diff.result import Differences


class GraphDiff(Differences):
    """A diff says what differs between two graphs, node by node.

    header: lines of the header that differ.
    added, removed: nodes that only the second or only the first graph has.
    changed: nodes that both have, with another op or other arguments.
    renamed: nodes that have another name.
    renumbered: nodes whose name has another number only.
    moved: nodes that stand elsewhere.
    collectives: collectives whose members, size or options differ.
    deltas: figures of both graphs: counts, bytes and predicted seconds.
    """

    def text(self) -> str:
        """A report in plain lines."""
        return render.text(self)

    def to_json(self) -> str:
        """The report as JSON with a version in "schema"."""
        return render.to_json(self)

    def markdown(self) -> str:
        """The report for a comment on a pull request, with details folded and long lists cut."""
        return render.markdown(self)
