"""Ready-made plans for `cf.shard(model, plan)`, which mark the modules of a known architecture.

A plan is a dict from path patterns to the marks of the modules or parameters that match. These plans use one mesh axis
only. They leave the other axes open, so that the batch can still be divided over those.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from torch import nn

from commfuse_fx.errors import ConfigTypeError, ConfigValueError
from commfuse_fx.ir.core.placement import Placement, R, S
from commfuse_fx.sharding.marking.logical import kind_of_module
from commfuse_fx.sharding.marking.strategy import Placements
from commfuse_fx.support.checks import check_bool, show

__all__ = ["Layouts", "Plan", "data_parallel", "tensor_parallel"]


@dataclass(frozen=True, kw_only=True)
class Layouts:
    """The marks of a plan on one module: strategies of its inputs, results and parameters, as in `cf.shard`.

        cf.shard(model, {"**.up": cf.plans.Layouts(parameters={"weight": ("tp", None), "bias": ("tp",)})})

    in_strategy, out_strategy: strategies of the inputs of forward and of its results.
    parameters: strategies of parameters, by their name in the module.
    keywords: strategies of inputs that forward takes by name.
    gradient: whether the gradients of inputs and results get the same layouts; with False the compiler chooses
        theirs.
    cross_batch: whether a rank computes the module with its own part of the batch, as in `cf.shard`.

    A plan may give a list of these for one pattern. Their marks on an input are then applied one after another.
    """

    in_strategy: Any = None
    out_strategy: Any = None
    parameters: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    keywords: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    gradient: bool = True
    cross_batch: bool = False


Plan = dict[str, Any]
"""A plan for `cf.shard(model, plan)`: path pattern -> marks of the modules or parameters that match."""


def data_parallel(model: nn.Module) -> Plan:
    """The empty plan: every rank holds all parameters, and gets its own part of the batch."""
    _check_model(model)
    return {}


def tensor_parallel(
    model: nn.Module, axis: str | None = None, vocabulary: bool = False, sequence: bool = False
) -> Plan:
    """A plan that divides the layers of transformer blocks over one mesh axis, as Megatron-LM does (arXiv:1909.08053).

    The first layers of attention and of the MLP are divided by columns (by heads), the last ones by rows. Each pair
    then needs one all_reduce over the axis. The plan finds blocks by the names and shapes of their layers: those of
    GPT-2, BERT and Llama in Hugging Face transformers.

    axis: the name of the mesh axis. None: the last axis of the mesh.
    vocabulary: whether embedding and head are divided by words too. The size of the axis has to divide the number of
        words.
    sequence: whether the activations between those layers (norms, residual stream) are divided by positions, dimension
        1 of [batch, positions, hidden]. Each all_reduce then becomes a reduce_scatter and an all_gather
        (arXiv:2205.05198, section 4.2.2).

    Raises ConfigValueError for a model without such blocks, and ConfigTypeError for arguments of the wrong type.
    """
    _check_model(model)
    check_bool(vocabulary, "vocabulary")
    check_bool(sequence, "sequence")
    if axis is not None and not isinstance(axis, str):
        raise ConfigTypeError(f"axis is {show(axis)}; give the name of a mesh axis, or None for the last one")
    named = {path: module for path, module in model.named_modules() if path}
    roles = {path: role for path, module in named.items() if (role := _role(path, module))}
    if not {"column", "row"} <= set(roles.values()):
        raise ConfigValueError(_unknown(model))
    build = _Builder(axis, sequence)
    widths = {_sizes(named[path])[0] for path, role in roles.items() if role == "column"}
    for path, module in named.items():
        role = roles.get(path, "")
        if role == "column":
            build.column(path, module)
        elif role == "row":
            build.row(path, module)
        elif _is_vocabulary(path, module):
            build.vocabulary(path, module, divided=vocabulary)
        elif sequence and _is_norm(module, widths):
            build.on_sequence(path, module)
    if sequence:
        for path in dict.fromkeys(block for path in roles if (block := _block(path))):
            build.block(path)
    return build.plan


_COLUMN = ("c_attn", "q_attn", "c_fc", "query", "key", "value", "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
_ROW = ("o_proj", "down_proj")
_EMBEDDINGS = ("wte", "word_embeddings", "embed_tokens")
_HEADS = ("lm_head", "decoder")


def _role(path: str, module: nn.Module) -> str:
    """ "column" or "row" for the layers that are divided, which take part in a block; else an empty string."""
    if kind_of_module(module) not in ("linear", "conv1d") or not _block(path):
        return ""
    parent, own = ["", *path.split(".")][-2:]
    if own in _COLUMN or (own == "dense" and parent == "intermediate"):
        return "column"
    if own in _ROW or own == "c_proj" or (own == "dense" and parent == "output"):
        return "row"
    return ""


def _block(path: str) -> str:
    """Path of the outermost numbered module that this one is in, or an empty string."""
    parts = path.split(".")
    numbers = [i for i, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbers[0] + 1]) if numbers else ""


def _is_vocabulary(path: str, module: nn.Module) -> bool:
    own = path.split(".")[-1]
    if isinstance(module, nn.Embedding):
        return own in _EMBEDDINGS
    return isinstance(module, nn.Linear) and own in _HEADS


def _is_norm(module: nn.Module, widths: set[int]) -> bool:
    """A norm of whole hidden vectors; those of single heads are divided with the heads."""
    weight = getattr(module, "weight", None)
    return kind_of_module(module) == "broadcast" and weight is not None and weight.numel() in widths


def _sizes(module: nn.Module) -> tuple[int, int]:
    """Numbers of input and output features of a linear layer."""
    weight = module.get_parameter("weight")
    first, second = int(weight.shape[0]), int(weight.shape[1])
    return (first, second) if kind_of_module(module) == "conv1d" else (second, first)


def _blocks(path: str, module: nn.Module) -> int:
    """The number of projections in a fused layer: query, key and value in GPT-2, key and value in cross-attention."""
    if path.split(".")[-1] != "c_attn":
        return 1
    taken, given = _sizes(module)
    return max(given // taken, 1) if given % taken == 0 else 1


class _Builder:
    """Makes the entries of a plan. Modules whose paths differ only in numbers share one entry."""

    def __init__(self, axis: str | None, sequence: bool) -> None:
        self.plan: Plan = {}
        self._axis: str | int = -1 if axis is None else axis
        self._sequence = sequence

    def column(self, path: str, module: nn.Module) -> None:
        """A layer that is divided by output features. Its input is whole, and the input's gradient is a partial sum."""
        blocks = _blocks(path, module)
        parameters = {"weight": self._on(S(_output_dim(module), blocks))}
        if getattr(module, "bias", None) is not None:
            parameters["bias"] = self._on(S(0, blocks))
        whole = (self._on(R),) if self._sequence else None
        self._add(path, Layouts(in_strategy=whole, parameters=parameters, gradient=False))

    def row(self, path: str, module: nn.Module) -> None:
        """A layer that is divided by input features. Its result is a partial sum, to which the bias is added once."""
        parameters = {"weight": self._on(S(1 - _output_dim(module)))}
        if getattr(module, "bias", None) is not None:
            parameters["bias"] = self._on(R)
        self._add(path, Layouts(out_strategy=self._by_position(), parameters=parameters))

    def vocabulary(self, path: str, module: nn.Module, divided: bool) -> None:
        parameters = {name: self._on(S(0)) for name, _ in module.named_parameters(recurse=False)} if divided else {}
        if isinstance(module, nn.Embedding):
            out = self._by_position()
            if divided or out:
                self._add(path, Layouts(out_strategy=out, parameters=parameters))
        elif divided:
            whole = (self._on(R),) if self._sequence else None
            self._add(path, Layouts(in_strategy=whole, parameters=parameters, gradient=False))

    def on_sequence(self, path: str, module: nn.Module) -> None:
        parameters = {name: self._on(R) for name, _ in module.named_parameters(recurse=False)}
        by_position = self._by_position()
        self._add(path, Layouts(in_strategy=by_position, out_strategy=by_position, parameters=parameters))

    def block(self, path: str) -> None:
        self._add(path, Layouts(out_strategy=self._by_position()))

    def _by_position(self) -> tuple[Placements, ...] | None:
        return (self._on(S(1)),) if self._sequence else None

    def _on(self, placement: Placement) -> Placements:
        return Placements(((self._axis, placement),))

    def _add(self, path: str, layouts: Layouts) -> None:
        pattern = ".".join("*" if part.isdigit() else part for part in path.split("."))
        if self.plan.setdefault(pattern, layouts) != layouts:
            self.plan[path] = layouts  # a block unlike the others


def _output_dim(module: nn.Module) -> int:
    """The dimension of the weight that holds output features."""
    return 1 if kind_of_module(module) == "conv1d" else 0


def _check_model(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise ConfigTypeError(f"model is {show(model)}; give a torch.nn.Module")


def _unknown(model: nn.Module) -> str:
    linear = [path for path, module in model.named_modules() if kind_of_module(module) in ("linear", "conv1d")]
    shown = ", ".join(linear[:4]) + (", ..." if len(linear) > 4 else "")
    return (
        f"model is a {type(model).__name__}, in which tensor_parallel finds no blocks shaped like those of GPT-2, "
        f"BERT or Llama (its linear layers: {shown or 'none'}). Mark it by hand: the first layer of each pair by output"
        ' features, cf.shard(model, "**.first", weight=("tp", None), bias=("tp",)), and the second by input features, '
        'cf.shard(model, "**.second", weight=(None, "tp"))'
    )
