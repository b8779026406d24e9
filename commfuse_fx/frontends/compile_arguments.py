"""What `compile` is given as model, loss function and optimizer, and what people give in their place.

What they raise names the argument, the value and the fix.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from commfuse_fx.capture.build import check_kinds
from commfuse_fx.config.compile_config import CompileConfig
from commfuse_fx.config.parallel_optimizer import BROADCAST, ParallelOptimizer
from commfuse_fx.errors import ConfigTypeError, ConfigValueError, NotAvailableError
from commfuse_fx.frontends.arguments_of_ddp import INSTEAD
from commfuse_fx.frontends.trained_model import check_model, named, problem_of
from commfuse_fx.kernels.described_optimizer import check_optimizer
from commfuse_fx.support.checks import check_choice, is_int, show


def check_arguments(model: object, comm_fusion: object, loss_fn: object, optimizer: object) -> None:
    """Raise unless `compile` can take these."""
    _check_position(comm_fusion)
    check_model(model)
    assert isinstance(model, nn.Module)
    check_kinds(model)
    if loss_fn is not None:
        _check_loss_fn(loss_fn)
    if optimizer is not None:
        _check_is_no_stand_in(optimizer)
        check_optimizer(optimizer, model)


def chosen_form(form: object, loss_fn: object, optimizer: object) -> str:
    """ "step" or "module": what is asked for, else what the other arguments say."""
    if form is None:
        return "module" if loss_fn is None and optimizer is None else "step"
    chosen = check_choice(form, "form", ("step", "module"))
    if chosen == "module":
        for name, value in (("loss_fn", loss_fn), ("optimizer", optimizer)):
            if value is not None:
                raise ConfigValueError(
                    f'form="module" with {name}={named(value)}: a module returns what the model returns, and its '
                    f'caller computes the loss and updates the parameters; leave {name} out, or use form="step"'
                )
    return chosen


def check_cuda_graph(config: CompileConfig, model: nn.Module, form: str) -> None:
    """Raise for cuda_graph=True where no step can be captured. form: "step" or "module"."""
    if config.cuda_graph is not True:
        return
    if form == "module":
        raise NotAvailableError(
            'cuda_graph=True is not available yet for the module form (form="module", or compile without loss_fn and '
            "optimizer), whose backward the caller starts: leave it out, or pass loss_fn and optimizer for a step"
        )
    if not any(param.is_cuda for param in model.parameters()):
        raise ConfigValueError(
            'cuda_graph=True, and no parameter of the model is on a CUDA device: leave it out (the default "auto" '
            'captures nothing there), or move the model first, as by model.to("cuda")'
        )
    if config.divides_graphs:
        raise NotAvailableError(
            f'cuda_graph=True is not available yet with parallel_mode="{config.parallel_mode}", which divides the '
            'graph among ranks: leave one of them out (the default cuda_graph="auto" runs such a step without a graph)'
        )


def check_form_of_module(config: CompileConfig) -> None:
    """Raise for options that a module cannot have yet."""
    if config.divides_graphs:
        raise NotAvailableError(
            f'parallel_mode="{config.parallel_mode}" is not available yet for the module form (form="module", or '
            "compile without loss_fn and optimizer): a loss over a rank's part of the output has no global meaning; "
            'pass loss_fn or form="step"'
        )
    if (sharded := config.parallel_optimizer) is not None:
        _check_parallel_optimizer_of_module(config, sharded)
    if config.asks_to_measure and config.capture == "dynamo":
        raise NotAvailableError(
            f'{_measured(config)} is not available yet with capture="dynamo", which makes several graphs: leave it '
            'out, or use capture="trace"'
        )


def _check_parallel_optimizer_of_module(config: CompileConfig, sharded: ParallelOptimizer) -> None:
    """Raise unless a module, whose caller updates its parameters, can divide them like this."""
    asked = f"enable_parallel_optimizer=True with the module form and level={sharded.level}"
    if sharded.mode == BROADCAST:
        raise NotAvailableError(
            f'{asked} is not available yet with mode="{BROADCAST}", where one rank has all of a gradient: leave mode '
            f"out, or leave enable_parallel_optimizer out and give the mode to cf.ShardedOptimizer"
        )
    if config.capture == "dynamo":
        raise NotAvailableError(
            f'{asked} is not available yet with capture="dynamo", which makes several graphs: use capture="trace", or '
            "leave enable_parallel_optimizer out and use cf.ShardedOptimizer, which divides the optimizer's state"
        )
    if config.asks_to_measure:
        raise NotAvailableError(f"{_measured(config)} is not available yet with {asked}: leave one of them out")


def _measured(config: CompileConfig) -> str:
    """The option by which plans follow from measurement."""
    return 'schedule="auto"' if config.is_auto else 'cluster="measured"'


def check_form_of_step(config: CompileConfig) -> None:
    """Raise for Dynamo, which only a module has, and for what a divided step does not have yet."""
    if config.has_aux and config.divides_graphs:
        raise NotAvailableError(
            f'has_aux=True is not available yet with parallel_mode="{config.parallel_mode}", where each rank has a '
            "part of the outputs; leave it out, or use data_parallel"
        )
    if config.capture == "dynamo":
        raise ConfigValueError(
            'capture="dynamo" is an option of the module form (form="module", or compile without loss_fn and '
            "optimizer): a step is one graph from the loss to the update, and Dynamo makes several; leave it out"
        )


def _check_position(comm_fusion: object) -> None:
    """The second positional argument is comm_fusion, which nobody who passes something else there knows."""
    given = comm_fusion if isinstance(comm_fusion, (list, tuple)) else ()
    if given and all(is_int(item) or isinstance(item, torch.device) for item in given):
        raise ConfigTypeError(
            f"comm_fusion is {show(comm_fusion)}: the second positional argument of compile() is comm_fusion, a dict, "
            f"not the device_ids of DistributedDataParallel: {INSTEAD['device_ids']}"
        )
    if isinstance(comm_fusion, type):
        is_optimizer = issubclass(comm_fusion, torch.optim.Optimizer)
    else:
        is_optimizer = isinstance(comm_fusion, (torch.optim.Optimizer, LRScheduler))
    if is_optimizer:
        wanted = "optimizer"
    elif callable(comm_fusion):
        wanted = "loss_fn"
    else:
        return
    raise ConfigTypeError(
        f"comm_fusion={named(comm_fusion)}: the second positional argument of compile() is comm_fusion, a dict; "
        f"pass {'an optimizer' if is_optimizer else 'a loss function'} by its name, {wanted}=..."
    )


def _check_loss_fn(loss_fn: object) -> None:
    if isinstance(loss_fn, type):
        raise ConfigTypeError(f"loss_fn={loss_fn.__name__} is a class: pass an instance of it, {loss_fn.__name__}()")
    if isinstance(loss_fn, torch.optim.Optimizer):
        raise ConfigTypeError(f"loss_fn={named(loss_fn)} is an optimizer: pass it as optimizer=")
    if not callable(loss_fn):
        raise ConfigTypeError(
            f"loss_fn={show(loss_fn)} is not callable: pass a function or module of (output, target) -> scalar, such "
            "as torch.nn.functional.cross_entropy"
        )
    if hasattr(loss_fn, "_torchdynamo_orig_callable") and not isinstance(loss_fn, nn.Module):
        raise ConfigTypeError(
            f"loss_fn={named(loss_fn)} is compiled with torch.compile, which cannot be traced: pass the original"
        )
    if isinstance(loss_fn, nn.Module):
        problem = problem_of(loss_fn, "loss_fn")
        if problem:
            raise ConfigTypeError(f"loss_fn is {problem}")


def _check_is_no_stand_in(optimizer: object) -> None:
    """For what is no optimizer, but leads to one."""
    if isinstance(optimizer, type):
        raise ConfigTypeError(
            f"optimizer={optimizer.__name__} is a class: pass an instance, {optimizer.__name__}(model.parameters())"
        )
    if isinstance(optimizer, LRScheduler) or hasattr(getattr(optimizer, "optimizer", None), "param_groups"):
        raise ConfigTypeError(
            f"optimizer={named(optimizer)} is a scheduler or a wrapper around an optimizer: pass the optimizer "
            "itself (its attribute `optimizer`), and call scheduler.step() after the step as always"
        )
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigTypeError(
            f"optimizer={show(optimizer)} of type {type(optimizer).__name__} is not a torch.optim.Optimizer: pass an "
            "instance such as torch.optim.AdamW(model.parameters())"
        )
