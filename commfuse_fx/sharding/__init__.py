"""Layouts of tensors on a mesh, what each op can do with them, and how a graph is divided among ranks.

What rules for `register_rule` are written with is at hand here.
"""

from commfuse_fx.ir.placement import P, R, S
from commfuse_fx.sharding.rules.call import INDEX, AllReduce, OpCall, Ref, Result, Step, Strategy

__all__ = ["INDEX", "AllReduce", "OpCall", "P", "R", "Ref", "Result", "S", "Step", "Strategy"]
