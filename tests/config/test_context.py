from __future__ import annotations

import re

import pytest

from commfuse_fx.config.compile_config import CompileConfig
from commfuse_fx.config.context import (
    CONTEXT_NAMES,
    get_auto_parallel_context,
    reset_auto_parallel_context,
    set_auto_parallel_context,
)
from commfuse_fx.config.fusion_config import FusionConfig
from commfuse_fx.errors import ConfigKeyError, ConfigTypeError, ConfigValueError, NotAvailableError

AUTO = {"mode": "auto", "config": None}
ALL_AUTO = {"openstate": True, "allreduce": AUTO, "allgather": AUTO, "reducescatter": AUTO}


@pytest.fixture(autouse=True)
def fresh_context():
    reset_auto_parallel_context()
    yield
    reset_auto_parallel_context()


def snapshot():
    return {name: get_auto_parallel_context(name) for name in CONTEXT_NAMES}


def size(config):
    return {"mode": "size", "config": config}


def index(config):
    return {"mode": "index", "config": config}


def optimal(config):
    return {"mode": "optimal", "config": config}


DEFAULTS = {
    "device_num": 0,
    "global_rank": 0,
    "gradients_mean": True,
    "parallel_mode": "data_parallel",
    "all_reduce_fusion_config": None,
    "enable_parallel_optimizer": False,
    "parallel_optimizer_config": None,
    "parameter_broadcast": False,
    "comm_fusion": ALL_AUTO,
    "gradient_fp32_sync": True,
    "search_mode": "dynamic_programming",
    "strategy_ckpt_load_file": None,
    "strategy_ckpt_load_strict": False,
    "strategy_ckpt_save_file": None,
    "full_batch": False,
    "pipeline_stages": 1,
}


def test_defaults():
    assert snapshot() == DEFAULTS


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("device_num", 8),
        ("device_num", 4096),
        ("global_rank", 0),
        ("global_rank", 4095),
        ("gradients_mean", False),
        ("parallel_mode", "stand_alone"),
        ("parallel_mode", "hybrid_parallel"),
        ("parallel_mode", "semi_auto"),
        ("parallel_mode", "semi_auto_parallel"),
        ("parallel_mode", "auto_parallel"),
        ("all_reduce_fusion_config", [20, 35]),
        ("enable_parallel_optimizer", True),
        ("parallel_optimizer_config", {"gradient_accumulation_shard": True}),
        ("parameter_broadcast", True),
        ("comm_fusion", {**ALL_AUTO, "allreduce": index([3])}),
        ("gradient_fp32_sync", False),
        ("search_mode", "sharding_propagation"),
        ("strategy_ckpt_load_file", "./"),
        ("strategy_ckpt_save_file", "./"),
        ("full_batch", True),
        ("pipeline_stages", 4),
    ],
)
def test_get_returns_what_was_set_and_reset_unsets_it(name, value):
    set_auto_parallel_context(**{name: value})
    assert get_auto_parallel_context(name) == value
    others = {"all_reduce_fusion_config", "comm_fusion"} if "fusion" in name else {name}
    assert {key: got for key, got in snapshot().items() if key not in others} == {
        key: got for key, got in DEFAULTS.items() if key not in others
    }
    reset_auto_parallel_context()
    assert snapshot() == DEFAULTS


@pytest.mark.parametrize("name", ["device_num", "global_rank"])
def test_none_unsets_the_world(name):
    set_auto_parallel_context(**{name: 1})
    set_auto_parallel_context(**{name: None})
    assert get_auto_parallel_context(name) == 0


def test_what_is_returned_or_given_is_not_shared():
    options = {"gradient_accumulation_shard": True}
    fusion = {"allreduce": index([20, 35])}
    set_auto_parallel_context(parallel_optimizer_config=options, comm_fusion=fusion)
    before = snapshot()
    options["other"] = 1
    fusion["allreduce"]["config"].append(1)
    get_auto_parallel_context("parallel_optimizer_config").clear()
    get_auto_parallel_context("all_reduce_fusion_config").clear()
    get_auto_parallel_context("comm_fusion")["allreduce"]["config"].clear()
    get_auto_parallel_context("comm_fusion").clear()
    assert snapshot() == before


