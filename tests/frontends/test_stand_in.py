"""A compiled module answers what programs and libraries ask of a wrapper as the page for users of DDP says."""

from __future__ import annotations

import ast
import copy
import logging
import re
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.join import Joinable
from torch.nn.parallel import DistributedDataParallel

import commfuse_fx as cf
from commfuse_fx.frontends.arguments_of_ddp import ATTRIBUTES

PAGE = Path(__file__).resolve().parents[2] / "docs" / "coming-from-ddp.md"


class Net(nn.Module):
    """It holds something of each kind itself, and in parts, of which one is called `module`."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("shift", torch.zeros(4))
        self.register_buffer("unsaved", torch.zeros(4), persistent=False)
        self._factor = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.module(x)) * self.scale * self._factor + self.shift + self.unsaved


def batch() -> torch.Tensor:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


def questions() -> dict[str, Any]:
    """What is asked -> the answer, of the table "What libraries ask"."""
    section = PAGE.read_text().split("## What libraries ask\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(.+?)` \| .*? \| `(.+?)`", section, re.MULTILINE)
    return {question: ast.literal_eval(answer) for question, answer in rows}


def test_the_table_of_questions_is_read() -> None:
    assert len(questions()) >= 20


@pytest.mark.parametrize("question", questions())
def test_a_question_of_a_library_gets_the_answer_of_the_page(question: str) -> None:
    accelerate = pytest.importorskip("accelerate") if "accelerator" in question else None
    model = cf.compile(nn.Sequential(nn.Linear(2, 2)))
    names = {"model": model, "Joinable": Joinable, "DistributedDataParallel": DistributedDataParallel, "copy": copy}
    if accelerate is not None:
        names["accelerator"] = accelerate.Accelerator(cpu=True)
    assert eval(question, names) == questions()[question]


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_an_attribute_of_ddp_is_refused_by_name(name: str) -> None:
    rows = re.findall(r"^\| (`\w+`.*?) \| not there: (.*?) \|$", PAGE.read_text(), re.MULTILINE)
    (text,) = [text for names, text in rows if f"`{name}`" in names]
    assert text.replace("`", "") == ATTRIBUTES[name].replace("`", "")
    model = cf.compile(nn.Linear(2, 2))
    with pytest.raises(cf.NotThereError, match=re.escape(f"{name} is an attribute of Dist")):
        getattr(model, name)
    with pytest.raises(AttributeError, match=re.escape(ATTRIBUTES[name])):
        setattr(model, name, True)
    setattr(model.module, name, 3)
    assert getattr(model, name) == 3


@pytest.mark.parametrize("name", ["verify", "verified", "save", "load", "profile", "record_communication"])
def test_what_only_a_step_has_is_refused_by_name(name: str) -> None:
    assert hasattr(cf.CompiledStep, name)
    model = cf.compile(nn.Linear(2, 2))
    with pytest.raises(cf.NotThereError, match=f"{name} is an attribute of a compiled step.*: "):
        getattr(model, name)
    model.save = 3
    assert model.module.save == 3 and model.save == 3


def test_nothing_that_ddp_has_is_answered_by_chance() -> None:
    """A private attribute of DDP is missing, or it is one of any module, or a table says what it is."""
    model = cf.compile(nn.Linear(2, 2))
    known = {"require_backward_grad_sync", "module", "no_sync", "_join_config", "register_comm_hook", "_abc_impl"}
    known |= {name for name in dir(DistributedDataParallel) if name.startswith("join")}
    of_ddp = {name for name in vars(DistributedDataParallel) if not name.startswith("__")}
    assert {name for name in of_ddp if hasattr(model, name)} - known - {*dir(nn.Linear(2, 2))} == set()


def test_the_list_of_what_ddp_ignores_is_refused() -> None:
    net = nn.Linear(2, 2)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["weight"])
    for options in ({}, {"loss_fn": nn.functional.mse_loss}):
        with pytest.raises(cf.ConfigValueError, match=r"ignore is \['weight'\], which only Dist.*layerwise_parallel"):
            cf.compile(net, **options)


# Attributes and parts


@pytest.mark.parametrize("capture", ["trace", "dynamo"])
def test_attributes_are_those_of_the_model(capture: str) -> None:
    net = Net()
    model = cf.compile(net, capture=capture)
    before = model(batch())
    model._factor = 2.0
    torch.testing.assert_close(model(batch()), before * 2)
    assert net._factor == 2.0 and model._factor == 2.0
    model._note = 1  # as Accelerate does
    assert model._note == 1 and not hasattr(net, "_note")
    del model._note, model._factor
    assert not hasattr(net, "_factor") and not hasattr(model, "_factor")
    model.result = None
    net.result = 3  # as a forward may set it
    assert model.result == 3


def test_what_is_registered_is_trained_and_saved() -> None:
    net = nn.Sequential(nn.Linear(2, 2))
    model = cf.compile(net)
    model.register_buffer("count", torch.zeros(1))
    model.register_parameter("bias", nn.Parameter(torch.ones(2)))
    model.more = nn.Linear(2, 2)
    model.add_module("most", nn.Linear(2, 2))
    model.register_module("last", nn.Linear(2, 2))
    model.gain = nn.Parameter(torch.ones(2))
    model.set_submodule("0", nn.Linear(2, 2, bias=False))
    assert (
        [*model.state_dict()] == [*net.state_dict()]
        and "last.weight" in net.state_dict()
        and "count" in dict(net.named_buffers())
    )
    assert {id(param) for param in model.parameters()} == {id(param) for param in net.parameters()}
    assert len([*model.parameters()]) == 9 and [*dict(model.named_children())] == ["module"]
    calls = []
    model.register_state_dict_post_hook(lambda *args: calls.append("saved"))
    model.register_load_state_dict_pre_hook(lambda *args: calls.append("loads"))
    model.register_load_state_dict_post_hook(lambda *args: calls.append("loaded"))
    model.load_state_dict(model.state_dict())
    assert calls == ["saved", "loads", "loaded"]


def test_attributes_that_a_compiled_module_hides_are_named(caplog: pytest.LogCaptureFixture) -> None:
    class Joined(nn.Linear):
        def join(self) -> str:
            return "mine"

    net = Joined(2, 2)
    net._calls = 0
    with caplog.at_level(logging.WARNING):
        model = cf.compile(net)
        cf.compile(Net())
    assert [record.getMessage() for record in caplog.records if "itself" in record.getMessage()] == [
        "a compiled module has _calls, join itself, which test_attributes_that_a_compiled_module_hides_are_named."
        "<locals>.Joined has as well: model.module._calls is that of the model"
    ]
    assert model.module.join() == "mine"


# Names


def test_names_are_those_of_the_model_in_a_module_that_holds_it() -> None:
    ours, plain = nn.ModuleDict({"part": cf.compile(Net())}), nn.ModuleDict({"part": Net()})
    for ask in ("named_parameters", "named_buffers", "state_dict"):
        assert [*dict(getattr(ours, ask)())] == [*dict(getattr(plain, ask)())]
    assert [*dict(ours.named_modules())] == [*dict(plain.named_modules())]
    state = OrderedDict((name, torch.full_like(value, 2)) for name, value in plain.state_dict().items())
    assert not any(ours.load_state_dict(state))
    assert all((value == 2).all() for value in ours.state_dict().values())
    wrong = {"part.other": torch.ones(1)}
    assert ours.load_state_dict(wrong, strict=False).unexpected_keys == ["part.module.other"]
    held = [param for module in ours.modules() for param in module.parameters(recurse=False)]
    assert len(held) == len({*map(id, held)}) == 5
    assert ours["part"].get_submodule("module") is ours["part"].module.module
    assert cf.compile(nn.Sequential(nn.Linear(2, 2))).get_parameter("module.0.weight").shape == (2, 2)


def test_torch_saves_and_loads_by_the_names_of_the_model() -> None:
    from torch.distributed.checkpoint import state_dict as saving  # takes long to import

    def trained(steps: int) -> tuple[nn.Module, torch.optim.Optimizer, nn.Module]:
        torch.manual_seed(steps)
        net = Net()
        model = cf.compile(net, cpu_kernels=False)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for _ in range(steps):
            model(batch()).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model, optimizer, net

    for around in (lambda model: model, lambda model: nn.ModuleDict({"part": model}), lambda model: model.module):
        for options in (None, saving.StateDictOptions(strict=False), saving.StateDictOptions(full_state_dict=True)):
            model, optimizer, net = trained(2)
            of_model, of_optimizer = saving.get_state_dict(around(model), optimizer, options=options)
            named = {name.removeprefix("part.") for name in of_model}
            assert named == {*net.state_dict()} and {*of_optimizer["state"]} <= {*of_model}
            state = copy.deepcopy((of_model, of_optimizer))
            other, other_optimizer, other_net = trained(1)
            saving.set_state_dict(
                around(other), other_optimizer, model_state_dict=state[0], optim_state_dict=state[1], options=options
            )
            for each in (optimizer, other_optimizer):
                assert len(each.state) == 5
                for group in each.param_groups:
                    for param in group["params"]:
                        param.grad = torch.ones_like(param)
                each.step()
            torch.testing.assert_close(net.state_dict(), other_net.state_dict(), rtol=0, atol=0)


# Another model


@pytest.mark.parametrize("capture", ["trace", "dynamo"])
def test_a_model_that_is_assigned_is_the_one_that_trains(capture: str) -> None:
    first, other = nn.Linear(4, 4), Net().eval()
    model = cf.compile(first, capture=capture)
    loss = model(batch()).sum()
    model.module = other
    model.require_backward_grad_sync = False
    twin = copy.deepcopy(other)
    assert not model.training
    for _ in range(2):
        for call in (model, twin):
            call.train()
            call(batch()).square().sum().backward()
    torch.testing.assert_close([p.grad for p in other.parameters()], [p.grad for p in twin.parameters()])
    torch.testing.assert_close(other.state_dict(), twin.state_dict())
    assert [*model.state_dict()] == [*other.state_dict()]
    loss.backward()  # of the first one
    assert first.weight.grad is not None
    for bad in (None, 3, model, nn.Sequential(model), nn.parallel.DataParallel(first)):
        with pytest.raises(cf.ConfigTypeError, match="module is|model is|model.0 is"):
            model.module = bad
        assert model.module is other


def _changed_by_set_submodule(model: Any) -> Any:
    model.set_submodule("module.1", nn.SyncBatchNorm(2))
    return model


@pytest.mark.parametrize("convert", [nn.SyncBatchNorm.convert_sync_batchnorm, _changed_by_set_submodule])
def test_a_library_changes_parts_through_the_level_of_module(convert: Callable[[Any], Any]) -> None:
    """As PyTorch's own tests do it: `add_module("module", ...)` put the model into itself."""
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model = cf.compile(net)
    assert convert(model) is model and model.module is net
    assert isinstance(net[1], nn.SyncBatchNorm) and [*model.state_dict()] == [*net.state_dict()]
    model(torch.randn(4, 2)).sum().backward()
    assert net[1].weight.grad is not None


@pytest.mark.parametrize("name", ["add_module", "register_module", "set_submodule", "__setattr__"])
def test_a_library_puts_another_model_in_place(name: str) -> None:
    model, other = cf.compile(nn.BatchNorm1d(2)), nn.BatchNorm1d(2)
    getattr(model, name)("module", other)
    assert model.module is other
    model(torch.randn(4, 2)).sum().backward()
    assert other.weight.grad is not None
    assert nn.SyncBatchNorm.convert_sync_batchnorm(model) is model and isinstance(model.module, nn.SyncBatchNorm)
    model(torch.randn(4, 2)).sum().backward()
    assert model.module.weight.grad is not None and model.module.weight is other.weight
