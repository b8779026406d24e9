"""Small models, their batches and their reference training, shared by the tests on real ranks."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import commfuse_fx as cf
from tests import captures

Model = TypeVar("Model", bound=nn.Module)

OFF: dict[str, Any] = {"openstate": False}


def _shared(name: str, model: Model) -> Model:
    """Tests look at what becomes of a captured graph: it is captured once in each process."""
    captures.share(model, name, any_mesh=True)
    return model


def mlp(width: int = 32, extra: bool = False, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    middle = [nn.Linear(width, width), *([nn.ReLU()] if extra else []), nn.ReLU()]
    return _shared("mlp", nn.Sequential(nn.Linear(16, width), nn.ReLU(), *middle, nn.Linear(width, 4)))


def wide_mlp() -> nn.Sequential:
    """Its middle weight alone fills 1 MiB."""
    return mlp(512)


def convnet() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [
        nn.Conv2d(1, 4, 3, padding=1, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 4),
    ]
    return _shared("convnet", nn.Sequential(*layers))


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=64, n_positions=16, n_embd=32, n_layer=1, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )
    return _shared("gpt2", GPT2LMHeadModel(config))


MODELS: dict[str, Callable[[], nn.Module]] = {"mlp": wide_mlp, "convnet": convnet, "gpt2": gpt2}


def batch(kind: str, step: int, rank: int | None = None, rows: int = 4) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of one call on one rank: (args, kwargs)."""
    rank = dist.get_rank() if rank is None else rank
    generator = torch.Generator().manual_seed(1000 * step + rank)
    if kind == "gpt2":
        ids = torch.randint(0, 64, (rows, 12), generator=generator)
        return (), {"input_ids": ids, "labels": ids}
    shape = (rows, 16) if kind == "mlp" else (rows, 1, 8, 8)
    x = torch.randn(shape, generator=generator)
    return (x, torch.randint(0, 4, (rows,), generator=generator)), {}


def xy(step: int, rank: int | None = None, rows: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    (x, y), _ = batch("mlp", step, rank, rows)
    return x, y


def loss_fn_of(kind: str) -> Any:
    return None if kind == "gpt2" else F.cross_entropy


def eager_loss(model: nn.Module, kind: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    if kind == "gpt2":
        loss: torch.Tensor = model(**kwargs).loss
        return loss
    return F.cross_entropy(model(args[0]), args[1])


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def optimizer_for(kind: str) -> Callable[[nn.Module], torch.optim.Optimizer]:
    """AdamW magnifies the rounding in gradients that are zero but for it: biases in front of a normalisation."""
    return adamw if kind == "mlp" else momentum


def plain_steps(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, kind: str = "mlp", rows: int = 4
) -> list[dict[str, torch.Tensor]]:
    """DistributedDataParallel steps on `model` itself. Returns the gradients of each step."""
    wrapped = DistributedDataParallel(model)
    seen = []
    for step in steps:
        optimizer.zero_grad()
        eager_loss(wrapped, kind, *batch(kind, step, rows=rows)).backward()  # type: ignore[no-untyped-call]
        seen.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
        optimizer.step()
    return seen


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Any:
    """A deep copy of everything a failed step must leave alone."""
    return copy.deepcopy((model.state_dict(), None if optimizer is None else optimizer.state_dict()))


def assert_same(left: Any, right: Any, where: str = "") -> None:
    """Nested containers with the same keys and bitwise equal tensors."""
    assert type(left) is type(right), f"{where}: {type(left)} and {type(right)}"
    if isinstance(left, torch.Tensor):
        assert torch.equal(left, right), f"{where} differs by {(left - right).abs().max()}"
    elif isinstance(left, dict):
        assert list(left) == list(right), f"{where}: keys {list(left)} and {list(right)}"
        for key in left:
            assert_same(left[key], right[key], f"{where}.{key}")
    elif isinstance(left, (list, tuple)):
        assert len(left) == len(right), where
        for number, pair in enumerate(zip(left, right, strict=True)):
            assert_same(*pair, f"{where}.{number}")
    else:
        assert left == right, f"{where}: {left} and {right}"


def assert_parameters_close(left: nn.Module, right: nn.Module) -> None:
    torch.testing.assert_close(dict(left.named_parameters()), dict(right.named_parameters()), rtol=1e-5, atol=1e-6)


def digest(model: nn.Module) -> str:
    """The same exactly when all parameters are bitwise the same."""
    found = hashlib.sha256()
    for param in model.parameters():
        found.update(param.detach().contiguous().numpy().tobytes())
    return found.hexdigest()


def compiled(model: nn.Module, optimizer: torch.optim.Optimizer | None = None, **options: Any) -> cf.CompiledStep:
    """With cross_entropy as its loss."""
    return cf.compile(model, loss_fn=F.cross_entropy, optimizer=optimizer, **options)
