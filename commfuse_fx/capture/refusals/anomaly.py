"""Switch off torch.autograd.detect_anomaly while a model is traced."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch

log = logging.getLogger("commfuse_fx.trace")


@contextmanager
def without_anomaly_detection() -> Iterator[None]:
    """Inside the `with` block anomaly detection is off: it reads the values of gradients, and a trace has none."""
    if not torch.is_anomaly_enabled():
        yield
        return
    log.warning(
        "anomaly detection is switched off while the model is traced, and sees nothing of a compiled step, in which "
        "autograd does not run; run the model itself to find the op that makes a NaN"
    )
    with torch.autograd.set_detect_anomaly(False):
        yield
