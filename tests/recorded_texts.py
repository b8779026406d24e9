"""Record what is compiled for 30 pairs of model and configuration: `python -m tests.recorded_texts FILE`.

A second run with the same file compares: canonical text, fingerprint and collectives have to be the same, byte for
byte, wherever a change is to move code and no text. `--write` records anew.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import commfuse_fx as cf
from tests import models
from tests.models import Case

LEVELS = {f"level {level}": {"level": level} for level in (1, 2, 3)} | {"owners": {"mode": "broadcast"}}
OPTIMAL = {"allreduce": {"mode": "optimal", "config": None}}
STEPS: dict[str, dict[str, Any]] = {
    "default": {},
    "stand_alone": {"parallel_mode": "stand_alone", "device_num": 1},
    "by size": {"comm_fusion": {"allreduce": {"mode": "size", "config": 1}}},
    "by index": {"comm_fusion": {"allreduce": {"mode": "index", "config": [2, 3]}}},
    "optimal": {"comm_fusion": OPTIMAL, "cluster": "gloo-1gbit"},
    "across": {"comm_fusion": OPTIMAL, "cluster": "gloo-1gbit", "schedule": cf.ScheduleConfig(across_steps=True)},
    "unscheduled": {"schedule": "none"},
    "hybrid": {"parallel_mode": "hybrid_parallel"},
    "full batch": {"full_batch": True},
    "micro-batches": {"accumulate_steps": 2, "clip_grad_norm": 1.0},
    "inductor": {"backend": "inductor"},
    "auto": {"parallel_mode": "auto", "cluster": "gloo-1gbit"},
    "auto on two axes": {"parallel_mode": "auto", "mesh": (2, 2), "cluster": "gloo-1gbit"},
    **{name: {"enable_parallel_optimizer": True, "parallel_optimizer_config": each} for name, each in LEVELS.items()},
}
PAIRS: tuple[tuple[Case, str, str], ...] = (
    *((models.WIDE, "step", name) for name in STEPS),
    *((models.GPT2, "step", name) for name in ("default", "optimal", "across", "auto", "level 3")),
    (models.CONV, "step", "default"),
    (models.BERT_CLASSIFIER, "step", "default"),
    (models.TIED, "step", "level 2"),
    (models.WIDE, "step", "semi_auto"),
    *((models.WIDE, "module", name) for name in ("default", "by size", "optimal", "level 2", "level 3")),
    (models.GPT2, "module", "default"),
    (models.CONV, "module", "default"),
)


def compiled(case: Case, form: str, name: str) -> Any:
    """What `lower` returns for one of the pairs, on rank 1 of 4."""
    model, batch = case.model(torch.float32), case.batches(1, dtype=torch.float32)[0]
    options: dict[str, Any] = {"device_num": 4, "global_rank": 1} | STEPS.get(name, {})
    if options["device_num"] == 1:
        options["global_rank"] = 0
    if "enable_parallel_optimizer" in options:
        for param in model.parameters():
            param.parallel_optimizer = True
    if name == "semi_auto":
        first, *_, last = (part for part in model.modules() if isinstance(part, torch.nn.Linear))
        cf.shard(first, weight=("tp", None))
        cf.shard(last, weight=(None, "tp"))
        options |= {"parallel_mode": "semi_auto", "mesh": (2, 2)}
    if form == "module":
        inputs = batch[:-1] if case.loss_fn is not None else batch
        return cf.compile(model, **options).lower(*inputs)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return cf.compile(model, loss_fn=case.loss_fn, optimizer=optimizer, **options).lower(*batch)


def records(pairs: tuple[tuple[Case, str, str], ...] = PAIRS) -> Iterator[tuple[str, dict[str, str]]]:
    for case, form, name in pairs:
        lowered = compiled(case, form, name)
        kinds: dict[str, Callable[[], str]] = {
            "text": lowered.text,
            "fingerprint": lambda lowered=lowered: lowered.fingerprint,
            "collectives": lambda lowered=lowered: "\n".join(map(repr, lowered.collectives)),
        }
        yield f"{case.name}, {form}, {name}", {kind: _hash(of()) for kind, of in kinds.items()}


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.recorded_texts", description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    found = dict(records())
    if options.write or not options.file.exists():
        options.file.write_text(json.dumps(found, indent=1) + "\n")
        print(f"{len(found)} pairs recorded")
        return 0
    before = json.loads(options.file.read_text())
    differ = [name for name in before if before[name] != found.get(name)]
    print(f"{len(found)} pairs, {len(differ)} differ", *differ, sep="\n")
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
