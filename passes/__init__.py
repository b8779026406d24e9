"""Graph-to-graph passes, one file each.

The names below are for those who write passes (docs/writing-a-pass.md). They are public; the modules are not.
"""

from commfuse_fx.passes.declaration import Pass, PassContext, PricedPass, Situation, Variant

__all__ = ["Pass", "PassContext", "PricedPass", "Situation", "Variant"]