# --- fusion


def test_comm_fusion_is_merged_kind_by_kind():
    set_auto_parallel_context(comm_fusion={"allreduce": size(32), "openstate": False})
    set_auto_parallel_context(comm_fusion={"allgather": size(16)})
    set_auto_parallel_context(comm_fusion={"allreduce": index([20])})
    assert get_auto_parallel_context("comm_fusion") == {
        "openstate": False,
        "allreduce": index([20]),
        "allgather": size(16),
        "reducescatter": AUTO,
    }
    set_auto_parallel_context(comm_fusion={"openstate": True})
    assert get_auto_parallel_context("comm_fusion")["openstate"] is True
    assert get_auto_parallel_context("comm_fusion")["allgather"] == size(16)


@pytest.mark.parametrize(("value", "expected"), [(None, ALL_AUTO), ({}, {**ALL_AUTO, "allgather": size(16)})])
def test_comm_fusion_none_goes_back_to_the_default_and_an_empty_dict_changes_nothing(value, expected):
    set_auto_parallel_context(comm_fusion={"allgather": size(16)})
    set_auto_parallel_context(comm_fusion=value)
    assert get_auto_parallel_context("comm_fusion") == expected


def test_a_fusion_config_replaces_everything():
    set_auto_parallel_context(comm_fusion={"allgather": size(16)})
    set_auto_parallel_context(comm_fusion=FusionConfig(openstate=False))
    assert get_auto_parallel_context("comm_fusion") == {**ALL_AUTO, "openstate": False}


@pytest.mark.parametrize(
    ("calls", "allreduce"),
    [
        ([{"all_reduce_fusion_config": [20, 35]}], index([20, 35])),
        ([{"comm_fusion": {"allreduce": size(3)}}, {"all_reduce_fusion_config": [20]}], index([20])),
        ([{"all_reduce_fusion_config": [20]}, {"comm_fusion": {"allreduce": size(3)}}], size(3)),
        ([{"all_reduce_fusion_config": [20]}, {"comm_fusion": {"allreduce": index([5])}}], index([5])),
        ([{"all_reduce_fusion_config": [20]}, {"comm_fusion": {"allgather": size(3)}}], index([20])),
        ([{"all_reduce_fusion_config": [20]}, {"all_reduce_fusion_config": None}], AUTO),
        ([{"comm_fusion": {"allreduce": size(3)}}, {"all_reduce_fusion_config": None}], size(3)),
        ([{"comm_fusion": {"allreduce": index([5])}, "all_reduce_fusion_config": [5]}], index([5])),
        ([{"comm_fusion": {"allgather": AUTO}, "all_reduce_fusion_config": [5]}], index([5])),
        ([{"comm_fusion": {"allreduce": size(3)}, "all_reduce_fusion_config": None}], size(3)),
        ([{"comm_fusion": None, "all_reduce_fusion_config": [5]}], index([5])),
    ],
)
def test_the_last_of_comm_fusion_and_all_reduce_fusion_config_wins(calls, allreduce):
    for settings in calls:
        set_auto_parallel_context(**settings)
    assert get_auto_parallel_context("comm_fusion")["allreduce"] == allreduce
    cuts = allreduce["config"] if allreduce["mode"] == "index" else None
    assert get_auto_parallel_context("all_reduce_fusion_config") == cuts


@pytest.mark.parametrize("fusion", [size(3), AUTO, index([5]), index([5, 6])])
@pytest.mark.parametrize("reverse", [False, True])
def test_contradicting_fusion_settings_in_one_call_are_refused(fusion, reverse):
    settings = {"comm_fusion": {"allreduce": fusion}, "all_reduce_fusion_config": [6]}
    if reverse:
        settings = dict(reversed(settings.items()))
    with pytest.raises(ConfigValueError) as caught:
        set_auto_parallel_context(**settings)
    for part in ("all_reduce_fusion_config is [6]", f'comm_fusion["allreduce"] is {fusion}'):
        assert part in str(caught.value)
    assert snapshot() == DEFAULTS


