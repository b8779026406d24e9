"""What `lower` returns: a compiled step to read, to write to files and to see as a page."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from commfuse_fx.inspect.dumps.write_dump import dump
from commfuse_fx.inspect.explain.compiled_graph import CompiledGraph
from commfuse_fx.inspect.report.page import report
from commfuse_fx.ir.core.program import Program
from commfuse_fx.machine.source import Costs
from commfuse_fx.machine.timeline import Timeline
from commfuse_fx.planning.compiled import Compiled, Snapshot
from commfuse_fx.planning.pipeline.pipeline import PassPipeline, PassRecord
from commfuse_fx.support.tracebacks import user_frames_only


@dataclass(frozen=True)
class LoweredCall:
    """The step that was lowered (a CompiledStep), and the arguments of the call.

    figures: what plans of the step are compared by, where its graph does not say it; None: what is assumed.
    """

    step: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    figures: Costs | None = None


class Lowered(CompiledGraph):
    """A lowered step is compiled and not run: it is there to be read.

    Its text, JSON, collectives and fingerprint are the same on every rank; only the groups of collectives differ.
    """

    def __init__(
        self,
        program: Program,
        rank: int,
        pass_records: Sequence[PassRecord],
        replay: Callable[[], Mapping[str, Snapshot]],
        call: LoweredCall,
        captured: Program | None = None,
        pipeline: PassPipeline | None = None,
    ) -> None:
        super().__init__(program, rank, pass_records, replay, captured, pipeline)
        self._call = call

    def _costs(self, cluster: Any) -> Costs:
        is_open = cluster is None and self._program.config.cluster is None
        return super()._costs(self._call.figures if is_open else cluster)

    @property
    def graphs(self) -> list[Lowered]:
        """This one alone. A model that Dynamo has cut into several has LoweredGraphs."""
        return [self]

    @user_frames_only
    def report(self, cluster: Any = None, measured: Timeline | None = None) -> str:
        """The step as one HTML page, which fetches nothing and is the same at every run.

        cluster: what the times are predicted for, as for `simulate`.
        measured: what `CompiledStep.record_communication` has recorded; its steps are shown below the predicted one.

        Raises what `simulate` raises for a bad cluster.
        """
        return report(self, cluster, measured)

    @user_frames_only
    def dump(self, directory: str | Path) -> Path:
        """Write all that is known of the step into the folder `rank<r>` under `directory`, and return that folder.

        It holds index.json and, beside it, one text per stage, the final and the captured graph as data, the
        explanation, the graph for Graphviz, and a report for a browser. Files of an earlier dump there are
        replaced or removed, other files stay. Raises ConfigValueError, which names the folder, where it cannot
        be written.
        """
        return dump(self, directory)


def lowered_of(compiled: Compiled, rank: int) -> Lowered:
    """What has been compiled, to read. It knows no call with which it could be run."""
    nobody = LoweredCall(None, (), {})
    return Lowered(
        compiled.program, rank, compiled.records, compiled.replay, nobody, compiled.captured, compiled.pipeline
    )
