"""A module in front of a model, whose names, attributes and state are those of the model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch import nn

from commfuse_fx.errors import ConfigTypeError, NotThereError
from commfuse_fx.frontends.arguments_of_ddp import ATTRIBUTES
from commfuse_fx.support.checks import show
from commfuse_fx.support.logs import logger

log = logger("trace")


class StandIn(nn.Module):
    """A stand-in is asked in place of its model, as DistributedDataParallel is, and answers as the model would.

    Names are those of the model, without `module.` in front, also where another module holds the stand-in. Only
    `children()` shows the model as a part. What a class annotates or defines is the stand-in's own. A new attribute
    goes to the model, unless its name has an underscore in front: libraries keep notes of their own there.

    module: the model. Assigning another one puts the stand-in in front of that one.
    """

    module: nn.Module
    _own: frozenset[str] = frozenset()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls._own = frozenset(name for each in cls.__mro__ for name in inspect.get_annotations(each))

    def _bind(self, model: nn.Module) -> None:
        """Stand in front of this model from now on."""
        hidden = self._hidden(model)
        if hidden:
            log.warning(
                "a compiled module has %s itself, which %s has as well: model.module.%s is that of the model",
                ", ".join(hidden),
                type(model).__qualname__,
                hidden[0],
            )
        super().__setattr__("module", model)

    def _hidden(self, model: nn.Module) -> list[str]:
        """Names of the model's own attributes that this class has, too: asked for here, they are those of the class."""
        of_model = {*vars(model), *model._parameters, *model._buffers, *model._modules}
        of_model.update(*(vars(each) for each in type(model).__mro__ if each not in type(self).__mro__))
        mine = {*self._own, *chain(*(vars(each) for each in type(self).__mro__ if each not in nn.Module.__mro__))}
        both = sorted(name for name in of_model & mine if not name.startswith("__"))
        return [name for name in both if name not in _OF_ANY]

    # Attributes

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            model = super().__getattr__("module")
        if (name in ATTRIBUTES or name in _OF_STEPS) and not hasattr(model, name):
            raise _not_there(name)
        return getattr(model, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "module":
            if not isinstance(value, nn.Module):
                raise ConfigTypeError(f"module is {show(value)}: assign a torch.nn.Module, to train that one")
            self._bind(value)
        elif self._is_of_model(name):
            setattr(self.module, name, value)
        else:
            super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        if self._is_of_model(name):
            delattr(self.module, name)
        else:
            super().__delattr__(name)

    def _is_of_model(self, name: str) -> bool:
        """Whether the model has or gets this attribute."""
        if name in self._own or name in self.__dict__ or hasattr(type(self), name) or "module" not in self._modules:
            return False
        if hasattr(self.module, name):
            return True
        if name in ATTRIBUTES:
            raise _not_there(name)
        return not name.startswith("_")

    # Names

    def _get_name(self) -> str:
        return str(self.module._get_name())

    def __repr__(self) -> str:
        """The model behind the name of this class."""
        return type(self).__name__ + super().__repr__().removeprefix(self._get_name())

    def _fqn_modifiers(self) -> dict[str, str]:
        """Tells torch.distributed.checkpoint which level has no part in names."""
        return {"module": "module"}

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Those of the model, with its own names. Without `recurse` none: they are those of a part."""
        return self.module.named_parameters(prefix, recurse, remove_duplicate) if recurse else iter(())

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Those of the model, with its own names. Without `recurse` none: they are those of a part."""
        return self.module.named_buffers(prefix, recurse, remove_duplicate) if recurse else iter(())

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """This module, and those of the model with its own names: the model has the name of this one."""
        memo = set() if memo is None else memo
        if self not in memo:
            if remove_duplicate:
                memo.add(self)
            yield prefix, self
            yield from self.module.named_modules(memo, prefix, remove_duplicate)

    def get_submodule(self, target: str) -> nn.Module:
        """A part of the model, by its own name, or by that with `module.` in front."""
        try:
            return self.module.get_submodule(target)
        except AttributeError:
            if target.partition(".")[0] != "module":
                raise
            return super().get_submodule(target)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """That of the model. As "module", which `SyncBatchNorm.convert_sync_batchnorm` gives back, it is the model."""
        if name != "module":
            self.module.add_module(name, module)
        elif module is not self.module:
            self.__setattr__("module", module)

    # State

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """That of the model, with its own keys."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load what `state_dict` has returned, here or of the model."""
        return self.module.load_state_dict(state_dict, *args, **kwargs)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        """A module that holds this one loads a state: here keys get the level that its walk goes through."""
        for name in [name for name in state_dict if name.startswith(prefix)]:
            state_dict[f"{prefix}module.{name.removeprefix(prefix)}"] = state_dict.pop(name)


_OF_ANY = frozenset({*dir(nn.Module()), *inspect.get_annotations(nn.Module), "module", "_abc_impl"})
"""What any module has and may define anew, and what is another one here, as in DistributedDataParallel."""


_A_STEP = "compile a step for it, cf.compile(model, loss_fn=..., optimizer=...)"
_OF_STEPS = {
    "verify": _A_STEP,
    "verified": _A_STEP,
    "save": "save model.state_dict() and optimizer.state_dict()",
    "load": "call model.load_state_dict(...) and optimizer.load_state_dict(...)",
    "profile": _A_STEP,
    "record_communication": _A_STEP,
}
"""What the other form has -> what to do in its place, where the model has none of that name."""


def _not_there(name: str) -> NotThereError:
    owner, instead = ("DistributedDataParallel", ATTRIBUTES) if name in ATTRIBUTES else ("a compiled step", _OF_STEPS)
    return NotThereError(f"{name} is an attribute of {owner}, not of a compiled module: {instead[name]}")


def _of_model(name: str) -> Callable[..., Any]:
    def ask(self: StandIn, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.module, name)(*args, **kwargs)

    ask.__name__, ask.__doc__ = name, f"`{name}` of the model."
    return ask


for _name in (
    "register_buffer",
    "register_parameter",
    "register_state_dict_pre_hook",
    "register_state_dict_post_hook",
    "_register_state_dict_hook",
    "_register_load_state_dict_pre_hook",
    "register_load_state_dict_pre_hook",
    "register_load_state_dict_post_hook",
):
    setattr(StandIn, _name, _of_model(_name))
