"""Types of numpy, where it is installed: this package and torch run without it."""

from __future__ import annotations

from types import ModuleType
from typing import Any

SCALARS: tuple[Any, ...] = ()
ARRAYS: tuple[Any, ...] = ()
GENERATORS: tuple[Any, ...] = ()
"""Classes of numpy's random generators."""
GLOBAL_GENERATOR: tuple[ModuleType, Any] | None = None
"""The module `numpy.random` and the generator that its functions draw from."""

try:
    import numpy as np
except ImportError:
    pass
else:
    SCALARS, ARRAYS = (np.generic,), (np.ndarray,)
    GENERATORS = (np.random.Generator, np.random.RandomState)
    GLOBAL_GENERATOR = (np.random, np.random.mtrand._rand)
