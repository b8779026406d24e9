"""From a captured graph to the final one: which passes, which variants, and which result is taken.

The names below are for those who write passes (docs/writing-a-pass.md). They are public; the modules are not.
"""

from commfuse_fx.passes.declaration import Pass
from commfuse_fx.planning.pipeline.pipeline import PassPipeline

__all__ = ["Pass", "PassPipeline"]
