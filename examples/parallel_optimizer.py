"""Three layers whose parameters are updated in parts, with a fusion id for each layer.

Each rank updates some rows of each parameter and holds the optimizer's state of these rows alone. Ids say which
collectives are merged: those of layer 1 (id 0) never, those of layers 2 and 3 with each other inside of a layer.

Start it with `torchrun --standalone --nproc-per-node 2 examples/parallel_optimizer.py`, or with `python` to see what
two ranks would run.
"""

from __future__ import annotations

import torch
from torch import nn

import commfuse_fx as cf


class DenseLayer(nn.Module):
    """Two linear layers, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.input_mapping = nn.Linear(10, 10)
        self.output_mapping = nn.Linear(10, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map rows of 10 numbers to rows of 10 numbers."""
        out: torch.Tensor = self.output_mapping(self.input_mapping(x))
        return out


def main() -> None:
    cf.init()
    torch.manual_seed(0)
    net = nn.Sequential(DenseLayer(), DenseLayer(), DenseLayer())
    for number, layer in enumerate(net):
        cf.set_comm_fusion(layer, number)
    # The layers are far below the default threshold of 64 KiB.
    cf.set_auto_parallel_context(
        enable_parallel_optimizer=True, parallel_optimizer_config={"parallel_optimizer_threshold": 0}
    )
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    is_alone = not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1
    world = {"device_num": 2} if is_alone else {}
    step = cf.compile(net, loss_fn=nn.functional.mse_loss, optimizer=optimizer, **world)
    batches = torch.Generator().manual_seed(cf.get_rank())
    if not world:
        for _ in range(20):
            x = torch.randn(8, 10, generator=batches)
            loss = step(x, x)
        optimizer.state_dict()  # gathers the states of all ranks, so all of them call it
    if cf.get_rank() == 0:
        for name, param in net.named_parameters():
            print(f"The parameter {name}'s fusion id is {param.comm_fusion}")
        x = torch.randn(8, 10)
        for each in step.lower(x, x).collectives:
            print(f"{each.kind} of {', '.join(each.members)}")
        if not world:
            print(f"loss {loss.item():.4f}")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
