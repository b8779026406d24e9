"""A step twice, of which one runs from a CUDA graph and the other without."""

from __future__ import annotations

import copy
from typing import Any

import torch

import commfuse_fx as cf
from tests.gpu.device_models import DeviceModel
from tests.gpu.step_checks import CLOSE, OPTIMIZERS, MakeOptimizer, assert_near

CUDA = torch.device("cuda", 0)
ADAMW = OPTIMIZERS["AdamW fused"]
CAPTURED = "captured a step"


class Pair:
    """The same step twice: with a graph and without."""

    def __init__(
        self,
        case: DeviceModel,
        optimizer: MakeOptimizer = ADAMW,
        dtype: torch.dtype = torch.float32,
        **options: Any,
    ) -> None:
        self.case = case
        # Inductor adds up the gradients of an embedding in whatever order its threads come.
        self.is_exact = options.get("backend") != "inductor"
        self.dtype = dtype
        self.model = case.on(CUDA, self.dtype)
        self.twin = copy.deepcopy(self.model)
        self.optimizers = (
            [optimizer(net.parameters()) for net in (self.model, self.twin)] if optimizer else [None, None]
        )
        options = {"cuda_graph": True, "form": "step", **options}
        self.step = cf.compile(self.model, optimizer=self.optimizers[0], **options)
        self.plain = cf.compile(self.twin, optimizer=self.optimizers[1], **(options | {"cuda_graph": False}))

    @property
    def graphs(self) -> Any:
        return self.step.session.graphs

    def run(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """One step of both with the same random numbers: the same bits, where that can be."""
        state = torch.cuda.get_rng_state(CUDA)
        want = self.plain(**batch)
        after = torch.cuda.get_rng_state(CUDA)
        torch.cuda.set_rng_state(state, CUDA)
        got: torch.Tensor = self.step(**batch)
        assert torch.equal(torch.cuda.get_rng_state(CUDA), after)
        mine, theirs = self.model.state_dict(), self.twin.state_dict()
        if self.is_exact:
            assert torch.equal(got, want)
            assert [name for name, value in mine.items() if not torch.equal(value, theirs[name])] == []
        else:
            assert_near([got, *mine.values()], [want, *theirs.values()], CLOSE[self.dtype])
        return got

    def run_all(self, count: int = 5, seed: int = 0) -> list[torch.Tensor]:
        return [self.run(batch) for batch in self.case.batches(CUDA, self.dtype, count, seed)]
