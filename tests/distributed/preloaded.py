"""What every rank has imported when it starts, and what Dynamo makes when it compiles for the first time."""

from __future__ import annotations

from contextlib import suppress
from importlib import import_module

import torch

for name in ("commfuse_fx.api", "commfuse_fx.virtual.lockstep"):
    import_module(name)
for name in ("bert", "gpt2", "llama"):
    with suppress(ImportError):
        import_module(f"transformers.models.{name}.modeling_{name}")

torch.set_num_threads(1)
# No backward: forks of a process that has run one may run none where torch is built for CUDA.
torch.compile(torch.nn.Linear(2, 2), backend="eager")(torch.ones(1, 2))
torch._dynamo.reset()
