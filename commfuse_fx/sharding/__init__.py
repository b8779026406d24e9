"""Sharding: marks of users, sharding rules of ops, and the division of a graph among ranks.

The names below are those that rules for `cf.register_rule` need.
"""

from commfuse_fx.ir.core.placement import P, R, S
from commfuse_fx.sharding.rules.writing.call import INDEX, AllReduce, OpCall, Ref, Result, Step, Strategy

__all__ = ["INDEX", "AllReduce", "OpCall", "P", "R", "Ref", "Result", "S", "Step", "Strategy"]
