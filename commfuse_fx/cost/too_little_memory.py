"""The error of a memory limit that no arrangement meets: how far off it is, and what would bring how much."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from commfuse_fx.config.parallel_optimizer import PARAMETERS
from commfuse_fx.cost.memory import Memory, bytes_of
from commfuse_fx.cost.numbers import in_bytes
from commfuse_fx.errors import ConfigValueError
from commfuse_fx.ir.core.meta import info
from commfuse_fx.ir.core.program import Parameter, Program


class TooLittleMemory(ConfigValueError):
    """No arrangement fits. needed: bytes of the one that needs least. helps: what would make a step take less."""

    def __init__(self, limit: int, needed: int, helps: tuple[str, ...], tried: str = "") -> None:
        super().__init__(
            f"memory_limit={limit} is below what the step needs: {needed} bytes "
            f"({needed / 2**20:.1f} MiB, {(needed - limit) / 2**20:.1f} MiB too much) for parameters, optimizer state, "
            "gradients and activations, with communication held back as far as it goes; raise the limit, or try "
            f"{'; '.join(helps)}{tried}"
        )
        self.limit, self.needed = limit, needed
        self.helps = helps

    @classmethod
    def of(cls, limit: int, needed: int, program: Program) -> TooLittleMemory:
        """The error of a program, which says what would help."""
        return cls(limit, needed, (*_sharing(program), *_what_helps(program)))

    def on_levels(self, needed: Mapping[int, int], are_tried: bool) -> TooLittleMemory:
        """The same, with what a step takes on levels of the parallel optimizer; 0 stands for that without it.

        are_tried: by a search, so that there is no need to turn it on. Else levels on which it takes no less are left
            out.
        """
        if not needed:
            return self
        others = tuple(each for each in self.helps if not each.startswith(_SHARING))
        if not are_tried:
            needed = {level: nbytes for level, nbytes in needed.items() if nbytes < self.needed}
            if not needed:
                return TooLittleMemory(self.limit, self.needed, others)
        found = {f"on level {level}" if level else "without it": nbytes for level, nbytes in needed.items()}
        text = ", ".join(f"{in_bytes(nbytes)} {level}" for level, nbytes in found.items())
        if are_tried:
            tried = f". The search has tried the parallel optimizer: the step needs {text}"
            return TooLittleMemory(self.limit, self.needed, others, tried)
        helps = (f"{self.helps[0]}: the step needs {text}", *self.helps[1:])
        return TooLittleMemory(self.limit, self.needed, helps)


_SHARING = "the parallel optimizer, which divides parameters, gradients and states"


@dataclass(frozen=True)
class _Held:
    """Bytes that a rank holds of one parameter. gradient: as the update reads it."""

    param: Parameter
    own: int
    gradient: int
    states: int

    @property
    def divided(self) -> int:
        """Bytes of which other ranks hold other parts."""
        if self.param.whole is not None and self.param.whole.numel > self.param.spec.numel:
            return self.own + self.gradient + self.states
        return self.gradient + self.states if self.param.shard else 0


def _sharing(program: Program) -> Iterator[str]:
    """How the parallel optimizer would be turned on, or up, where that is possible."""
    asked = program.config.parallel_optimizer
    if program.mesh.world > 1 and program.optimizer is not None and (asked is None or asked.level < PARAMETERS):
        switch = "" if asked is not None else "enable_parallel_optimizer=True, "
        yield f'{_SHARING} ({switch}"level": {PARAMETERS} in parallel_optimizer_config)'


def _what_helps(program: Program) -> Iterator[str]:
    """What else makes a step like this one take less memory, and how much less."""
    if program.config.parallel_optimizer is not None or program.config.divides_graphs:
        divided = sum(each.divided for each in _held(program))
        less = f"up to {in_bytes(divided // 2)} less" if divided else "no less, as no parameter or state is divided"
        yield f"more devices: twice as many, with as many rows of the batch on each, take {less}"
    kept = Memory(program).kept_by_forward()
    yield (
        "activation checkpointing (torch.utils.checkpoint), which computes again what the forward keeps for the "
        f"backward: {in_bytes(kept)}"
    )
    yield "a smaller batch, or a smaller model"


def _held(program: Program) -> Iterator[_Held]:
    """What a rank holds of the parameters that an update changes."""
    states: dict[str, int] = {}
    for node, source in program.sources.items():
        specs = info(node).spec
        if source.kind != "state" or not isinstance(specs, tuple):
            continue
        for segment, spec in zip(program.updates[source.owner].segments, specs, strict=True):
            total = sum(program.params[name].spec.numel for name, _ in segment.members)
            for name, _ in segment.members:
                part = bytes_of(spec) * program.params[name].spec.numel // max(total, 1)
                states[name] = states.get(name, 0) + part
    for name in (name for update in program.updates for segment in update.segments for name, _ in segment.members):
        param = program.params[name]
        rows = program.mesh.size(param.shard) if param.shard else 1
        yield _Held(param, param.spec.nbytes, param.spec.nbytes // rows, states.get(name, 0))
