from __future__ import annotations

import inspect
import pickle
from dataclasses import fields
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from commfuse_fx import compile, errors
from commfuse_fx.config.compile_config import DEFAULTS, CompileConfig, Default, FusionConfig, KindFusion, ScheduleConfig
from commfuse_fx.config.context import set_auto_parallel_context
from commfuse_fx.config.options import SEARCH_MODES
from commfuse_fx.cost.priced import model_fingerprint
from commfuse_fx.errors import (
    CommFuseError,
    ConfigKeyError,
    ConfigTypeError,
    ConfigValueError,
    NotAvailableError,
)
from commfuse_fx.machine.presets import preset
from commfuse_fx.machine.step_profile import StepProfile
from tests.config.configs import CLUSTER, index, optimal, raises_naming, size

# --- errors


@pytest.mark.parametrize(
    ("name", "builtin"),
    [
        ("ConfigTypeError", TypeError),
        ("ConfigKeyError", KeyError),
        ("ConfigValueError", ValueError),
        ("NotAvailableError", NotImplementedError),
        ("CaptureError", RuntimeError),
        ("PlanMismatchError", RuntimeError),
        ("CollectiveError", RuntimeError),
        ("PeerFailedError", RuntimeError),
        ("VirtualWorldError", RuntimeError),
        ("VerificationError", RuntimeError),
    ],
)
def test_errors_derive_from_the_base_and_a_builtin_and_print_plainly(name, builtin):
    error = getattr(errors, name)
    assert issubclass(error, CommFuseError) and issubclass(error, builtin) and error.__doc__
    assert str(error('say "hello"')) == 'say "hello"'
    assert str(pickle.loads(pickle.dumps(error("over the wire")))) == "over the wire"


# --- CompileConfig: what is accepted


def test_every_option_has_a_default_and_the_defaults_resolve():
    assert [field.name for field in fields(CompileConfig) if field.compare] == [
        name for name in DEFAULTS if name != "memory_limit"
    ]  # it is in the schedule
    config = CompileConfig.resolve({})
    expected = {**DEFAULTS, "comm_fusion": FusionConfig()}
    assert {name: getattr(config, name) for name in DEFAULTS} == expected


def test_a_default_counts_as_not_given():
    set_auto_parallel_context(gradients_mean=False, comm_fusion={"openstate": False})
    given = {name: Default(value) for name, value in DEFAULTS.items()}
    config = CompileConfig.resolve(given)
    assert config.gradients_mean is False and config.comm_fusion.openstate is False
    config = CompileConfig.resolve({**given, "gradients_mean": True, "comm_fusion": None})
    assert config.gradients_mean is True and config.comm_fusion.openstate is False
    config = CompileConfig.resolve({**given, "comm_fusion": {}})
    assert config.comm_fusion == FusionConfig()


def test_default_prints_as_its_value():
    parameters = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=Default(DEFAULTS[name]))
        for name in ("comm_fusion", "gradients_mean", "schedule")
    ]
    text = str(inspect.Signature(parameters))
    assert text == "(*, comm_fusion=None, gradients_mean=True, schedule='overlap')"


@pytest.mark.parametrize(
    ("name", "value", "resolved"),
    [
        ("parallel_mode", "stand_alone", "stand_alone"),
        ("parallel_mode", "hybrid_parallel", "hybrid_parallel"),
        ("gradients_mean", False, False),
        ("gradient_fp32_sync", False, False),
        ("full_batch", True, True),
        ("parameter_broadcast", True, True),
        ("broadcast_buffers", True, True),
        ("broadcast_buffers", None, False),
        ("cpu_kernels", False, False),
        ("pipeline_stages", 1, 1),
        ("accumulate_steps", 1, 1),
        ("accumulate_steps", 8, 8),
        ("clip_grad_norm", None, None),
        ("clip_grad_norm", 1, 1.0),
        ("clip_grad_norm", 0.25, 0.25),
        ("schedule", "none", "none"),
        ("schedule", ScheduleConfig(), ScheduleConfig()),
        ("device_num", 1, 1),
        ("device_num", 4096, 4096),
        ("mesh", (2, 4), (2, 4)),
        ("mesh", [8], (8,)),
        ("mesh", None, None),
        ("comm_fusion", {"allreduce": size(32)}, FusionConfig(allreduce=KindFusion("size", 32))),
        ("comm_fusion", FusionConfig(openstate=False), FusionConfig(openstate=False)),
    ],
)
def test_option_is_taken(name, value, resolved):
    assert getattr(CompileConfig.resolve({name: value}), name) == resolved


