"""Explain in words why a call needs another graph: the first difference between two signatures, with both values."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from commfuse_fx.capture.guards.signature import CHOICES_OF_KERNELS, Signature
from commfuse_fx.capture.guards.tree import Structure, argument_path
from commfuse_fx.ir.core.meta import dtype_name

NAMES = ("shape", "dtype", "device", "strides", "requires_grad")
"""Names of the facts that a signature holds about a tensor."""


def cause(new: Signature, old: Signature, model: nn.Module | None = None) -> str:
    """The differences as text, such as `input.0 (x): f32[32,8] -> f32[17,8]`: the first of each kind, "" for none.

    model: the model that takes the inputs. If it is given, the text has the names of its arguments too.
    """
    if new.model != old.model:  # modes and the optimizer follow from it
        return new.model.difference(old.model)
    return "; ".join(dict.fromkeys([*_arguments(new, old, model), *_states(new, old)]))


def _arguments(new: Signature, old: Signature, model: nn.Module | None) -> Iterator[str]:
    found = difference_of_structures(old.argument_structure, new.argument_structure, "")
    if found is not None:
        yield f"{_called(argument_path(found[0]), model)}: {found[1]} -> {found[2]}"
        return
    for path, one, two in zip(tensor_paths(new.argument_structure, ""), old.tensors, new.tensors, strict=True):
        if one != two:
            yield f"{_called(argument_path(path), model)}: {_tensors(one, two)}"
            return


def _states(new: Signature, old: Signature) -> Iterator[str]:
    for what, kind in (("train_or_eval_mode", _mode), ("requires_grad", _requires_grad), ("autocast", _autocast)):
        pairs = zip(getattr(old, what), getattr(new, what), strict=False)
        changed = next(((at, one, two) for at, (one, two) in enumerate(pairs) if one != two), None)
        if changed is not None:
            yield kind(new, *changed)
    if new.default_dtype != old.default_dtype:
        yield f"default dtype: {dtype_name(old.default_dtype)} -> {dtype_name(new.default_dtype)}"
    kernels = zip(CHOICES_OF_KERNELS, old.choice_of_kernels, new.choice_of_kernels, strict=True)
    yield from (f"{what}: {one} -> {two}" for what, one, two in kernels if one != two)
    if new.gradients != old.gradients and new.train_or_eval_mode[0] == old.train_or_eval_mode[0]:
        yield f"gradients: {_on(old.gradients)} -> {_on(new.gradients)}"
    if new.layout_of_parameters_or_buffers != old.layout_of_parameters_or_buffers:
        yield "the shape, the dtype or the strides of a parameter or buffer changed"
    if new.optimizer != old.optimizer:
        yield _optimizers(old.optimizer, new.optimizer)


def tensor_paths(structure: Structure, path: str) -> list[str]:
    """The paths of a structure's tensors, in order, as `flatten` gives them."""
    if structure.kind == "tensor":
        return [path]
    if structure.kind == "constant":
        return []
    pairs = zip(structure.key[1], structure.children, strict=True)
    return [found for name, child in pairs for found in tensor_paths(child, f"{path}.{name}")]


def difference_of_structures(old: Structure, new: Structure, path: str) -> tuple[str, str, str] | None:
    """The first difference of two structures: its path, and the content of both there. None if they are equal."""
    if old == new:
        return None
    if old.kind == new.kind and old.key == new.key:
        for name, one, two in zip(old.key[1], old.children, new.children, strict=True):
            found = difference_of_structures(one, two, f"{path}.{name}")
            if found is not None:
                return found
    if old.kind == new.kind and old.kind in ("mapping", "sequence") and old.key[0] is new.key[0]:
        missing = [name for name in old.key[1] if name not in new.key[1]]
        added = [name for name in new.key[1] if name not in old.key[1]]
        if added:
            return f"{path}.{added[0]}", "not given", _content(new.children[new.key[1].index(added[0])])
        if missing:
            return f"{path}.{missing[0]}", _content(old.children[old.key[1].index(missing[0])]), "not given"
    return path, _content(old), _content(new)


def _content(structure: Structure) -> str:
    if structure.kind == "tensor":
        return "a tensor"
    if structure.kind == "constant":
        return repr(structure.pattern)
    return f"a {structure.key[0].__name__} of {len(structure.children)}"


def _called(path: str, model: nn.Module | None) -> str:
    """`input.0 (x)` for the first argument of `forward(self, x)`."""
    part, _, number = path.partition(".")
    if model is None or part != "input" or not number.isdigit():
        return path
    try:
        names = list(inspect.signature(model.forward).parameters.values())
    except (TypeError, ValueError):
        return path
    at = int(number)
    if at >= len(names) or names[at].kind not in (names[at].POSITIONAL_ONLY, names[at].POSITIONAL_OR_KEYWORD):
        return path
    return f"{path} ({names[at].name})"


def _tensors(old: tuple[Any, ...], new: tuple[Any, ...]) -> str:
    shape = [f"{dtype_name(each[1])}[{','.join(map(str, each[0]))}]" for each in (old, new)]
    if shape[0] != shape[1]:
        return " -> ".join(shape)
    name, one, two = next(each for each in zip(NAMES, old, new, strict=True) if each[1] != each[2])
    return f"{shape[0]} with {name} {one} -> {two}"


def _mode(new: Signature, at: int, old_mode: bool, new_mode: bool) -> str:
    paths = list({module: path for path, module in reversed(new.model.modules)}.values())[::-1]
    change = " -> ".join("train" if mode else "eval" for mode in (old_mode, new_mode))
    return f"mode of {f'module {paths[at]}' if at and paths[at] else 'the model'}: {change}"


def _requires_grad(new: Signature, at: int, old_flag: bool, new_flag: bool) -> str:
    names = [name for name, looks in new.model.parameters if isinstance(looks, tuple) and looks[0] == name]
    return f"requires_grad of parameter {names[at]}: {old_flag} -> {new_flag}"


def _autocast(new: Signature, at: int, old_dtype: torch.dtype | None, new_dtype: torch.dtype | None) -> str:
    change = " -> ".join("off" if each is None else dtype_name(each) for each in (old_dtype, new_dtype))
    return f"autocast on {('cpu', 'cuda')[at]}: {change}"


def _optimizers(old: tuple[Any, ...] | None, new: tuple[Any, ...] | None) -> str:
    if old is None or new is None or old[0] != new[0]:
        return f"optimizer: {old and old[0]} -> {new and new[0]}"
    if old[1] != new[1]:
        return f"optimizer: {old[1] or 'its update is compiled'} -> {new[1] or 'its update is compiled'}"
    groups: Sequence[Sequence[Any]] = (old[2], new[2])
    if len(groups[0]) != len(groups[1]):
        return f"optimizer: {len(groups[0])} -> {len(groups[1])} param groups"
    for number, ((members, flags), (others, changed)) in enumerate(zip(*groups, strict=True)):
        if members != others:
            return f"optimizer: the parameters of param group {number} changed"
        for (name, before), (_, after) in zip(flags, changed, strict=True):
            if before != after:
                return f"optimizer: {name} of param group {number}: {before} -> {after}"
    return "the optimizer changed"


def _on(flag: bool) -> str:
    return "enabled" if flag else "disabled"
