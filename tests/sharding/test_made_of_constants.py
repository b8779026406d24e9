"""What is computed of constants and seeds alone is computed where it is used, and only the part that is used."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import commfuse_fx as cf
from commfuse_fx.ir.core.dependence import is_view
from commfuse_fx.ir.core.meta import TensorSpec, info
from commfuse_fx.virtual.rank_copies import copy_for_rank

WAYS, ROWS, PLACES, WIDTH = 4, 8, 24, 12


class Masked(nn.Module):
    """Attention with a causal mask made for each row of the batch, and dropout."""

    def __init__(self, drop: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.all, self.out, self.drop = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.all(x).chunk(3, -1)
        place = torch.arange(x.shape[1])
        allowed = (place[:, None] >= place[None, :]).expand(x.shape[0], -1, -1)
        bias = torch.where(allowed, 0.0, torch.full((), -1e4)).to(x.dtype)
        scores = self.drop((q @ k.transpose(1, 2) / WIDTH**0.5 + bias).softmax(-1))
        return self.out(scores @ v).square().mean()


def divided(model: nn.Module) -> tuple[cf.Lockstep, cf.Step]:
    step = cf.compile(
        model, None, parallel_mode="semi_auto", mesh=(WAYS,), device_num=WAYS, full_batch=True, form="step"
    )
    return cf.lockstep(step.lower(batch())), step


def batch() -> Tensor:
    return torch.randn(ROWS, PLACES, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def test_no_rank_makes_a_whole_mask() -> None:
    _, step = divided(Masked(0.25).double())
    program = step.lower(batch()).program
    sizes = {info(node).name: info(node).spec.numel for node in program.graph.nodes if _has_memory(node)}
    assert max(sizes.values()) == ROWS // WAYS * PLACES * 3 * WIDTH < ROWS * PLACES * PLACES
    assert [size for name, size in sizes.items() if name.endswith("bernoulli_at")] == [ROWS // WAYS * PLACES * PLACES]


def _has_memory(node: torch.fx.Node) -> bool:
    return node.op == "call_function" and isinstance(info(node).spec, TensorSpec) and not is_view(node)


def test_masks_are_those_of_one_device() -> None:
    model = Masked(0.0).double()
    reference, _ = copy_for_rank(model, None)
    want = reference(batch())
    want.backward()
    found = divided(model)[0](batch())
    assert found.disagreement is None
    torch.testing.assert_close(found.loss, want.detach())
    for name, param in reference.named_parameters():
        torch.testing.assert_close(found.grads[name], param.grad)


def test_drawn_masks_do_not_depend_on_the_ranks() -> None:
    losses = []
    for ways in (1, 2, 4):
        step = cf.compile(
            Masked(0.5).double(), None, parallel_mode="semi_auto", mesh=(ways,), device_num=ways, full_batch=True,
            form="step",
        )  # fmt: skip
        losses.append(cf.lockstep(step.lower(batch()))(batch()).loss)
    torch.testing.assert_close(losses[1], losses[0])
    torch.testing.assert_close(losses[2], losses[0])
