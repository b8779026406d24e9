"""Remember what torch's rules for fake tensors say of an op: looking it up takes half as long as in torch's own cache.

Only ops are remembered that make new strided tensors or one view of an argument. What they make follows from the
layouts of their arguments and from Python constants.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager
from torch.utils._pytree import tree_leaves

_aten = torch.ops.aten

_OF_TENSORS = (torch.dtype, torch.device, torch.layout, torch.memory_format)
CONSTANTS_OF_OPS = frozenset([int, float, bool, str, type(None), *_OF_TENSORS])
"""The types of arguments of ops that are equal wherever they are the same."""

_NOT_LAYOUTS_ALONE = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view)
_NEVER = (_aten.detach.default, _aten.lift_fresh.default, _aten.lift_fresh_copy.default, _aten._unsafe_view.default)
_MOST = 50_000
"""How many results are remembered. It is far more than a model has, and then all are forgotten."""


class _Result(NamedTuple):
    """view_of: the number of the argument whose memory it shares, or -1."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    view_of: int
    offset: int


_known: dict[tuple[Any, ...], _Result | tuple[_Result | None, ...]] = {}
_suitable: dict[int, tuple[Any, bool]] = {}
"""By the identity of an op, which stays alive here: whether its results can be remembered."""


def key_of(mode: FakeTensorMode, func: Any, args: Any, kwargs: Any) -> tuple[Any, ...] | None:
    """What the result of an op follows from, or None if it cannot be remembered."""
    found = _suitable.get(id(func))
    if found is None:
        found = _suitable[id(func)] = (func, _is_suitable(func))
    if not found[1]:
        return None
    inference = torch.is_inference_mode_enabled()
    parts: list[Any] = [id(func), torch.get_default_dtype(), torch._C._get_default_device(), inference]
    # These choose layouts of convolutions.
    parts += (torch._C._get_mkldnn_enabled(), torch._C._get_cudnn_enabled(), torch.get_num_threads())
    is_known = _add(mode, parts, args) and (
        not kwargs or (_add(mode, parts, kwargs) and _add(mode, parts, kwargs.values()))
    )
    return tuple(parts) if is_known else None


def known_result(mode: FakeTensorMode, key: tuple[Any, ...], args: Any) -> Any:
    """Make what the op has made before of arguments with this key; None if it has not been called."""
    found = _known.get(key)
    if found is None or isinstance(found, _Result):
        return None if found is None else _make(mode, found, args)
    return tuple([None if each is None else _make(mode, each, args) for each in found])


def remember(mode: FakeTensorMode, key: tuple[Any, ...], func: Any, args: Any, kwargs: Any, made: Any) -> None:
    """Remember what an op has made, unless more belongs to it than a `_Result` says."""
    given = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
    if len(_known) >= _MOST:
        _known.clear()
    if func.is_view:
        if len(given) == 1 and any(value is given[0] for value in args) and _shares(made, given):
            view_of = next(i for i, value in enumerate(args) if value is given[0])
            if (result := _result_of(mode, made, args, view_of)) is not None:
                _known[key] = result
    elif not isinstance(made, tuple):
        if (result := None if _shares(made, given) else _result_of(mode, made, args)) is not None:
            _known[key] = result
    else:
        results = [None if each is None else _result_of(mode, each, args) for each in made]
        there = [each for each in made if each is not None]
        is_new = not any(_shares(each, given + there[:i]) for i, each in enumerate(there))
        if is_new and all((result is None) == (each is None) for result, each in zip(results, made, strict=True)):
            _known[key] = tuple(results)


def _make(mode: FakeTensorMode, result: _Result, args: Any) -> FakeTensor:
    shape, stride, dtype, device, view_of, offset = result
    with in_kernel_invocation_manager(mode):
        made = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        if view_of >= 0:
            made.set_(args[view_of].untyped_storage(), offset, shape, stride)
    return FakeTensor(mode, made, device)


def _result_of(mode: FakeTensorMode, made: Any, args: Any, view_of: int = -1) -> _Result | None:
    if type(made) is not FakeTensor or made.constant is not None or made.requires_grad or not _is_plain(made):
        return None
    offset = int(made.storage_offset()) if view_of >= 0 else 0
    result = _Result(tuple(made.shape), made.stride(), made.dtype, made.fake_device, view_of, offset)
    again = _make(mode, result, args)
    return result if _description(again) == _description(made) else None


def _description(made: FakeTensor) -> tuple[Any, ...]:
    return torch._C._dispatch_key_set(made), made.storage_offset(), made.untyped_storage().nbytes()


def _shares(made: Any, others: list[Any]) -> bool:
    memory = made.untyped_storage()._cdata if type(made) is FakeTensor and made.layout is torch.strided else None
    return any(each.layout is torch.strided and each.untyped_storage()._cdata == memory for each in others)


def _is_suitable(func: Any) -> bool:
    if not isinstance(func, torch._ops.OpOverload) or func.namespace != "aten" or func in _NEVER:
        return False
    schema, implicit = func._schema, torch._C.DispatchKey.CompositeImplicitAutograd
    return (
        not schema.is_mutable
        and {str(each.type) for each in schema.returns} == {"Tensor"}
        and not any(tag in func.tags for tag in _NOT_LAYOUTS_ALONE)
        and not torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), implicit)
    )


def _add(mode: FakeTensorMode, parts: list[Any], values: Any) -> bool:
    """Add what is known of arguments; returns whether that is all there is to know."""
    parts.append(len(values))
    for value in values:
        kind = type(value)
        if kind is FakeTensor:
            if value.fake_mode is not mode or value.constant is not None or not _is_plain(value):
                return False
            parts += (value.shape, value.stride(), value.storage_offset(), value.untyped_storage().nbytes())
            parts += (value.dtype, value.fake_device, value.requires_grad, value.is_inference())
        elif kind in CONSTANTS_OF_OPS:
            if value != value:  # not a number, which is no key
                return False
            parts += (kind, value)
        elif kind is list or kind is tuple:
            if not _add(mode, parts, value):
                return False
        else:
            return False
    return True


def _is_plain(value: FakeTensor) -> bool:
    return value.layout is torch.strided and not (value.is_quantized or value.is_conj() or value.is_neg())