def test_a_device_mesh_is_taken_as_it_is():
    mesh = SimpleNamespace(mesh_dim_names=("dp",))
    assert CompileConfig.resolve({"mesh": mesh}).mesh is mesh


@pytest.mark.parametrize("rank", [0, 3, 7])
def test_virtual_world(rank):
    config = CompileConfig.resolve({"device_num": 8, "global_rank": rank, "mesh": (2, 4)})
    assert (config.device_num, config.global_rank, config.mesh) == (8, rank, (2, 4))


def test_a_virtual_world_is_rank_0_by_default():
    assert CompileConfig.resolve({"device_num": 8}).global_rank == 0


# --- CompileConfig: where a value comes from


def test_context_fills_what_is_not_given():
    set_auto_parallel_context(
        device_num=8, global_rank=3, gradients_mean=False, parallel_mode="stand_alone", full_batch=True,
        all_reduce_fusion_config=[20, 35],
    )  # fmt: skip
    config = CompileConfig.resolve({"gradients_mean": True})
    assert (config.device_num, config.global_rank, config.parallel_mode) == (8, 3, "stand_alone")
    assert config.gradients_mean is True and config.full_batch is True
    assert config.comm_fusion.allreduce == KindFusion("index", (20, 35))


def test_a_given_comm_fusion_is_not_merged_with_the_context():
    set_auto_parallel_context(comm_fusion={"allgather": size(1), "openstate": False})
    assert CompileConfig.resolve({"comm_fusion": {"allreduce": size(2)}}).comm_fusion == FusionConfig(
        allreduce=KindFusion("size", 2)
    )


def test_device_num_none_turns_the_context_world_off():
    set_auto_parallel_context(device_num=8, global_rank=3)
    config = CompileConfig.resolve({"device_num": None})
    assert (config.device_num, config.global_rank) == (None, None)
    with raises_naming(ConfigValueError, "global_rank is 3", "device_num"):
        CompileConfig.resolve({"device_num": None, "global_rank": 3})


def test_a_context_rank_must_fit_a_given_world():
    set_auto_parallel_context(device_num=8, global_rank=7)
    with raises_naming(ConfigValueError, "global_rank is 7", "0..3", "device_num is 4"):
        CompileConfig.resolve({"device_num": 4})


# --- CompileConfig: what is refused

BOOLS = [
    "gradients_mean",
    "gradient_fp32_sync",
    "enable_parallel_optimizer",
    "full_batch",
    "parameter_broadcast",
    "cpu_kernels",
]
CHOICES = {
    "parallel_mode": ["stand_alone", "data_parallel", "hybrid_parallel", "semi_auto", "auto"],
    "search_mode": ["dynamic_programming", "recursive_programming", "sharding_propagation"],
    "schedule": ["overlap", "none"],
    "backend": ["eager", "inductor"],
    "inductor_regions": ["stretches", "layers"],
    "exchange_factors": ["never", "auto", "always"],
}


@pytest.mark.parametrize("value", [1, 0, None, "True"])
@pytest.mark.parametrize("name", BOOLS)
def test_bool_options_take_only_bools(name, value):
    with raises_naming(ConfigTypeError, f"{name} is {value!r}", "True or False"):
        CompileConfig.resolve({name: value})