def test_what_get_returns_can_be_set_again():
    set_auto_parallel_context(comm_fusion={"allreduce": index([2]), "allgather": size(1)}, device_num=8)
    before = snapshot()
    reset_auto_parallel_context()
    set_auto_parallel_context(**before)
    assert snapshot() == before


# --- what is refused


@pytest.mark.parametrize(
    ("error", "settings", "parts"),
    [
        (ConfigTypeError, {"device_num": True}, ["device_num is True", "1..4096"]),
        (ConfigValueError, {"device_num": 0}, ["device_num is 0", "1..4096"]),
        (ConfigValueError, {"device_num": 5000}, ["device_num is 5000", "1..4096"]),
        (ConfigTypeError, {"global_rank": "0"}, ["global_rank is '0'"]),
        (ConfigValueError, {"global_rank": -1}, ["global_rank is -1", "0..4095"]),
        (ConfigValueError, {"global_rank": 4096}, ["global_rank is 4096", "0..4095"]),
        (ConfigValueError, {"device_num": 4, "global_rank": 4}, ["global_rank is 4", "0..3"]),
        (ConfigTypeError, {"gradients_mean": 1}, ["gradients_mean is 1"]),
        (ConfigTypeError, {"gradients_mean": None}, ["gradients_mean is None"]),
        (ConfigTypeError, {"gradient_fp32_sync": "yes"}, ["gradient_fp32_sync is 'yes'"]),
        (ConfigTypeError, {"enable_parallel_optimizer": 1}, ["enable_parallel_optimizer is 1"]),
        (ConfigTypeError, {"parameter_broadcast": 0}, ["parameter_broadcast is 0"]),
        (ConfigTypeError, {"full_batch": None}, ["full_batch is None"]),
        (ConfigValueError, {"parallel_mode": "ddp"}, ["parallel_mode is 'ddp'", '"auto_parallel"']),
        (ConfigTypeError, {"parallel_mode": None}, ["parallel_mode is None"]),
        (ConfigValueError, {"search_mode": "greedy"}, ["search_mode is 'greedy'", '"recursive_programming"']),
        (ConfigTypeError, {"pipeline_stages": 1.0}, ["pipeline_stages is 1.0"]),
        (ConfigValueError, {"pipeline_stages": 0}, ["pipeline_stages is 0"]),
        (ConfigTypeError, {"strategy_ckpt_load_file": 1}, ["strategy_ckpt_load_file is 1"]),
        (ConfigTypeError, {"strategy_ckpt_save_file": b"x"}, ["strategy_ckpt_save_file is b'x'"]),
        (ConfigTypeError, {"parallel_optimizer_config": "x"}, ["parallel_optimizer_config is 'x'"]),
        (ConfigTypeError, {"parallel_optimizer_config": {1: 2}}, ["optimizer_config is {1: 2}", "str"]),
        (ConfigTypeError, {"comm_fusion": "auto"}, ["comm_fusion is 'auto'"]),
        (ConfigKeyError, {"comm_fusion": {"allreduce": {}}}, ['comm_fusion["allreduce"]', '"mode"']),
        (ConfigValueError, {"comm_fusion": {"allgather": size(0)}}, ['["allgather"]["config"] is 0']),
        (ConfigValueError, {"comm_fusion": {"allgather": optimal("best")}}, ['["config"] is \'best\'', "no preset"]),
        (ConfigTypeError, {"comm_fusion": {"allreduce": optimal(64)}}, ['["allreduce"]["config"] is 64']),
        (ConfigTypeError, {"all_reduce_fusion_config": (20, 35)}, ["all_reduce_fusion_config is (20, 35)"]),
        (ConfigTypeError, {"all_reduce_fusion_config": [True]}, ["all_reduce_fusion_config is [True]"]),
        (ConfigValueError, {"all_reduce_fusion_config": []}, ["all_reduce_fusion_config is []"]),
        (ConfigValueError, {"all_reduce_fusion_config": [35, 20]}, ["all_reduce_fusion_config is [35, 20]"]),
        (ConfigKeyError, {"device_number": 8}, ["'device_number'", *CONTEXT_NAMES]),
        (ConfigKeyError, {"mesh": (2, 4)}, ["'mesh'", *CONTEXT_NAMES]),
    ],
)  # fmt: skip
def test_a_call_that_fails_changes_nothing(error, settings, parts):
    set_auto_parallel_context(gradient_fp32_sync=False, comm_fusion={"allreduce": size(7)})
    before = snapshot()
    good = {"search_mode": "recursive_programming", "strategy_ckpt_save_file": "s", "pipeline_stages": 3}
    for call in ({**good, **settings}, {**settings, **{k: v for k, v in good.items() if k not in settings}}):
        with pytest.raises(error) as caught:
            set_auto_parallel_context(**call)
        for part in parts:
            assert part in str(caught.value)
        assert snapshot() == before


