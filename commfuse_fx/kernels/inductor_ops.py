"""Which ops the regions that Inductor compiles leave out, and why."""

from __future__ import annotations

import torch

from commfuse_fx.kernels.recurrent import lstm_layer, lstm_layer_backward

aten = torch.ops.aten

_QUICKER_ON_CPU = (
    aten._native_batch_norm_legit_functional.default,
    aten.native_batch_norm.default,
    aten.native_batch_norm_backward.default,
)
"""Ops whose own kernels take less time than those that Inductor makes of them: a convnet took 0.93."""

_SCATTERING = (
    aten.embedding_dense_backward.default,
    aten.index_add.default,
    aten.index_copy.default,
    aten.index_put.default,
    aten.scatter.reduce,
    aten.scatter.src,
    aten.scatter.value,
    aten.scatter.value_reduce,
    aten.scatter_add.default,
    aten.scatter_reduce.two,
)
"""Ops that write anywhere in their result. In C++ Inductor may put what reads a row into the loop that still writes to
it (torch 2.13)."""

_SIZED_BY_MACHINE = (lstm_layer, lstm_layer_backward)
"""Ops with results whose size only the machine knows, or that take such."""

_DECOMPOSED_WRONGLY = (
    aten.bernoulli.default,  # draws numbers of the probabilities' type, so in float64 other ones than PyTorch
    aten.hardsigmoid_backward.default,  # multiplies by 1 / 6, PyTorch in float64 by what float32 has for it
    aten.multilabel_margin_loss_forward.default,  # takes all labels, PyTorch those before the first -1
    aten.rrelu_with_noise_functional.default,  # returns no noise in evaluation, PyTorch one of the input's shape
    aten.soft_margin_loss_backward.default,  # subtracts 1 from a sigmoid: small gradients are 0
)
"""Ops of which Inductor computes something else (torch 2.13)."""

_REFUSED = (aten._ctc_loss.default,)
"""Ops that Inductor refuses, and their regions with them."""

BY_STRIDES = (aten.as_strided.default, aten.as_strided_copy.default, aten.as_strided_scatter.default)
"""Ops that go by how a tensor lies in memory. Inside of a region Inductor may have laid it out otherwise."""

LEFT_OUT = frozenset((*_SIZED_BY_MACHINE, *_DECOMPOSED_WRONGLY, *_REFUSED))
"""Ops that are in no region."""

LEFT_OUT_ON_CPU = frozenset((*_QUICKER_ON_CPU, *_SCATTERING))
"""Ops that are in no region where they run on a CPU."""