@pytest.mark.parametrize("name", CHOICES)
def test_choices_are_listed(name):
    allowed = [f'"{choice}"' for choice in CHOICES[name]]
    for value in ("fastest", "", CHOICES[name][0].upper()):
        with raises_naming(ConfigValueError, f"{name} is {value!r}", *allowed):
            CompileConfig.resolve({name: value})
    for value in (None, 1, True, [CHOICES[name][0]]):
        with raises_naming(ConfigTypeError, f"{name} is {value!r}", *allowed):
            CompileConfig.resolve({name: value})


@pytest.mark.parametrize(
    ("error", "given", "parts"),
    [
        (ConfigTypeError, {"device_num": True}, ["device_num is True", "1..4096"]),
        (ConfigTypeError, {"device_num": "8"}, ["device_num is '8'", "1..4096"]),
        (ConfigTypeError, {"device_num": 8.0}, ["device_num is 8.0", "1..4096"]),
        (ConfigValueError, {"device_num": 0}, ["device_num is 0", "1..4096"]),
        (ConfigValueError, {"device_num": -1}, ["device_num is -1", "1..4096"]),
        (ConfigValueError, {"device_num": 4097}, ["device_num is 4097", "1..4096"]),
        (ConfigValueError, {"device_num": 8, "global_rank": 8}, ["global_rank is 8", "0..7"]),
        (ConfigValueError, {"device_num": 8, "global_rank": -1}, ["global_rank is -1", "0..7"]),
        (ConfigValueError, {"device_num": 8, "global_rank": 5000}, ["global_rank is 5000", "0..7"]),
        (ConfigValueError, {"device_num": 1, "global_rank": 1}, ["global_rank is 1", "0..0"]),
        (ConfigTypeError, {"device_num": 8, "global_rank": True}, ["global_rank is True", "0..device_num-1"]),
        (ConfigTypeError, {"device_num": 8, "global_rank": "3"}, ["global_rank is '3'", "0..device_num-1"]),
        (ConfigTypeError, {"global_rank": 1.5}, ["global_rank is 1.5", "0..device_num-1"]),
        (ConfigValueError, {"global_rank": 3}, ["global_rank is 3", "device_num", "1..4096"]),
        (ConfigValueError, {"global_rank": 0}, ["global_rank is 0", "device_num"]),
        (ConfigValueError, {"global_rank": 4096}, ["global_rank is 4096", "0..4095"]),
        (ConfigValueError, {"mesh": ()}, ["mesh is ()", "None"]),
        (ConfigValueError, {"mesh": (2, 0)}, ["mesh[1]", "(2, 0)", ">= 1"]),
        (ConfigValueError, {"mesh": [-2]}, ["mesh[0]", "[-2]", ">= 1"]),
        (ConfigTypeError, {"mesh": (True, 2)}, ["mesh[0]", "(True, 2)"]),
        (ConfigTypeError, {"mesh": (2, "4")}, ["mesh[1]", "(2, '4')"]),
        (ConfigTypeError, {"mesh": 8}, ["mesh is 8", "DeviceMesh", "(2, 4)"]),
        (ConfigTypeError, {"mesh": "dp"}, ["mesh is 'dp'", "DeviceMesh"]),
        (ConfigValueError, {"mesh": (2, 3), "device_num": 8}, ["mesh is (2, 3)", "6", "device_num is 8"]),
        (ConfigTypeError, {"pipeline_stages": True}, ["pipeline_stages is True", ">= 1"]),
        (ConfigTypeError, {"pipeline_stages": 2.0}, ["pipeline_stages is 2.0", ">= 1"]),
        (ConfigTypeError, {"pipeline_stages": None}, ["pipeline_stages is None", ">= 1"]),
        (ConfigValueError, {"pipeline_stages": 0}, ["pipeline_stages is 0", ">= 1"]),
        (ConfigTypeError, {"accumulate_steps": True}, ["accumulate_steps is True", ">= 1"]),
        (ConfigTypeError, {"accumulate_steps": 2.0}, ["accumulate_steps is 2.0", ">= 1"]),
        (ConfigTypeError, {"accumulate_steps": None}, ["accumulate_steps is None", ">= 1"]),
        (ConfigValueError, {"accumulate_steps": 0}, ["accumulate_steps is 0", ">= 1"]),
        (ConfigTypeError, {"clip_grad_norm": True}, ["clip_grad_norm is True", "above 0", "None"]),
        (ConfigTypeError, {"clip_grad_norm": "1"}, ["clip_grad_norm is '1'", "above 0"]),
        (ConfigTypeError, {"clip_grad_norm": torch.ones(())}, ["clip_grad_norm is tensor(1.)", "above 0"]),
        (ConfigValueError, {"clip_grad_norm": 0}, ["clip_grad_norm is 0", "above 0"]),
        (ConfigValueError, {"clip_grad_norm": -1.5}, ["clip_grad_norm is -1.5", "above 0"]),
        (ConfigValueError, {"clip_grad_norm": float("inf")}, ["clip_grad_norm is inf", "above 0"]),
        (ConfigValueError, {"clip_grad_norm": float("nan")}, ["clip_grad_norm is nan", "above 0"]),
        (ConfigValueError, {"clip_grad_norm": 10**400}, ["clip_grad_norm is 1000", "above 0"]),
        (ConfigTypeError, {"strategy_ckpt_load_file": 3}, ["strategy_ckpt_load_file is 3", "path"]),
        (ConfigTypeError, {"strategy_ckpt_save_file": True}, ["strategy_ckpt_save_file is True", "path"]),
        (ConfigTypeError, {"parallel_optimizer_config": [1]}, ["parallel_optimizer_config is [1]", "dict"]),
        (ConfigTypeError, {"parallel_optimizer_config": {1: 2}}, ["optimizer_config is {1: 2}", "str"]),
        (ConfigValueError, {"cuda_graph": "always"}, ["cuda_graph is 'always'", '"auto"']),
        (ConfigTypeError, {"cuda_graph": 1}, ["cuda_graph is 1", "True or False"]),
        (ConfigTypeError, {"comm_fusion": "auto"}, ["comm_fusion is 'auto'"]),
        (ConfigKeyError, {"com_fusion": None}, ["'com_fusion'", "comm_fusion", "gradient_compression"]),
    ],
)  # fmt: skip
def test_option_is_refused(error, given, parts):
    with raises_naming(error, *parts):
        CompileConfig.resolve(given)


