"""SyncBatchNorm whose sums are reduced by collectives of the graph. Torch's own would communicate while tracing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from commfuse_fx import ops
from commfuse_fx.errors import CaptureError, ConfigValueError
from commfuse_fx.ir.core.mesh import Mesh
from commfuse_fx.sharding.marking.traced_marks import entered_call


def sync_batch_norm(mesh: Mesh, divided: bool) -> Callable[[nn.SyncBatchNorm, torch.Tensor], torch.Tensor]:
    """A forward for nn.SyncBatchNorm on this mesh.

    divided: whether the compiler divides the graph. The traced batch is then the whole one, and needs no collective.
    In eval mode there is none either, as in torch: without running statistics, those of the rank's own batch count.

    The forward raises CaptureError if the module's process group is not that of all ranks, and ConfigValueError in a
    call with `cross_batch`.
    """

    def forward(self: nn.SyncBatchNorm, x: torch.Tensor) -> torch.Tensor:
        if self.training and (call := entered_call()) is not None:
            raise ConfigValueError(
                f"{call.label} has a SyncBatchNorm, which takes the statistics of all ranks in data parallel as well: "
                "leave cross_batch out, or use BatchNorm"
            )
        if not self.training or divided or mesh.world == 1:
            return nn.modules.batchnorm._BatchNorm.forward(self, x)
        _check_group(self.process_group, mesh)
        return _over_all_ranks(self, x)

    return forward


def _check_group(group: Any, mesh: Mesh) -> None:
    if group is not None and tuple(dist.get_process_group_ranks(group)) != (mesh.devices or tuple(range(mesh.world))):
        raise CaptureError(
            f"SyncBatchNorm over the process group of rank(s) {dist.get_process_group_ranks(group)}: a compiled step "
            f"takes it over all {mesh.world} rank(s) of its mesh, so leave process_group out"
        )


def _over_all_ranks(norm: nn.SyncBatchNorm, x: torch.Tensor) -> torch.Tensor:
    """Batch norm with two all_reduces: of the sums, then of squared distances from the mean.

    One all_reduce of sums of squares would lose digits.
    """
    given = x.float() if x.dtype.itemsize < 4 else x
    dims = [0, *range(2, x.ndim)]
    shape = [1, -1, *[1] * (x.ndim - 2)]
    # The graph counts rows, since ranks with batches of different sizes share one graph.
    count = torch.ones_like(given.detach()[:, :1]).sum().view(1)
    sums = ops.all_reduce(torch.cat([given.sum(dims), count]))
    total = sums[-1:].detach()
    mean = sums[:-1] / total
    centered = given - mean.view(shape)
    variance = ops.all_reduce(centered.square().sum(dims)) / total
    _update_statistics(norm, mean.detach(), variance.detach() * (total / (total - 1)))
    out = centered * torch.rsqrt(variance + norm.eps).view(shape)
    if norm.affine:
        out = out * norm.weight.view(shape) + norm.bias.view(shape)
    return out.to(x.dtype)


def _update_statistics(norm: nn.SyncBatchNorm, mean: torch.Tensor, variance: torch.Tensor) -> None:
    if not norm.training or not norm.track_running_stats:
        return
    assert norm.running_mean is not None and norm.running_var is not None and norm.num_batches_tracked is not None
    with torch.no_grad():
        norm.num_batches_tracked.add_(1)
        for kept, new in ((norm.running_mean, mean), (norm.running_var, variance)):
            share = 1.0 / norm.num_batches_tracked.to(kept.dtype) if norm.momentum is None else norm.momentum
            kept.mul_(1 - share).add_(new.to(kept.dtype) * share)
