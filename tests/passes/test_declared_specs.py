"""What passes say of the nodes that they add is what these make; where it is not, that is found."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import commfuse_fx as cf
from commfuse_fx.errors import VerificationError
from commfuse_fx.ir.core.builder import aten
from commfuse_fx.ir.core.dependence import Roots
from commfuse_fx.ir.core.merge import Merge
from commfuse_fx.ir.core.meta import TensorSpec, info, tensor_spec
from commfuse_fx.ir.core.program import Program
from commfuse_fx.ir.core.verify import verify
from commfuse_fx.ir.updates.update_layout import check_blocks
from commfuse_fx.runtime.execute.code.recorded import LayoutCheck
from commfuse_fx.runtime.execute.executor import Executor
from commfuse_fx.runtime.memory.flat_pool import FlatPool
from commfuse_fx.testing import parse_program
from commfuse_fx.virtual.ranks_program import _last_uses_of_memory
from commfuse_fx.virtual.virtual_world import LockstepWorld
from tests.oracle import MakeOptimizer, by_class


class Heads(nn.Module):
    """A scale and a bias per head, and a norm with as many channels, all of them divided among as many ranks."""

    def __init__(self, heads: int = 4) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, heads), nn.Linear(heads, 5)
        self.norm = nn.BatchNorm1d(heads)
        self.scale, self.bias = nn.Parameter(torch.randn(heads)), nn.Parameter(torch.randn(heads))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.tanh(self.norm(self.a(x)) * self.scale + self.bias)).square().mean()  # type: ignore[no-any-return]


class Rows(nn.Module):
    """Tables of one row per rank: the parts that are gathered are rows."""

    def __init__(self, heads: int = 4) -> None:
        super().__init__()
        self.one, self.two = nn.Parameter(torch.randn(heads, 3)), nn.Parameter(torch.randn(heads, 2, 5))
        self.b = nn.Linear(heads, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.tanh(x[:, :3] @ self.one.t() + self.two.mean((1, 2)))).square().mean()  # type: ignore[no-any-return]


MODELS: dict[str, Callable[[], nn.Module]] = {"heads": Heads, "rows": Rows}
UPDATES: dict[str, MakeOptimizer | None] = {
    "sgd": by_class(torch.optim.SGD, lr=0.5, momentum=0.9),
    "adamw": by_class(torch.optim.AdamW, lr=0.1, eps=1e-2),
    "gradients": None,
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("update", UPDATES)
def test_gathered_vectors_as_long_as_the_group(name: str, update: str) -> None:
    model, make = MODELS[name](), UPDATES[update]
    reference = copy.deepcopy(model)
    cf.shard(model.b, weight=(None, "dp"))
    optimizer = None if make is None else make(model)
    options: dict[str, Any] = {"parallel_mode": "semi_auto", "device_num": 4, "global_rank": 0, "full_batch": True}
    world = LockstepWorld(cf.compile(model, optimizer=optimizer, **options, form="step"))
    eager = None if make is None else make(reference)
    for _ in range(1 if make is None else 2):
        x = torch.randn(8, 6)
        reference.zero_grad()
        reference(x).backward()
        if eager is not None:
            eager.step()
        world([(x,)] * 4)
    for rank in world.models:
        for (name, have), want in zip(rank.named_parameters(), reference.parameters(), strict=True):
            pair = (have.grad, want.grad) if make is None else (have, want)
            torch.testing.assert_close(*pair, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("verified", [True, False])
def test_a_wrong_record_is_found(verified: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the pass that makes it, and otherwise by the first rank that runs the node in lockstep."""
    node = Merge.node

    def wrong(self: Merge, target: Any, args: Any, spec: Any, label: str, *others: Any) -> Any:
        if label.startswith("restore") and spec.shape == (4,):
            spec = replace(spec, stride=(2,))
        return node(self, target, args, spec, label, *others)

    monkeypatch.setattr(Merge, "node", wrong)
    monkeypatch.setenv("COMMFUSE_VERIFY", str(int(verified)))
    model = Heads()
    cf.shard(model.b, weight=(None, "dp"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = cf.compile(model, optimizer=optimizer, parallel_mode="semi_auto", device_num=4, full_batch=True, form="step")
    where = "after pass fuse_collectives: node bucket" if verified else "node bucket"
    with pytest.raises(VerificationError, match=rf"{where}.*is recorded as f32\[4\]\(2\) of strides \(2,\), but makes"):
        LockstepWorld(step)([(torch.randn(8, 6),)] * 4)


def _program() -> tuple[nn.Module, torch.optim.Optimizer, Program]:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = cf.compile(model, loss_fn=nn.functional.mse_loss, optimizer=optimizer, device_num=2, global_rank=0)
    return model, optimizer, step.lower(torch.randn(4, 6), torch.randn(4, 6))._program


def test_the_first_run_of_a_plan_proves_views() -> None:
    """Real ranks copy what a kernel has laid out otherwise; of a view they can make no copy."""
    _, _, program = _program()
    view = next(node for node in program.graph.nodes if node.target is aten.as_strided.default)
    prove = LayoutCheck(program, program.graph.nodes).functions[view]
    spec = tensor_spec(view)
    value = torch.empty_strided(spec.shape, spec.stride)
    assert prove(value) is value
    with pytest.raises(VerificationError, match="is recorded as"):
        prove(torch.empty(*spec.shape, 2).select(-1, 0))


def test_updates_take_blocks_of_memory_in_one_order() -> None:
    model, optimizer, program = _program()
    verify(program, "nothing")
    update = next(node for node in program.graph.nodes if node.target is aten._fused_sgd_.default)
    grad = update.args[1][0]
    spec = tensor_spec(grad)
    info(grad).spec = TensorSpec(spec.shape, spec.dtype, (2,), spec.device)
    found: list[str] = []
    check_blocks(program, lambda node, what: found.append(what))
    assert "entry 0 of its lists has strides (1,) and (2,)" in found[0]
    with pytest.raises(VerificationError, match="takes its operands for blocks of memory in one order"):
        Executor(program, dict(model.named_parameters()), {}, optimizer, None, 0, FlatPool())


class Reduced(nn.Module):
    """Collectives of the user's own on a transposed tensor and on a part of one."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.one(x)
        mean = cf.ops.all_reduce(hidden.t(), "avg").reshape(-1) + cf.ops.broadcast(hidden[:, ::2].t()).repeat(
            2, 1
        ).reshape(-1)
        return (mean * torch.arange(1.0, mean.numel() + 1)).square().mean() + cf.ops.all_gather(
            hidden.t()
        ).square().mean()


@pytest.mark.parametrize("size", [1, 2])
def test_users_collectives_on_strided_tensors(size: int) -> None:
    """Ranks that hold the same give what one device gives."""
    model = Reduced()
    reference = copy.deepcopy(model)
    optimizer, eager = (torch.optim.SGD(each.parameters(), lr=1e-3) for each in (model, reference))
    world = LockstepWorld(cf.compile(model, optimizer=optimizer, device_num=size, global_rank=0, form="step"))
    x = torch.randn(3, 6)
    loss = reference(x)
    loss.backward()
    eager.step()
    for result in world([(x,)] * size):
        torch.testing.assert_close(result.loss, loss.detach())


def squares(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target.reshape(-1, 8)).square().mean()


def test_strided_batches_of_a_divided_graph() -> None:
    """A rank's part of the batch is taken for contiguous, whatever it is handed."""
    model = nn.Sequential(nn.Flatten(0), nn.Unflatten(0, (-1, 8)), nn.Linear(8, 8))
    reference = copy.deepcopy(model)
    options: dict[str, Any] = {"loss_fn": squares, "parallel_mode": "semi_auto"}
    optimizer, eager = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, reference))
    world = LockstepWorld(cf.compile(model, optimizer=optimizer, device_num=2, global_rank=0, **options, form="step"))
    parts = [(torch.randn(8, 4).t(), torch.randn(8, 4).t()) for _ in range(2)]
    for _ in range(2):
        world(parts)
        eager.zero_grad()
        x, y = (torch.cat(both) for both in zip(*parts, strict=True))
        squares(reference(x), y).backward()
        eager.step()
    for rank in world.models:
        torch.testing.assert_close(dict(rank.named_parameters()), dict(reference.named_parameters()))


SCATTERED = """
    in  %a: f32[4,8] = parameter
    bwd %storage: f32[32] = aten.empty.memory_format([32], dtype=f32, device=cpu)
    bwd %place: f32[4,8] = aten.as_strided(%storage, [4, 8], [8, 1], 0)
    bwd %write: f32[4,8] = aten.mul.out(%a, %a, out=%place)
    bwd %reduce_scatter: f32[2,8] = _c10d_functional.reduce_scatter_tensor(%place, sum, 2, dp)  SENT
    bwd %wait: f32[2,8] = _c10d_functional.wait_tensor(%reduce_scatter)
    return [%wait]
""".replace("SENT", "{group=dp(2) op=sum dtype=f32 bytes=128 members=[a]}")


def test_memory_lives_until_the_wait_of_what_sends_it() -> None:
    """A reduce_scatter whose input is a view of kept memory reads it until its wait: only then it may be poisoned."""
    program = parse_program(SCATTERED)
    order = {info(node).name: node for node in program.graph.nodes if node.op == "call_function"}
    roots = Roots(program.graph, program.aliases())
    found = _last_uses_of_memory([*order.values()], [order["storage"]], roots)
    assert found == {order["wait"]: [order["storage"]]}
