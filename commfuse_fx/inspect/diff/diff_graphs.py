"""Semantic diffs of compiled graphs."""

from __future__ import annotations

from typing import Any

from commfuse_fx.errors import ConfigValueError
from commfuse_fx.inspect.diff.compare import compare
from commfuse_fx.inspect.diff.graph_diff import GraphDiff
from commfuse_fx.inspect.diff.result import Delta
from commfuse_fx.inspect.diff.sources import read_graph
from commfuse_fx.inspect.diff.strategy_diff import StrategyDiff, diff_strategies
from commfuse_fx.inspect.lowered import Lowered
from commfuse_fx.support.tracebacks import user_frames_only


@user_frames_only
def diff(a: Any, b: Any, cluster: Any = None) -> GraphDiff | StrategyDiff:
    """Compare two compiled graphs, or two files of strategies: align their entries, then say what differs.

    a, b: each a Lowered; its text() or to_json(); or the path of a file of either, or of a folder that
        `Lowered.dump` wrote (of several ranks, the first is read). Or two files that strategy_ckpt_save_file has
        written, or their texts, which give a StrategyDiff.
    cluster: what to predict step times for where both are Lowered, as for `Lowered.simulate`. Files hold no
        program that could be simulated, so diffs of files tell no times.

    Raises ConfigTypeError for a source of another type. Raises ConfigValueError for one that is missing,
    damaged or written by a newer version, for a graph and strategies together, and for a cluster that is given
    with files. A bad cluster raises what `Lowered.simulate` raises.
    """
    times: tuple[Delta, ...] = ()
    if isinstance(a, Lowered) and isinstance(b, Lowered):
        before, after = a.simulate(cluster), b.simulate(cluster)
        times = (
            Delta("step_seconds", before.step_seconds, after.step_seconds),
            Delta("exposed_seconds", before.exposed_seconds, after.exposed_seconds),
        )
    elif cluster is not None:
        raise ConfigValueError(
            "cluster= is given, and step times can be predicted only where a and b are both Lowered: leave it out, "
            "or give lowered steps"
        )
    if (strategies := diff_strategies(a, b)) is not None:
        return strategies
    return compare(read_graph(a, "a"), read_graph(b, "b"), times)
