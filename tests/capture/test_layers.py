"""Layers of torch.nn: three compiled steps leave what three eager steps leave."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.capture.architectures import Case, Cases, Fn, fn, ints, mean_square, r, seq

pytestmark = pytest.mark.usefixtures("double_precision")
case = Cases()


# Recurrent (over two steps: each is a dozen ops) and attention


@case
def lstm() -> Case:
    return fn(
        lambda m, x: m.inner(m.lin(x))[0], r(3, 2, 8), inner=nn.LSTM(8, 8, 2, batch_first=True, bidirectional=True)
    )


@case
def lstm_dropout_projection() -> Case:
    return fn(lambda m, x: m.inner(m.lin(x)), r(2, 3, 8), inner=nn.LSTM(8, 8, 2, dropout=0.3, proj_size=4))


@case
def lstm_given_states() -> Case:
    """Only the last states count, in the order of the batch: the gradient of the output is none at all."""
    states = (r(2, 3, 6), r(2, 3, 6))
    return fn(
        lambda m, x, h, c: m.inner(m.lin(x), (h * m.lin.bias[:6], c))[1],
        *(r(2, 3, 8), *states),
        inner=nn.LSTM(8, 6, bidirectional=True, bias=False),
    )


@case
def lstm_without_gradients() -> Case:
    def run(m: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            first = m.inner(x)[0]
        return m.lin(first) + m.inner(x)[0]

    return fn(run, r(2, 3, 8), inner=nn.LSTM(8, 8))


@case
def rnn_relu() -> Case:
    return fn(lambda m, x: m.inner(m.lin(x))[0], r(3, 2, 8), inner=nn.RNN(8, 6, nonlinearity="relu", batch_first=True))


@case
def gru() -> Case:
    return fn(lambda m, x: m.inner(m.lin(x))[1], r(2, 3, 8), inner=nn.GRU(8, 6, 2, dropout=0.2))


@case
def rnn_cells() -> Case:
    def run(m: Any, x: torch.Tensor) -> torch.Tensor:
        h, c = torch.zeros(3, 8), torch.zeros(3, 8)
        for t in range(2):
            h, c = m.inner(m.lin(x[:, t]), (h, c))
        return m.gru(h, c)

    return fn(run, r(3, 2, 8), inner=nn.LSTMCell(8, 8), gru=nn.GRUCell(8, 8))


def _encoder(norm_first: bool) -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, norm_first=norm_first, batch_first=True)
    return nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)


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


@pytest.mark.parametrize("name", list(case))
def test_architecture(name: str) -> None:
    case.check(name)
