"""Whatever architecture a user brings: three compiled steps leave what three eager steps leave."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from tests.capture.equivalence import assert_trains_as_eager

Case = tuple[Callable[[], nn.Module], tuple[Any, ...], Callable[..., torch.Tensor] | None]
CASES: dict[str, Callable[[], Case]] = {}


@pytest.fixture(autouse=True)
def _double_precision() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def case(make: Callable[[], Case]) -> Callable[[], Case]:
    CASES[make.__name__] = make
    return make


def mean_square(output: Any, target: Any) -> torch.Tensor:
    """A loss for any nest of outputs."""
    if isinstance(output, torch.Tensor):
        value = torch.view_as_real(output) if output.is_complex() else output
        return value.square().mean() + (target.sum() * 0 if isinstance(target, torch.Tensor) else 0)
    items = output.values() if isinstance(output, dict) else output
    return sum((mean_square(item, None) for item in items), torch.zeros((), dtype=torch.get_default_dtype()))


def r(*shape: int) -> torch.Tensor:
    return torch.randn(*shape)


def ints(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, high, shape)


class Fn(nn.Module):
    """A linear layer and a function of (module, x): most cases are one line of user code."""

    def __init__(self, run: Callable[..., Any], inner: nn.Module | None = None, width: int = 8, **parts: Any) -> None:
        super().__init__()
        self.lin = nn.Linear(width, width)
        self.run = run
        if inner is not None:
            self.inner = inner
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(self, *args, **kwargs)


def fn(run: Callable[..., Any], *inputs: Any, loss: Any = mean_square, **parts: Any) -> Case:
    return (lambda: Fn(run, **parts)), (*inputs, r(2)), loss


def seq(*modules: nn.Module) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(*modules)


# Recurrent and attention


@case
def lstm() -> Case:
    return fn(
        lambda m, x: m.inner(m.lin(x))[0], r(3, 5, 8), inner=nn.LSTM(8, 8, 2, batch_first=True, bidirectional=True)
    )


@case
def lstm_dropout_projection() -> Case:
    return fn(lambda m, x: m.inner(m.lin(x)), r(5, 3, 8), inner=nn.LSTM(8, 8, 2, dropout=0.3, proj_size=4))


@case
def gru() -> Case:
    return fn(lambda m, x: m.inner(m.lin(x))[1], r(5, 3, 8), inner=nn.GRU(8, 6, 2, dropout=0.2))


@case
def rnn_cells() -> Case:
    def run(m: Any, x: torch.Tensor) -> torch.Tensor:
        h, c = torch.zeros(3, 8), torch.zeros(3, 8)
        for t in range(4):
            h, c = m.inner(m.lin(x[:, t]), (h, c))
        return m.gru(h, c)

    return fn(run, r(3, 4, 8), inner=nn.LSTMCell(8, 8), gru=nn.GRUCell(8, 8))


def _encoder(norm_first: bool) -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, norm_first=norm_first, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


@case
def transformer_encoder_norm_first() -> Case:
    return fn(lambda m, x: m.inner(x), r(3, 5, 8), inner=_encoder(True))


@case
def transformer_encoder_padding_mask() -> Case:
    mask = torch.zeros(3, 5, dtype=torch.bool)
    mask[:, 4:] = True
    return fn(lambda m, x, p: m.inner(x, src_key_padding_mask=p), r(3, 5, 8), mask, inner=_encoder(False))


@case
def transformer() -> Case:
    inner = nn.Transformer(8, 2, 1, 1, 16, dropout=0.1, batch_first=True)
    mask = nn.Transformer.generate_square_subsequent_mask(5)
    return fn(lambda m, x: m.inner(x, m.lin(x), tgt_mask=m.mask), r(3, 5, 8), inner=inner, mask=mask)


@case
def multihead_attention_weights() -> Case:
    inner = nn.MultiheadAttention(8, 2, dropout=0.2, batch_first=True, add_bias_kv=True)
    return fn(lambda m, x: m.inner(x, m.lin(x), x, need_weights=True), r(3, 5, 8), inner=inner)


@case
def multihead_attention_other_widths() -> Case:
    inner = nn.MultiheadAttention(8, 2, kdim=8, vdim=4, batch_first=True)
    return fn(lambda m, x: m.inner(x, m.lin(x), x[..., :4], need_weights=False)[0], r(3, 5, 8), inner=inner)


def _attend(**options: Any) -> Callable[..., torch.Tensor]:
    def run(m: Any, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        q = m.lin(x).view(3, 5, 2, 4).transpose(1, 2)
        return F.scaled_dot_product_attention(q, q * 2, q.square(), attn_mask=mask, **options)

    return run


@case
def sdpa_causal_dropout() -> Case:
    return fn(_attend(is_causal=True, dropout_p=0.2), r(3, 5, 8))


@case
def sdpa_causal() -> Case:
    return fn(_attend(is_causal=True), r(3, 5, 8))


@case
def sdpa_bool_mask() -> Case:
    return fn(_attend(), r(3, 5, 8), torch.ones(5, 5, dtype=torch.bool).tril())


@case
def sdpa_float_mask() -> Case:
    return fn(_attend(scale=0.3), r(3, 5, 8), r(3, 1, 5, 5))


@case
def grouped_query_attention() -> Case:
    def run(m: Any, x: torch.Tensor) -> torch.Tensor:
        q = m.lin(x).view(3, 5, 4, 2).transpose(1, 2)
        return F.scaled_dot_product_attention(q, q[:, :2], q[:, :2], is_causal=True, enable_gqa=True)

    return fn(run, r(3, 5, 8))


# Convolution and normalisation


@case
def conv1d_groups_dilated() -> Case:
    return (
        seq(nn.Conv1d(4, 8, 3, groups=2, dilation=2, padding="same"), nn.GroupNorm(2, 8)),
        (r(2, 4, 9), r(2)),
        mean_square,
    )


@case
def conv2d_resnet_stem() -> Case:
    model = seq(
        nn.Conv2d(3, 8, 3, stride=2),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32, 3),
    )
    return model, (r(4, 3, 10, 10), ints(3, 4)), nn.CrossEntropyLoss(label_smoothing=0.1)


@case
def conv3d_transposed() -> Case:
    model = seq(
        nn.Conv3d(2, 4, 2), nn.InstanceNorm3d(4, affine=True), nn.ConvTranspose3d(4, 2, 2, stride=2, output_padding=1)
    )
    return model, (r(2, 2, 3, 3, 3), r(2)), mean_square


@case
def conv_padding_modes() -> Case:
    model = seq(
        nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"),
        nn.Conv2d(3, 2, 3, padding=1, padding_mode="reflect"),
        nn.ConvTranspose2d(2, 2, 3),
        nn.ConvTranspose1d(2, 1, 2) if False else nn.PReLU(),
    )
    return model, (r(2, 2, 6, 6), r(2)), mean_square


@case
def norms() -> Case:
    model = seq(
        nn.LayerNorm(8),
        nn.RMSNorm(8),
        nn.Linear(8, 8, bias=False),
        nn.LayerNorm(8, elementwise_affine=False),
        nn.GELU(),
    )
    return model, (r(4, 3, 8), r(2)), mean_square


@case
def batch_norm_momentum_none() -> Case:
    return seq(nn.Linear(8, 8), nn.BatchNorm1d(8, momentum=None)), (r(6, 8), r(2)), mean_square


@case
def batch_norm_without_statistics() -> Case:
    return seq(nn.Linear(8, 8), nn.BatchNorm1d(8, track_running_stats=False)), (r(6, 8), r(2)), mean_square


@case
def batch_norm_called_twice() -> Case:
    return fn(lambda m, x: m.inner(m.lin(m.inner(x))), r(6, 8), inner=nn.BatchNorm1d(8))


@case
def batch_norm_frozen() -> Case:
    class Frozen(Fn):
        def train(self, mode: bool = True) -> Frozen:
            super().train(mode)
            self.inner.eval()
            return self

    def make() -> nn.Module:
        model = Frozen(lambda m, x: m.inner(m.lin(x)), inner=nn.BatchNorm1d(8))
        return model.train()

    return make, (r(6, 8), r(2)), mean_square


@case
def instance_norm_tracking() -> Case:
    return (
        seq(nn.Conv2d(2, 4, 3), nn.InstanceNorm2d(4, track_running_stats=True, affine=True)),
        (r(2, 2, 6, 6), r(2)),
        mean_square,
    )


@case
def channels_last() -> Case:
    def make() -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3)).to(
            memory_format=torch.channels_last
        )

    return make, (r(2, 3, 8, 8).to(memory_format=torch.channels_last), r(2)), mean_square


@case
def pools() -> Case:
    model = seq(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.AvgPool2d(2, ceil_mode=True),
        nn.AdaptiveAvgPool2d(3),
        nn.AdaptiveMaxPool2d(2),
        nn.LPPool2d(2, 2),
    )
    return model, (r(2, 2, 9, 9), r(2)), mean_square


@case
def dropouts() -> Case:
    model = seq(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.Dropout2d(0.3),
        nn.FeatureAlphaDropout(0.2),
        nn.AlphaDropout(0.2),
        nn.Dropout(0.1),
        nn.RReLU(),
    )
    return model, (r(2, 2, 5, 5), r(2)), mean_square


# Embeddings


@case
def embedding_padding_scale_grad() -> Case:
    inner = nn.Embedding(10, 8, padding_idx=0, scale_grad_by_freq=True)
    return fn(lambda m, i: m.lin(m.inner(i)), ints(10, 3, 5), inner=inner)


@case
def embedding_max_norm() -> Case:
    return fn(lambda m, i: m.lin(m.inner(i)), ints(10, 3, 5), inner=nn.Embedding(10, 8, max_norm=1.0))


def _bag(mode: str) -> Case:
    inner = nn.EmbeddingBag(10, 8, mode=mode, padding_idx=0)
    return fn(lambda m, i, o: m.lin(m.inner(i, o)), ints(10, 12), torch.tensor([0, 4, 7]), inner=inner)


@case
def embedding_bag_mean() -> Case:
    return _bag("mean")


@case
def embedding_bag_max() -> Case:
    return _bag("max")


@case
def embedding_bag_weighted() -> Case:
    inner = nn.EmbeddingBag(10, 8, mode="sum")
    return fn(lambda m, i, w: m.lin(m.inner(i, per_sample_weights=w)), ints(10, 3, 4), torch.rand(3, 4), inner=inner)


# In-place and indexing


@case
def in_place() -> Case:
    def run(m: Any, x: torch.Tensor) -> torch.Tensor:
        y = m.lin(x).relu_().add(1.0)
        y[:, 0] = 0.5
        y[:, 1:3] *= 2
        y.masked_fill_(y > 3, 3.0)
        y.transpose(0, 1)[2].add_(x[:, 0])
        z = torch.zeros_like(y)
        z[:] = y
        z += m.lin(y)
        return z.clamp_(min=-1).sub_(0.1).tanh_()

    return fn(run, r(4, 8))


@case
def in_place_on_input() -> Case:
    return fn(lambda m, x: m.lin(x.mul_(2.0)), r(4, 8))


@case
def scatter_gather() -> Case:
    index = torch.tensor([[0, 2], [1, 1], [3, 0], [2, 2]])

    def run(m: Any, x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        y = m.lin(x)
        g = y.gather(1, i)
        s = torch.zeros(4, 8).scatter(1, i, g).scatter_add(1, i, g * 2)
        p = s.index_put((i[:, 0], i[:, 1]), g[:, 0], accumulate=True)
        p = p.index_add(0, i[:, 0] % 4, y).index_copy(1, torch.tensor([3]), y[:, :1])
        return p[i[:, 0]] + p.index_select(0, i[:, 1]) + torch.take_along_dim(y, i.repeat(1, 4), 1)

    return fn(run, r(4, 8), index)


@case
def topk_sort_cumsum() -> Case:
    def run(m: Any, x: torch.Tensor) -> Any:
        y = m.lin(x)
        values, where = y.topk(3, dim=1)
        return [
            values,
            y.sort(1, descending=True).values,
            y.cumsum(1),
            y.cumprod(1),
            y.gather(1, where),
            y.kthvalue(2, 1).values,
            y.max(1).values,
            y.amin(0),
            y.median(1).values,
            y.logcumsumexp(0),
        ]

    return fn(run, r(4, 8))


@case
def list_of_views() -> Case:
    def run(m: Any, x: torch.Tensor) -> Any:
        a, b = m.lin(x).chunk(2, dim=1)
        parts = torch.stack([a, b]).unbind(0)
        c, d, e = m.lin(x).split([2, 3, 3], dim=1)
        a = a.clone()
        a[0].zero_()
        return [a * b, parts[0], torch.cat([c, d * 2, e]) if False else d * e, x.unfold(1, 4, 2) @ m.lin.weight[:4, :4]]

    return fn(run, r(4, 8))


# Images and signals


@case
def pixel_shuffle_interpolate() -> Case:
    model = seq(
        nn.Conv2d(2, 8, 3, padding=1),
        nn.PixelShuffle(2),
        nn.Upsample(scale_factor=2, mode="bilinear"),
        nn.PixelUnshuffle(2),
        nn.Upsample(size=5, mode="nearest"),
        nn.Upsample(size=(7, 6), mode="bicubic"),
        nn.ReflectionPad2d(1),
        nn.ZeroPad2d(1),
        nn.ReplicationPad2d(1),
    )
    return model, (r(2, 2, 4, 4), r(2)), mean_square


@case
def grid_sample() -> Case:
    def run(m: Any, x: torch.Tensor) -> torch.Tensor:
        theta = m.lin(x.mean((1, 2, 3), keepdim=False).unsqueeze(1).repeat(1, 8))[:, :6].view(-1, 2, 3)
        return F.grid_sample(x, F.affine_grid(theta, list(x.shape), align_corners=False), align_corners=False)

    return fn(run, r(2, 3, 6, 6))


@case
def fft() -> Case:
    def run(m: Any, x: torch.Tensor) -> torch.Tensor:
        spectrum = torch.fft.rfft(m.lin(x))
        return torch.fft.irfft(spectrum * torch.view_as_complex(m.w), n=8) + spectrum.abs().sum()

    return fn(run, r(4, 8), w=nn.Parameter(r(5, 2)))


@case
def complex_parameter() -> Case:
    def run(m: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.fft.ifft(torch.fft.fft(m.lin(x)) * m.w).real

    return fn(run, r(4, 8), w=nn.Parameter(torch.randn(8, dtype=torch.complex128)))


@case
def einsum() -> Case:
    return fn(lambda m, x: torch.einsum("bij,kj,bkl->bil", m.lin(x), m.lin.weight, x.repeat(1, 4, 1)), r(2, 2, 8))


@case
def linear_algebra() -> Case:
    def run(m: Any, x: torch.Tensor) -> Any:
        a = m.lin(x)
        spd = torch.tanh(a @ a.mT) * 0.1 + 3 * torch.eye(8)
        return [
            torch.linalg.inv(spd),
            torch.linalg.cholesky(spd),
            torch.linalg.solve(spd, x),
            torch.logdet(spd),
            torch.linalg.svdvals(a),
            torch.linalg.norm(a),
            torch.linalg.qr(spd).R.abs(),
            torch.cdist(a, x),
        ]

    return fn(run, r(8, 8))


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


# Losses


def _losses() -> dict[str, tuple[Any, Any]]:
    probabilities = torch.softmax(r(4, 8), 1)
    classes = ints(8, 4)
    return {
        "cross_entropy_weight": (nn.CrossEntropyLoss(weight=torch.rand(8).double(), ignore_index=2), classes),
        "cross_entropy_soft": (nn.CrossEntropyLoss(), probabilities),
        "nll": (lambda o, t: F.nll_loss(F.log_softmax(o, 1), t), classes),
        "bce_logits": (nn.BCEWithLogitsLoss(pos_weight=torch.rand(8)), probabilities),
        "bce": (lambda o, t: F.binary_cross_entropy(o.sigmoid(), t), probabilities),
        "kl": (lambda o, t: F.kl_div(F.log_softmax(o, 1), t, reduction="batchmean"), probabilities),
        "huber": (nn.HuberLoss(), r(4, 8)),
        "smooth_l1": (nn.SmoothL1Loss(), r(4, 8)),
        "poisson": (nn.PoissonNLLLoss(), torch.rand(4, 8)),
        "cosine": (lambda o, t: F.cosine_embedding_loss(o, t, torch.ones(4)), r(4, 8)),
        "triplet": (lambda o, t: F.triplet_margin_loss(o, t, o.roll(1, 0)), r(4, 8)),
        "margin": (nn.MultiMarginLoss(), classes),
        "multilabel": (nn.MultiLabelSoftMarginLoss(), ints(2, 4, 8)),
    }


LOSSES = list(_losses())


@pytest.mark.parametrize("name", LOSSES)
def test_loss(name: str) -> None:
    torch.manual_seed(3)
    loss, target = _losses()[name]
    assert_trains_as_eager(nn.Linear(8, 8), [((r(4, 8), target), {})], loss)


@case
def ctc() -> Case:
    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.ctc_loss(output.log_softmax(2), target, (6, 6), (3, 2))

    return (lambda: nn.Linear(8, 5)), (r(6, 2, 8), torch.randint(1, 5, (2, 3))), loss


# What is passed in and comes out


@dataclasses.dataclass
class _Batch:
    x: torch.Tensor
    scale: float
    extras: list[torch.Tensor]


@case
def dataclass_input() -> Case:
    return fn(lambda m, b: m.lin(b.x) * b.scale + b.extras[0], _Batch(r(4, 8), 2.0, [r(8)]))


@case
def nested_input() -> Case:
    batch = {
        "a": {"x": r(4, 8), "none": None},
        "flags": [True, 3],
        "list": [r(8), r(8)],
        "mask": torch.rand(4, 1) > 0.5,
    }

    def run(m: Any, b: Any) -> torch.Tensor:
        assert b["a"]["none"] is None
        return torch.where(b["mask"], m.lin(b["a"]["x"]) * b["flags"][1], sum(b["list"]))

    return fn(run, batch)


@case
def dict_output() -> Case:
    return fn(lambda m, x: {"a": m.lin(x), "b": (x, [m.lin(x)])}, r(4, 8))


@case
def input_requires_grad() -> Case:
    return fn(lambda m, x: m.lin(x), r(4, 8).requires_grad_(True))


@case
def input_expanded() -> Case:
    return fn(lambda m, x: m.lin(x), r(1, 8).expand(4, 8))


@case
def same_tensor_twice() -> Case:
    x = r(4, 8)
    return fn(lambda m, a, b: m.lin(a) * b, x, x)


@case
def zero_dimensional_input() -> Case:
    return fn(lambda m, x, t: m.lin(x) * t, r(4, 8), torch.tensor(0.3))


@pytest.mark.parametrize("name", list(CASES))
def test_architecture(name: str) -> None:
    torch.manual_seed(1)
    make, args, loss = CASES[name]()
    assert_trains_as_eager(make(), [(args, {})], loss, whole_step=len(name) % 2 == 0)
