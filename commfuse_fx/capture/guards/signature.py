"""The signature of a call: calls with different signatures need different graphs.

Why: docs/decisions.md, "What chooses kernels makes a new graph".
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Iterator, Mapping, Sequence, ValuesView
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

from commfuse_fx.capture.guards.model_structure import (
    GLOBAL_HOOKS,
    HOOKS,
    PARAMETER_MARKS,
    TENSOR_HOOKS,
    ModelStructure,
    marks_in,
)
from commfuse_fx.capture.guards.tree import Structure
from commfuse_fx.errors import CaptureError
from commfuse_fx.kernels.described_optimizer import optimizer_key
from commfuse_fx.sharding.marking.marks import marks_made

_IS_TRAINING = operator.attrgetter("training")
_REQUIRES_GRAD = operator.attrgetter("requires_grad")
_DTYPE = operator.attrgetter("dtype")
_TENSOR_HOOKS = tuple(map(operator.attrgetter, TENSOR_HOOKS))


CHOICES_OF_KERNELS: Mapping[str, Callable[[], Any]] = {
    "torch.backends.mkldnn": torch._C._get_mkldnn_enabled,
    "torch.backends.cudnn": torch._C._get_cudnn_enabled,
    "deterministic algorithms": torch.are_deterministic_algorithms_enabled,
    "number of threads": torch.get_num_threads,
    "flash attention": torch._C._get_flash_sdp_enabled,
    "memory-efficient attention": torch._C._get_mem_efficient_sdp_enabled,
    "attention by plain ops": torch._C._get_math_sdp_enabled,
    "attention by cuDNN": torch._C._get_cudnn_sdp_enabled,
    "attention by plain ops in half precision": torch._C._get_math_sdp_allow_fp16_bf16_reduction,
    "order of kernels of attention": lambda: tuple(torch._C._get_sdp_priority_order()),
}
"""Of attention the trace has recorded the kernel. Another kernel may also lay its results out in another way, which the
first run of a graph has looked at."""


@dataclass(frozen=True)
class Signature:
    """A hashable signature of a call. `capture.differences.cause` explains how two signatures differ."""

    argument_structure: Structure
    tensors: tuple[Any, ...]
    model: ModelStructure
    layout_of_parameters_or_buffers: int
    train_or_eval_mode: tuple[bool, ...]
    gradients: bool
    requires_grad: tuple[bool, ...]
    autocast: tuple[Any, ...]
    default_dtype: torch.dtype
    choice_of_kernels: tuple[Any, ...]
    optimizer: Any


class Watch:
    """Watches a model and its optimizer, and makes the signatures of calls.

    Before every step it checks cheaply whether modules, parameters, buffers, hooks or marks were replaced, added or
    removed.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None, trains_in_eval_mode: bool = False
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._trains_in_eval_mode = trains_in_eval_mode
        self._modules: list[nn.Module] = []
        self._laid_out: list[torch.Tensor] = []
        self._own_tensors: frozenset[int] = frozenset()
        self._known_layouts: dict[tuple[Any, ...], int] = {}
        self._layout: tuple[tuple[Any, ...] | None, int] = (None, 0)
        self._structure: ModelStructure | None = None  # until the first look
        # Dicts in which modules hold their parameters, buffers and submodules, and their content at the last look.
        self._empty: list[dict[Any, Any]] = []
        self._filled: list[dict[Any, Any]] = []
        self._views: list[ValuesView[Any]] = []
        self._names: list[str] = []
        self._held: list[Any] = []
        self._params: list[nn.Parameter] = []
        self._tensor_hooks: list[Any] = []  # of them, as they were at the last look
        self._unhooked: list[dict[int, Any]] = []
        self._next_hook = 0  # the number that the next hook of the process gets
        self._marks_made = 0  # by `cf.shard`, in this process
        self._bare: list[torch.Tensor] = []  # without attributes, and so without marks
        self._attributed: list[torch.Tensor] = []
        self._marks: list[Any] = []  # the values of the marks of these
        self._parameter_names: dict[int, str] = {}
        self.params: Mapping[str, nn.Parameter] = {}
        self.buffers: Mapping[str, torch.Tensor] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy starts with a new look at its own model."""
        return Watch, (self._model, self._optimizer, self._trains_in_eval_mode)

    @property
    def structure(self) -> ModelStructure:
        """The structure of the model at the last look."""
        assert self._structure is not None, "a signature was asked for"
        return self._structure

    @property
    def trains(self) -> bool:
        """Whether a call made now computes gradients."""
        return (self._model.training or self._trains_in_eval_mode) and torch.is_grad_enabled()

    @property
    def own_tensors(self) -> Container[int]:
        """The ids of the model's parameters and buffers at the last look."""
        return self._own_tensors

    def look(self) -> None:
        """Bring `params` and `buffers` up to date."""
        if not self._is_up_to_date():
            self._look()

    def _look(self) -> None:
        _refuse_tensors_of_a_call(self._model)
        self._structure = ModelStructure.of(self._model)
        self._modules = list(self._model.modules())
        self.params = dict(self._model.named_parameters())
        self.buffers = dict(self._model.named_buffers())
        held = (*self.params.values(), *self.buffers.values())
        self._own_tensors = frozenset(map(id, held))
        self._laid_out = [each for each in held if not is_lazy(each)]
        self._parameter_names = {id(param): name for name, param in self.params.items()}
        dicts: list[dict[Any, Any]] = [
            held for module in self._modules for held in (module._parameters, module._buffers, module._modules)
        ]
        self._empty = [held for held in dicts if not held]
        self._filled = [held for held in (*dicts, *self._look_at_hooks()) if held]
        self._views = [held.values() for held in self._filled]
        self._names = list(chain.from_iterable(self._filled))
        self._held = list(chain.from_iterable(self._views))
        self._look_at_marks()

    def _is_up_to_date(self) -> bool:
        # This runs before every step, so it runs no line of Python per module.
        return (
            self._structure is not None
            and not any(self._empty)
            and list(chain.from_iterable(self._filled)) == self._names
            and all(map(operator.is_, chain.from_iterable(self._views), self._held))
            and (RemovableHandle.next_id == self._next_hook or self._has_no_new_hooks())
            and (self._marks_look_the_same() or self._has_no_new_marks())
        )

    def _look_at_marks(self) -> None:
        self._marks_made = marks_made()
        held = (*self._params, *self.buffers.values())
        self._bare = [each for each in held if not vars(each)]
        self._attributed = [each for each in held if vars(each)]
        self._marks = list(self._present_marks())

    def _present_marks(self) -> Iterator[Any]:
        return chain.from_iterable(
            map(getattr, self._attributed, repeat(name), repeat(None)) for name in PARAMETER_MARKS
        )

    def _marks_look_the_same(self) -> bool:
        return (
            marks_made() == self._marks_made
            and not any(map(vars, self._bare))
            and all(map(operator.is_, self._present_marks(), self._marks))
        )

    def _has_no_new_marks(self) -> bool:
        """Whether only other attributes, or marks of other models, are new."""
        if tuple(marks_in(self._model)) != self.structure.marks:
            return False
        self._look_at_marks()
        return True

    def _look_at_hooks(self) -> list[dict[int, Any]]:
        """All dicts of hooks. Every new hook takes a number, so empty dicts are only checked when that has grown."""
        self._next_hook = RemovableHandle.next_id
        self._params = list(self.params.values())
        self._tensor_hooks = list(self._hooks_of_tensors())
        dicts = [held for module in self._modules for name in HOOKS if (held := vars(module).get(name)) is not None]
        dicts = [*dicts, *GLOBAL_HOOKS, *(held for held in self._tensor_hooks if held is not None)]
        self._unhooked = [held for held in dicts if not held]
        return dicts

    def _has_no_new_hooks(self) -> bool:
        if any(self._unhooked) or not all(map(operator.is_, self._hooks_of_tensors(), self._tensor_hooks)):
            return False
        self._next_hook = RemovableHandle.next_id
        return True

    def _hooks_of_tensors(self) -> Iterator[Any]:
        return chain.from_iterable(map(get, self._params) for get in _TENSOR_HOOKS)

    def signature(self, structure: Structure, tensors: Sequence[torch.Tensor]) -> Signature:
        """The signature of a call with these tensors, as things stand now."""
        self.look()
        return Signature(
            structure,
            tuple((t.shape, t.dtype, t.device, t.stride(), t.requires_grad) for t in tensors),
            self.structure,
            self._number_of_layouts(),
            tuple(map(_IS_TRAINING, self._modules)),
            self.trains,
            tuple(map(_REQUIRES_GRAD, self.params.values())),
            _autocast(),
            torch.get_default_dtype(),
            tuple(read() for read in CHOICES_OF_KERNELS.values()),
            None if self._optimizer is None else optimizer_key(self._optimizer, self._parameter_names),
        )

    def _number_of_layouts(self) -> int:
        """A number for the present shapes, strides and dtypes, since those of hundreds of tensors are slow to hash."""
        held = self._laid_out
        layout = (*map(torch.Tensor.size, held), *map(torch.Tensor.stride, held), *map(_DTYPE, held))
        if layout != self._layout[0]:
            self._layout = layout, self._known_layouts.setdefault(layout, len(self._known_layouts))
        return self._layout[1]


def _autocast() -> tuple[Any, ...]:
    return tuple(
        torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None for device in ("cpu", "cuda")
    )


def _refuse_tensors_of_a_call(model: nn.Module) -> None:
    """Raises CaptureError where tensors stand in place of parameters for one call: those get the gradients."""
    for name, param in model.named_parameters():
        if not isinstance(param, nn.Parameter):
            raise CaptureError(
                f"parameter {name} is a tensor in place of an nn.Parameter, as torch.func.functional_call puts it "
                "there: call the model itself with other values, not what compile() made of it"
            )
