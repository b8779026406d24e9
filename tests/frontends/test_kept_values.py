"""What a compiled module keeps for its backward, beside what the partition of AOTAutograd keeps.

On a GPU; here the pass runs on a CPU. Buffers are not sent: the backward would overwrite them, and copies be kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from unittest import mock

import pytest
import torch
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition

import commfuse_fx as cf
from benchmarks.plain_models import GPT2, Llama, NormedMLP
from commfuse_fx.cost.memory import bytes_of
from commfuse_fx.ir.core.dependence import Roots
from commfuse_fx.ir.core.halves import crossing
from commfuse_fx.ir.core.meta import info
from commfuse_fx.passes.rewrite.recompute import Recompute

Batch = dict[str, torch.Tensor]


def kept_here(model: nn.Module, batch: Batch) -> int:
    with mock.patch.object(Recompute, "when", return_value=Recompute(on_cpu=True)):
        options = {"backend": "inductor", "device_num": 2, "cpu_kernels": False, "broadcast_buffers": False}
        program = cf.compile(model, **options).lower(**batch).program
    roots = Roots(program.graph, program.aliases())
    kept = dict.fromkeys(roots[node] for node in crossing(program))
    return sum(bytes_of(info(root).spec) for root in kept if root.op == "call_function")


def kept_by_aot(model: nn.Module, batch: Batch) -> int:
    """The memory behind the outputs of its forward that are not the model's own, each block once."""
    sizes: dict[object, int] = {}

    def forward(module: fx.GraphModule, given: Sequence[torch.Tensor]) -> Callable[..., object]:
        _, *saved = module.graph.output_node().args[0]
        for node in saved:
            value = node.meta.get("val") if isinstance(node, fx.Node) and node.op != "placeholder" else None
            if isinstance(value, torch.Tensor):
                block = value.untyped_storage()
                sizes[block._cdata] = block.nbytes()
        return module.forward

    torch._dynamo.reset()
    compiler = aot_autograd(
        fw_compiler=forward,
        bw_compiler=lambda module, given: module.forward,
        partition_fn=min_cut_rematerialization_partition,
    )
    torch.compile(model, backend=compiler)(**batch).backward()
    return sum(sizes.values())


def tokens() -> Batch:
    ids = torch.randint(0, 64, (4, 32))
    return {"ids": ids, "labels": ids}


@pytest.mark.parametrize(
    ("build", "batch"),
    [
        (lambda: GPT2(2, 64, 2, 64, 32), tokens),
        (lambda: GPT2(2, 64, 2, 64, 32, 0.1), tokens),
        (lambda: Llama(2, 64, 4, 2, 96, 64, 32), tokens),
        (lambda: NormedMLP(64, 2), lambda: {"x": torch.randn(32, 64), "labels": torch.randint(0, 10, (32,))}),
    ],
    ids=["gpt2", "gpt2 with dropout", "llama", "mlp"],
)
def test_no_more_is_kept_than_by_aot_autograd(build: Callable[[], nn.Module], batch: Callable[[], Batch]) -> None:
    torch.manual_seed(0)
    model, given = build(), batch()
    here, there = kept_here(model, given), kept_by_aot(model, given)
    assert 0 < here <= there
