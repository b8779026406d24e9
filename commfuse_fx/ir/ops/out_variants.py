"""Ops that can compute straight into memory that they are given."""

from __future__ import annotations

from typing import Any

from commfuse_fx.ir.core.builder import aten

# Ops that compute straight into memory they are given, and the variant that does so.
WRITES_INTO: dict[Any, Any] = {
    aten.mm.default: aten.mm.out,
    aten.addmm.default: aten.addmm.out,
    aten.bmm.default: aten.bmm.out,
    aten.sum.dim_IntList: aten.sum.IntList_out,
    aten.add.Tensor: aten.add.out,
    aten.mul.Tensor: aten.mul.out,
}
