"""What every rank has imported when it starts, and what Dynamo makes when it compiles for the first time."""

from __future__ import annotations

from contextlib import suppress

import torch

import commfuse_fx.api
import commfuse_fx.virtual.lockstep  # noqa: F401

with suppress(ImportError):
    import transformers.models.bert.modeling_bert
    import transformers.models.gpt2.modeling_gpt2
    import transformers.models.llama.modeling_llama  # noqa: F401

torch.set_num_threads(1)
# No backward: forks of a process that has run one may run none where torch is built for CUDA.
torch.compile(torch.nn.Linear(2, 2), backend="eager")(torch.ones(1, 2))
torch._dynamo.reset()
