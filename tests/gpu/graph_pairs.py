"""A step twice, of which one runs from a CUDA graph and the other without."""

from __future__ import annotations

import copy
from typing import Any

import torch

import commfuse_fx as cf
from tests.gpu.device_models import DeviceModel
from tests.gpu.step_checks import OPTIMIZERS, MakeOptimizer

CUDA = torch.device("cuda", 0)
ADAMW = OPTIMIZERS["AdamW fused"]
CAPTURED = "captured a step"


class Pair:
    """The same step twice: with a graph and without."""

    def __init__(self, case: DeviceModel, optimizer: MakeOptimizer = ADAMW, **options: Any) -> None:
        self.case = case
        self.model = case.on(CUDA, torch.float32)
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
        """One step of both with the same random numbers: the same bits."""
        state = torch.cuda.get_rng_state(CUDA)
        want = self.plain(**batch)
        after = torch.cuda.get_rng_state(CUDA)
        torch.cuda.set_rng_state(state, CUDA)
        got: torch.Tensor = self.step(**batch)
        assert torch.equal(torch.cuda.get_rng_state(CUDA), after)
        assert torch.equal(got, want)
        for name, value in self.model.state_dict().items():
            assert torch.equal(value, self.twin.state_dict()[name]), name
        return got

    def run_all(self, count: int = 5, seed: int = 0) -> list[torch.Tensor]:
        return [self.run(batch) for batch in self.case.batches(CUDA, torch.float32, count, seed)]
