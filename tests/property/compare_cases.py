"""Run a case beside eager training, and say what differs."""

from __future__ import annotations

import math
import random
import signal
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

import commfuse_fx as cf
from tests.property.attribute_parts import Counts, SetsAttributes
from tests.property.idle_options import messages
from tests.property.known_refusals import reason_of
from tests.property.random_cases import OF_THE_STEP, Act, Case, Step
from tests.property.random_models import make_batch
from tests.property.trainee import Named, make_trainee
from tests.property.user_actions import ACTIONS
from tests.property.worlds import Batch, Compiled, Distributed, Eager, Module

BESIDE_DDP = ("ranks", "module_ranks")

SECONDS = 300
"""After which a case counts as hung. Cases take a second, or ten where Inductor compiles, and many times as long on a
busy machine."""


@dataclass(frozen=True)
class Result:
    """outcome: "same", "refused" (by a documented refusal, named in `text`), "void" (eager training fails too) or
    "failed" (`text` says how)."""

    seed: int
    outcome: str
    text: str = ""


class Differs(AssertionError):
    """The compiled step has not done what eager training does.

    `is_slight`: one element of a tensor is off, or none by more than ten times the tolerance.
    """

    def __init__(self, text: str, is_slight: bool = False) -> None:
        super().__init__(text)
        self.is_slight = is_slight


def run_case(case: Case) -> Result:
    """Never raises but KeyboardInterrupt.

    In float32 and bfloat16, rounding grows where a value stands at a kink or a variance is near zero. So a case that
    differs slightly there in one process counts as the same if it agrees to 1e-8 in float64.
    """
    torch.manual_seed(case.seed)
    try:
        with _alarm(SECONDS), _masks_of_eager_pytorch(case.regions):
            return _Comparison(case).run()
    except Exception as error:
        if isinstance(error, Differs) and error.is_slight and case.model.dtype in (torch.float32, torch.bfloat16):
            exact = run_case(replace(case, model=replace(case.model, dtype=torch.float64)))
            if exact.outcome == "same":
                return replace(exact, text=f"in float64; rounding: {error}")
        text = f"{type(error).__name__}: {error}"
        if not isinstance(error, Differs):
            text += "\n" + "".join(traceback.format_exception(error, limit=-12))
        return Result(case.seed, "failed", text)


