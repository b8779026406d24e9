from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from commfuse_fx.config.fusion_marks import (
    check_fusion_id,
    read_fusion_id,
    read_layerwise_parallel,
    set_comm_fusion,
)
from commfuse_fx.errors import ConfigTypeError, ConfigValueError

BAD_IDS = [
    (ConfigTypeError, True),
    (ConfigTypeError, False),
    (ConfigTypeError, "1"),
    (ConfigTypeError, 1.0),
    (ConfigTypeError, [1]),
    (ConfigTypeError, torch.tensor(1)),
    (ConfigValueError, -1),
    (ConfigValueError, -100),
]


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))


def ids(module: nn.Module) -> list[int | None]:
    return [read_fusion_id(param, name) for name, param in module.named_parameters()]


@pytest.mark.parametrize("fusion_id", [0, 1, 2, 10**9])
def test_set_comm_fusion_marks_every_parameter_and_chains(fusion_id):
    net = model()
    assert set_comm_fusion(net, fusion_id) is net
    assert ids(net) == [fusion_id] * 6
    assert net[0].weight.comm_fusion == fusion_id


def test_only_trainable_parameters_are_marked():
    net = model()
    net[0].weight.requires_grad_(False)
    set_comm_fusion(net, 3)
    assert ids(net) == [None, 3, 3, 3, 3, 3]
    assert not hasattr(net[0].weight, "comm_fusion")


def test_the_last_call_wins_on_what_it_covers():
    net = set_comm_fusion(model(), 1)
    set_comm_fusion(net[2], 2)
    net[0].bias.comm_fusion = 5
    assert ids(net) == [1, 5, 1, 1, 2, 2]


def test_a_module_without_parameters_is_returned_as_it_was():
    relu = nn.ReLU()
    assert set_comm_fusion(relu, 1) is relu


@pytest.mark.parametrize(("error", "value"), [*BAD_IDS, (ConfigTypeError, None)])
def test_set_comm_fusion_refuses_a_bad_id_and_marks_nothing(error, value):
    net = model()
    with pytest.raises(error, match=re.escape(f"fusion_id is {value!r}; give an int >= 0")):
        set_comm_fusion(net, value)
    assert ids(net) == [None] * 6


@pytest.mark.parametrize("target", [None, "layer1", nn.Parameter(torch.zeros(1))])
def test_set_comm_fusion_refuses_what_is_no_module(target):
    with pytest.raises(ConfigTypeError, match=r"module is .*give a torch\.nn\.Module"):
        set_comm_fusion(target, 1)


@pytest.mark.parametrize(("error", "value"), BAD_IDS)
def test_an_id_set_by_hand_is_checked_when_read(error, value):
    param = nn.Parameter(torch.zeros(1))
    param.comm_fusion = value
    with pytest.raises(
        error, match=re.escape(f'comm_fusion of parameter "head.weight" is {value!r}; give an int >= 0')
    ):
        read_fusion_id(param, "head.weight")


def test_no_id_and_none_mean_unmarked():
    param = nn.Parameter(torch.zeros(1))
    assert read_fusion_id(param, "w") is None
    param.comm_fusion = None
    assert read_fusion_id(param, "w") is None


@pytest.mark.parametrize(("error", "value"), BAD_IDS)
def test_check_fusion_id_names_the_place(error, value):
    with pytest.raises(error, match=re.escape(f"fusion of all_reduce is {value!r}")):
        check_fusion_id(value, "fusion of all_reduce")
    assert check_fusion_id(7, "fusion of all_reduce") == 7


@pytest.mark.parametrize("value", [True, False])
def test_layerwise_parallel(value):
    param = nn.Parameter(torch.zeros(1))
    assert read_layerwise_parallel(param, "w") is False
    param.layerwise_parallel = value
    assert read_layerwise_parallel(param, "w") is value


@pytest.mark.parametrize("value", [1, 0, None, "True"])
def test_layerwise_parallel_must_be_a_bool(value):
    param = nn.Parameter(torch.zeros(1))
    param.layerwise_parallel = value
    message = f'layerwise_parallel of parameter "head.weight" is {value!r}; give True or False'
    with pytest.raises(ConfigTypeError, match=re.escape(message)):
        read_layerwise_parallel(param, "head.weight")
