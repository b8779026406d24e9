"""Unusual modules, buffers and autograd: three compiled steps leave what three eager steps leave."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from tests.capture.architectures import Case, Cases, Fn, fn, ints, mean_square, r

pytestmark = pytest.mark.usefixtures("double_precision")
case = Cases()


# Parametrizations, sharing, unusual modules


@case
def weight_norm() -> Case:
    return fn(lambda m, x: m.inner(m.lin(x)), r(4, 8), inner=parametrizations.weight_norm(nn.Linear(8, 4)))


@case
def old_weight_norm() -> Case:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        inner = nn.utils.weight_norm(nn.Linear(8, 4))
    with torch.no_grad():
        inner.weight = inner.weight.detach()  # the non-leaf that this hook leaves cannot be deep-copied
    return fn(lambda m, x: m.inner(m.lin(x)), r(4, 8), inner=inner)


@case
def spectral_norm() -> Case:
    return fn(lambda m, x: m.inner(m.lin(x)), r(4, 8), inner=parametrizations.spectral_norm(nn.Linear(8, 4)))


@case
def orthogonal() -> Case:
    return fn(lambda m, x: m.inner(m.lin(x)), r(4, 8), inner=parametrizations.orthogonal(nn.Linear(8, 8)))


@case
def tied_by_attribute() -> Case:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb = nn.Embedding(10, 8)
            self.head = nn.Linear(8, 10, bias=False)
            self.head.weight = self.emb.weight

        def forward(self, i: torch.Tensor) -> torch.Tensor:
            return self.head(self.emb(i)).flatten(0, 1)

    return Tied, (ints(10, 3, 4), ints(10, 12)), nn.CrossEntropyLoss(ignore_index=3)


@case
def shared_module() -> Case:
    def make() -> nn.Module:
        layer = nn.Linear(8, 8)
        return nn.Sequential(layer, nn.Tanh(), layer, nn.Tanh(), nn.Sequential(layer))

    return make, (r(4, 8), r(2)), mean_square


@case
def parameter_containers() -> Case:
    def run(m: Any, x: torch.Tensor) -> torch.Tensor:
        for p in m.ps:
            x = x @ p
        return x * m.pd["scale"] + m.pd["shift"] + m.bare

    parts = {"ps": nn.ParameterList([r(8, 8), r(8, 8)]), "pd": nn.ParameterDict({"scale": r(8), "shift": r(1)})}
    return fn(run, r(4, 8), bare=nn.Parameter(torch.tensor(2.0)), **parts)


@case
def unused_and_frozen() -> Case:
    def make() -> nn.Module:
        model = Fn(lambda m, x: m.inner(x) if m.training else m.lin(x), inner=nn.Linear(8, 8), extra=nn.Linear(8, 8))
        model.inner.weight.requires_grad_(False)
        return model

    return make, (r(4, 8), r(2)), mean_square


@case
def plain_tensor_attribute() -> Case:
    return fn(lambda m, x: m.lin(x) * m.scale + m.table[0], r(4, 8), scale=torch.full((8,), 1.5), table=[r(8)])


@case
def tensors_made_in_forward() -> Case:
    def run(m: Any, x: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(8, dtype=x.dtype) + torch.zeros(8) + torch.tensor([1.0] * 8)
        mask = torch.ones(4, 8).tril() * torch.tensor(3.0)
        return m.lin(x) * positions + mask + torch.eye(4, 8) + torch.linspace(0, 1, 8) + torch.full_like(x, 2)

    return fn(run, r(4, 8))


@case
def random_numbers_in_forward() -> Case:
    def run(m: Any, x: torch.Tensor) -> torch.Tensor:
        y = m.lin(x) + torch.randn_like(x) * torch.rand(8) + torch.randint(0, 3, (4, 1))
        y = y + torch.empty_like(x).normal_() + torch.normal(0.0, 1.0, (4, 8)) + torch.bernoulli(torch.rand(4, 8))
        keep = torch.rand(4) < 0.5
        y = torch.where(keep[:, None], y, x)
        return y[torch.randperm(4)] + torch.distributions.Normal(x, 1.0).rsample() + F.gumbel_softmax(y)

    return fn(run, r(4, 8))


@case
def reparametrised_vae() -> Case:
    def run(m: Any, x: torch.Tensor) -> Any:
        mean, log = m.lin(x).chunk(2, 1)
        z = mean + torch.exp(log / 2) * torch.randn_like(log)
        kl = torch.distributions.kl_divergence(
            torch.distributions.Normal(mean, (log / 2).exp()), torch.distributions.Normal(0.0, 1.0)
        )
        return {"out": m.inner(z), "kl": kl}

    return fn(run, r(4, 8), inner=nn.Linear(4, 8))


# Buffers


class _Buffers(nn.Module):
    def __init__(self, mode: str) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)
        self.mode = mode
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("average", torch.zeros(8))
        self.register_buffer("step", torch.zeros((), dtype=torch.long))
        self.register_buffer("nothing", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.lin(x)
        if self.training:
            if self.mode == "assign":
                self.count = self.count + 1
                self.average = 0.9 * self.average + 0.1 * y.detach().mean(0)
            else:
                self.count += 1
                self.step.add_(1)
                self.average.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
                self.average[0] = 7.0
        return y * (1 + self.average) + self.count


@case
def buffer_assigned() -> Case:
    return (lambda: _Buffers("assign")), (r(4, 8), r(2)), mean_square


@case
def buffer_in_place() -> Case:
    return (lambda: _Buffers("in place")), (r(4, 8), r(2)), mean_square


@case
def teacher_with_moving_average() -> Case:
    class Student(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student, self.teacher = nn.Linear(8, 8), nn.Linear(8, 8)
            self.teacher.requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                if self.training:
                    for s, t in zip(self.student.parameters(), self.teacher.parameters(), strict=True):
                        t.mul_(0.9).add_(s, alpha=0.1)
                target = self.teacher(x)
            return self.student(x) - target

    return Student, (r(4, 8), r(2)), mean_square


@case
def queue_buffer() -> Case:
    def run(m: Any, x: torch.Tensor) -> torch.Tensor:
        y = F.normalize(m.lin(x), dim=1)
        logits = y @ m.inner.weight.detach().T
        if m.training:
            m.inner.running_mean.copy_(torch.cat([y.detach().mean(1), m.inner.running_mean[:-4]]))
        return logits

    inner = nn.BatchNorm1d(8)
    inner.weight = nn.Parameter(r(8, 8))
    return fn(run, r(4, 8), inner=inner)


# Autograd


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.scale = scale
        return x * x * scale

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return grad * 3 * x * ctx.scale, None


class _SetupContext(torch.autograd.Function):
    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x.exp()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * ctx.saved_tensors[0]


@case
def custom_function() -> Case:
    return fn(lambda m, x: _SetupContext.apply(_Square.apply(m.lin(x), 0.5)), r(4, 8))


@case
def checkpointed() -> Case:
    layer = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3), nn.GELU())
    return fn(lambda m, x: checkpoint(m.inner, m.lin(x), use_reentrant=False), r(4, 8), inner=layer)


@case
def checkpointed_reentrant() -> Case:
    layer = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3), nn.GELU())
    return fn(lambda m, x: checkpoint(m.inner, m.lin(x), use_reentrant=True), r(4, 8), inner=layer)


@case
def gradient_penalty() -> Case:
    def loss(output: Any, target: torch.Tensor) -> torch.Tensor:
        x, y = output
        if not y.requires_grad:
            return y.mean()
        (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return (g.norm(2, dim=1) - 1).square().mean() + y.mean()

    def run(m: Any, x: torch.Tensor) -> Any:
        x = x.detach().requires_grad_(True)
        return x, torch.tanh(m.lin(x)).sum(1)

    return fn(run, r(4, 8), loss=loss)


@case
def functional_grad() -> Case:
    def run(m: Any, x: torch.Tensor) -> torch.Tensor:
        f = lambda v: torch.tanh(m.lin(v)).sum()  # noqa: E731
        return torch.func.vmap(torch.func.grad(f))(x) + torch.vmap(lambda v: v * 2)(m.lin(x))

    return fn(run, r(4, 8))


@case
def detach_and_no_grad() -> Case:
    def run(m: Any, x: torch.Tensor) -> torch.Tensor:
        y = m.lin(x)
        with torch.no_grad():
            scale = m.lin(y).abs().mean()
        return (y - y.detach()) + y / scale + (torch.round(y) - y).detach()

    return fn(run, r(4, 8))


@case
def hooks() -> Case:
    def make() -> nn.Module:
        model = Fn(lambda m, x: m.inner(m.lin(x).relu()), inner=nn.Linear(8, 8))
        model.lin.register_forward_hook(lambda module, args, out: out * 2)
        model.lin.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
        model.inner.register_full_backward_hook(lambda module, gi, go: (gi[0] * 3,))
        model.inner.register_full_backward_pre_hook(lambda module, go: (go[0] * 0.5,))
        return model

    return make, (r(4, 8), r(2)), mean_square


class _ParameterHooks(Fn):
    def __init__(self) -> None:
        super().__init__(lambda m, x: m.lin(x))
        self.lin.weight.register_hook(lambda grad: grad * 2)

    def __deepcopy__(self, memo: Any) -> nn.Module:
        other = _ParameterHooks()  # hooks of tensors are lost in a deep copy
        other.load_state_dict(self.state_dict())
        return other


@case
def activation_hook() -> Case:
    def run(m: Any, x: torch.Tensor) -> torch.Tensor:
        y = m.lin(x)
        if y.requires_grad:
            y.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
        return y

    return fn(run, r(4, 8))


@case
def parameter_hook() -> Case:
    return _ParameterHooks, (r(4, 8), r(2)), mean_square


@case
def own_call() -> Case:
    class Called(nn.Linear):
        def __call__(self, *args: Any) -> torch.Tensor:
            return super().__call__(*args) * 2

    return fn(lambda m, x: m.inner(x), r(4, 8), inner=Called(8, 8))


@case
def control_flow_on_shapes() -> Case:
    def run(m: Any, x: torch.Tensor) -> torch.Tensor:
        for _ in range(x.shape[0] // 2):
            x = m.lin(x) if x.numel() > 4 and x.dim() == 2 else x
        return x

    return fn(run, r(4, 8))


@case
def mixed_precision_inside() -> Case:
    def run(m: Any, x: torch.Tensor) -> torch.Tensor:
        y = m.lin(x).float()
        return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * m.scale

    return fn(run, r(4, 8), scale=nn.Parameter(torch.ones(8)))


@case
def jit_script_function() -> Case:
    return fn(lambda m, x: _scripted(m.lin(x)), r(4, 8))


@torch.jit.script
def _scripted(x: torch.Tensor) -> torch.Tensor:
    return x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))


@pytest.mark.parametrize("name", list(case))
def test_architecture(name: str) -> None:
    case.check(name)
