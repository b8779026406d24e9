"""A step played on a cluster: when each node runs, what is exposed, and the bound that no order beats.

`simulate` is for those who write passes (docs/writing-a-pass.md). It is public; the modules are not.
"""

from commfuse_fx.simulate.simulation import simulate

__all__ = ["simulate"]
