"""A compiled program to read: its text, its collectives, how it came about, and what it costs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from importlib import import_module
from typing import Any

import networkx as nx
import torch
from torch import fx

from commfuse_fx.cost.model import cost_model
from commfuse_fx.cost.priced import priced_for
from commfuse_fx.errors import ConfigValueError
from commfuse_fx.inspect.explain.explanation import Explanation, explain
from commfuse_fx.inspect.explain.network import to_networkx
from commfuse_fx.ir.core.collectives import collective_of
from commfuse_fx.ir.core.meta import info
from commfuse_fx.ir.core.program import Program
from commfuse_fx.ir.json.write import to_json
from commfuse_fx.ir.text.write_text import canonical_text
from commfuse_fx.machine.source import Costs, costs_label, resolve_costs
from commfuse_fx.planning.compiled import Collective, Snapshot
from commfuse_fx.planning.pipeline.pipeline import PassPipeline, PassRecord
from commfuse_fx.simulate.simulation import Simulation, simulate
from commfuse_fx.support.checks import check_bool
from commfuse_fx.support.tracebacks import user_frames_only


class CompiledGraph:
    """The final program of one compile with what led to it. Only the groups of its collectives depend on the rank."""

    def __init__(
        self,
        program: Program,
        rank: int,
        pass_records: Sequence[PassRecord],
        replay: Callable[[], Mapping[str, Snapshot]],
        captured: Program | None = None,
        pipeline: PassPipeline | None = None,
    ) -> None:
        self._program = program
        self.rank = rank
        self._replay = replay
        self._captured = captured
        self.pipeline = pipeline
        """The passes that made the final graph of the captured one; None where that is not known."""
        self.pass_records = tuple(pass_records)
        """What each pass did and how long it took; empty for a step that was loaded."""

    @property
    def program(self) -> Program:
        """A copy of the final graph with what its inputs and outputs mean; passes work on it."""
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
        """The snapshot after each pass by its name, in order; "capture" comes first. They are made when first
        asked for.
        """
        return self._replay()

    @cached_property
    def collectives(self) -> list[Collective]:
        """All collectives, in issue order."""
        mesh = self._program.mesh
        found: list[Collective] = []
        for node in self._program.collectives():
            details = collective_of(node)
            found.append(Collective.of(details, info(node), mesh.ranks(details.group, self.rank)))
        return found

    @cached_property
    def _canonical(self) -> str:
        return canonical_text(self._program)

    def text(self) -> str:
        """The canonical text, which is byte-identical over runs, ranks and hash seeds."""
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
    def explain(self, cluster: Any = None, timings: bool = False) -> Explanation:
        """Say why the graph is as it is, and why communication is not hidden.

        The explanation lists buckets, merges that were illegal and parameters that are not reduced. For each
        collective it says how much of it is hidden on a cluster, and why the rest is not.

        cluster: as for `simulate`.
        timings: whether it also lists the passes that have changed the graph, with the seconds that each took. A step
            that was loaded has none.
        """
        costs = self._costs(cluster)
        found = explain(self._program, cost_model(costs), costs_label(costs))
        changed = tuple(each for each in self.pass_records if each.modified)
        return replace(found, passes=changed) if check_bool(timings, "timings") else found

    @user_frames_only
    def search_proof(self) -> Any:
        """What shows how far the strategies of `parallel_mode="auto"` are from the cheapest ones by the prices of their
        search, which runs once more: a SearchProof. None where nothing was searched, or three mesh axes or more.

        Under a memory limit its bound is that of all strategies, whatever memory they take. Raises ConfigValueError for
        a graph that was loaded.
        """
        if self._captured is None or self.pipeline is None:
            raise ConfigValueError("a graph that was loaded has no proof of its search: lower the step again")
        numbers = [number for number, each in enumerate(self.pipeline.passes) if each.name == "divide"]
        if not numbers or not getattr(self.pipeline.passes[numbers[0]], "searched", False):
            return None
        proofs = import_module("commfuse_fx.sharding.search.search_proof").SearchProofs()
        context = replace(self.pipeline.context, kept={type(proofs): proofs})
        replace(self.pipeline, context=context).run(self._captured.copy(), part=slice(numbers[0] + 1))
        return proofs[0] if proofs else None

    @user_frames_only
    def simulate(self, cluster: Any = None) -> Simulation:
        """Predict the step on a cluster: its time, exposed communication, peak memory and a lower bound.

        cluster: what `compile` takes as `cluster=`. None: the one that the step was compiled for or has measured while
            it trained, else 10 Gbit/s between CPU ranks, or nodes of 8 H100 for a model on CUDA.

        Raises ConfigTypeError, ConfigKeyError or ConfigValueError for a bad cluster, one with too few ranks, or
        a profile of another step.
        """
        return simulate(self._program, cost_model(self._costs(cluster)))

    def _costs(self, cluster: Any) -> Costs:
        program = self._program
        given = program.config.cluster if cluster is None else resolve_costs(cluster)
        specs = {name: param.whole or param.spec for name, param in program.params.items()}
        device = next((spec.device for spec in specs.values()), "cpu").split(":")[0]
        return priced_for(given, device, program.mesh, specs)
