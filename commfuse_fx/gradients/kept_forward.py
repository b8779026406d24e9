"""What a forward of a compiled module leaves to its backward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch

from commfuse_fx.capture.joint import Outputs
from commfuse_fx.planning.plan_cache import Plan
from commfuse_fx.runtime.execute.halves_executor import HalvesExecutor
from commfuse_fx.runtime.memory.shards import Shards


@dataclass
class Forward:
    """A forward holds its outputs, and what its backward needs.

    described: how the outputs nest, and which have a gradient.
    inputs: the call's tensors that require a gradient, by path.
    values: what was saved, under the names of `names`.
    versions: names, tensors, their versions and addresses, of what the user can change and the backward reads.
    """

    plan: Plan
    outputs: list[torch.Tensor]
    described: Outputs
    inputs: dict[str, torch.Tensor]
    names: tuple[str, ...]
    values: list[Any] | None
    versions: Versions


def values_of(forward: Forward) -> list[Any]:
    """What a forward has saved. Raises RuntimeError, as autograd does, where a backward has used it up."""
    if forward.values is None:
        raise RuntimeError(
            "Trying to backward through the graph a second time (or directly access saved tensors after they have "
            "already been freed): pass retain_graph=True to the first backward"
        )
    return forward.values


def guarded(outputs: Sequence[torch.Tensor], differentiable: Sequence[bool]) -> list[torch.Tensor]:
    """Autograd lets nobody change a view in place that a function of its own returns. That is right for outputs that
    share memory: a change of one would not reach the gradient of the other."""
    memory = [out.untyped_storage()._cdata if out.layout is torch.strided else id(out) for out in outputs]
    sharing = Counter(each for each, has_gradient in zip(memory, differentiable, strict=True) if has_gradient)
    found = []
    for output, each in zip(outputs, memory, strict=True):
        if sharing[each] > 1:
            found.append(output if output._is_view() else output.view_as(output))
        else:
            found.append(output.data if output._is_view() else output)
    return found


def read_late(
    described: Outputs, executor: HalvesExecutor, inputs: Mapping[str, torch.Tensor], outputs: list[torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """What the user can change although the backward reads it, but for parameters that are divided."""
    divided = dict.fromkeys(divided_read_late(described, executor))
    held = {"parameter": executor.params, "buffer": executor.buffers, "input": inputs}
    for source in described.read_late:
        if source.kind != "parameter" or source.name not in divided:
            yield source.name, held[source.kind][source.name]
    for number in described.outputs_read_late:
        yield f"output {number}", outputs[number].detach()  # not what leads back to here: that would be a cycle


def divided_read_late(described: Outputs, executor: HalvesExecutor) -> list[str]:
    """The names of the divided parameters whose rows the backward gathers."""
    known = {} if executor.shards is None else executor.shards.by_name
    divided = {name for name, each in known.items() if each.is_divided}
    return [each.name for each in described.read_late if each.kind == "parameter" and each.name in divided]


_version = attrgetter("_version")


class Versions:
    """What the user can change although a backward reads it, as it was: hundreds of tensors are compared at once.

    watched: names and tensors. shards, divided: what divides parameters, and names of some.
    """

    def __init__(
        self,
        watched: Iterable[tuple[str, torch.Tensor]] = (),
        shards: Shards | None = None,
        divided: Iterable[str] = (),
    ) -> None:
        self._shards = shards
        self._changes = {} if shards is None else {name: shards.changes(name) for name in divided}
        pairs = list(watched)
        self._names = [name for name, _ in pairs]
        self._tensors = [tensor for _, tensor in pairs]
        self._versions = list(map(_version, self._tensors))
        self._addresses = self._present_addresses()

    def _present_addresses(self) -> list[int]:
        try:
            return list(map(torch.Tensor.data_ptr, self._tensors))
        except RuntimeError:  # a sparse tensor has none
            return [each.data_ptr() if each.layout is torch.strided else 0 for each in self._tensors]

    def forget(self) -> None:
        """Let go of the tensors."""
        self._names, self._tensors, self._versions, self._addresses = [], [], [], []
        self._shards, self._changes = None, {}

    def check(self) -> None:
        """Raise RuntimeError, as autograd does, where something has been changed. Autograd itself keeps the old memory
        of a parameter whose `.data` has been replaced."""
        versions = list(map(_version, self._tensors))
        if versions != self._versions:
            triples = zip(self._names, versions, self._versions, strict=True)
            name, now, before = next((name, now, before) for name, now, before in triples if now != before)
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"{name} is at version {now}; expected version {before} instead"
            )
        for name, change in self._changes.items():
            if self._shards is not None and self._shards.changes(name) != change:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: "
                    f"{name}, whose rows are divided among ranks, has other values than in the forward"
                )
        addresses = self._present_addresses()
        if addresses != self._addresses:
            triples = zip(self._names, addresses, self._addresses, strict=True)
            raise RuntimeError(
                "one of the variables needed for gradient computation has been replaced: "
                f"{next(name for name, now, before in triples if now != before)} got another .data between the forward "
                "and the backward of a compiled module; replace it before the forward, or after the backward"
            )
