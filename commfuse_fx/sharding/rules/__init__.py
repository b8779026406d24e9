"""Sharding rules: the placements with which each op can work, one file per family of ops.

Importing this package registers all rules in `rule_registry`. A new file of rules has to be added to the list below.
"""

from __future__ import annotations

from commfuse_fx.sharding.rules.ops import (
    attention,
    convolution,
    embedding,
    factories,
    indexing,
    joining,
    losses,
    matmul,
    norms,
    parts,
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
    "parts",
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
