"""The page for users of DistributedDataParallel names all of its arguments and methods, and says what errors say."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commfuse_fx as cf
from commfuse_fx.config.options import DEFAULTS
from commfuse_fx.frontends.arguments_of_ddp import INSTEAD

PAGE = Path(__file__).resolve().parents[2] / "docs" / "coming-from-ddp.md"
ARGUMENTS = [name for name in inspect.signature(DistributedDataParallel.__init__).parameters if name != "self"]


def rows(heading: str) -> dict[str, str]:
    """First cell -> second cell, of the table under a heading. Names that share a first cell have a row each."""
    section = PAGE.read_text().split(f"## {heading}\n")[1].split("\n## ")[0]
    cells = re.findall(r"^\| (`.*?) \| (.*) \|$", section, re.MULTILINE)
    return {name: text for names, text in cells for name in re.findall(r"`(\w+)`", names)}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_every_argument_has_a_row_that_says_what_the_error_says(name: str) -> None:
    table = rows("The arguments of its constructor")
    if name in DEFAULTS:
        assert table[name].startswith("the same")
    else:
        assert table[name].replace("`", "") == INSTEAD[name]
        if name != "module":
            with pytest.raises(cf.ConfigKeyError, match=re.escape(INSTEAD[name])):
                cf.compile(nn.Linear(2, 2), **{name: None})


@pytest.mark.parametrize("devices", [[0], [torch.device("cpu")]], ids=["numbers", "devices"])
def test_device_ids_in_the_second_position_are_told_apart_from_comm_fusion(devices: Any) -> None:
    with pytest.raises(cf.ConfigTypeError, match=r"not the device_ids of DistributedDataParallel: move the model"):
        cf.compile(nn.Linear(2, 2), devices)


def test_the_table_has_no_other_arguments() -> None:
    """Those of all supported versions of torch, which are more than this one's."""
    assert {*rows("The arguments of its constructor")} == {*INSTEAD, "broadcast_buffers", "find_unused_parameters"}


def test_every_method_has_a_row() -> None:
    methods = [name for name in vars(DistributedDataParallel) if not name.startswith("_")]
    table = rows("Its methods and attributes")
    assert [name for name in methods if name not in table] == []
    compiled = cf.compile(nn.Linear(2, 2))
    for name, text in table.items():
        if text.startswith("the same"):
            assert hasattr(compiled, name), name
        if text.startswith("not there"):
            assert not hasattr(compiled, name), name


def test_a_hook_of_communication_is_refused_with_what_to_do() -> None:
    row = rows("Its methods and attributes")["register_comm_hook"].replace("`", "")
    with pytest.raises(cf.NotAvailableError) as error:
        cf.compile(nn.Linear(2, 2)).register_comm_hook(None, lambda state, bucket: None)
    assert row.startswith("an error. For ") and row.removeprefix("an error. ").lower() in str(error.value).lower()
