"""Make a failing case smaller while it fails in the same way."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from tests.property.compare_cases import Result, run_case
from tests.property.random_cases import Case

MOST_RUNS = 300


def shrink(case: Case, result: Result) -> tuple[Case, Result]:
    """The smallest case found that fails as this one does, and its result."""
    runs, progress = 0, True
    while progress:
        progress = False
        for smaller in _smaller(case):
            runs += 1
            if runs > MOST_RUNS:
                return case, result
            found = run_case(smaller)
            if found.outcome == "failed" and _kind(found) == _kind(result):
                case, result, progress = smaller, found, True
                break
    return case, result


def _kind(result: Result) -> str:
    """What stays of a failure when the case gets smaller: the first line without numbers and names."""
    line = result.text.partition("\n")[0]
    line = re.sub(r"step \d+(, \w+)?(, rank \d+)?: .* is off by.*", "off", line)
    return re.sub(r"[\d.e+-]+|tensor\(.*|'[^']*'", "", line)[:80]


def _smaller(case: Case) -> Iterator[Case]:
    for count in (2, 4, 7):
        if count < len(case.steps):
            yield replace(case, steps=(*case.steps[: count - 1], replace(case.steps[count - 1], check=True)))
    for number in range(len(case.steps)):
        if len(case.steps) > 1:
            yield replace(case, steps=case.steps[:number] + case.steps[number + 1 :])
    for number, step in enumerate(case.steps):
        for place in range(len(step.actions)):
            fewer = replace(step, actions=step.actions[:place] + step.actions[place + 1 :])
            yield replace(case, steps=(*case.steps[:number], fewer, *case.steps[number + 1 :]))
        if step.call != "train":
            yield replace(case, steps=(*case.steps[:number], replace(step, call="train"), *case.steps[number + 1 :]))
    model = case.model
    for number in range(len(model.parts)):
        yield replace(case, model=replace(model, parts=model.parts[:number] + model.parts[number + 1 :]))
    if model.ties:
        yield replace(case, model=replace(model, ties=()))
    if model.loss != "mse":
        yield replace(case, model=replace(model, loss="mse"))
    plain = {"optimizer": "sgd", "groups": "one", "flags": "", "accumulate": False, "fusion": "default"}
    for name, value in plain.items():
        if getattr(case, name) != value:
            yield replace(case, **{name: value})
    if case.kind != "one":
        yield replace(case, kind="one", mesh=(1,))
    for number, mark in enumerate(case.marks):
        if mark != 2:
            yield replace(case, marks=(*case.marks[:number], 2, *case.marks[number + 1 :]))
