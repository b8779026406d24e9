"""How long an op takes at least: the roofline model.

Time is the largest of floating-point work at the device's rate, memory traffic at its bandwidth, and the overhead
that any op has (Williams, Waterman, Patterson: Roofline, CACM 52(4), 2009). Work and traffic follow from the
shapes alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from torch import fx

from commfuse_fx.cost.drawn_numbers import CACHED, DRAWN_ON_CPU
from commfuse_fx.ir.core.collectives import is_start, is_wait
from commfuse_fx.ir.core.dependence import is_view, written_nodes
from commfuse_fx.ir.core.functions import InnerOps
from commfuse_fx.ir.core.meta import Spec, TensorSpec, dtype_name, info
from commfuse_fx.ir.core.naming import op_label
from commfuse_fx.ir.ops.redistribution import COLLECTIVES
from commfuse_fx.ir.rows.owned_work import share_of_rank
from commfuse_fx.ir.updates.whole_updates import BY_OP
from commfuse_fx.machine.cluster_parts import Device

# Matrix products: op -> positions of the left and the right matrix.
_PRODUCTS = {
    "mm": (0, 1),
    "bmm": (0, 1),
    "mv": (0, 1),
    "dot": (0, 1),
    "addmm": (1, 2),
    "baddbmm": (1, 2),
    "addbmm": (1, 2),
    "addmv": (1, 2),
}

# Ops that pick elements of their first argument, and read no more of it than they return.
_PICKS = ("embedding", "embedding_of_rows", "index", "index_select", "gather", "take", "_unsafe_index")

# Functions of the compiler that compute nothing: they return memory which is there already, or send it.
_PARTS = ("own_part", "of_owner", *(function.__name__ for function in COLLECTIVES))

# Ops that overwrite the argument they write, and do not read it.
_OVERWRITES = ("copy_", "zero_", "fill_", "normal_", "uniform_", "bernoulli_", "random_", "exponential_")

# Ops that overwrite some rows of the argument they write: as many as the last argument has.
_PLACES = ("put_rows_",)

# Ops that reserve memory and touch none of it.
_RESERVES = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted")

# dtype -> where to look for its rate when a device does not state it, nearest first.
_NEAREST = {
    "f64": ("f32",),
    "f32": ("tf32", "f64"),
    "tf32": ("f32",),
    "bf16": ("f16", "f32"),
    "f16": ("bf16", "f32"),
    "c64": ("f32",),
    "c128": ("f64", "f32"),
}

# A complex multiply-add is four real ones.
_COMPLEX = 4


@dataclass(frozen=True)
class _Op:
    """What can be said of an op without its arguments."""

    label: str
    is_python: bool
    free: bool
    flops: Callable[[fx.Node], float] | None
    reserves: bool
    overwrites: bool
    picks: bool
    places: bool
    writes: bool
    passes: int
    computes: bool
    inner: InnerOps | None
    drawn: int


_ops: dict[Any, _Op] = {}


def _op(node: fx.Node) -> _Op:
    known = _ops.get(node.target)
    if known is None:
        known = _ops[node.target] = _describe(node)
    return known


def _describe(node: fx.Node) -> _Op:
    label = op_label(node.target)
    flops = _WORK.get(label)
    if "scaled_dot_product" in label and "attention" in label:
        flops = _attention
    schema = getattr(node.target, "_schema", None)
    return _Op(
        label=label,
        is_python=schema is None,
        free=is_wait(node) or is_start(node) or is_view(node),
        flops=flops,
        reserves=label in _RESERVES,
        overwrites=label in _OVERWRITES,
        picks=label in _PICKS,
        places=label in _PLACES,
        writes=schema is not None and any(arg.alias_info and arg.alias_info.is_write for arg in schema.arguments),
        passes=BY_OP[node.target].passes if node.target in BY_OP else 0,
        computes=getattr(node.target, "commfuse_pure", False) and label not in _PARTS,
        inner=getattr(node.target, "commfuse_inner", None),
        drawn=DRAWN_ON_CPU.get(str(getattr(node.target, "overloadpacket", "")), 0),
    )


def is_free(node: fx.Node) -> bool:
    """True for nodes that touch no memory and do no work: inputs, views, waits, starts, arithmetic on numbers."""
    if node.op != "call_function":
        return True
    op = _op(node)
    if op.computes and info(node).spec is not None:
        return False
    # Other Python is numbers and the rank's coordinate; the user's own optimizer, which takes lists, is the exception.
    return op.free or (op.is_python and not _tensor_lists(node))


def is_product(node: fx.Node) -> bool:
    """Whether the node multiplies matrices, in a convolution, attention or a recurrent layer as well."""
    return node.op == "call_function" and _op(node).flops is not None


def flops_and_bytes(node: fx.Node) -> tuple[float, float]:
    """(FLOPs, bytes read and written) of one run of a node; (0, 0) where `is_free`.

    Multiplications and additions count one each. Bytes are those of all arguments and results, each once: no
    cache is modelled. A dimension that is expanded (stride 0) is read once. Updates and functions that run several ops
    (`whole_updates.py`, `InnerOps`) count what those read and write. Of parameters that one rank of a group owns, an
    update counts what each rank has on the average.
    """
    if is_free(node):
        return 0.0, 0.0
    op = _op(node)
    return op.flops(node) if op.flops else 0.0, _traffic(node, op) * share_of_rank(node)


def roofline_seconds(node: fx.Node, device: Device) -> float:
    """Seconds that a node takes at least on this device; 0 where `is_free` and for memory that is there already."""
    if is_free(node):
        return 0.0
    if _op(node).reserves and info(node).kept:
        return 0.0
    return seconds_of_work(node, *flops_and_bytes(node), device)


def seconds_of_work(node: fx.Node, flops: float, nbytes: float, device: Device) -> float:
    """Seconds that a node takes at least if it computes and moves so much."""
    seconds = max(_launches(node) * device.op_overhead, nbytes / device.memory_bandwidth)
    return max(seconds, flops / flops_rate(node, device)) if flops else seconds


def _launches(node: fx.Node) -> int:
    """How many kernels a node launches. On a CPU, where they begin at once, inner ops count by their memory alone."""
    inner = _op(node).inner
    return 1 if inner is None or _spec(node).device == "cpu" else inner.count


def flops_rate(node: fx.Node, device: Device) -> float:
    """FLOP per second for the dtype that a node computes in.

    A dtype that the device does not state gets the rate of the nearest one that it does: half precisions stand in
    for each other, then f32; complex numbers compute at the rate of their parts; all else at the slowest rate.
    """
    name = _compute_dtype(node)
    if name in device.flops:
        return device.flops[name]
    for candidate in _NEAREST.get(name, ("f32",)):
        if candidate in device.flops:
            return device.flops[candidate]
    return min(device.flops.values())


def _compute_dtype(node: fx.Node) -> str:
    for value in (*node.all_input_nodes, node):
        spec = info(value).spec
        if isinstance(spec, TensorSpec) and (spec.dtype.is_floating_point or spec.dtype.is_complex):
            return dtype_name(spec.dtype)
    return "f32"


def _product(node: fx.Node) -> float:
    left, right = (_spec(node.args[position]) for position in _PRODUCTS[_op(node).label])
    columns = right.shape[-1] if len(right.shape) > 1 else 1
    work = 2.0 * left.numel * columns
    return work * _COMPLEX if left.dtype.is_complex else work


def _linear(node: fx.Node) -> float:
    return 2.0 * _spec(node.args[0]).numel * _spec(node.args[1]).shape[0]


def _convolution(node: fx.Node) -> float:
    return _convolution_work(_spec(node.args[0]), _spec(node.args[1]), _spec(node), _argument(node, "transposed"))


def _convolution_backward(node: fx.Node) -> float:
    """The gradients of input and weight each take as much work as the forward; that of the bias is a plain sum."""
    out, x, weight = (_spec(value) for value in node.args[:3])
    mask = _argument(node, "output_mask")
    return _convolution_work(x, weight, out, _argument(node, "transposed")) * (bool(mask[0]) + bool(mask[1]))


def _weight_gradient(node: fx.Node) -> float:
    out, x, weight = (_spec(value) for value in node.args[:3])
    return _convolution_work(x, weight, out, False)


def _convolution_work(x: TensorSpec, weight: TensorSpec, out: TensorSpec, transposed: bool) -> float:
    # Each position (of the output; of the input where transposed) meets the whole weight once, groups or not.
    positions = (x if transposed else out).shape
    return 2.0 * positions[0] * prod(positions[2:]) * weight.numel


def _attention(node: fx.Node) -> float:
    """Two products in the forward; five in the backward, which computes the scores again (Dao, FlashAttention-2).

    A causal mask leaves half of the scores.
    """
    backward = op_label(node.target).endswith("_backward")
    query, key, value = (_spec(arg) for arg in node.args[1 if backward else 0 :][:3])
    scores = 2.0 * prod(query.shape[:-1]) * key.shape[-2]
    width, value_width = query.shape[-1], value.shape[-1]
    work = scores * (3 * width + 2 * value_width if backward else width + value_width)
    return work / 2 if _argument(node, "is_causal") else work


def _recurrent(node: fx.Node) -> float:
    """Each step of each sequence meets both weight matrices once; twice in the backward pass."""
    x, on_input, on_state = (_spec(value) for value in node.args[:3])
    work = 2.0 * prod(x.shape[:2]) * (on_input.numel + on_state.numel)
    return 2 * work if op_label(node.target).endswith("_backward") else work


_WORK: dict[str, Callable[[fx.Node], float]] = {
    **dict.fromkeys(_PRODUCTS, _product),
    "linear": _linear,
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
    "convolution_weight_gradient": _weight_gradient,
    **dict.fromkeys(("mkldnn_rnn_layer", "lstm_layer", "lstm_layer_backward"), _recurrent),
}


def _traffic(node: fx.Node, op: _Op) -> float:
    if op.reserves:
        return 0.0
    if op.passes:
        return float(op.passes * sum(_bytes(info(param).spec) for param in _tensor_lists(node)[0]))
    if op.inner:
        made = _spec(node)
        cached = CACHED if made.device == "cpu" else 1.0
        return cached * op.inner.passes * made.numel * max(4, made.dtype.itemsize)
    if op.drawn and _spec(node).device == "cpu":
        return float(4 * op.drawn * _spec(node).numel)
    result = _bytes(info(node).spec)
    arguments = node.all_input_nodes
    if op.places:
        return float(sum(_bytes(info(value).spec) for value in (*arguments[1:], arguments[-1])))
    if op.is_python and not op.computes:
        # The user's optimizer: it reads its lists, and writes the first, the parameters.
        changed = sum(_bytes(info(value).spec) for value in _tensor_lists(node)[0])
        return float(changed + sum(_bytes(info(value).spec) for value in arguments))
    unread: Sequence[fx.Node] = ()
    if op.writes:
        written = written_nodes(node)
        result = sum(_bytes(info(value).spec) for value in written)
        unread = written if op.overwrites else _outs(node)
    total = result
    for value in arguments:
        if value not in unread:
            size = _bytes(info(value).spec)
            total += min(size, result) if op.picks and value is node.args[0] else size
    return float(total)


def _outs(node: fx.Node) -> list[fx.Node]:
    """The arguments named out, out0, out1, ..."""
    return [value for name, value in node.kwargs.items() if name.startswith("out") and isinstance(value, fx.Node)]


def _tensor_lists(node: fx.Node) -> list[list[fx.Node]]:
    lists = [[item for item in arg if isinstance(item, fx.Node)] for arg in node.args if isinstance(arg, (list, tuple))]
    return [items for items in lists if items]


def _bytes(spec: Spec) -> int:
    """Bytes of memory behind a value; what is expanded counts once."""
    if isinstance(spec, TensorSpec):
        if 0 not in spec.stride or 0 in spec.shape:
            return prod(spec.shape) * spec.dtype.itemsize
        apart = (size for size, stride in zip(spec.shape, spec.stride, strict=True) if stride)
        return prod(apart) * spec.dtype.itemsize
    return sum(_bytes(item) for item in spec) if spec else 0


def _spec(value: Any) -> TensorSpec:
    """Of one tensor, or of the first of several."""
    spec = info(value).spec
    while isinstance(spec, tuple):
        spec = spec[0]
    assert spec is not None, "an op that works on numbers takes tensors"
    return spec


def _argument(node: fx.Node, name: str) -> Any:
    """The value that an op gets for an argument: as given, or its default."""
    if name in node.kwargs:
        return node.kwargs[name]
    for position, argument in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if argument.name == name:
            return node.args[position] if position < len(node.args) else argument.default_value
    return None
