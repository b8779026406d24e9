"""Refuse functions of torch.distributed in a model's forward.

They would communicate while the model is traced, and would be no part of the compiled step. The tracer sees the ops
behind most of these functions. Functions that do work before they reach an op are patched here by name.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

import torch.distributed as dist

from commfuse_fx.capture.torch_parts.this_thread import patched_here
from commfuse_fx.errors import CaptureError
from commfuse_fx.support.user_lines import is_user_file

_HERE = dist.__file__.removesuffix("__init__.py")
_WRAPPERS = ("c10d_logger.py", "_composable_state.py")

_SIBLINGS = {  # name in cf.ops -> how torch's names begin; the first that fits counts
    "reduce_scatter": ("reduce_scatter",),
    "all_reduce": ("all_reduce", "allreduce", "reduce"),
    "all_gather": ("all_gather", "allgather", "gather"),
    "broadcast": ("broadcast", "scatter"),
    "all_to_all": ("all_to_all", "alltoall"),
}


def is_eager_collective(op: Any) -> bool:
    """Whether this op communicates with other ranks when it is called."""
    return getattr(op, "namespace", "") in ("c10d", "symm_mem")


def refuse_eager_collective(op: Any) -> None:
    """Raises CaptureError, which names the function that the user called and what to use in its place."""
    raise CaptureError(_refusal(_called() or op._schema.name.split("::")[1].strip("_")))


@contextmanager
def eager_collectives_refused() -> Iterator[None]:
    """Inside the `with` block, functions of torch.distributed that do work before they reach an op are refused too."""
    if not dist.is_available():
        yield
        return
    c10d = dist.distributed_c10d
    with ExitStack() as stack:
        for name in ("_object_to_tensor", "_tensor_to_object", "_coalescing_manager"):
            if hasattr(c10d, name):
                stack.enter_context(patched_here(c10d, name, _refuse_call))
        yield


def _refuse_call(*args: Any, **kwargs: Any) -> Any:
    raise CaptureError(_refusal(_called() or "a collective"))


def _called() -> str:
    """The name of the function of torch.distributed that the user's code has called."""
    found = ""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(_HERE):
            if not code.co_filename.endswith(_WRAPPERS):
                found = code.co_name
        elif found and is_user_file(code.co_filename):
            break
        frame = frame.f_back
    return found


def _refusal(called: str) -> str:
    return (
        f"{called} of torch.distributed would run once, while the model is traced, and be no part of the step: "
        f"{_remedy(called)}"
    )


def _remedy(called: str) -> str:
    if "object" in called:
        return "exchange objects outside of the model's forward, and pass it their content as an argument"
    if "barrier" in called:
        return "move it out of the model's forward (the ranks of a compiled step keep together by themselves)"
    name = called.strip("_")
    for sibling, beginnings in _SIBLINGS.items():
        if name.startswith(beginnings):
            more = ", and take this rank's part of it" if name.startswith("scatter") else ""
            return f"use cf.ops.{sibling}, which becomes a collective of the step and has a gradient{more}"
    return "move it out of the model's forward, or use cf.ops.all_to_all"
