"""torch.distributed in a model: its functional collectives are taken, all else is refused with the line and the fix."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
import torch.distributed.nn.functional as dnn
from torch import nn
from torch.distributed import all_reduce as bound_all_reduce
from torch.distributed.device_mesh import init_device_mesh

import commfuse_fx as cf
from commfuse_fx.virtual.virtual_world import LockstepWorld
from tests.distributed.harness import Ranks

Function = Callable[[torch.Tensor], Any]


class Model(nn.Module):
    def __init__(self, run: Function) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(8, 4).double()
        self.run = run

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        out = self.run(y)
        return ((y + 1) * (out.sum(0) if isinstance(out, torch.Tensor) else 1)).square().mean()


class _Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        grad = grad.clone()
        bound_all_reduce(grad)
        return grad


def _p2p(x: torch.Tensor) -> None:
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, x.detach(), 1 - dist.get_rank())]):
        work.wait()


def _halves(x: torch.Tensor) -> list[torch.Tensor]:
    return [each.contiguous() for each in x.detach().chunk(2)]


REFUSED: dict[str, tuple[Function, str]] = {
    "all_reduce": (lambda x: dist.all_reduce(x.detach()), "cf.ops.all_reduce"),
    "bound": (lambda x: bound_all_reduce(x.detach()), "all_reduce of.*cf.ops.all_reduce"),
    "async": (lambda x: dist.all_reduce(x.detach(), async_op=True), "cf.ops.all_reduce"),
    "attribute": (lambda x: dist.all_reduce(torch.ones(3)), "cf.ops.all_reduce"),
    "backward": (_Own.apply, "cf.ops.all_reduce"),
    "reduce": (lambda x: dist.reduce(x.detach(), 0), "cf.ops.all_reduce"),
    "all_gather": (lambda x: dist.all_gather(_halves(x), x.detach()[:3].clone()), "cf.ops.all_gather"),
    "all_gather_into": (lambda x: dist.all_gather_into_tensor(x.new_empty(12, 4), x.detach()), "cf.ops.all_gather"),
    "gather": (lambda x: dist.gather(x.detach(), [x.detach()] * 2 if dist.get_rank() == 0 else None), "cf.ops.all_g"),
    "reduce_scatter": (lambda x: dist.reduce_scatter(x.detach()[:3].clone(), _halves(x)), "cf.ops.reduce_scatter"),
    "reduce_scatter_t": (lambda x: dist.reduce_scatter_tensor(x.new_empty(3, 4), x.detach()), "cf.ops.reduce_scatter"),
    "scatter": (lambda x: dist.scatter(x.detach(), [x.detach()] * 2 if not dist.get_rank() else None), "cf.ops.broad"),
    "broadcast": (lambda x: dist.broadcast(x.detach(), 0), "cf.ops.broadcast"),
    "all_to_all": (lambda x: dist.all_to_all(_halves(x), _halves(x)), "cf.ops.all_to_all"),
    "all_to_all_single": (lambda x: dist.all_to_all_single(x.detach().clone(), x.detach()), "cf.ops.all_to_all"),
    "barrier": (lambda x: dist.barrier(), "barrier of.*move it out"),
    "monitored_barrier": (lambda x: dist.monitored_barrier(), "monitored_barrier of.*move it out"),
    "send": (lambda x: dist.send(x.detach(), 1 - dist.get_rank()), "send of.*move it out"),
    "irecv": (lambda x: dist.irecv(x.detach(), 1 - dist.get_rank()), "irecv of.*move it out"),
    "p2p": (_p2p, "batch_isend_irecv of.*move it out"),
    "all_gather_object": (lambda x: dist.all_gather_object([None] * 2, {"a": 1}), "all_gather_object.*as an argument"),
    "broadcast_objects": (lambda x: dist.broadcast_object_list(["a"], 0), "broadcast_object_list.*as an argument"),
    "nn all_reduce": (dnn.all_reduce, "all_reduce of.*cf.ops.all_reduce"),
    "nn all_gather": (lambda x: torch.cat(dnn.all_gather(x)), "all_gather of.*cf.ops.all_gather"),
    "nn all_to_all_single": (lambda x: dnn.all_to_all_single(torch.empty_like(x), x), "cf.ops.all_to_all"),
    "group": (lambda x: dist.distributed_c10d._get_default_group().allreduce([x.detach()]), "cf.ops.all_reduce"),
    "part": (lambda x: fc.all_reduce(x, "sum", _alone()), r"group of rank\(s\) \d: .*cf.ops.all_reduce\(x, group"),
    "uneven": (lambda x: fc.all_to_all_single(x, [4, 2], [4, 2], dist.group.WORLD), "pad them"),
    "sync batch norm": (
        lambda x: _part_of_the_ranks()(x),
        r"SyncBatchNorm over.*rank\(s\) \[\d\].*leave process_group",
    ),
}

_groups: list[Any] = []
_meshes: list[Any] = []


def _alone() -> Any:
    return _groups[dist.get_rank()]


def _part_of_the_ranks() -> nn.Module:
    return nn.SyncBatchNorm(4, affine=False, track_running_stats=False, process_group=_alone())


def refusals() -> dict[str, str]:
    """What each says; nobody has sent anything, so the ranks can go on."""
    _groups[:] = [dist.new_group([0]), dist.new_group([1])]
    said: dict[str, str] = {}
    x = torch.randn(6, 8).double()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, (run, _) in REFUSED.items():
            model = nn.Sequential(Model(run))
            try:
                cf.compile(model, form="step").lower(x)
                said[name] = "nothing"
            except cf.CaptureError as error:
                said[name] = str(error)
            except Exception as error:
                said[name] = f"{type(error).__name__}: {error}"
    said["semi_auto"] = _semi_auto(x)
    return said


def _semi_auto(x: torch.Tensor) -> str:
    try:
        cf.compile(Model(TAKEN["all_reduce"]), parallel_mode="semi_auto", form="step").lower(x)
    except cf.CaptureError as error:
        return str(error)
    return "nothing"


def test_what_talks_while_tracing_is_refused(ranks: Ranks) -> None:
    for said in ranks.values(refusals):
        for name, (_, wanted) in {**REFUSED, "semi_auto": (None, "written for one device.*remove the call")}.items():
            assert re.search(wanted, said[name]), f"{name}: {said[name]}"
            assert re.search(r"cannot trace 0?.* at .*test_torch_collectives\.py:\d+", said[name]), said[name]


def _world() -> Any:
    return dist.group.WORLD


TAKEN: dict[str, Function] = {
    "all_reduce": lambda x: fc.all_reduce(x * 2, "sum", _world()),
    "all_reduce max": lambda x: fc.all_reduce(x.detach(), "MAX", _world()),
    "name": lambda x: fc.all_reduce(x, "sum", _world().group_name),
    "ranks": lambda x: fc.all_reduce(x, "sum", [0, 1]),
    "mesh": lambda x: fc.all_reduce(x, "sum", _meshes[0]),
    "all_gather": lambda x: fc.all_gather_tensor(x, 0, _world()),
    "all_gather dim": lambda x: fc.all_gather_tensor(x, 1, _world()).view(-1, 4),
    "all_gather autograd": lambda x: fc.all_gather_tensor_autograd(x, 0, _world()),
    "reduce_scatter": lambda x: fc.reduce_scatter_tensor(x, "sum", 0, _world()),
    "reduce_scatter autograd": lambda x: fc.reduce_scatter_tensor_autograd(x, "sum", 0, _world()),
    "all_to_all": lambda x: fc.all_to_all_single(x, None, None, _world()),
    "all_to_all autograd": lambda x: fc.all_to_all_single_autograd(x, [3, 3], [3, 3], _world()),
    "broadcast": lambda x: fc.broadcast(x.detach(), 1, _world()),
    "coalesced": lambda x: torch.cat(fc.all_reduce_coalesced([x.detach(), x.detach() * 2], "sum", _world())),
    "gathered together": lambda x: torch.cat(fc.all_gather_into_tensor_coalesced([x.detach()] * 2, _world())),
}


def differences() -> dict[str, float]:
    """By how much loss and mean gradients of a step differ from those of eager ranks."""
    _meshes[:] = [init_device_mesh("cpu", (2,))]
    found: dict[str, float] = {}
    for name, run in TAKEN.items():
        model = Model(run)
        eager = copy.deepcopy(model)
        x = torch.randn(6, 8, generator=torch.Generator().manual_seed(dist.get_rank())).double()
        want = eager(x)
        want.backward()
        loss = cf.compile(model, form="step")(x)
        found[name] = abs(loss.item() - want.item())
        for param, other in zip(model.parameters(), eager.parameters(), strict=True):
            assert param.grad is not None and other.grad is not None
            dist.all_reduce(other.grad)
            found[name] = max(found[name], (param.grad - other.grad / 2).abs().max().item())
    return found


def test_functional_collectives_are_part_of_the_graph(ranks: Ranks) -> None:
    for found in ranks.values(differences):
        assert found.keys() == TAKEN.keys()
        assert not {name: by for name, by in found.items() if by > 1e-12}


def test_a_world_without_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fake process group of torch's, and the name that the default group has, mean the mesh."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    batches = [(torch.randn(6, 8).double(),) for _ in range(2)]

    def losses(run: Function) -> list[torch.Tensor]:
        world = LockstepWorld(cf.compile(Model(run), device_num=2, global_rank=0, form="step"))
        return [result.loss for result in world(batches)]

    want = losses(lambda x: cf.ops.all_reduce(x))
    assert losses(lambda x: fc.all_reduce(x, "sum", "0")) == want
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        assert losses(lambda x: fc.all_reduce(x, "sum", dist.group.WORLD)) == want
    finally:
        dist.destroy_process_group()
