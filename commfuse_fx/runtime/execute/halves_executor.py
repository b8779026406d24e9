"""Run a program of two halves: a forward, and a backward that the caller starts with the outputs' gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import fx

from commfuse_fx.ir.core.halves import USED, split
from commfuse_fx.ir.core.meta import Spec, TensorSpec, info, tensor_spec
from commfuse_fx.runtime.execute.code.codegen import Hooks, Sends
from commfuse_fx.runtime.execute.code.codegen_of_halves import generate_half, saved_values
from commfuse_fx.runtime.execute.code.generated_code import Code
from commfuse_fx.runtime.execute.code.half import Half
from commfuse_fx.runtime.execute.code.recorded import LayoutCheck, as_recorded
from commfuse_fx.runtime.execute.code.vote_hooks import communicates
from commfuse_fx.runtime.execute.executor import Executor
from commfuse_fx.runtime.memory.own_storage import separated, with_own_storage

NamedGradients = tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]
"""Gradients of parameters, and those of inputs, by name."""


class HalvesExecutor(Executor):
    """An executor of one program of two halves.

    A forward changes buffers, and nothing else that the user owns. A backward returns gradients, each in a storage of
    its own, and does not write to `.grad`. If it raises, no gradient has changed. Of a parameter that is divided, both
    read rows, and what ranks have reduced of its gradient is rows as well.
    """

    _parts: list[str] | None = None
    """The gradients that lie in a larger block of memory; None before the first backward."""

    @cached_property
    def forward_sends(self) -> bool:
        """Whether the forward has collectives: gathers of parameters that are divided."""
        return any(map(communicates, split(self.program)[0]))

    @cached_property
    def backward_sends(self) -> bool:
        """Whether the backward has collectives."""
        return any(map(communicates, split(self.program)[1]))

    def _voted_for(self) -> list[fx.Node]:
        return split(self.program)[1]

    def _generate(self, hooks: Hooks, sends: Sends) -> None:
        views, compiled, once = self._views_with_memory(), *self._computed_otherwise()

        def generate(half: str, check: LayoutCheck) -> Code:
            code = generate_half(
                half, self.program, self._bind_in_code, hooks, sends, check.functions, views, compiled, once
            )
            self._show_lines(code)
            return code

        early, late = split(self.program)
        self._forward_half = Half("forward", lambda: LayoutCheck(self.program, early), generate)
        self._backward_half = Half("backward", lambda: LayoutCheck(self.program, late), generate)
        specs = info(self.program.loss).spec
        assert isinstance(specs, tuple)
        used = [node.args[1] for node in self.program.loss.users if node.op == "call_function"]
        self._gradient_specs = [spec if number in used else None for number, spec in enumerate(specs)]

    @property
    def _codes(self) -> list[Code]:
        return [half.code for half in (self._forward_half, self._backward_half) if half.code is not None]

    def forward(self, inputs: Mapping[str, torch.Tensor]) -> tuple[list[torch.Tensor], tuple[Any, ...]]:
        """Run the forward; returns the outputs, and the values for the backward (named in `saved`)."""
        given = self.gather(inputs)
        with self._quietly():
            try:
                outputs, saved = self._forward_half.run(given)
            except BaseException as error:
                if self.shards is not None:  # parameters that it gathers may be on the wire
                    self._leave(error)
                else:
                    self._locate(error)
                raise
        self._forward_half.has_run()
        return outputs, saved

    @cached_property
    def saved(self) -> tuple[str, ...]:
        """The names of the values that a forward saves, in order."""
        return tuple(info(node).name for node in saved_values(self.program))

    def backward(
        self,
        saved: list[Any],
        gradients: Sequence[torch.Tensor | None],
        held: Mapping[str, torch.Tensor | None],
    ) -> NamedGradients:
        """Run the backward; returns the gradients of parameters and those of inputs, by name.

        saved: the values that the forward has saved, in the order of the property `saved`. The list is emptied.
        gradients: the gradients of the outputs; None counts as zero.
        held: `.grad` of the parameters by name, for a program that adds to it; None counts as zero. Under
            `USED` a count for each trainable parameter (int32): 1 where backwards that did not reduce have reached it.
        """
        return self.backward_by(self._backward_half.run, saved, gradients, held)

    def backward_by(
        self,
        run: Callable[[list[Any]], tuple[Any, ...]],
        saved: list[Any],
        gradients: Sequence[torch.Tensor | None],
        held: Mapping[str, torch.Tensor | None],
    ) -> NamedGradients:
        """As `backward`, by another function than the generated code.

        run: gets the values of `inputs_of_backward`, and returns the gradients of parameters and inputs.
        """
        self._add_held(saved, held)
        saved.append([_given(value, spec) for value, spec in zip(gradients, self._gradient_specs, strict=True)])
        with self._quietly():
            try:
                found = run(saved)
            except BaseException as error:
                self._leave(error)
                raise
        return self._results(found)

    @property
    def has_run(self) -> bool:
        """Whether a first backward is over, which finds out what later ones need not do."""
        return self._backward_half.is_known

    def begin_backward(self, saved: list[Any], held: Mapping[str, torch.Tensor | None]) -> Arrivals:
        """Begin a backward to which autograd hands its gradients one by one. The arguments are those of `backward`."""
        self._add_held(saved, held)
        saved.append(None)
        return Arrivals(self, saved)

    def _add_held(self, saved: list[Any], held: Mapping[str, torch.Tensor | None]) -> None:
        for node, source in self.program.sources.items():
            if source.kind == "gradient":
                saved.append(self._held(source.name.removesuffix(".grad"), tensor_spec(node), held))

    def _results(self, found: tuple[Any, ...]) -> NamedGradients:
        """What a backward returns, of what its code has returned."""
        self._backward_half.has_run()
        count = len(self.program.grads)
        grads = dict(zip(self.program.grads, found[:count], strict=True))
        if self._parts is None:  # how a gradient lies is a part of the plan
            own = {name: separated(grad) for name, grad in grads.items()}
            self._parts = [name for name, grad in grads.items() if own[name] is not grad]
            grads = own
        else:
            grads.update({name: with_own_storage(grads[name]) for name in self._parts})
        others = dict(zip(self.program.aux, found[count:], strict=True))
        if (used := others.pop(USED, None)) is not None:
            for name in [name for name, ranks in zip(grads, used.tolist(), strict=True) if not ranks]:
                del grads[name]
        return grads, others

    def _held(self, name: str, spec: TensorSpec, held: Mapping[str, torch.Tensor | None]) -> torch.Tensor:
        value = held[name]
        if value is None:
            assert name != USED, "the session counts"
            return spec.empty(self.params[name].device).zero_()
        found: torch.Tensor = as_recorded(value.detach(), spec)
        return found

    def places_in(self, saved: Sequence[str]) -> list[int] | None:
        """The positions of this backward's values among the values with these names.

        None if one is missing: then the forward was run by a program that saves other values.
        """
        place = {name: i for i, name in enumerate(saved)}
        if any(name not in place for name in self.saved):
            return None
        return [place[name] for name in self.saved]


def _given(value: torch.Tensor | None, spec: Spec) -> torch.Tensor | None:
    """The gradient of an output with the layout that the graph expects; zeros if there is none."""
    if not isinstance(spec, TensorSpec):
        return None
    if value is None:
        return spec.empty().zero_()
    found: torch.Tensor = as_recorded(value.detach(), spec)
    return found


class Arrivals:
    """A backward that goes on as gradients arrive, in the order of the program.

    wanted: the number of the gradient that it waits for; None when it has come to its end.
    """

    def __init__(self, executor: HalvesExecutor, saved: list[Any]) -> None:
        self.wanted: int | None = None
        self._executor = executor
        self._found: tuple[Any, ...] = ()
        self._has_left = False
        self._code = executor._backward_half.run(saved)
        self._go_on(None)

    def take(self, gradients: dict[int, torch.Tensor]) -> None:
        """Go on as far as these gradients suffice; those that were taken are removed."""
        while self.wanted in gradients:
            self._go_on(gradients.pop(self.wanted))

    def finish(self) -> NamedGradients:
        """Go on to the end; what has not arrived is zero. Returns the gradients of parameters."""
        while self.wanted is not None:
            self._go_on(None)
        return self._executor._results(self._found)

    def leave(self, error: BaseException) -> None:
        """Give up, as autograd has failed."""
        if not self._has_left:
            self._has_left = True
            self._executor._leave(error)

    def _go_on(self, gradient: torch.Tensor | None) -> None:
        given = None if self.wanted is None else _given(gradient, self._executor._gradient_specs[self.wanted])
        with self._executor._quietly():
            try:
                self.wanted = self._code.send(given)
            except StopIteration as end:
                self.wanted, self._found = None, end.value
            except BaseException as error:
                self.leave(error)
                raise
