"""Tells what autograd does with the parameters of a model, whatever code has used them."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge


class Listener(Protocol):
    """What is told of a parameter, by its name, in a backward."""

    def accumulates(self, name: str) -> None:
        """Autograd is about to add to `.grad`."""

    def accumulated(self, name: str) -> None:
        """Autograd has come to the end of the parameter: it has added to `.grad`, or a compiled backward has."""


class ParameterHooks:
    """Hooks of the parameters of one model, as long as their listener lives.

    Of several such models that share a parameter, the one whose forward has run last has the hooks.
    """

    def __init__(self, listener: Listener) -> None:
        self.params: dict[str, nn.Parameter] = {}
        self._listener = weakref.ref(listener)
        self._hooks: dict[str, LateHook] = {}
        weakref.finalize(listener, _remove, self._hooks).atexit = False

    def watch(self, params: Mapping[str, nn.Parameter], tells_before: bool) -> None:
        """Look at these parameters from now on, in place of those before. They may be frozen and unfrozen later.

        tells_before: whether the listener is told before autograd adds to a gradient, too.
        """
        for name, param in params.items():
            hook = self._hooks.get(name)
            if hook is not None and (hook.is_removed or self.params.get(name) is not param):
                hook.remove()
                hook = None
            if not param.requires_grad:
                continue
            if hook is None:
                hook = self._hooks[name] = LateHook(self._listener, name, param)
            if tells_before:
                hook.look_before(param)
        for name in [name for name in self._hooks if name not in params]:
            self._hooks.pop(name).remove()
        if len(self.params) != len(params) or any(self.params.get(name) is not params[name] for name in params):
            self.params = dict(params)


class LateHook:
    """The hook of a parameter that runs when autograd has come to its end. there_are: how many of them there are."""

    there_are = 0

    def __init__(self, listener: weakref.ref[Listener], name: str, param: nn.Parameter) -> None:
        self.is_removed = False
        LateHook.there_are += 1
        self._listener = listener
        self._name = name
        self._node: Any = None
        for other in tuple((param._post_accumulate_grad_hooks or {}).values()):
            if isinstance(other, LateHook):
                other.remove()
        self._handles = [param.register_post_accumulate_grad_hook(self)]

    def look_before(self, param: nn.Parameter) -> None:
        """Tell the listener, too, before autograd adds to the gradient."""
        node = get_gradient_edge(param).node
        if self._node is not node:  # a parameter gets another one with other memory
            self._node = node
            self._handles.append(node.register_prehook(self._before))

    def remove(self) -> None:
        """Listen no longer."""
        LateHook.there_are -= not self.is_removed
        self.is_removed, self._node = True, None
        for handle in self._handles:
            handle.remove()

    @torch._disable_dynamo
    def __call__(self, param: torch.Tensor) -> None:
        listener = self._listener()
        if listener is not None and not self.is_removed:
            listener.accumulated(self._name)

    @torch._disable_dynamo
    def _before(self, gradients: tuple[torch.Tensor | None, ...]) -> None:
        listener = self._listener()
        if listener is not None and gradients[0] is not None and not self.is_removed:
            listener.accumulates(self._name)


def _remove(hooks: Mapping[str, LateHook]) -> None:
    for hook in hooks.values():
        hook.remove()


def remove_hooks_of_graphs(model: nn.Module) -> None:
    """Before a call that is not cut into graphs: take away what was left by calls of the same model that were."""
    if LateHook.there_are:
        for param in model.parameters():
            for hook in tuple((param._post_accumulate_grad_hooks or {}).values()):
                if isinstance(hook, LateHook):
                    hook.remove()
