"""Parameters of which each rank updates some rows, or one rank all: how many, and the node that gives them.

Why: docs/decisions.md, "A rank updates rows of each parameter, not a range of a bucket".
"""

from __future__ import annotations

from torch import fx

from commfuse_fx.errors import ConfigValueError
from commfuse_fx.ir.core.functions import axis_index
from commfuse_fx.ir.core.mesh import Mesh
from commfuse_fx.ir.core.meta import TensorSpec, has_info, info
from commfuse_fx.ir.core.owner_ops import of_owner
from commfuse_fx.ir.core.program import Parameter, Program

_PART = "/rows"


def sharing_ranks(mesh: Mesh, group: str, size: int) -> str:
    """The axes over which so many neighbouring ranks of a group share an update. 0: all ranks of the group.

    Raises ConfigValueError where the last axes of the group do not have that product.
    """
    if size in (0, mesh.size(group)):
        return group
    if found := mesh.last_axes(group, size):
        return found
    ranks, axes = mesh.size(group), [name for name in mesh.names if name in group.split(",")]
    known = dict.fromkeys(str(mesh.size(",".join(axes[i:]))) for i in reversed(range(len(axes))))
    where = f'parallel_optimizer_config["optimizer_weight_shard_size"] is {size}, '
    leave = "or leave it out to divide among all of them"
    if ranks % size:
        ways = [each for each in range(1, ranks + 1) if ranks % each == 0]
        raise ConfigValueError(
            f"{where}which does not divide the {ranks} ranks over which gradients are summed; use one of "
            f"{', '.join(map(str, ways))}, {leave}"
        )
    shown = "x".join(f"{name}={mesh.size(name)}" for name in axes)
    raise ConfigValueError(
        f"{where}which is not the product of the last axes of {shown}, over which gradients are summed; use "
        f"{' or '.join(known)}, {leave}, or give the mesh axes of {ranks // size} and {size} in their place"
    )


def rows_per_rank(param: Parameter, mesh: Mesh) -> int:
    """How many rows each rank that updates any has, padding included."""
    if param.owner is not None:
        return param.spec.shape[0]
    return -(-param.spec.shape[0] // mesh.size(param.shard))


def spec_of_rows(param: Parameter, mesh: Mesh) -> TensorSpec:
    """What a rank that updates the parameter, or rows of it, does update of it."""
    if not param.shard or param.owner is not None:
        return param.spec
    return param.spec.with_shape((rows_per_rank(param, mesh), *param.spec.shape[1:]))


def padding_of(param: Parameter, mesh: Mesh) -> int:
    """The rows that the last ranks update beyond those that the parameter has."""
    if param.owner is not None:
        return 0
    return rows_per_rank(param, mesh) * mesh.size(param.shard) - param.spec.shape[0]


def name_of_rows(name: str) -> str:
    """The name of the node that gives a rank its rows of this parameter."""
    return f"shard/{name}{_PART}"


def name_of_gradient(name: str) -> str:
    """The name of the node that gives a rank what it takes of a gradient that is whole on every rank."""
    return f"shard/{name}/gradient"


def gives_rows(node: fx.Node) -> bool:
    """Whether a node gives a rank its rows of a parameter."""
    name = info(node).name
    return name.startswith("shard/") and name.endswith(_PART)


def parameter_of_rows(node: fx.Node) -> str:
    """The name of the parameter of which a node gives a rank its rows."""
    return info(node).name.removeprefix("shard/").removesuffix(_PART)


def group_of_rows(node: fx.Node) -> str:
    """The mesh axes over which these rows are divided. Raises ValueError for rows that do not follow from a rank."""
    if node.target is of_owner:
        return str(node.args[3])
    begin = node.args[2] if len(node.args) > 2 else None
    index = begin.args[0] if isinstance(begin, fx.Node) and begin.args else None
    if not isinstance(index, fx.Node) or index.target is not axis_index:
        raise ValueError(f"{info(node).name} are no rows that follow from axis_index")
    return str(index.args[0])


def owner_of_rows(node: fx.Node) -> int | None:
    """The position of the rank that gets all rows of a parameter; None where every rank gets some."""
    if node.target is not of_owner:
        return None
    owner = node.args[1]
    assert isinstance(owner, int)
    return owner


def is_parameter(node: fx.Node) -> bool:
    """Whether an update gets this as a parameter or as its state, not as a gradient."""
    return node.op == "placeholder" or gives_rows(node)


def updated_nodes(program: Program) -> dict[str, fx.Node]:
    """The node that an update writes for each parameter: the parameter, or the rank's rows of it."""
    found = {source.name: node for node, source in program.sources.items() if source.kind == "parameter"}
    rows = (node for node in program.graph.nodes if has_info(node) and gives_rows(node))
    return found | {parameter_of_rows(node): node for node in rows}