@pytest.mark.parametrize("name", ["device_number", "mesh", "", None, ["comm_fusion"]])
def test_get_of_an_unknown_name_lists_the_known(name):
    with pytest.raises(ConfigKeyError, match=re.escape(repr(name))) as caught:
        get_auto_parallel_context(name)
    assert all(known in str(caught.value) for known in CONTEXT_NAMES)


def test_settings_of_earlier_calls_are_checked_together_with_the_new():
    set_auto_parallel_context(device_num=8, global_rank=7)
    with pytest.raises(ConfigValueError, match=r"global_rank is 7.*0\.\.3"):
        set_auto_parallel_context(device_num=4)
    set_auto_parallel_context(device_num=4, global_rank=3)
    assert (get_auto_parallel_context("device_num"), get_auto_parallel_context("global_rank")) == (4, 3)


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({"pipeline_stages": 4}, "pipeline_stages=4"),
    ],
)
def test_what_is_not_available_is_kept_here_and_refused_at_compile(settings, part):
    set_auto_parallel_context(**settings)
    with pytest.raises(NotAvailableError, match=re.escape(part)):
        CompileConfig.resolve({})
    CompileConfig.resolve({"enable_parallel_optimizer": False, "parallel_mode": "data_parallel",
                           "pipeline_stages": 1, "search_mode": "dynamic_programming"})  # fmt: skip


def test_optimal_fusion_is_kept_merged_and_used():
    set_auto_parallel_context(comm_fusion={"allreduce": optimal(None), "allgather": size(7)})
    set_auto_parallel_context(comm_fusion={"reducescatter": optimal("gloo-1gbit")})
    want = {"openstate": True, "allreduce": optimal(None), "allgather": size(7), "reducescatter": optimal("gloo-1gbit")}
    assert get_auto_parallel_context("comm_fusion") == want
    assert get_auto_parallel_context("all_reduce_fusion_config") is None
    config = CompileConfig.resolve({})
    assert config.plans_by_cost
    assert config.comm_fusion.as_dict() == want
    assert config.cluster.name == "gloo-1gbit"
    assert not CompileConfig.resolve({"comm_fusion": {}}).plans_by_cost
    set_auto_parallel_context(comm_fusion=None)
    assert get_auto_parallel_context("comm_fusion") == ALL_AUTO


def test_cuts_replace_optimal_fusion_and_not_in_the_same_call():
    set_auto_parallel_context(comm_fusion={"allreduce": optimal(None)})
    with pytest.raises(ConfigValueError, match="give one of the two"):
        set_auto_parallel_context(comm_fusion={"allreduce": optimal(None)}, all_reduce_fusion_config=[3])
    assert get_auto_parallel_context("comm_fusion")["allreduce"] == optimal(None)
    set_auto_parallel_context(all_reduce_fusion_config=[3])
    assert get_auto_parallel_context("comm_fusion")["allreduce"] == index([3])
