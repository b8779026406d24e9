"""Process groups of mesh axes."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from commfuse_fx.errors import ConfigValueError
from commfuse_fx.ir.core.mesh import Mesh
from commfuse_fx.runtime.ranks.forks import check_world
from commfuse_fx.runtime.ranks.joining.starts import name_of_start
from commfuse_fx.runtime.ranks.joining.world import world_timeout
from commfuse_fx.support.ranks import is_distributed


class Groups:
    """Looks up the process group of "dp", or of several axes such as "dp,tp"; each is made once."""

    def __init__(self, mesh: Mesh, device_mesh: Any) -> None:
        self.mesh = mesh
        self._device_mesh = device_mesh
        self._groups: dict[str, Any] = {}
        self._refined: dict[tuple[str, ...], Groups] = {}

    def on(self, mesh: Mesh) -> Groups:
        """The groups of a mesh of the same ranks that splits some axes ("dp" into "dp.0" and "dp.1").

        All ranks call this together.
        """
        if mesh.names == self.mesh.names:
            return self
        if mesh.names not in self._refined:
            ranks = torch.tensor(mesh.devices or range(mesh.world), device="cpu").view(mesh.shape)
            made = DeviceMesh(self._device_mesh.device_type, ranks, mesh_dim_names=mesh.names)
            self._refined[mesh.names] = Groups(mesh, made)
        return self._refined[mesh.names]

    @classmethod
    def of_world(cls, mesh: Mesh, device_type: str, device_mesh: Any = None) -> Groups:
        """Groups over the running world. All ranks call this together.

        Raises ConfigValueError if sizes do not match, ForkError in a forked child of a rank.
        """
        check_world()
        if not is_distributed():
            raise ConfigValueError(
                f"mesh={mesh.shape} has {mesh.world} devices, but this process has joined no world: call cf.init() in "
                f"each of {mesh.world} processes that torchrun starts, or pass device_num={mesh.world} to look at the "
                "plan without them"
            )
        world = dist.get_world_size()
        if mesh.world != world:
            raise ConfigValueError(
                f"mesh={mesh.shape} has {mesh.world} device{'s' if mesh.world > 1 else ''}, but the world has {world} "
                "processes: make the product of the sizes equal to --nproc-per-node times the number of nodes"
                + ("" if mesh.world > 1 else ', or pass parallel_mode="stand_alone" where each rank trains by itself')
            )
        name_of_start(world_timeout())  # before any group is made
        if device_mesh is None:
            device_mesh = init_device_mesh(device_type, mesh.shape, mesh_dim_names=mesh.names)
        elif device_mesh.mesh_dim_names is None:  # torch makes groups of several axes by their names only
            device_mesh = DeviceMesh(device_mesh.device_type, device_mesh.mesh, mesh_dim_names=mesh.names)
        return cls(mesh, device_mesh)

    def check_order(self, group: str) -> None:
        """Check that the ranks of every group along these axes ascend in the order of the mesh.

        torch.distributed sorts the ranks of a process group, and some collectives depend on their order. All ranks
        raise ConfigValueError alike.
        """
        for ranks in self.mesh.groups(group):
            if list(ranks) != sorted(ranks):
                raise ConfigValueError(
                    f"the mesh lists ranks {', '.join(map(str, ranks))} in this order along {group}, but "
                    "torch.distributed sorts the ranks of a group, so parts would come from other ranks than the mesh "
                    "says: pass a DeviceMesh whose ranks ascend along its axes, as init_device_mesh() makes it"
                )

    def __getitem__(self, group: str) -> Any:
        if group not in self._groups:
            self._groups[group] = self._find(group)
        return self._groups[group]

    def _find(self, group: str) -> Any:
        if self.mesh.size(group) == dist.get_world_size():
            return dist.group.WORLD
        axes = group.split(",")
        if len(axes) == 1:
            found = self._device_mesh.get_group(self.mesh.names.index(axes[0]))
        else:
            found = self._device_mesh[tuple(axes)]._flatten().get_group()
        dist.distributed_c10d._set_pg_timeout(world_timeout(), found)
        return found
