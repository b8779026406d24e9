"""What was compiled, to read: the final graph, its collectives, and how it came about."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import networkx as nx
import torch
from torch import fx

from commfuse_fx.inspect.explanation import Explanation, explain
from commfuse_fx.inspect.network import to_networkx
from commfuse_fx.ir.json.write import to_json
from commfuse_fx.ir.meta import CollectiveInfo, NodeInfo, info
from commfuse_fx.ir.program import Program
from commfuse_fx.ir.text import canonical_text
from commfuse_fx.machine.source import Costs, cost_model, costs_label, priced_for, resolve_costs
from commfuse_fx.planning.pipeline import PassPipeline, PassRecord
from commfuse_fx.simulate.simulation import Simulation, simulate
from commfuse_fx.support.tracebacks import user_frames_only

if TYPE_CHECKING:
    from commfuse_fx.runtime.execute.timeline import Timeline


@dataclass(frozen=True)
class Collective:
    """One collective of the final graph, as this rank runs it.

    bytes: payload of the full, unsharded buffer. group: global ranks. members: parameter names, or node
    names for collectives that serve no parameter. index: sequence number of the first member.
    """

    kind: str
    reduce_op: str | None
    dtype: torch.dtype
    group: tuple[int, ...]
    bytes: int
    members: list[str]
    fusion_id: int | None
    index: int
    phase: str

    @property
    def fused(self) -> bool:
        return len(self.members) > 1

    @classmethod
    def of(cls, details: CollectiveInfo, node: NodeInfo, ranks: tuple[int, ...]) -> Collective:
        return cls(
            kind=details.kind,
            reduce_op=details.reduce_op,
            dtype=details.dtype,
            group=ranks,
            bytes=details.nbytes,
            members=list(details.members),
            fusion_id=details.fusion_id,
            index=details.sequence,
            phase=node.phase,
        )


@dataclass(frozen=True)
class Snapshot:
    """The program after one pass. collectives: in issue order; their groups name mesh axes."""

    name: str
    modified: bool
    _text: str
    collectives: tuple[CollectiveInfo, ...]

    def text(self) -> str:
        return self._text


@dataclass(frozen=True)
class LoweredCall:
    """The step that was lowered (a CompiledStep), and the arguments of the call."""

    step: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


class Lowered:
    """A compiled step. Text, JSON, collectives and fingerprint do not depend on the rank; groups do."""

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
        self._program = program
        self._rank = rank
        self._replay = replay
        self._call = call
        self._captured = captured
        self.pipeline = pipeline
        """The passes that made the final graph of the captured one; None where that is not known."""
        self.pass_records = tuple(pass_records)
        """What each pass did and how long it took; empty for a step that was loaded."""

    @property
    def program(self) -> Program:
        """A copy of the final graph with what its inputs and outputs mean: what passes work on."""
        return self._program.copy()

    @property
    def captured(self) -> Program | None:
        """A copy of the graph before all passes; None where it was not kept."""
        return None if self._captured is None else self._captured.copy()

    @cached_property
    def graph_module(self) -> fx.GraphModule:
        """The final graph. Collectives name mesh axes as their group; `node.meta["commfuse"]` is a NodeInfo."""
        root = torch.nn.Module()
        for name, constant in self._program.constants.items():
            root.register_buffer(name, constant, persistent=False)
        return fx.GraphModule(root, self._program.graph, "CommFuseStep")

    @cached_property
    def stages(self) -> Mapping[str, Snapshot]:
        """Pass name -> snapshot after it, in order; "capture" comes first. Made when first asked for."""
        return self._replay()

    @cached_property
    def collectives(self) -> list[Collective]:
        """All collectives, in issue order."""
        mesh = self._program.mesh
        found: list[Collective] = []
        for node in self._program.collectives():
            details = info(node).collective
            assert details is not None
            found.append(Collective.of(details, info(node), mesh.ranks(details.group, self._rank)))
        return found

    @cached_property
    def _canonical(self) -> str:
        return canonical_text(self._program)

    def text(self) -> str:
        """Canonical text: byte-identical over runs, ranks and hash seeds."""
        return self._canonical

    def to_json(self) -> str:
        """The final graph as JSON, `{"schema", "header", "nodes", "program"}`, which `cf.load` reads from a file."""
        return to_json(self._program)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the canonical text, in hex."""
        return hashlib.sha256(self._canonical.encode()).hexdigest()

    def to_networkx(self) -> nx.DiGraph:
        """The final graph as a networkx graph of names: an edge from each value to the nodes that take it.

        Nodes have the attributes `phase`, `module`, `op` and, for collectives, `collective` (a CollectiveInfo).
        """
        return to_networkx(self._program)

    @user_frames_only
    def explain(self, cluster: Any = None) -> Explanation:
        """Why the graph is as it is: buckets, merges that were illegal, parameters that are not reduced; and for each
        collective how much of it is hidden on a cluster, and why the rest is not.

        cluster: as for `simulate`.
        """
        costs = self._costs(cluster)
        return explain(self._program, cost_model(costs), costs_label(costs))

    @user_frames_only
    def simulate(self, cluster: Any = None) -> Simulation:
        """Predict the step on a cluster: times in seconds, exposed communication, peak memory in bytes, a lower bound.

        cluster: what `compile` takes as `cluster=`. None: the one that the step was compiled for, else 10 Gbit/s
            between CPU ranks, or nodes of 8 H100 for a model on CUDA.

        Raises ConfigTypeError, ConfigKeyError or ConfigValueError for a bad cluster, one with too few ranks, or a
        profile of another step.
        """
        return simulate(self._program, cost_model(self._costs(cluster)))

    def _costs(self, cluster: Any) -> Costs:
        program = self._program
        given = program.config.cluster if cluster is None else resolve_costs(cluster)
        specs = {name: param.whole or param.spec for name, param in program.params.items()}
        device = next((spec.device for spec in specs.values()), "cpu").split(":")[0]
        return priced_for(given, device, program.mesh, specs)

    @user_frames_only
    def report(self, cluster: Any = None, measured: Timeline | None = None) -> str:
        """One self-contained HTML page about the step: it fetches nothing, and it is the same at every run.

        cluster: what the times are predicted for, as for `simulate`. measured: what `CompiledStep.record_communication`
        has recorded; its steps are shown below the predicted one. Raises what `simulate` raises for a bad cluster.
        """
        from commfuse_fx.inspect.report.page import report  # which reads a Lowered

        return report(self, cluster, measured)

    @user_frames_only
    def dump(self, directory: str | Path) -> Path:
        """Write `rank<r>/` under `directory`: index.json and, beside it, one text per stage, the final and the captured
        graph as data, the explanation, the graph for Graphviz, and a report for a browser.

        Returns the folder of this rank. Files of an earlier dump there are replaced or removed, other files stay.
        Raises ConfigValueError, which names the folder, where it cannot be written.
        """
        from commfuse_fx.inspect.dumps.write_dump import dump  # which reads a Lowered

        return dump(self, self._rank, directory)