class _Comparison:
    """Both sides of one case. `strict`: raise at the first difference; real ranks go on to the end, so that they stay
    together."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.ranks = math.prod(case.mesh)
        self.is_real = case.kind.endswith("ranks")
        trainees = 1 if case.marks or self.is_real else self.ranks
        made = [make_trainee(case.model, case.optimizer, case.groups, "") for _ in range(trainees)]
        self.eager = Distributed(made[0]) if case.kind in BESIDE_DDP else Eager(made)
        self.compiled = Module(case) if case.kind.startswith("module") else Compiled(case)
        loose = case.model.dtype == torch.float32 or any(part.kind == "odd_dtypes" for part in case.model.parts)
        self.tolerance = 0.1 if case.model.dtype == torch.bfloat16 else 2e-4 if loose else 1e-8
        self.first = ""

    def run(self) -> Result:
        with messages() as said:
            result = self._run()
        parts = list(self.compiled.trainees[0].model.modules())
        counts = any(isinstance(part, Counts) for part in parts)
        known = ".calls ", *(".rows " for part in parts if isinstance(part, SetsAttributes) and part.may_count_rows)
        warned = [text for text in said if "does only when it is traced" in text]
        wrong = [text for text in warned if not any(name in text for name in known)]
        if result.outcome == "same" and (counts > bool(warned) or wrong):
            raise Differs(f"what forwards change is told as {warned or 'nothing'}")
        return result

    def _run(self) -> Result:
        for number, step in enumerate(self.case.steps):
            try:
                self._step(number, step)
            except _Void as void:
                return Result(self.case.seed, "void", str(void))
            except cf.CommFuseError as error:
                reason = reason_of(error)
                if reason is None:
                    raise
                return Result(self.case.seed, "refused", reason)
        for trainee in self.compiled.trainees:
            for copied, values in trainee.copies:
                self._compare(copied.state_dict(), values, "a deep copy of the model, after later steps", 0.0)
        if isinstance(self.compiled, Compiled):
            self.compiled.step.synchronize()
        return Result(self.case.seed, "failed" if self.first else "same", self.first)

    def _step(self, number: int, step: Step) -> None:
        case, eager, compiled = self.case, self.eager, self.compiled
        for act in step.actions:
            self._act(act, f"step {number}, {act.kind}")
        batches = self._batches(number, step)
        whole, training = not case.accumulate, step.call == "no_grad"
        with _void_if_it_fails(f"step {number}"):
            want = eager.train(batches, whole) if step.call == "train" else eager.evaluate(batches, training)
        if len(batches) < len(compiled.trainees):
            batches = batches * len(compiled.trainees)
        have = compiled.train(batches) if step.call == "train" else compiled.evaluate(batches, training)
        for rank, loss in enumerate(have):
            self._compare({"loss": loss}, {"loss": want[rank % len(want)]}, f"step {number}, rank {rank}")
        if case.accumulate and step.call == "train" and step.update:
            for trainee in (*eager.trainees, *compiled.trainees):
                trainee.optimizer.step()
                trainee.optimizer.zero_grad()
        if step.check:
            for rank, trainee in enumerate(compiled.trainees):
                right = eager.trainees[rank % len(eager.trainees)].tensors()
                self._compare(trainee.tensors(), right, f"step {number}, rank {rank}")

    def _act(self, act: Act, where: str) -> None:
        if act.kind in OF_THE_STEP:
            self.compiled.act(act.kind, act.number)
            return
        with _void_if_it_fails(where):
            want = [ACTIONS[act.kind](each, random.Random(act.number)) for each in self.eager.trainees]
        have = [ACTIONS[act.kind](each, random.Random(act.number)) for each in self.compiled.trainees]
        if act.kind == "change_dtype":
            self.tolerance = max(self.tolerance, 2e-4)
        for rank, found in enumerate(have):
            self._compare(found, want[rank % len(want)], f"{where}, rank {rank}")

    def _batches(self, number: int, step: Step) -> list[Batch]:
        """One per eager trainee; that of a model to be divided is the whole batch."""
        rows = step.rows * (self.ranks if self.case.marks else 1)
        first = 100 * number + (dist.get_rank() if self.case.kind in BESIDE_DDP else 0)
        dtype = self.eager.trainees[0].dtype
        return [make_batch(self.case.model, rows, first + rank, dtype) for rank in range(len(self.eager.trainees))]

    def _compare(self, have: Named, want: Named, where: str, tolerance: float | None = None) -> None:
        try:
            compare(have, want, self.tolerance if tolerance is None else tolerance, where)
        except Differs as error:
            if not self.is_real:
                raise
            self.first = self.first or f"Differs: {error}"


class _Void(Exception):
    """Eager training cannot do this either."""


@contextmanager
def _void_if_it_fails(where: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise _Void(f"{where}: {type(error).__name__}: {error}") from error


def compare(have: Mapping[str, torch.Tensor], want: Mapping[str, torch.Tensor], tolerance: float, where: str) -> None:
    """Raises Differs. tolerance: relative and absolute; names that end in # are upper limits."""
    if have.keys() != want.keys():
        missing, extra = [n for n in want if n not in have], [n for n in have if n not in want]
        raise Differs(f"{where}: lacks {missing}, has besides {extra}")
    for name, right in want.items():
        found = have[name]
        if name.endswith("#"):
            if int(found) > int(right):
                raise Differs(f"{where}: {name} is {int(found)}, eager training has {int(right)}")
            continue
        if found.shape != right.shape or found.dtype != right.dtype:
            raise Differs(
                f"{where}: {name} is {found.dtype}{list(found.shape)}, "
                f"eager training has {right.dtype}{list(right.shape)}"
            )
        if torch.equal(found, right):  # as most are
            continue
        close = torch.isclose(found, right, rtol=tolerance, atol=tolerance, equal_nan=True)
        if not close.all():
            off = (found.double() - right.double()).abs().max()
            slight = torch.isclose(found, right, rtol=10 * tolerance, atol=10 * tolerance, equal_nan=True).all()
            raise Differs(
                f"{where}: {name} is off by {off:.2e}: {found.flatten()[:4]} for {right.flatten()[:4]}",
                bool(slight) or int((~close).sum()) == 1,
            )


@contextmanager
def _masks_of_eager_pytorch(regions: str) -> Iterator[None]:
    if not regions:
        yield
        return
    from torch._inductor import config  # takes seconds

    with config.patch(fallback_random=True):
        yield


@contextmanager
def _alarm(seconds: int) -> Iterator[None]:
    """Raise TimeoutError after so many seconds. While the process is held, one goes by at most."""
    left = seconds

    def tick(*_: object) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            raise TimeoutError(f"a case took more than {seconds} s")

    before = signal.signal(signal.SIGALRM, tick)
    signal.setitimer(signal.ITIMER_REAL, 1.0, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
