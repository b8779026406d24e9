"""What one node, one collective and the memory of a step cost.

The names below are for those who write passes (docs/writing-a-pass.md). They are public; the modules are not.
"""

from commfuse_fx.cost.model import CostModel, cost_model

__all__ = ["CostModel", "cost_model"]
