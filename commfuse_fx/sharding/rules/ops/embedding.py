"""Look-up in a table of vectors, whose rows (the vocabulary) or columns (the features) may be divided."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from commfuse_fx.ir.core.functions import pure
from commfuse_fx.ir.core.placement import P, R, S
from commfuse_fx.sharding.rules.writing.call import INDEX, OpCall, Result, Step, Strategy
from commfuse_fx.sharding.rules.writing.named import strategy, subdivided
from commfuse_fx.sharding.rules.writing.rule_registry import rule

aten = torch.ops.aten


@pure
def embedding_of_rows(rows: torch.Tensor, indices: torch.Tensor, index: int) -> torch.Tensor:
    """Vectors of the indices that fall into this rank's rows; zeros for the others."""
    local = indices - index * rows.shape[0]
    inside = (local >= 0) & (local < rows.shape[0])
    vectors: torch.Tensor = aten.embedding.default(rows, torch.where(inside, local, 0))
    return vectors.masked_fill(~inside.unsqueeze(-1), 0)


@pure
def embedding_gradient_of_rows(
    grad: torch.Tensor, indices: torch.Tensor, rows: int, padding_idx: int, scale_grad_by_freq: bool, index: int
) -> torch.Tensor:
    """Gradient of this rank's rows [rows, features]. `padding_idx` is a row of the whole table, or negative."""
    local = indices - index * rows
    inside = (local >= 0) & (local < rows)
    if padding_idx >= 0:
        inside = inside & (indices != padding_idx)
    # One more row takes what belongs to other ranks; as the row of padding it costs no additions.
    whole: torch.Tensor = aten.embedding_dense_backward.default(
        grad, torch.where(inside, local, rows), rows + 1, rows, scale_grad_by_freq
    )
    return whole.narrow(0, 0, rows)


@rule(aten.embedding.default)
def embedding(call: OpCall) -> Sequence[Strategy]:
    bound = call.bound()
    out = call.outputs[0]
    assert out is not None
    last = len(out.shape) - 1
    found = [strategy(call, {"indices": S(d)}, (S(d),)) for d in range(last)]
    found.append(strategy(call, {"weight": S(1)}, (S(last),)))
    step = Step(embedding_of_rows, (bound["weight"], bound["indices"], INDEX))
    return [*found, strategy(call, {"weight": S(0)}, (P,), [step])]


@rule(aten.embedding_dense_backward.default)
def embedding_backward(call: OpCall) -> Sequence[Strategy]:
    """With scale_grad_by_freq the count of every index has to be whole, so the indices cannot be divided."""
    bound, ways = call.bound(), call.ways
    last = len(call.inputs[bound["grad_output"].index].shape) - 1
    found: list[Strategy] = []
    if not bound["scale_grad_by_freq"]:
        found += [strategy(call, {"grad_output": S(d), "indices": S(d)}, (P,)) for d in range(last)]
    found.append(strategy(call, {"grad_output": S(last)}, (S(1),)))
    found.append(strategy(call, {"grad_output": P}, (P,)))
    names = ("padding_idx", "scale_grad_by_freq")
    rows = bound["num_weights"] // ways
    step = Step(
        embedding_gradient_of_rows,
        (bound["grad_output"], bound["indices"], rows, *(bound[name] for name in names), INDEX),
    )
    return [*found, strategy(call, {}, (S(0),), [step])]


@rule(embedding_of_rows)
def embedding_of_rows_again(call: OpCall) -> Sequence[Strategy]:
    """Strategies to divide the function once more, over another mesh axis."""
    rows, indices, index = call.args
    last = len(call.inputs[1].shape)
    found = [Strategy((S(d),), (R, S(d))) for d in range(last)]
    steps = (subdivided(index, call.ways), Step(embedding_of_rows, (rows, indices, Result(0))))
    return [*found, Strategy((S(last),), (S(1), R)), Strategy((P,), (S(0), R), steps)]


@rule(embedding_gradient_of_rows)
def embedding_gradient_of_rows_again(call: OpCall) -> Sequence[Strategy]:
    """Strategies to divide the function once more, over another mesh axis."""
    grad, indices, rows, padding_idx, scale_grad_by_freq, index = call.args
    last = len(call.inputs[1].shape)
    found = [] if scale_grad_by_freq else [Strategy((P,), (S(d), S(d))) for d in range(last)]
    own = (grad, indices, rows // call.ways, padding_idx, scale_grad_by_freq, Result(0))
    steps = (subdivided(index, call.ways), Step(embedding_gradient_of_rows, own))
    return [*found, Strategy((S(1),), (S(last), R)), Strategy((P,), (P, R)), Strategy((S(0),), (R, R), steps)]


@rule(aten._embedding_bag.default, aten._embedding_bag_forward_only.default)
def embedding_bag(call: OpCall) -> Sequence[Strategy]:
    """Strategies by features. Bags cannot be divided, because the step finds only when it runs where a bag begins."""
    of_maximum = S(1) if _takes_maximum(call) else R
    return [strategy(call, {"weight": S(1)}, (S(1), R, R, of_maximum))]


@rule(aten._embedding_bag_backward.default, aten._embedding_bag_dense_backward.default)
def embedding_bag_backward(call: OpCall) -> Sequence[Strategy]:
    of_maximum = S(1) if _takes_maximum(call) else R
    by_features = strategy(call, {"grad": S(1), "maximum_indices": of_maximum}, (S(1),))
    return [by_features, strategy(call, {"grad": P}, (P,))]


def _takes_maximum(call: OpCall) -> bool:
    return bool(call.bound()["mode"] == 2)
