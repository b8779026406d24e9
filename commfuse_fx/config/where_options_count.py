"""Where each option of `compile` counts: a table, in which every option and every field of one has a row.

Why: docs/decisions.md, "An option without effect is an error where memory or numbers are not what was asked".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from commfuse_fx.config.fusion_config import KindFusion
from commfuse_fx.config.options import DEFAULTS, TrialLimits
from commfuse_fx.config.parallel_optimizer import ParallelOptimizer

ERROR, WARNING, LISTED = "error", "warning", "listed"
"""What becomes of an option that a call of `compile` gives and that has no effect there: an error where memory, numbers
or results would not be what was asked, a warning elsewhere; what the documents promise to do nothing is only listed."""


@dataclass(frozen=True)
class Idle:
    """An idle case is one in which an option has no effect.

    where: its name in `uses.WHERE`.
    then: ERROR, WARNING or LISTED.
    why: what there is in its place.
    fix: what to do in place of leaving the option out.
    stays: whether the configuration keeps its value all the same.
    """

    where: str
    then: str
    why: str
    fix: str = "leave {option} out"
    stays: bool = False


@dataclass(frozen=True)
class Row:
    """A row of the table says of one option, or of one field of an option, where it has no effect.

    asks: whether a value asks for something that would be missed.
    """

    asks: Callable[[Any], bool]
    idle: tuple[Idle, ...] = ()


def _is_true(value: Any) -> bool:
    return value is True


def _is_false(value: Any) -> bool:
    return value is False


def _is_given(value: Any) -> bool:
    return value is not None


def _is_kind(value: Any) -> bool:
    return bool(value != KindFusion())


def _differs(name: str) -> Callable[[Any], bool]:
    return lambda value: value is not None and value != DEFAULTS[name]


def _differs_in_sharing(name: str) -> Callable[[Any], bool]:
    return lambda value: value is not None and value != getattr(ParallelOptimizer(), name)


_ALONE = "no rank sends anything there"
_NO_LEVEL = "nothing is divided"
_SWITCH = "pass enable_parallel_optimizer=True as well, or leave {option} out"
_ROWS = (
    Idle("alone", ERROR, "each rank updates all of its parameters there"),
    Idle("no switch", ERROR, _NO_LEVEL, _SWITCH),
    Idle("switched off", WARNING, _NO_LEVEL),
    Idle(
        "no update",
        ERROR,
        "the step only computes gradients, and nothing is updated",
        "pass optimizer=, or leave {option} out",
    ),
)
_LEVEL = (
    Idle("rows, no switch", ERROR, _NO_LEVEL, _SWITCH),
    Idle("rows, switched off", WARNING, _NO_LEVEL),
)
_CLOSED = Idle("closed", LISTED, "it turns all fusion off")
_ORDERED = "gradients are sent in the order of the parameters"
_NOT_SEARCHED = 'pass parallel_mode="auto" as well, or leave {option} out'
_BUCKETS = Idle("in order", WARNING, f"{_ORDERED}, in buckets of 25 MiB", 'use mode "size"', stays=True)
_PREDICTIONS = "what it says only serves predictions"
_ONE_OF_TWO = "leave one of the two out"
_UNMEASURED = (
    Idle("alone", WARNING, _ALONE),
    Idle("virtual", LISTED, "nothing trains there"),
    Idle("kept plan", LISTED, "the first plan stays"),
)


TABLE: Mapping[str, Row] = MappingProxyType(
    {
        "has_aux": Row(_is_true, (Idle("module", ERROR, "a module returns all that the model returns"),)),
        "return_loss": Row(
            _is_false,
            (
                Idle(
                    "module",
                    ERROR,
                    "a module returns what the model returns, and the loss is the caller's",
                    "leave {option} out, or pass loss_fn or optimizer",
                ),
            ),
        ),
        "parallel_mode": Row(_is_given),
        "mesh": Row(_is_given),
        "device_num": Row(_is_given),
        "global_rank": Row(_is_given),
        "pipeline_stages": Row(_differs("pipeline_stages")),
        "capture": Row(_differs("capture")),  # a step refuses "dynamo"
        "find_unused_parameters": Row(
            _is_true,
            (
                Idle(
                    "step",
                    WARNING,
                    "it is an option of the module form; all ranks of a step trace the same graph, which knows "
                    "what is unused",
                ),
                Idle("alone", WARNING, _ALONE),
            ),
        ),
        "gradients_mean": Row(
            _is_false,
            (
                Idle("alone, one batch", WARNING, _ALONE),
                Idle(
                    "divided, one batch",
                    ERROR,
                    "gradients are those of the one loss of the global batch",
                    "leave {option} out, and let the loss be a sum in place of a mean",
                ),
            ),
        ),
        "gradient_fp32_sync": Row(_is_false, (Idle("alone", WARNING, _ALONE),)),
        "enable_parallel_optimizer": Row(
            _is_true,
            (
                Idle("alone", ERROR, "each rank updates all of its parameters there"),
                Idle(
                    "no update",
                    ERROR,
                    "the step only computes gradients, and nothing is updated",
                    "pass optimizer=, or leave {option} out",
                ),
                Idle(
                    "module of whole parameters",
                    ERROR,
                    "its caller updates the parameters",
                    "leave {option} out, and update with cf.ShardedOptimizer(model, torch.optim.AdamW, lr=...), which "
                    "takes "
                    'parallel_optimizer_config; or pass parallel_optimizer_config={{"level": 2}}, by which the module '
                    'divides gradients, or {{"level": 3}}, by which it divides parameters as well; or pass loss_fn and '
                    "optimizer for a step",
                ),
            ),
        ),
        "parallel_optimizer_config.level": Row(_is_given, (*_ROWS, *_LEVEL)),
        "parallel_optimizer_config.mode": Row(_differs_in_sharing("mode"), _ROWS),
        "parallel_optimizer_config.parallel_optimizer_threshold": Row(
            _differs_in_sharing("parallel_optimizer_threshold"), _ROWS
        ),
        "parallel_optimizer_config.optimizer_weight_shard_size": Row(
            _differs_in_sharing("optimizer_weight_shard_size"), _ROWS
        ),
        "parallel_optimizer_config.pad": Row(
            _is_true, (*_ROWS, Idle("owners", WARNING, "a rank has all rows of what it updates"))
        ),
        "parallel_optimizer_config.gradient_accumulation_shard": Row(
            _is_true,
            (
                Idle(
                    "module of rows",
                    ERROR,
                    "its loop says when gradients are reduced",
                    "leave {option} out, and run micro-batches without no_sync(), so that each backward reduces and "
                    "scatters, and ranks add up rows",
                ),
                *_ROWS,
                Idle("one batch", WARNING, "no sums of gradients are kept"),
            ),
        ),
        "search_mode": Row(
            _differs("search_mode"),
            (Idle("not searched", WARNING, "it searches no strategies", _NOT_SEARCHED),),
        ),
        "strategy_ckpt_load_file": Row(
            _is_given,
            (Idle("not searched", ERROR, "it takes no strategies", _NOT_SEARCHED),),
        ),
        "strategy_ckpt_load_strict": Row(
            _is_true,
            (
                Idle("not searched", WARNING, "it takes no strategies", _NOT_SEARCHED),
                Idle("no strategies", ERROR, "nothing is loaded", "give the file, or leave {option} out"),
            ),
        ),
        "strategy_ckpt_save_file": Row(
            _is_given,
            (Idle("not searched", WARNING, "it searches no strategies", _NOT_SEARCHED),),
        ),
        "full_batch": Row(
            _is_true,
            (
                Idle(
                    "module",
                    ERROR,
                    "a rank's output would be that of its rows, and the loss is the caller's",
                    "hand every rank its own rows and leave {option} out, or pass loss_fn",
                ),
                Idle("alone", WARNING, "a rank takes all that it is handed there"),
            ),
        ),
        "parameter_broadcast": Row(_is_true, (Idle("alone", ERROR, _ALONE),)),
        "broadcast_buffers": Row(
            _is_true,
            (
                Idle("alone", ERROR, _ALONE),
                Idle(
                    "divided",
                    ERROR,
                    "the ranks run one device's graph together, whose buffers are the same on all of them",
                ),
            ),
        ),
        "accumulate_steps": Row(
            _differs("accumulate_steps"),
            (
                Idle(
                    "no optimizer",
                    ERROR,
                    "the update is the caller's, and so is when it comes",
                    "pass optimizer=, or leave accumulate_steps out. A module accumulates under model.no_sync(), as "
                    "with DistributedDataParallel, and a step without an optimizer adds to param.grad in every call",
                ),
            ),
        ),
        "clip_grad_norm": Row(
            _is_given,
            (
                Idle(
                    "no optimizer",
                    ERROR,
                    "the update is the caller's, and so is what comes before it",
                    "pass optimizer=, or leave clip_grad_norm out and call "
                    "torch.nn.utils.clip_grad_norm_(model.parameters(), {value}) ahead of optimizer.step()",
                ),
            ),
        ),
        "comm_fusion.openstate": Row(_is_false),
        "comm_fusion.allreduce": Row(_is_kind, (_CLOSED,)),
        "comm_fusion.allgather": Row(_is_kind, (_CLOSED,)),
        "comm_fusion.reducescatter": Row(_is_kind, (_CLOSED,)),
        "comm_fusion.index": Row(_is_given, (Idle("alone", WARNING, "no gradient is reduced there"),)),
        "comm_fusion.optimal": Row(_is_true, (_BUCKETS,)),
        "schedule": Row(lambda value: value == "none"),
        "schedule.mode": Row(lambda value: value == "auto", _UNMEASURED),
        "schedule.across_steps": Row(
            _is_true,
            (
                Idle("module", WARNING, "the update is the caller's, and needs all gradients"),
                Idle("no optimizer", WARNING, "there is no update that could end in the next step"),
                Idle("alone", WARNING, "updates wait for no other rank there"),
            ),
        ),
        "memory_limit": Row(
            _is_given,
            (
                Idle("in order", ERROR, f"{_ORDERED}, whatever memory that takes", _ONE_OF_TWO),
                Idle(
                    "dynamo", ERROR, "graphs are planned one by one, and none knows what the others hold", _ONE_OF_TWO
                ),
            ),
        ),
        "replan": Row(
            lambda value: isinstance(value, TrialLimits),
            (
                Idle("nothing measured", WARNING, "nothing is tried"),
                Idle("dynamo", WARNING, "several graphs are not measured"),
                Idle("rows", WARNING, "its forwards communicate as well, and nothing measures these"),
                *_UNMEASURED,
            ),
        ),
        "backend": Row(_differs("backend")),
        "inductor_regions": Row(
            _differs("inductor_regions"),
            (
                Idle(
                    "eager", WARNING, "it compiles no regions", 'pass backend="inductor" as well, or leave {option} out'
                ),
            ),
        ),
        "cuda_graph": Row(_is_true),  # a module, a CPU and a divided step refuse it
        "cpu_kernels": Row(_is_false),
        "skip_passes": Row(bool),
        "cluster": Row(
            _is_given,
            (
                Idle("another cluster", WARNING, "plans are priced with that one", "give one of them", stays=True),
                Idle("in order", LISTED, f"{_ORDERED}, and {_PREDICTIONS}"),
                Idle("dynamo", LISTED, f"several ranks plan without prices, and {_PREDICTIONS}"),
                Idle("nothing moved", LISTED, f"it moves nothing, and {_PREDICTIONS}"),
                Idle("alone, measured", WARNING, _ALONE),
                Idle("default prices", WARNING, "nothing is priced"),
                Idle("virtual, measured", LISTED, "nothing trains there"),
                Idle("kept plan, measured", LISTED, "the first plan stays"),
            ),
        ),
        "exchange_factors": Row(_differs("exchange_factors")),
        "gradient_compression": Row(_is_given),
    }
)
