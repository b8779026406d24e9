"""Attributes of parameters and buffers (`weight.gain = 2.0`) can be read and set while a model is traced."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from commfuse_fx.capture.guards.reads import Reads

_OF_TORCH = (torch.Tensor, nn.Parameter, nn.Buffer)


@contextmanager
def own_attributes(stand_ins: Mapping[torch.Tensor, torch.Tensor], reads: Reads | None) -> Iterator[None]:
    """Inside the `with` block, a stand-in has the attributes that the user has stored on its original.

    Otherwise `getattr(weight, "gain", 1.0)` would give 1.0, whatever the user has set. `reads` notes these reads,
    and at the end of the block what the forward has set. Copies would not tell what was read: tools that set an
    attribute in every step would have it traced each time.
    """
    originals = {id(stand_in): original for original, stand_in in stand_ins.items()}
    of_torch = {id(stand_in): set(vars(stand_in)) for stand_in in stand_ins.values()}

    def look_up(tensor: FakeTensor, name: str) -> Any:
        """Python calls this where the usual places have no such attribute."""
        original = originals.get(id(tensor))
        if original is not None and not name.startswith("__"):
            held = vars(original)
            if reads is not None:
                reads.got_of_tensor(original, name)
            if name in held:
                return held[name]
            if type(original) not in _OF_TORCH and hasattr(type(original), name):
                return getattr(original, name)
        raise AttributeError(f"{type(tensor).__name__!r} object has no attribute {name!r}")

    with patch.object(FakeTensor, "__getattr__", look_up, create=True):
        yield
    if reads is not None:
        for original, stand_in in stand_ins.items():
            for name, value in vars(stand_in).items():
                if name not in of_torch[id(stand_in)]:
                    reads.stored_in_tensor(original, name, value)
