"""Run a program of two halves: the caller starts the backward, with the gradients of the outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from commfuse_fx.ir.halves import USED, split
from commfuse_fx.ir.meta import Spec, TensorSpec, info
from commfuse_fx.runtime.execute.codegen_of_halves import Halves, generate_halves
from commfuse_fx.runtime.execute.executor import Executor
from commfuse_fx.runtime.execute.recorded import LayoutCheck, as_recorded
from commfuse_fx.runtime.memory.own_storage import separated


class HalvesExecutor(Executor):
    """One program of two halves, and its generated code.

    A forward changes nothing that the user owns but buffers. A backward returns gradients, each in a storage of its
    own, and writes none. If it raises, no gradient has changed.
    """

    halves: Halves | None = None

    @property
    def _code(self) -> Halves:
        assert self.halves is not None, "prepare() comes first"
        return self.halves

    def _voted_for(self) -> list[fx.Node]:
        return split(self.program)[1]

    def _generate(self, hooks: Mapping[fx.Node, Sequence[Callable[[], None]]], check: LayoutCheck) -> None:
        self.halves = generate_halves(self.program, self._bind, hooks, self.wire.sends(), check.functions)
        specs = info(self.program.loss).spec
        assert isinstance(specs, tuple)
        used = [node.args[1] for node in self.program.loss.users if node.op == "call_function"]
        self._gradient_specs = [spec if number in used else None for number, spec in enumerate(specs)]

    def forward(self, inputs: Mapping[str, torch.Tensor]) -> tuple[list[torch.Tensor], tuple[Any, ...]]:
        """The outputs, and what the backward needs (named in `saved`)."""
        given = self.gather(inputs)
        with self._quietly():
            try:
                return self._code.forward(given)
            except BaseException as error:
                self._locate(error)
                raise

    @property
    def saved(self) -> tuple[str, ...]:
        """The names of what a forward saves, in its order."""
        return self._code.saved

    def gather(self, inputs: Mapping[str, torch.Tensor]) -> list[Any]:
        """The value of every placeholder of the forward, in the order of the program's sources."""
        held = [source for source in self._sources if source.kind == "gradient"]
        self._sources = [source for source in self._sources if source.kind != "gradient"]
        try:
            return super().gather(inputs)
        finally:
            self._sources = [*self._sources, *held]

    def backward(
        self,
        saved: list[Any],
        gradients: Sequence[torch.Tensor | None],
        held: Mapping[str, torch.Tensor | None],
    ) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """The gradients of parameters and of inputs, by name.

        saved: what the forward has saved, in the order of `saved`; the list is emptied on the way.
        gradients: of the outputs; None counts as zero.
        held: what `.grad` of the parameters holds, for a program that adds it.
        """
        for source in self._sources:
            if source.kind == "gradient":
                saved.append(self._held(source.name, held))
        saved.append([_given(value, spec) for value, spec in zip(gradients, self._gradient_specs, strict=True)])
        with self._quietly():
            try:
                found = self._code.backward(saved)
            except BaseException as error:
                self._leave(error)
                raise
        if self._check is not None:
            self.halves = self._code.without(self._check.needless())
            self._check = None
        count = len(self.program.grads)
        grads = {name: separated(grad) for name, grad in zip(self.program.grads, found[:count], strict=True)}
        others = dict(zip(self.program.aux, found[count:], strict=True))
        if (used := others.pop(USED, None)) is not None:
            for name in [name for name, ranks in zip(grads, used.tolist(), strict=True) if not ranks]:
                del grads[name]
        return grads, others

    def _held(self, name: str, held: Mapping[str, torch.Tensor | None]) -> torch.Tensor:
        param = name.removesuffix(".grad")
        value, spec = held[param], info(self._placeholders[name]).spec
        assert isinstance(spec, TensorSpec)
        return spec.empty(self.params[param].device).zero_() if value is None else as_recorded(value.detach(), spec)

    @property
    def _placeholders(self) -> dict[str, fx.Node]:
        return {source.name: node for node, source in self.program.sources.items()}

    def places_in(self, saved: Sequence[str]) -> list[int] | None:
        """Where among the values of these names stand those that this program's backward takes; None where one is
        missing, as the forward was made by a program that computes otherwise."""
        place = {name: i for i, name in enumerate(saved)}
        if any(name not in place for name in self.saved):
            return None
        return [place[name] for name in self.saved]


def _given(value: torch.Tensor | None, spec: Spec) -> torch.Tensor | None:
    """The gradient of an output as the graph has it."""
    if not isinstance(spec, TensorSpec):
        return None
    if value is None:
        return spec.empty().zero_()
    found: torch.Tensor = as_recorded(value.detach(), spec)
    return found
