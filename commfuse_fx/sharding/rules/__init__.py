"""Which layouts each op can work with. One file per family of ops; `rule_registry` holds them all.

Importing this package registers the rules of all families. A new file of rules has to be added to the list below.
"""

from __future__ import annotations

from commfuse_fx.sharding.rules import (
    attention,
    convolution,
    embedding,
    factories,
    indexing,
    joining,
    losses,
    matmul,
    norms,
    pointwise,
    pooling,
    random,
    recurrence,
    redistributed,
    reductions,
    slicing,
    softmax,
    transforms,
    views,
)

__all__ = [
    "attention",
    "convolution",
    "embedding",
    "factories",
    "indexing",
    "joining",
    "losses",
    "matmul",
    "norms",
    "pointwise",
    "pooling",
    "random",
    "recurrence",
    "redistributed",
    "reductions",
    "slicing",
    "softmax",
    "transforms",
    "views",
]
