"""Which updates ranks share among them, and what `explain()` says of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from commfuse_fx.config.compile_config import CompileConfig
from commfuse_fx.config.parallel_optimizer import BROADCAST
from commfuse_fx.errors import ConfigValueError
from commfuse_fx.ir.core.mesh import Mesh
from commfuse_fx.ir.core.program import OptimizerInfo, Parameter
from commfuse_fx.ir.rows.shard_rows import rows_per_rank, sharing_ranks

SHARED, WHOLE = "sharded updates", "updated by every rank"
"""Topics of notes."""


@dataclass(frozen=True)
class Sharing:
    """What a parameter has to be like for ranks to share its update.

    threshold: KiB that it must have at least.
    pad: whether rows that do not divide are padded.
    ranks: how many neighbouring ranks share an update; 0: all of a group.
    by_owners: whether one rank makes all of an update, in place of rows on every rank.
    """

    threshold: int
    pad: bool
    ranks: int
    by_owners: bool

    def why_not(self, param: Parameter, mesh: Mesh, group: str) -> str:
        """Why every rank of the group makes the whole update of a parameter; "" if they share it."""
        kib = param.spec.nbytes / 1024
        if self.ranks == 1:
            return "optimizer_weight_shard_size=1 leaves it to each rank"
        if not param.parallel_optimizer:
            return "it is marked with parallel_optimizer = False"
        if not param.spec.shape:
            return "it is a scalar, which has no rows"
        if kib < self.threshold:
            return f"it has {kib:.3g} KiB, less than parallel_optimizer_threshold={self.threshold}"
        if not param.is_block or not (self.by_owners or param.spec.is_contiguous):
            return "it shares memory, or its rows do not lie one after another"
        ways = mesh.size(sharing_ranks(mesh, group, self.ranks))
        if param.spec.shape[0] % ways and not self.pad and not self.by_owners:
            return (
                f"its first dimension of {param.spec.shape[0]} does not divide by {ways} ranks; "
                'parallel_optimizer_config={"pad": True} pads it'
            )
        return ""


def divided_by_rule(params: Mapping[str, Parameter], mesh: Mesh, config: CompileConfig) -> dict[str, str]:
    """Of a module at level 2 or 3, why a parameter or its gradient stays whole; "" for one of which ranks hold rows.

    It follows from the parameters alone, so that all graphs of a module, and that of its update, divide the same ones.
    """
    asked = config.parallel_optimizer
    assert asked is not None, "the module divides its parameters"
    sharing = Sharing(asked.parallel_optimizer_threshold, asked.pad, asked.sharing, asked.mode == BROADCAST)
    found: dict[str, str] = {}
    for name, param in params.items():
        found[name] = sharing.why_not(param, mesh, mesh.all_axes)
        if config.parallel_mode == "hybrid_parallel" and param.layerwise_parallel:
            found[name] = "its gradient is not reduced over several ranks"
        elif not found[name] and (param.spec.shape[0] == 1 or not param.spec.numel):
            found[name] = "it has one row" if param.spec.numel else "it has no elements"
    return found


def in_rows(param: Parameter, mesh: Mesh, config: CompileConfig) -> Parameter:
    """The parameter as one whose rows are divided among the ranks, while a graph still has all of it."""
    asked = config.parallel_optimizer
    assert asked is not None, "the module divides its parameters"
    return replace(param, shard=sharing_ranks(mesh, mesh.all_axes, asked.sharing))


def who_updates(param: Parameter, mesh: Mesh) -> str:
    """Which ranks update a parameter that they share."""
    if param.owner is not None:
        return f"rank {param.owner} over {param.shard} updates it"
    return f"{mesh.size(param.shard)} ranks over {param.shard} update {rows_per_rank(param, mesh)} rows each"


def refuse_unknown(optimizer: OptimizerInfo, asked: str, instead: str) -> None:
    """Raise ConfigValueError for an optimizer whose updates may mix the elements of a parameter.

    asked: what divides its updates. instead: what to do otherwise.
    """
    if optimizer.rule == "opaque":
        raise ConfigValueError(
            f"{asked} with {optimizer.class_name}: {optimizer.why_opaque}, so it is not known whether its update of "
            "some rows of a parameter is the same as that of the whole; change that, use an optimizer that the "
            f"compiler has a rule for (docs: parallel optimizer), or {instead}"
        )
