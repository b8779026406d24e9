"""A case: a model, an optimizer, the options of the step, and what the user does over some steps, all from a seed.

Why: docs/decisions.md, "Random models and users are drawn by a generator of our own".
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tests.property.asked_of_wrappers import ASKED, ASKED_AND_TRACED
from tests.property.random_models import LOSSES, PARTS, ModelSpec, PartSpec
from tests.property.trainee import OPTIMIZERS, WITHOUT_FUSED
from tests.property.user_actions import CHEAP, COSTLY

STEPS = 10

WAITING: tuple[str, ...] = ()
"""Names of parts, actions and calls that are not drawn yet, or not for steps that divide parameters."""

_WEIGHTS = {"one": 12, "lockstep": 5, "divided": 3, "ranks": 2, "divided_ranks": 1, "module": 3, "module_ranks": 1}
OP_BY_OP = tuple(_WEIGHTS)

COMPILED = "inductor_"
"""What names of kinds begin with that Inductor compiles."""

KINDS = {**_WEIGHTS, **{f"{COMPILED}{kind}": weight for kind, weight in _WEIGHTS.items()}}
"""Kind -> how often it is drawn, of all that are asked for.

One device; ranks in this process, data parallel or with a divided model; real ranks beside DistributedDataParallel,
or with a divided model; the module form, on one device and on real ranks beside DistributedDataParallel. The same with
compute that Inductor compiles, which takes seconds of a C++ compiler for each case."""

LOCAL = ("one", "lockstep", "divided")
"""Kinds that run in one process."""

OF_RANKS = ("ranks", "divided_ranks")
"""Kinds of steps that need real ranks."""

OF_THE_STEP = ("retrace", "lower")
"""Actions on the compiled step itself."""

MESHES = {"2": (2,), "2x2": (2, 2)}
"""Of divided models."""

FUSIONS = ("default", "size", "index", "off", "optimal", "preset", "across", "apart_across", "ids", "unscheduled")


@dataclass(frozen=True)
class Act:
    """One action of the user's; `number` decides its details."""

    kind: str
    number: int


@dataclass(frozen=True)
class Step:
    """actions, then a call. call: "train", "eval" or "no_grad". update: whether the user's own optimizer steps then
    (without one in the step). check: whether everything is compared afterwards, which reads all parameters."""

    actions: tuple[Act, ...]
    rows: int
    call: str
    update: bool
    check: bool


@dataclass(frozen=True)
class Case:
    """`accumulate`: the step is compiled without the optimizer. `marks`: what divides parameters, as numbers.

    `regions`: `inductor_regions` where Inductor compiles, else "". `idle`: the number of an option without effect that
    `compile` is given as well; negative: none.
    """

    seed: int
    kind: str
    regions: str
    model: ModelSpec
    optimizer: str
    groups: str
    flags: str
    accumulate: bool
    fusion: str
    mesh: tuple[int, ...]
    marks: tuple[int, ...]
    steps: tuple[Step, ...]
    idle: int

    def __str__(self) -> str:
        lines = [
            f"seed {self.seed}: {self.kind}, mesh {self.mesh}, fusion {self.fusion}, marks {list(self.marks)}"
            + (f", regions {self.regions}" if self.regions else "")
            + (f", idle {self.idle}" if self.idle >= 0 else ""),
            f"  model: {self.model}",
            f"  optimizer: {self.optimizer} {self.flags}, groups {self.groups}, accumulate {self.accumulate}",
        ]
        for number, step in enumerate(self.steps):
            actions = ", ".join(f"{act.kind}({act.number})" for act in step.actions)
            then = " update" if self.accumulate and step.update else ""
            check = "" if step.check else " (not compared)"
            lines.append(f"  {number}: {actions + '; ' if actions else ''}{step.call} {step.rows} rows{then}{check}")
        return "\n".join(lines)


