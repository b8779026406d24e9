"""What `cf.diff` returns: the differences of two graphs, and how they are shown."""

from __future__ import annotations

from commfuse_fx.inspect.diff import render
from commfuse_fx.inspect.diff.result import Differences


class GraphDiff(Differences):
    """Two graphs, node by node, with reports about them. The fields are those of `Differences`."""

    def text(self) -> str:
        """A report in plain lines."""
        return render.text(self)

    def to_json(self) -> str:
        """The report as JSON with a version in "schema"."""
        return render.to_json(self)

    def markdown(self) -> str:
        """For a comment on a pull request, with details folded and long lists cut."""
        return render.markdown(self)
