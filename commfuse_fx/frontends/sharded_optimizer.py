"""The optimizer of a compiled module whose state and update are divided among the ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from commfuse_fx.calls.update_session import CompiledUpdate, UpdateSession
from commfuse_fx.config.context import context_settings
from commfuse_fx.config.options import Default
from commfuse_fx.config.parallel_optimizer import BROADCAST, ParallelOptimizer
from commfuse_fx.errors import ConfigTypeError, ConfigValueError, NotAvailableError, VirtualWorldError
from commfuse_fx.frontends.module import CompiledModule
from commfuse_fx.gradients.gradient_parts import zero_gradients
from commfuse_fx.inspect.lowered import Lowered
from commfuse_fx.ir.updates.update_sharing import refuse_unknown
from commfuse_fx.kernels.described_optimizer import check_optimizer, describe_optimizer
from commfuse_fx.runtime.memory.modes import outside_inference_mode
from commfuse_fx.support.checks import show
from commfuse_fx.support.logs import logger
from commfuse_fx.support.ranks import is_distributed
from commfuse_fx.support.tracebacks import user_frames_only

log = logger("plan")

_NAME = "parallel_optimizer_config"


class ShardedOptimizer(torch.optim.Optimizer):
    """A sharded optimizer updates the parameters of a compiled module, each rank a part of them.

    `ShardedOptimizer(model, torch.optim.AdamW, lr=1e-3)` takes the place of
    `torch.optim.AdamW(model.parameters(), lr=1e-3)`, and trains to the same parameters. Of a parameter that is large
    enough each rank updates some rows, and holds the state of these alone. The backward of the module leaves whole
    gradients in `.grad`, so clipping and scaling stay as they are, and `step()` gathers what all ranks have updated.
    Where the module divides gradients (level 2), ranks hold rows of these; where it divides parameters as well (level
    3), `step()` gathers nothing.

    All ranks make it together, after the module, and call `step()` and `state_dict()` together.

    model: what `compile` has returned without `loss_fn` and `optimizer`.
    optimizer_class: a class of torch.optim whose update is known to the compiler.
    params: parameters or param groups, as for the class. None: all parameters of the model.
    parallel_optimizer_config: which parameters are divided, as for `compile`, at level 1. By default that of the
        module, else that of `set_auto_parallel_context`.
    options: what the class takes besides, such as `lr`.

    Raises ConfigTypeError or ConfigValueError for what is no compiled module, for another optimizer and for bad
    options, and NotAvailableError for `gradient_accumulation_shard`, which only a step has.
    """

    @user_frames_only
    def __init__(
        self,
        model: CompiledModule,
        optimizer_class: type[torch.optim.Optimizer],
        params: Iterable[Any] | None = None,
        *,
        parallel_optimizer_config: Any = Default(None),
        **options: Any,
    ) -> None:
        _check_module(model)
        _check_class(optimizer_class)
        _check_params(params)
        config = _checked_config(parallel_optimizer_config, model)
        self._optimizer = optimizer_class(model.parameters() if params is None else params, **options)
        check_optimizer(self._optimizer, model.module)
        refuse_unknown(describe_optimizer(self._optimizer, model.module), "ShardedOptimizer", "use it as it is")
        self._model = model
        if is_distributed():
            model._follow_world()
        self._update = CompiledUpdate(model._compiled, self._optimizer, config)
        begins_with = self._optimizer.state  # that of Adagrad
        super().__init__(self._optimizer.param_groups, self._optimizer.defaults)
        self.state = begins_with

    @property
    def state(self) -> Any:
        """The state of each parameter, as that of the class. Reading a divided one gathers it from all ranks."""
        return self._optimizer.state

    @state.setter
    def state(self, value: Any) -> None:
        self._optimizer.state = value

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The param groups, as those of the class."""
        return self._optimizer.param_groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        self._optimizer.param_groups = value

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Update these parameters of the model as well. All ranks call this together.

        Raises ConfigValueError for a parameter that is none of the model's, which is not added then.
        """
        self._optimizer.add_param_group(param_group)
        try:
            check_optimizer(self._optimizer, self._update.model)
        except ConfigValueError:
            self._optimizer.param_groups.pop()
            raise

    @user_frames_only
    @torch._disable_dynamo
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient. All ranks call this together.

        closure: computes the gradients anew, and returns the loss, which this returns.

        Raises PlanMismatchError where ranks have gradients of other parameters, PeerFailedError where another rank has
        failed before its update, CollectiveError where communication fails, CommFuseError for gradients that were not
        reduced, and VirtualWorldError in a virtual world.
        """
        if self._update.virtual:
            raise VirtualWorldError(
                f"the module was compiled for a virtual world (device_num={self._update.config.device_num}), which has "
                "no devices to run on: leave device_num out and start the program under torchrun; lower() works here"
            )
        self._follow_world()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with outside_inference_mode(), torch.enable_grad():
            self._session.update()
        return loss

    @torch._disable_dynamo
    def zero_grad(self, set_to_none: bool = True) -> None:
        """As of any optimizer. Where ranks hold rows of gradients, nothing is gathered for it."""
        params = [param for group in self.param_groups for param in group["params"]]
        zero_gradients(params, self._update.parts, set_to_none)

    @user_frames_only
    @torch._disable_dynamo
    def state_dict(self) -> dict[str, Any]:
        """That of the class, with whole tensors. All ranks call this together; any of them may then save it.

        Raises CollectiveError where ranks do not come together within a minute at most. Nothing is lost then.
        """
        self._session.runners.executors.open()
        return super().state_dict()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take what `load_state_dict` has made of a state."""
        self._optimizer.__setstate__(state)

    @user_frames_only
    def lower(self) -> Lowered:
        """Compile the update of all parameters that require a gradient, without running it. It works in a virtual
        world."""
        self._follow_world()
        held = dict.fromkeys(id(param) for group in self.param_groups for param in group["params"])
        named = self._update.model.named_parameters()
        learning = {name: param for name, param in named if id(param) in held and param.requires_grad}
        with torch.enable_grad():
            return self._update.lower(self._update.examples(learning))

    def _follow_world(self) -> None:
        """The module goes first, since the update works on its gradients."""
        self._model._follow_world()
        self._update._follow_world()

    @property
    def _session(self) -> UpdateSession:
        session = self._update.session
        assert isinstance(session, UpdateSession)
        return session

    def __getstate__(self) -> dict[str, Any]:
        raise NotAvailableError(
            "a ShardedOptimizer cannot be copied or pickled, as it belongs to a compiled module: copy or save its "
            "state_dict(), and make another one for the copy of the model, on all ranks"
        )


def _check_module(model: object) -> None:
    if isinstance(model, CompiledModule):
        return
    what = f"{model.__name__}, a class" if isinstance(model, type) else f"a {type(model).__name__}"
    if isinstance(model, nn.Module):
        fix = "pass what compile(model) has returned, whose backward reduces gradients"
    elif hasattr(model, "session"):
        fix = "a step updates by itself: pass optimizer= and enable_parallel_optimizer=True to compile()"
    else:
        fix = "pass what compile(model) has returned"
    raise ConfigTypeError(f"model is {what}, not a compiled module: {fix}")


def _check_class(optimizer_class: object) -> None:
    if isinstance(optimizer_class, torch.optim.Optimizer):
        name = type(optimizer_class).__name__
        raise ConfigTypeError(
            f"optimizer_class is an instance of {name}: pass the class and its options, as in "
            f"ShardedOptimizer(model, torch.optim.{name}, lr=...)"
        )
    if optimizer_class is torch.optim.LBFGS:
        raise ConfigValueError(
            "optimizer_class is LBFGS, which evaluates the loss several times in one step: use LBFGS as it is, over "
            "model.parameters(), or another optimizer"
        )
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, torch.optim.Optimizer)):
        raise ConfigTypeError(
            f"optimizer_class is {show(optimizer_class)}: pass a class of torch.optim, such as torch.optim.AdamW"
        )


def _check_params(params: object) -> None:
    if params is not None and not isinstance(params, Iterable):
        raise ConfigTypeError(
            f"params is {show(params)}; give parameters or param groups, or leave it out for all parameters of the "
            "model; options of the class have names, as in ShardedOptimizer(model, torch.optim.AdamW, lr=...)"
        )


def _checked_config(given: Any, model: CompiledModule) -> dict[str, Any] | None:
    """The options, by default those of the module, else of the context. Raises for bad ones."""
    of_module = model._compiled.config
    if of_module.parallel_optimizer is not None:
        return _as_of_module(given, of_module.parallel_optimizer, of_module.parallel_optimizer_config)
    is_own = not isinstance(given, Default)
    if not is_own:
        given = of_module.parallel_optimizer_config or context_settings().get(_NAME, given.value)
    options = ParallelOptimizer.parse(given, _NAME)
    if options.gradient_accumulation_shard:
        raise NotAvailableError(
            f'{_NAME}["gradient_accumulation_shard"] is True, and micro-batches of a compiled module add up whole '
            "gradients in .grad: leave it out, or pass loss_fn, optimizer and accumulate_steps to compile() for a step"
        )
    if options.level > 1:
        raise ConfigValueError(
            f'{_NAME}["level"] is {options.level}, and the module was compiled to hold whole parameters and gradients: '
            f'compile it with enable_parallel_optimizer=True and {_NAME}={{"level": {options.level}}}, and leave the '
            "options out here"
        )
    if is_own and options.pad and options.mode == BROADCAST:
        log.warning(
            '%s["pad"]=True has no effect with mode="%s": a rank has all rows of what it updates; leave pad out',
            _NAME,
            BROADCAST,
        )
    return None if given is None else dict(given)


def _as_of_module(given: Any, mine: ParallelOptimizer, config: dict[str, Any] | None) -> dict[str, Any] | None:
    """The options of a module that divides parameters or gradients. Raises ConfigValueError for others."""
    if not isinstance(given, Default) and ParallelOptimizer.parse(given, _NAME) != mine:
        asked = str(ParallelOptimizer.parse(given, _NAME)) or "level=1"
        raise ConfigValueError(
            f"{_NAME} of the ShardedOptimizer has {asked}, and the module was compiled with {mine}: leave it out here, "
            "as the module's options hold for its update"
        )
    return config
