"""What `lower` returns for a model that Dynamo has cut into several graphs."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from commfuse_fx.errors import ConfigTypeError
from commfuse_fx.inspect.explain_graphs import AsItIs, GraphsExplanation
from commfuse_fx.inspect.lowered import Lowered
from commfuse_fx.planning.compiled import Collective
from commfuse_fx.simulate.simulation import Simulation
from commfuse_fx.support.tracebacks import user_frames_only


@dataclass(frozen=True)
class LoweredGraphs:
    """The graphs of one call of a model that Dynamo has cut, each a Lowered: compiled and not run.

    compiled: the graphs in the order in which the forward runs them; their backwards run in the opposite order.
    late: what reduces, at the end of the backward, gradients that none of them reduces.
    as_they_are: the graphs that are not compiled, each with the reason.
    """

    compiled: tuple[Lowered, ...]
    late: tuple[Lowered, ...]
    as_they_are: tuple[AsItIs, ...]

    @property
    def graphs(self) -> list[Lowered]:
        """All of them; what runs at the end of the backward comes last."""
        return [*self.compiled, *self.late]

    @property
    def collectives(self) -> list[Collective]:
        """The collectives of all graphs, graph by graph."""
        return [each for graph in self.graphs for each in graph.collectives]

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the fingerprints of all graphs, in hex."""
        return hashlib.sha256("\n".join(graph.fingerprint for graph in self.graphs).encode()).hexdigest()

    def text(self) -> str:
        """The canonical texts of all graphs, each below a line with its name."""
        return "\n".join(f"== {name} ==\n{graph.text()}" for name, graph in self.named().items())

    def named(self) -> dict[str, Lowered]:
        """The graphs by the names that `text` and `dump` give them: graph-00, graph-01, late-00."""
        found = {f"graph-{number:02d}": graph for number, graph in enumerate(self.compiled)}
        return found | {f"late-{number:02d}": graph for number, graph in enumerate(self.late)}

    @user_frames_only
    def dump(self, directory: str | Path) -> Path:
        """Write each graph to a folder of its own below `directory`, as `Lowered.dump` does, and return `directory`.

        `cf.load` and `cf.diff` take such a folder, graph-00 for example. Raises ConfigValueError, which names the
        folder, where it cannot be written.
        """
        for name, graph in self.named().items():
            graph.dump(Path(directory) / name)
        return Path(directory)

    def explain(self) -> GraphsExplanation:
        """Which graphs are compiled, which run as they are and why, and what is reduced at the end of the backward."""
        return GraphsExplanation(self.compiled, self.as_they_are, self.late)

    @user_frames_only
    def simulate(self, cluster: Any = None) -> list[Simulation]:
        """What each graph costs, as `Lowered.simulate` predicts it: one simulation per graph, in the order of `graphs`.

        Graphs run one after the other, and so do those in a backward. Python between them is not counted. Raises what
        `Lowered.simulate` raises.
        """
        return [graph.simulate(cluster) for graph in self.graphs]


def refuse_several(value: object, argument: str) -> None:
    """Raise ConfigTypeError for LoweredGraphs, where one graph is wanted."""
    if isinstance(value, LoweredGraphs):
        names = ", ".join(value.named()) or "none"
        raise ConfigTypeError(
            f"{argument} is what lower() returns for a model that Dynamo has cut into {len(value.graphs)} graphs "
            f"({names}): give one of them, such as {argument}.graphs[0]"
        )