@pytest.mark.parametrize(
    ("name", "value", "instead"),
    [
        ("exchange_factors", "auto", "'never'"),
        ("exchange_factors", "always", "'never'"),
        ("gradient_compression", object, "None"),
        ("pipeline_stages", 2, "1"),
    ],
)
def test_not_available_says_what_to_use_instead(name, value, instead):
    with raises_naming(NotAvailableError, f"{name}={value!r} is not available yet", f"use {name}={instead}"):
        CompileConfig.resolve({name: value})


def test_parallel_mode_aliases():
    assert CompileConfig.resolve({"parallel_mode": "semi_auto_parallel"}).parallel_mode == "semi_auto"
    assert CompileConfig.resolve({"parallel_mode": "auto_parallel"}).parallel_mode == "auto"


def test_which_search_starts_from_marks():
    for mode in SEARCH_MODES:
        config = CompileConfig.resolve({"search_mode": mode, "parallel_mode": "auto"})
        assert config.propagates == (mode == "sharding_propagation")


def test_invalid_comes_before_not_available():
    with raises_naming(ConfigTypeError, "full_batch"):
        CompileConfig.resolve({"enable_parallel_optimizer": True, "full_batch": 1})


# --- cluster


@pytest.mark.parametrize(
    ("error", "value", "part"),
    [
        (ConfigValueError, "h100", "which is no preset; use one of"),
        (ConfigValueError, "Measured", 'or "measured" or "default"'),
        (ConfigValueError, "h100-ib-1", "n in 2..512"),
        (ConfigTypeError, 8, "the name of a preset, or a path"),
        (ConfigTypeError, {"name": "x"}, "the name of a preset, or a path"),
        (ConfigTypeError, True, "the name of a preset, or a path"),
    ],
)
def test_cluster_refuses(error, value, part):
    with raises_naming(error, f"cluster is {value!r}", part):
        CompileConfig.resolve({"cluster": value})


