"""The intermediate representation: one torch.fx graph of a training step, with typed metadata.

The names below are for those who write passes (docs/writing-a-pass.md). They are public; the modules are not.
"""

from commfuse_fx.ir.core.builder import Builder
from commfuse_fx.ir.core.collectives import is_start, is_wait, wait_of
from commfuse_fx.ir.core.dependence import Dependence
from commfuse_fx.ir.core.meta import CollectiveInfo, NodeInfo, TensorSpec, info
from commfuse_fx.ir.core.program import Program
from commfuse_fx.ir.core.verify import verify
from commfuse_fx.ir.json.read import from_json
from commfuse_fx.ir.json.write import to_json
from commfuse_fx.ir.text.write_text import canonical_text

__all__ = [
    "Builder",
    "CollectiveInfo",
    "Dependence",
    "NodeInfo",
    "Program",
    "TensorSpec",
    "canonical_text",
    "from_json",
    "info",
    "is_start",
    "is_wait",
    "to_json",
    "verify",
    "wait_of",
]
