"""The nodes of an update by the rule of an optimizer."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from commfuse_fx.ir.core.builder import Builder, aten
from commfuse_fx.ir.core.meta import NodeInfo, Spec, TensorSpec, info, tensor_spec
from commfuse_fx.ir.core.program import Update
from commfuse_fx.ir.updates.plain_updates import plain_adagrad_, plain_adam_, plain_rmsprop_, plain_sgd_
from commfuse_fx.ir.updates.whole_updates import WHOLE_UPDATES
from commfuse_fx.kernels.update_rules import RULES

_LIKE = NodeInfo("update")


def emit_update(
    build: Builder,
    update: Update,
    flags: dict[str, Any],
    params: Sequence[fx.Node],
    grads: Sequence[fx.Node],
    before: fx.Node | None = None,
) -> None:
    """Write an update in front of a node, by default at the end of the step. `params` and `grads` have one entry per
    segment."""
    build.program.updates.append(update)
    place = build.program.output if before is None else before
    _Emitter(build, len(build.program.updates) - 1, flags, list(params), list(grads), place).emit()


class _Emitter:
    """Emits one update. Lists of state tensors are inputs of the graph, one tensor per segment."""

    def __init__(
        self,
        build: Builder,
        owner: int,
        flags: dict[str, Any],
        params: list[fx.Node],
        grads: list[fx.Node],
        before: fx.Node,
    ) -> None:
        self.build = build
        self.before = before
        self.owner = owner
        self.flags = flags
        self.segments = build.program.updates[owner].segments
        self.rule = RULES[build.program.updates[owner].rule]
        self.params = params
        self.grads = grads
        self.specs: tuple[Spec, ...] = tuple(info(param).spec for param in params)

    def state(self, name: str) -> fx.Node:
        return self.build.placeholder("state", name, self.specs, self.owner)

    def hyper(self, *names: str) -> dict[str, fx.Node]:
        return {name: self.build.placeholder("hyper", name, None, self.owner) for name in names}

    def numbers_of_parameters(self, name: str) -> fx.Node:
        """A list with one tensor per segment, which has a number for each parameter."""
        one = TensorSpec((1,), torch.float32, (1,), tensor_spec(self.params[0]).device)
        return self.build.placeholder("state", name, tuple(one for _ in self.params), self.owner)

    def steps(self) -> fx.Node:
        """Count the step; returns the list of step counts that kernels take, one number per segment."""
        one = TensorSpec((), torch.float32, (), tensor_spec(self.params[0]).device)
        specs = tuple(one for _ in self.params)
        steps = self.build.placeholder("state", "steps", specs, self.owner)
        firsts = self.build.placeholder("state", "step", specs, self.owner)
        self.call(aten._foreach_add_.Scalar, (steps, 1), "step")
        return firsts

    def call(
        self,
        target: Any,
        args: tuple[Any, ...],
        label: str,
        kwargs: dict[str, Any] | None = None,
        spec: Spec = None,
    ) -> fx.Node:
        with self.build.before(self.before):
            return self.build.call(target, args, kwargs, spec=spec, like=_LIKE, name=f"update.{self.owner}/{label}")

    def number(self, target: Any, *args: Any) -> fx.Node:
        """A Python number computed from hyper-parameters."""
        with self.build.before(self.before):
            name = self.build.program.names.numbered(f"update.{self.owner}/{target.__name__}")
            return self.build.call(target, args, spec=None, like=_LIKE, name=name)

    def each(self, target: Any, args: tuple[Any, ...], label: str, kwargs: dict[str, Any] | None = None) -> fx.Node:
        """A _foreach_ op that makes a list of new tensors."""
        return self.call(target, args, label, kwargs, spec=self.specs)

    def emit(self) -> None:
        is_plain = not self.build.program.params[self.segments[0].members[0][0]].is_block
        (_PLAIN if is_plain else _EMIT)[self.rule.name](self)


def _adam(emit: _Emitter) -> None:
    op = aten._fused_adamw_.default if emit.flags["decoupled"] else aten._fused_adam_.default
    averages = [emit.state("exp_avg"), emit.state("exp_avg_sq")]
    maxima: Any = emit.state("max_exp_avg_sq") if emit.flags["amsgrad"] else []
    numbers = emit.hyper("lr", "beta1", "beta2", "weight_decay", "eps")
    flags = {"amsgrad": emit.flags["amsgrad"], "maximize": emit.flags["maximize"]}
    emit.call(op, (emit.params, emit.grads, *averages, maxima, emit.steps()), emit.rule.name, {**numbers, **flags})


def _sgd(emit: _Emitter) -> None:
    spec = emit.specs[0]
    if isinstance(spec, TensorSpec) and spec.device == "cpu" and spec.dtype in (torch.bfloat16, torch.float16):
        # There the fused kernel (torch 2.13) leaves the parameters as they were, but for the last few elements.
        _sgd_of_lists(emit)
    else:
        _fused_sgd(emit)


def _sgd_of_lists(emit: _Emitter) -> None:
    """The list ops, in the order of torch.optim.sgd. A new momentum buffer is zero, and takes the whole gradient."""
    number = emit.hyper("weight_decay", "momentum", "lr", "dampening", "is_first_step")
    descent = emit.number(operator.neg, number["lr"])
    grads: Any = emit.grads
    if emit.flags["maximize"]:
        grads = emit.each(aten._foreach_neg.default, (grads,), "maximize")
    grads = emit.each(aten._foreach_add.List, (grads, emit.params), "weight_decay", {"alpha": number["weight_decay"]})
    if emit.flags["momentum"]:
        buffers = emit.state("momentum_buffer")
        damped = emit.number(operator.mul, number["dampening"], emit.number(operator.not_, number["is_first_step"]))
        share = emit.number(operator.sub, 1, damped)
        emit.call(aten._foreach_mul_.Scalar, (buffers, number["momentum"]), "momentum.decay")
        emit.call(aten._foreach_add_.List, (buffers, grads), "momentum", {"alpha": share})
        if emit.flags["nesterov"]:
            grads = emit.each(aten._foreach_add.List, (grads, buffers), "nesterov", {"alpha": number["momentum"]})
        else:
            grads = buffers
    emit.call(aten._foreach_add_.List, (emit.params, grads), "sgd", {"alpha": descent})


def _fused_sgd(emit: _Emitter) -> None:
    buffers: Any = emit.state("momentum_buffer") if emit.flags["momentum"] else []
    numbers = emit.hyper("weight_decay", "momentum", "lr", "dampening", "is_first_step")
    first = numbers.pop("is_first_step")
    flags = {"nesterov": emit.flags["nesterov"], "maximize": emit.flags["maximize"], "is_first_step": first}
    emit.call(aten._fused_sgd_.default, (emit.params, emit.grads, buffers), "sgd", {**numbers, **flags})


def _adagrad(emit: _Emitter) -> None:
    numbers = emit.hyper("lr", "lr_decay", "weight_decay", "eps")
    sums = emit.state("sum")
    args = (emit.params, emit.grads, sums, emit.steps())
    emit.call(aten._fused_adagrad_.default, args, "adagrad", {**numbers, "maximize": emit.flags["maximize"]})


def _rmsprop(emit: _Emitter) -> None:
    """No fused kernel exists: the list ops, in the order of torch.optim.rmsprop."""
    flags = emit.flags
    number = emit.hyper("lr", "alpha", "eps", *(("momentum",) if flags["momentum"] else ()))
    square = emit.state("square_avg")
    emit.steps()
    rest = emit.number(operator.sub, 1, number["alpha"])
    descent = emit.number(operator.neg, number["lr"])
    grads: Any = emit.grads
    if flags["maximize"]:
        grads = emit.each(aten._foreach_neg.default, (grads,), "maximize")
    if flags["weight_decay"]:
        decay = emit.hyper("weight_decay")["weight_decay"]
        grads = emit.each(aten._foreach_add.List, (grads, emit.params), "weight_decay", {"alpha": decay})
    emit.call(aten._foreach_mul_.Scalar, (square, number["alpha"]), "square_avg.decay")
    emit.call(aten._foreach_addcmul_.Scalar, (square, grads, grads, rest), "square_avg")
    if flags["centered"]:
        mean = emit.state("grad_avg")
        emit.call(aten._foreach_lerp_.Scalar, (mean, grads, rest), "grad_avg")
        average = emit.each(aten._foreach_addcmul.Scalar, (square, mean, mean, -1), "variance")
        emit.call(aten._foreach_sqrt_.default, (average,), "sqrt")
    else:
        average = emit.each(aten._foreach_sqrt.default, (square,), "sqrt")
    emit.call(aten._foreach_add_.Scalar, (average, number["eps"]), "eps")
    if flags["momentum"]:
        buffer = emit.state("momentum_buffer")
        emit.call(aten._foreach_mul_.Scalar, (buffer, number["momentum"]), "momentum.decay")
        emit.call(aten._foreach_addcdiv_.Scalar, (buffer, grads, average, 1), "momentum")
        emit.call(aten._foreach_add_.List, (emit.params, buffer), "rmsprop", {"alpha": descent})
    else:
        emit.call(aten._foreach_addcdiv_.Scalar, (emit.params, grads, average, descent), "rmsprop")


def _in_one_op(op: Any) -> Callable[[_Emitter], None]:
    """By an op that makes the whole update, and counts the step. Its lists have the names of states, in the plural."""

    def emit_op(emit: _Emitter) -> None:
        used = emit.rule.states(emit.flags)
        lists = [argument.name for argument in op._schema.arguments if not argument.kwarg_only][2:]
        args: list[Any] = [emit.params, emit.grads]
        for name in lists:
            state = name.removesuffix("s")
            if state in emit.rule.scalars:
                args.append(emit.numbers_of_parameters(name))
            else:
                args.append(emit.state(state) if state in used else [])
        settings = [argument for argument in op._schema.arguments if argument.kwarg_only]
        flags = {
            each.name: emit.flags[each.name]
            for each in settings
            if str(each.type) == "bool" and each.name in emit.flags
        }
        numbers = emit.hyper(*(each.name for each in settings if each.name not in flags))
        emit.call(op, tuple(args), emit.rule.name, {**numbers, **flags})

    return emit_op


_PLAIN = {
    "adam": _in_one_op(plain_adam_),
    "adamw": _in_one_op(plain_adam_),
    "sgd": _in_one_op(plain_sgd_),
    "adagrad": _in_one_op(plain_adagrad_),
    "rmsprop": _in_one_op(plain_rmsprop_),
    **{name: _in_one_op(update.plain) for name, update in WHOLE_UPDATES.items()},
}
"""For parameters that are no block of memory of their own."""


_EMIT: dict[str, Callable[[_Emitter], None]] = {
    "adam": _adam,
    "adamw": _adam,
    "sgd": _sgd,
    "adagrad": _adagrad,
    "rmsprop": _rmsprop,
    **{name: _in_one_op(update.op) for name, update in WHOLE_UPDATES.items()},
}