def draw(seed: int, kinds: Sequence[str] = LOCAL, small: bool = False) -> Case:
    """The case of a seed. kinds: those that it may be of. small: with fewer parts and fewer causes to trace again, on
    which nearly all the time of a case goes."""
    rng = random.Random(seed)
    drawn = rng.choices(kinds, [KINDS[each] for each in kinds])[0]
    kind = drawn.removeprefix(COMPILED)
    divides = kind.startswith("divided")
    accumulate = rng.random() < 0.25
    dtype = rng.choices((torch.float64, torch.float32, torch.bfloat16), (14, 5, 1))[0]
    optimizer = rng.choice(list(OPTIMIZERS))
    # torch's own fused kernels go wrong where memory has gaps or strides differ: the step may be asked for them, a
    # user's own update may not.
    flags = rng.choice(("", "foreach", "fused"))
    is_own = accumulate or kind.startswith("module")
    if flags == "fused" and (is_own or optimizer in WITHOUT_FUSED):
        flags = ""
    if flags == "foreach" and is_own and optimizer == "asgd":  # there torch has rates of float32
        flags = ""
    mesh = (1,) if kind in ("one", "module") else (2,)
    if kind == "lockstep":
        mesh = rng.choice(((2,), (3,)))
    elif kind == "divided":
        mesh = MESHES[choose(rng, tuple(MESHES), divides)]
    return Case(
        seed=seed,
        kind=kind,
        regions="" if drawn == kind else ("stretches", "layers")[seed % 2],
        model=_draw_model(rng, dtype, divides, small),
        optimizer=optimizer,
        groups=rng.choice(("one", "one", "two", "held_back")),
        flags=flags,
        accumulate=accumulate,
        fusion=rng.choice(FUSIONS),
        mesh=mesh,
        marks=tuple(rng.randrange(3) for _ in range(12)) if divides else (),
        steps=_draw_steps(rng, kind, small),
        idle=rng.choice((-1, -1, rng.randrange(1000))),
    )


def choose(rng: random.Random, names: Sequence[str], divides: bool) -> str:
    """One of them; the next one in place of one that waits, so that cases without such do not depend on what waits."""
    place = rng.randrange(len(names))
    for name in (*names[place:], *names[:place]):
        if name not in WAITING and not (divides and f"divided:{name}" in WAITING):
            return name
    raise AssertionError("all of them wait")


def _draw_model(rng: random.Random, dtype: torch.dtype, divides: bool, small: bool) -> ModelSpec:
    count = rng.choice((1, 1, 1, 1, 2, 2) if small else (1, 1, 2, 2, 3, 4))
    parts = tuple(PartSpec(choose(rng, tuple(PARTS), divides), rng.randrange(1000)) for _ in range(count))
    ties = ((rng.randrange(count), rng.randrange(count)),) if count > 1 and rng.random() < 0.25 else ()
    loss = rng.choice(LOSSES)
    return ModelSpec(rng.randrange(1000), parts, ties, rng.choice((4, 4, 8)), rng.choice((2, 3, 4)), dtype, loss)


def _draw_steps(rng: random.Random, kind: str, small: bool) -> tuple[Step, ...]:
    divides = kind.startswith("divided")
    cheap, costly = tuple(CHEAP), (*COSTLY, *OF_THE_STEP, "rows", "eval", "no_grad")
    acts: list[list[Act]] = [[] for _ in range(STEPS)]
    if kind.startswith("module"):
        cheap, costly = (*cheap, *ASKED), (*costly, *ASKED_AND_TRACED)
        acts[rng.randrange(STEPS)].append(Act("ask", 0))
        if rng.random() < 0.3:
            acts[rng.randrange(1, STEPS)].append(Act(rng.choice(list(ASKED_AND_TRACED)), rng.randrange(1000)))
    rows = [rng.choice((4, 6))] * STEPS
    calls = ["train"] * STEPS
    for _ in range(rng.choice((0, 1, 2, 3, 4, 5))):
        acts[rng.randrange(STEPS)].append(Act(choose(rng, cheap, divides), rng.randrange(1000)))
    for _ in range(rng.choice((0, 0, 0, 1, 1, 1) if small else (0, 1, 1, 1, 2, 3))):
        act, place = choose(rng, costly, divides), rng.randrange(1, STEPS)
        if act == "rows":
            rows[place:] = [2] * (STEPS - place) if rows[place] != 2 else [4] * (STEPS - place)
        elif act in ("eval", "no_grad"):
            calls[place] = act
        else:
            acts[place].insert(rng.randint(0, len(acts[place])), Act(act, rng.randrange(1000)))
    often = rng.choice((0.0, 0.3, 1.0))  # reading ends what communication has left for later
    return tuple(
        Step(tuple(acts[n]), rows[n], calls[n], rng.random() < 0.7, n == STEPS - 1 or rng.random() < often)
        for n in range(STEPS)
    )