def test_cluster_resolves_to_what_it_stands_for(tmp_path):
    profile = StepProfile(cluster=CLUSTER, world=2, model="0" * 64, node_seconds={"a": 1.0})
    CLUSTER.save(tmp_path / "cluster.json")
    profile.save(tmp_path / "profile.json")
    for given, want in [
        (CLUSTER, CLUSTER),
        ("gloo-1gbit", preset("gloo-1gbit")),
        (tmp_path / "cluster.json", CLUSTER),
        (profile, profile),
        (str(tmp_path / "profile.json"), profile),
    ]:
        assert CompileConfig.resolve({"cluster": given}).cluster == want
    inside = {"cluster": "gloo-1gbit", "comm_fusion": {"allgather": optimal(CLUSTER)}}
    assert CompileConfig.resolve(inside).cluster == CLUSTER


@pytest.mark.parametrize(
    "options",
    [
        {"cluster": CLUSTER},
        {"comm_fusion": {"allreduce": optimal(CLUSTER)}},
        {"comm_fusion": {"reducescatter": optimal(CLUSTER)}, "schedule": "none"},
    ],
    ids=["cluster", "optimal", "optimal without schedule"],
)
def test_a_cluster_with_fewer_ranks_than_the_world_is_refused(options):
    with raises_naming(ConfigValueError, "rank 3, but cluster two has 2 ranks", "give a larger cluster"):
        compile(nn.Linear(2, 2), device_num=4, **options)
    compile(nn.Linear(2, 2), device_num=2, **options)


def test_a_profile_of_another_world_or_model_is_refused():
    model = nn.Linear(2, 2)
    mine = model_fingerprint(dict(model.named_parameters()))
    for world, fingerprint in ((4, mine), (2, "0" * 64)):
        profile = StepProfile(cluster=CLUSTER, world=world, model=fingerprint, node_seconds={"a": 1.0})
        with raises_naming(ConfigValueError, "profile for another world or model", "measure this step"):
            compile(model, device_num=2, cluster=profile)
    compile(model, device_num=2, cluster=StepProfile(cluster=CLUSTER, world=2, model=mine, node_seconds={"a": 1.0}))


# --- header


def test_header():
    given = {
        "comm_fusion": {"allreduce": index([20, 35]), "reducescatter": size(32)},
        "gradients_mean": False,
        "schedule": "none",
    }
    assert CompileConfig.resolve(given).header() == [
        ("comm_fusion.openstate", "True"),
        ("comm_fusion.allreduce", "index 20,35"),
        ("comm_fusion.allgather", "auto"),
        ("comm_fusion.reducescatter", "size 32"),
        ("parallel_mode", "data_parallel"),
        ("gradients_mean", "False"),
        ("gradient_fp32_sync", "True"),
        ("full_batch", "False"),
        ("parameter_broadcast", "False"),
        ("schedule", "none"),
        ("cpu_kernels", "True"),
    ]


def test_header_is_the_same_on_every_rank_and_for_equal_schedules():
    headers = [CompileConfig.resolve({"device_num": 4, "global_rank": rank}).header() for rank in range(4)]
    headers.append(CompileConfig.resolve({"schedule": ScheduleConfig(), "mesh": [2, 2]}).header())
    assert all(header == headers[0] for header in headers)


def test_the_default_cluster_has_a_name() -> None:
    assert CompileConfig.resolve({"cluster": "default"}).unmeasured == CompileConfig.resolve({})
    optimal = {"comm_fusion": {"allreduce": {"mode": "optimal", "config": None}}}
    assert CompileConfig.resolve(optimal).measures and not CompileConfig.resolve({}).measures
    assert not CompileConfig.resolve({**optimal, "cluster": "default"}).measures
    assert not CompileConfig.resolve({**optimal, "cluster": "gloo-1gbit"}).measures
