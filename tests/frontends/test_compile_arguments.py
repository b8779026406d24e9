"""What people pass to compile() and to the step in place of what is meant: errors name the argument, value and fix."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import commfuse_fx as cf
from commfuse_fx.config.compile_config import CompileConfig
from commfuse_fx.frontends.compile_arguments import check_cuda_graph


class Net(nn.Module):
    """`run` is called on the output of a linear layer."""

    def __init__(self, run: Callable[[torch.Tensor], Any] = torch.tanh) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 4)
        self.run = run

    def forward(self, x: torch.Tensor) -> Any:
        return self.run(self.inner(x))


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters())


def compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="eager")


def compiled_in_place(module: nn.Module) -> nn.Module:
    module.compile(backend="eager")
    return module


def within(module: Any) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), module)


def empty_groups() -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    optimizer.param_groups[0]["params"] = []
    return optimizer


class Sharded(nn.Linear):
    """Stands for a wrapper of torch.distributed.fsdp, which only real ranks can make."""


Sharded.__module__ = "torch.distributed.fsdp._fully_shard"


@torch.compile(backend="eager")
def compiled_function(x: torch.Tensor, target: Any = None) -> torch.Tensor:
    return x.square().mean()


def scheduler(model: nn.Module) -> Any:
    return torch.optim.lr_scheduler.StepLR(adam(model), 1)


GIVEN: dict[str, tuple[Callable[[], Any], str]] = {
    "second optimizer": (lambda: cf.compile((m := Net()), adam(m)), r"comm_fusion=Adam: .*optimizer=\.\.\."),
    "second optimizer class": (lambda: cf.compile(Net(), torch.optim.Adam), r"comm_fusion=Adam: .*optimizer=\.\.\."),
    "second scheduler": (lambda: cf.compile((m := Net()), scheduler(m)), r"comm_fusion=StepLR: .*optimizer=\.\.\."),
    "second loss": (lambda: cf.compile(Net(), F.mse_loss), r"comm_fusion=mse_loss: .*loss_fn=\.\.\."),
    "second loss module": (lambda: cf.compile(Net(), nn.MSELoss()), r"comm_fusion=MSELoss: .*loss_fn=\.\.\."),
    "second loss class": (lambda: cf.compile(Net(), nn.MSELoss), r"comm_fusion=MSELoss: .*loss_fn=\.\.\."),
    "second string": (lambda: cf.compile(Net(), "auto"), "comm_fusion is 'auto'"),
    "model class": (lambda: cf.compile(Net), r"model=Net is a class: .*Net\(\.\.\.\)"),
    "model string": (lambda: cf.compile("resnet"), "model='resnet' of type str.*pass the module"),
    "model function": (lambda: cf.compile(F.relu), "model=relu of type function.*pass the module"),
    "loss class": (lambda: cf.compile(Net(), loss_fn=nn.MSELoss), r"loss_fn=MSELoss is a class: .*MSELoss\(\)"),
    "loss string": (lambda: cf.compile(Net(), loss_fn="mse"), "loss_fn='mse' is not callable"),
    "loss optimizer": (lambda: cf.compile((m := Net()), loss_fn=adam(m)), "loss_fn=Adam is an optimizer.*optimizer="),
    "loss compiled": (lambda: cf.compile(Net(), loss_fn=compiled_function), "loss_fn=.*torch.compile.*the original"),
    "loss module compiled": (lambda: cf.compile(Net(), loss_fn=compiled(nn.MSELoss())), "pass loss_fn._orig_mod"),
    "optimizer class": (lambda: cf.compile(Net(), optimizer=torch.optim.Adam), r"optimizer=Adam is a class.*Adam\(mod"),
    "optimizer string": (lambda: cf.compile(Net(), optimizer="adam"), "optimizer='adam' of type str"),
    "optimizer params": (lambda: cf.compile(Net(), optimizer=Net().parameters()), "generator.*torch.optim.AdamW"),
    "optimizer scheduler": (lambda: cf.compile((m := Net()), optimizer=scheduler(m)), "optimizer=StepLR is a sched"),
    "optimizer empty": (lambda: cf.compile(Net(), optimizer=empty_groups()), "SGD holds no parameters"),
    "accumulation in a module": (
        lambda: cf.compile(Net(), accumulate_steps=2),
        r"accumulate_steps=2 without an optimizer: .*model\.no_sync\(\)",
    ),
    "accumulation without an update": (
        lambda: cf.compile(Net(), loss_fn=F.mse_loss, accumulate_steps=3),
        r"accumulate_steps=3 without an optimizer: .*pass optimizer=.*adds to param\.grad",
    ),
    "clipping in a module": (
        lambda: cf.compile(Net(), clip_grad_norm=2),
        r"clip_grad_norm=2\.0 without an optimizer: .*torch\.nn\.utils\.clip_grad_norm_\(model\.parameters\(\), 2\.0\)",
    ),
    "clipping without an update": (
        lambda: cf.compile(Net(), loss_fn=F.mse_loss, clip_grad_norm=0.5),
        r"clip_grad_norm=0\.5 without an optimizer: .*pass optimizer=",
    ),
    "compiled": (lambda: cf.compile(compiled(Net())), r"model is compiled with torch\.compile.*pass model\._orig_mod"),
    "compiled part": (lambda: cf.compile(within(compiled(Net()))), r"set model\.1 = model\.1\._orig_mod"),
    "in place": (
        lambda: cf.compile(compiled_in_place(Net())),
        r"model is compiled in place, by its .* compile\(\)",
    ),
    "part in place": (lambda: cf.compile(within(compiled_in_place(Net()))), r"model\.1 is compiled in place"),
    "traced": (lambda: cf.compile(torch.jit.trace(nn.Linear(8, 4), torch.randn(2, 8))), "model is a .* of TorchScript"),
    "traced part": (
        lambda: cf.compile(within(torch.jit.trace(nn.Linear(8, 4), torch.randn(2, 8)))),
        r"model\.1 is a .* of TorchScript.*use the module it was made from",
    ),
    "data parallel": (
        lambda: cf.compile(nn.DataParallel(Net())),
        r"model is wrapped by DataParallel: use model\.mod",
    ),
    "mesh without ranks": (
        lambda: cf.compile(Net(), mesh=(2, 4)),
        r"mesh=\(2, 4\) has 8 devices, but this process has joined no world: call cf\.init\(\).*device_num=8",
    ),
    "fsdp": (lambda: cf.compile(within(Sharded(8, 4))), r"model\.1 is wrapped by FSDP"),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", GIVEN)
def test_arguments_of_compile(name: str) -> None:
    call, wanted = GIVEN[name]
    with pytest.raises((cf.ConfigTypeError, cf.ConfigValueError)) as raised:
        call()
    assert re.search(wanted, str(raised.value)), str(raised.value)


def test_a_wrapper_of_ddp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.parallel, "DistributedDataParallel", Net)  # the real one needs a process group
    with pytest.raises(cf.ConfigTypeError, match=r"wrapped by DistributedDataParallel: use model\.module"):
        cf.compile(Net(), form="step")


X, Y = torch.randn(3, 8), torch.randn(3, 4)
AT_A_CALL: dict[str, tuple[Callable[[], Any], str]] = {
    "no target": (
        lambda: cf.compile(Net(), loss_fn=F.mse_loss).lower(X),
        r"the last positional argument is the target.*shape \(3, 8\) is the target, which leaves 0 .*Net\.forward\(x\)",
    ),
    "no arguments": (lambda: cf.compile(Net(), loss_fn=F.mse_loss).lower(), "last positional argument is the target"),
    "names only": (lambda: cf.compile(Net(), loss_fn=F.mse_loss).lower(x=X), "keyword arguments x only, which go to"),
    "target by name": (
        lambda: cf.compile(Net(), loss_fn=F.mse_loss).lower(X, target=Y),
        "last positional argument is the target.*keyword arguments target",
    ),
    "unreduced": (
        lambda: cf.compile(Net(), loss_fn=nn.MSELoss(reduction="none")).lower(X, Y),
        r"^(?!.*pass loss_fn).*loss_fn returned a tensor of shape \(3, 4\), not a scalar loss: reduce it",
    ),
    "tuple": (lambda: cf.compile(Net(), loss_fn=lambda o, t: (o.sum(), o)).lower(X, Y), "returned tuple of 2.*alone"),
    "dict": (lambda: cf.compile(Net(), loss_fn=lambda o, t: {"l": o.sum()}).lower(X, Y), "dict with the keys l, not"),
    "number": (lambda: cf.compile(Net(), loss_fn=lambda o, t: 1.5).lower(X, Y), r"1\.5 of type float.*without \.item"),
    "nothing": (lambda: cf.compile(Net(), loss_fn=lambda o, t: None).lower(X, Y), r"None of type NoneType.*`return`"),
    "integers": (lambda: cf.compile(Net(), loss_fn=lambda o, t: o.argmax()).lower(X, Y), "dtype torch.int64"),
    "detached": (lambda: cf.compile(Net(), loss_fn=lambda o, t: o.detach().sum()).lower(X, Y), r"without detach\(\)"),
    "keys": (
        lambda: cf.compile(Net(lambda y: {"logits": y}), form="step").lower(X),
        'keys logits, which is neither.*"loss"',
    ),
    "compiled function": (
        lambda: cf.compile(Net(compiled_function), form="step").lower(X),
        r"cannot trace .* at .*test_compile_arguments\.py:\d+: a function .* torch\.compile",
    ),
}


@pytest.mark.parametrize("name", AT_A_CALL)
def test_arguments_and_results_of_a_call(name: str) -> None:
    call, wanted = AT_A_CALL[name]
    with pytest.raises((cf.CaptureError, cf.ConfigTypeError)) as raised:
        call()
    assert re.search(wanted, str(raised.value)), str(raised.value)


def test_a_type_error_of_the_model_itself_is_its_own() -> None:
    with pytest.raises(TypeError, match="unsupported operand") as raised:
        cf.compile(Net(lambda y: y + "one"), loss_fn=F.mse_loss).lower(X, Y)
    assert not isinstance(raised.value, cf.CommFuseError)


class OnCuda(Net):
    """Looks as if its parameters were on a GPU, which this machine need not have."""

    def parameters(self, recurse: bool = True) -> Any:
        return iter([SimpleNamespace(is_cuda=True)])


@pytest.mark.parametrize(
    ("model", "options", "form", "error", "says"),
    [
        (Net(), {}, "step", cf.ConfigValueError, r'no parameter of the model is on a CUDA device.*model\.to\("cuda"\)'),
        (OnCuda(), {}, "module", cf.NotAvailableError, "not available yet for the module form.*or pass loss_fn"),
        (
            OnCuda(),
            {"parallel_mode": "semi_auto"},
            "step",
            cf.NotAvailableError,
            'parallel_mode="semi_auto".*leave one',
        ),
    ],
    ids=["cpu", "module", "divided"],
)
def test_where_no_step_can_be_captured(
    model: nn.Module, options: dict[str, Any], form: str, error: type[Exception], says: str
) -> None:
    config = CompileConfig.resolve({"cuda_graph": True, **options}, form)
    with pytest.raises(error, match="cuda_graph=True.*" + says):
        check_cuda_graph(config, model, form)
    check_cuda_graph(CompileConfig.resolve({"cuda_graph": "auto", **options}, form), model, form)


def test_a_step_on_cuda_may_be_captured() -> None:
    check_cuda_graph(CompileConfig.resolve({"cuda_graph": True}), OnCuda(), "step")


def test_where_no_plan_is_tried() -> None:
    with pytest.raises(cf.NotAvailableError, match='schedule="auto" is not available yet with capture="dynamo"'):
        cf.compile(Net(), schedule="auto", capture="dynamo")
    for options in ({}, {"device_num": 4}):
        step = cf.compile(Net(), loss_fn=F.mse_loss, schedule="auto", **options)
        assert step.session.replan is None and step.profile_used() is None
        assert "# schedule: overlap" in step.lower(X, Y).text()
