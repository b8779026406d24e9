"""Marks on a model's parameters that say how their collectives are treated.

Why: docs/decisions.md, "No fusion id and fusion id 0 differ, and None counts as not given".
"""

from __future__ import annotations

from typing import TypeVar

import torch

from commfuse_fx.errors import ConfigTypeError
from commfuse_fx.support.checks import check_bool, check_int, show
from commfuse_fx.support.tracebacks import user_frames_only

_FUSION_ID = "comm_fusion"
_LAYERWISE_PARALLEL = "layerwise_parallel"
_PARALLEL_OPTIMIZER = "parallel_optimizer"

ModuleT = TypeVar("ModuleT", bound=torch.nn.Module)


@user_frames_only
def set_comm_fusion(module: ModuleT, fusion_id: int) -> ModuleT:
    """Mark all trainable parameters of `module` with a fusion id, and return the module.

    Collectives with the same id > 0 are fused into one where their keys allow; those with id 0 are never fused.
    The last call wins; `param.comm_fusion = 2` does the same for one parameter. `copy.deepcopy` of a module drops such
    marks, as torch copies no attributes of parameters.

    Raises ConfigTypeError (not a module; an id that is a bool or no int) or ConfigValueError (negative id).
    """
    if not isinstance(module, torch.nn.Module):
        raise ConfigTypeError(f"module is {show(module)}; give a torch.nn.Module")
    check_fusion_id(fusion_id, "fusion_id")
    for param in module.parameters():
        if param.requires_grad:
            setattr(param, _FUSION_ID, fusion_id)
    return module


def read_fusion_id(param: torch.Tensor, name: str) -> int | None:
    """The fusion id that `param` is marked with, or None. `name` is the parameter's name, for the message.

    Raises ConfigTypeError or ConfigValueError for an id set by hand that is not an int >= 0.
    """
    value = getattr(param, _FUSION_ID, None)
    return None if value is None else check_fusion_id(value, f'comm_fusion of parameter "{name}"')


def read_layerwise_parallel(param: torch.Tensor, name: str) -> bool:
    """Whether `param`, a parameter or a buffer, is marked as each rank's own: no gradient of it is reduced, and no
    value sent. `name` is for the message.

    Raises ConfigTypeError for a mark that is not a bool.
    """
    value = getattr(param, _LAYERWISE_PARALLEL, False)
    return check_bool(value, f'layerwise_parallel of parameter "{name}"')


def is_of_each_rank(tensor: torch.Tensor, parallel_mode: str) -> bool:
    """Whether each rank has its own of this parameter or buffer: the mark counts in hybrid_parallel."""
    return parallel_mode == "hybrid_parallel" and bool(getattr(tensor, _LAYERWISE_PARALLEL, False))


def read_parallel_optimizer(param: torch.Tensor, name: str) -> bool:
    """Whether the update of `param` may be divided among ranks: it is not marked with False. `name` is for the message.

    Raises ConfigTypeError for a mark that is not a bool.
    """
    value = getattr(param, _PARALLEL_OPTIMIZER, True)
    return check_bool(value, f'parallel_optimizer of parameter "{name}"')


def check_fusion_id(value: object, where: str) -> int:
    """`value` if it is a fusion id, an int >= 0. Raises ConfigTypeError or ConfigValueError."""
    return check_int(value, where, 0)
