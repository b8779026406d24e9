"""A program of two ranks in which nothing can be imported that commfuse-fx does not depend on, as after `pip install`
of it alone. The argument is a folder for what it writes."""

from __future__ import annotations

import os
import re
import sys
from importlib import import_module, metadata
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any


def required(names: list[str]) -> set[str]:
    """These distributions and what they depend on."""
    found: set[str] = set()
    while names:
        name = names.pop().lower().replace("_", "-")
        if name not in found:
            found.add(name)
            try:
                lines = metadata.requires(name) or []
            except metadata.PackageNotFoundError:  # for another platform
                continue
            names += [re.match(r"[\w.-]*\w", line)[0] for line in lines if "extra ==" not in line]  # type: ignore[index]
    return found


class Required(PathFinder):
    """Finds nothing of distributions that are not required, and all others."""

    def __init__(self, needed: set[str]) -> None:
        by_module = metadata.packages_distributions()
        self.hidden = {
            module
            for module, owners in by_module.items()
            if not any(owner.lower().replace("_", "-") in needed for owner in owners)
        }

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:  # type: ignore[override]
        return None if fullname in self.hidden else PathFinder.find_spec(fullname, path, target)


def train(folder: Path) -> None:
    import torch
    from torch import nn
    from torch.nn import functional as F

    import commfuse_fx as cf

    def net() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Linear(32, 4))

    class Weighted(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * torch.tensor([1.0, 2.0, 3.0, 4.0])

    rows = {"parallel_optimizer_threshold": 0, "pad": True, "level": 2}
    cf.init()
    x, y = torch.randn(8, 16), torch.randn(8, 4)
    module = cf.compile(net())
    sharded = cf.ShardedOptimizer(module, torch.optim.AdamW, lr=0.1)
    F.mse_loss(module(x), y).backward()
    sharded.step()
    assert len(sharded.state_dict()["state"]) == 6

    model = Weighted(*net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step = cf.compile(
        model, loss_fn=F.mse_loss, optimizer=optimizer, enable_parallel_optimizer=True, parallel_optimizer_config=rows
    )
    step(x, y)
    step.save(folder / "saved", {"generator": torch.Generator()})
    step.load(folder / "saved")
    step.load_state_dict(step.state_dict())
    step.profile(x, y, rounds=1)
    if cf.get_rank():
        x = x[:, :4]
    try:
        step(x, y)
    except (cf.CommFuseError, RuntimeError) as error:
        print(f"rank {cf.get_rank()}: {type(error).__name__}")
    torch.distributed.destroy_process_group()


def use_commands(folder: Path) -> None:
    import torch

    import commfuse_fx as cf
    from commfuse_fx.cli import main

    model = torch.nn.Linear(4, 2)
    virtual = cf.compile(model, loss_fn=torch.nn.functional.mse_loss, device_num=4)
    virtual.lower(torch.randn(3, 4), torch.randn(3, 2)).dump(folder / "dump")
    (folder / "target.py").write_text(
        "import torch\n"
        "def make():\n"
        "    net = torch.nn.Linear(4, 2)\n"
        "    loss, sgd = torch.nn.functional.mse_loss, torch.optim.SGD(net.parameters(), lr=0.1)\n"
        "    return net, loss, sgd, (torch.randn(3, 4), torch.randn(3, 2))\n"
    )
    made, dump = f"{folder / 'target.py'}:make", str(folder / "dump")
    for command in (
        ["--version"], ["lower", made, "--devices", "4"], ["explain", made, "--devices", "4"],
        ["simulate", dump, "--cluster", "gloo-1gbit"], ["diff", dump, dump],
    ):  # fmt: skip
        assert main(command) == 0, command


if __name__ == "__main__":
    finder = Required(required(["commfuse-fx"]))
    assert {"numpy", "rich", "pytest"} <= finder.hidden and "torch" not in finder.hidden
    sys.meta_path[sys.meta_path.index(PathFinder)] = finder
    import_module("commfuse_fx.api")  # once for both
    other = os.fork()
    os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(int(not other))
    train(Path(sys.argv[1]))
    if other:
        use_commands(Path(sys.argv[1]))
        assert os.waitpid(other, 0)[1] == 0
    assert not {"numpy", "rich"} & set(sys.modules)
