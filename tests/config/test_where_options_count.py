"""Every option and field, in every form and mode: it changes what is compiled, or is told to do nothing."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import commfuse_fx as cf
from commfuse_fx import api
from commfuse_fx.config.compile_config import CompileConfig
from commfuse_fx.config.context import set_auto_parallel_context
from commfuse_fx.config.options import DEFAULTS, PARALLEL_MODES
from commfuse_fx.config.parallel_optimizer import ParallelOptimizer
from commfuse_fx.config.uses import WHERE
from commfuse_fx.config.where_options_count import ERROR, LISTED, TABLE, WARNING

FORMS = ("step", "gradients", "module", "dynamo")
USES = [(form, mode) for form in FORMS for mode in PARALLEL_MODES if form in FORMS[:2] or mode in PARALLEL_MODES[:3]]
ON: dict[str, Any] = {"enable_parallel_optimizer": True}
CONFIG = "parallel_optimizer_config"
CUTS = {"allreduce": {"mode": "index", "config": [2]}}
OPTIMAL = {"mode": "optimal", "config": None}
ACROSS = cf.ScheduleConfig(across_steps=True)


class Net(nn.Module):
    """It has buffers, gradients of two precisions, and rows that do not divide by the ranks."""

    def __init__(self, sends: bool) -> None:
        super().__init__()
        self.sends = sends
        self.first, self.norm = nn.Linear(8, 16), nn.BatchNorm1d(16)
        self.low, self.last = nn.Linear(16, 6, dtype=torch.bfloat16), nn.Linear(6, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last(self.low(self.norm(self.first(x)).bfloat16()).float())
        return cf.ops.all_reduce(found) + cf.ops.all_reduce(found.sin()) if self.sends else found


def sharing(**options: Any) -> dict[str, Any]:
    return {"parallel_optimizer_config": {"parallel_optimizer_threshold": 0, **options}}


# Row of the table -> options that it is given beside, and it.
GIVEN: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "has_aux": ({}, {"has_aux": True}),
    "return_loss": ({}, {"return_loss": False}),
    "mesh": ({}, {"mesh": (2, 2)}),
    "device_num": ({}, {"device_num": 2}),
    "global_rank": ({"global_rank": 0}, {"global_rank": 3}),
    "find_unused_parameters": ({}, {"find_unused_parameters": True}),
    "gradients_mean": ({}, {"gradients_mean": False}),
    "gradient_fp32_sync": ({}, {"gradient_fp32_sync": False}),
    "enable_parallel_optimizer": ({}, ON | sharing()),
    "parallel_optimizer_config.level": (ON | sharing(), sharing(level=3)),
    "parallel_optimizer_config.mode": (ON | sharing(), sharing(mode="broadcast")),
    "parallel_optimizer_config.parallel_optimizer_threshold": (ON, sharing()),
    "parallel_optimizer_config.optimizer_weight_shard_size": (ON | sharing(), sharing(optimizer_weight_shard_size=1)),
    "parallel_optimizer_config.pad": (ON | sharing(), sharing(pad=True)),
    "parallel_optimizer_config.gradient_accumulation_shard": (
        ON | sharing() | {"accumulate_steps": 2},
        sharing(gradient_accumulation_shard=True),
    ),
    "search_mode": ({}, {"search_mode": "sharding_propagation"}),
    "strategy_ckpt_load_file": ({}, {"strategy_ckpt_load_file": "found.json"}),
    "strategy_ckpt_load_strict": ({}, {"strategy_ckpt_load_strict": True}),
    "strategy_ckpt_save_file": ({}, {"strategy_ckpt_save_file": "found.json"}),
    "full_batch": ({}, {"full_batch": True}),
    "parameter_broadcast": ({"parameter_broadcast": False}, {"parameter_broadcast": True}),
    "broadcast_buffers": ({"broadcast_buffers": False}, {"broadcast_buffers": True}),
    "accumulate_steps": ({}, {"accumulate_steps": 2}),
    "clip_grad_norm": ({}, {"clip_grad_norm": 1.0}),
    "comm_fusion.openstate": ({}, {"comm_fusion": {"openstate": False}}),
    "comm_fusion.allreduce": ({}, {"comm_fusion": {"allreduce": {"mode": "size", "config": 1}}}),
    "comm_fusion.allgather": (ON | sharing(), {"comm_fusion": {"allgather": OPTIMAL}}),
    "comm_fusion.reducescatter": (ON | sharing(level=2), {"comm_fusion": {"reducescatter": OPTIMAL}}),
    "comm_fusion.index": ({}, {"comm_fusion": CUTS}),
    "comm_fusion.optimal": ({}, {"comm_fusion": {"allreduce": OPTIMAL}}),
    "schedule": ({}, {"schedule": "none"}),
    "schedule.mode": ({}, {"schedule": "auto"}),
    "schedule.across_steps": ({}, {"schedule": ACROSS}),
    "memory_limit": ({}, {"memory_limit": 1 << 10}),
    "replan": ({"comm_fusion": {"allreduce": OPTIMAL}}, {"replan": cf.TrialLimits(steps=9)}),
    "backend": ({}, {"backend": "inductor"}),
    "inductor_regions": ({"backend": "inductor"}, {"inductor_regions": "layers"}),
    "cpu_kernels": ({}, {"cpu_kernels": False}),
    "skip_passes": ({}, {"skip_passes": ("merge_equal",)}),
    "cluster": ({}, {"cluster": "gloo-1gbit"}),
}
OTHERS = {"parallel_mode", "capture", "pipeline_stages", "cuda_graph", "exchange_factors", "gradient_compression"}
"""The modes are what this goes over; of the others, what has no effect is not available, as tests of their own say."""

OF_THE_RUN = {"return_loss", "global_rank", "strategy_ckpt_save_file", "replan", "parameter_broadcast"}
"""These change what runs, or who, and not the graph."""

MAY_CHANGE_NOTHING = {"comm_fusion.allreduce", "comm_fusion.allgather", "comm_fusion.reducescatter", "cluster"}
MAY_CHANGE_NOTHING |= {"comm_fusion.optimal", "inductor_regions", "cpu_kernels", "skip_passes"}
"""These change the graphs of models that are larger than this one: of more buckets, layers, or convolutions."""

WOULD_DO_OTHER_THINGS = {"accumulate_steps", "full_batch", "strategy_ckpt_load_file", "enable_parallel_optimizer"}
WOULD_DO_OTHER_THINGS |= {"find_unused_parameters", "schedule.across_steps"}
"""Where these have no effect of their own, passes would do something else, if they were handed them."""


def made(form: str, mode: str, **options: Any) -> Any:
    """What `compile` makes of the options in a virtual world of 4."""
    torch.manual_seed(0)
    model = Net(sends=mode == "stand_alone" and form != "dynamo")
    options = {"device_num": 4, "parallel_mode": mode, **options}
    if form == "step":
        options["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if form in ("step", "gradients"):
        options["loss_fn"] = (lambda out, y: (F.mse_loss(out, y), out)) if options.get("has_aux") else F.mse_loss
    if form == "dynamo":
        options["capture"] = "dynamo"
    return cf.compile(model, **options)


def graph_of(form: str, compiled: Any) -> str:
    """The text without its header, which has all options."""
    batch = (torch.ones(16, 8),) * (2 if form in ("step", "gradients") else 1)
    text: str = compiled.lower(*batch).text()
    return "\n".join(line for line in text.splitlines() if not line.startswith("#"))


def config_of(compiled: Any) -> CompileConfig:
    found: CompileConfig = (compiled if isinstance(compiled, cf.CompiledStep) else compiled._compiled).config
    return found


def merged(base: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """Both, where the fields of the parallel optimizer are put together."""
    found = {**base, **more}
    if CONFIG in base and CONFIG in more:
        found[CONFIG] = {**base[CONFIG], **more[CONFIG]}
    return found


def base_of(form: str, mode: str, base: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """What an option is given beside, or as much of it as the form and the mode have."""
    for options in (base, merged(base, sharing(level=2)) if CONFIG in base else base):
        try:
            return options, made(form, mode, **options)
        except cf.CommFuseError:
            continue
    return {}, made(form, mode)


MODULE_KEEPS = {f"{CONFIG}.{name}" for name in ("mode", "pad", "optimizer_weight_shard_size")} | {
    f"{CONFIG}.parallel_optimizer_threshold"
}
"""A ShardedOptimizer takes these of a module that divides nothing itself."""


def test_every_option_and_every_field_has_a_row() -> None:
    assert {option.partition(".")[0] for option in TABLE} == {*DEFAULTS}
    assert {option for option in TABLE if option.startswith(CONFIG)} == {
        f"{CONFIG}.{each.name}" for each in fields(ParallelOptimizer)
    }
    assert {*GIVEN} | OTHERS == {*TABLE}
    for row in TABLE.values():
        for idle in row.idle:
            assert idle.where in WHERE and idle.then in (ERROR, WARNING, LISTED)
    assert {idle.where for row in TABLE.values() for idle in row.idle} == {*WHERE}


@pytest.mark.parametrize(("form", "mode"), USES)
def test_an_option_counts_or_is_told_not_to(
    form: str, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What is not told has changed the configuration, and what is told has left it as it was."""
    monkeypatch.chdir(tmp_path)
    for option, (beside, more) in GIVEN.items():
        base, plain = base_of(form, mode, beside)
        caplog.clear()
        try:
            found = made(form, mode, **merged(base, more))
        except (cf.NotAvailableError, cf.ConfigValueError):
            continue
        idle = config_of(found).without_effect
        warned = [each.getMessage() for each in caplog.records if "has no effect" in each.getMessage()]
        assert warned == [f"{each.option} has no effect {each.reason}" for each in idle if each.warns], option
        mine = [each for each in idle if each not in config_of(plain).without_effect]
        is_listed = any(not each.warns for each in mine)
        assert (config_of(found) == config_of(plain)) == bool(mine) or is_listed or option == "replan", (option, mine)


@pytest.mark.parametrize(("form", "mode"), [use for use in USES if use[1] in ("stand_alone", "data_parallel")])
def test_the_table_is_true(form: str, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What counts changes the graph, and what does not count would leave it alone even if the passes were handed it."""
    monkeypatch.chdir(tmp_path)
    texts: dict[str, str] = {}
    for option, (beside, more) in GIVEN.items():
        if option in OF_THE_RUN or (form == "dynamo" and mode == "stand_alone"):
            continue  # Dynamo hands collectives of the model to no graph
        base, plain = base_of(form, mode, beside)
        if repr(base) not in texts:
            texts[repr(base)] = graph_of(form, plain)
        options = merged(base, more)
        try:
            counts = not config_of(made(form, mode, **options)).without_effect
        except cf.NotAvailableError:
            continue
        except cf.ConfigValueError:
            counts = False
        if option in (MAY_CHANGE_NOTHING if counts else WOULD_DO_OTHER_THINGS):
            continue
        if form in ("module", "dynamo") and option in MODULE_KEEPS and "enable_parallel_optimizer" not in base:
            continue
        with monkeypatch.context() as patch:
            patch.setattr(api, "settled", lambda config, *_: config)
            try:
                text = graph_of(form, made(form, mode, **options))
            except cf.ConfigValueError:  # memory_limit
                text = "no plan fits"
        assert (text != texts[repr(base)]) == counts, option


IDLE: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "a level": (
        "step",
        ERROR,
        {CONFIG: {"level": 3}},
        r'"level"\]=3 without enable_parallel_optimizer=True: .*pass en',
    ),
    "level 1": ("step", ERROR, {CONFIG: {"level": 1}}, r'"level"\]=1 without'),
    "a threshold": ("gradients", ERROR, sharing(), "parallel_optimizer_threshold.*without enable"),
    "a level of a module": ("module", ERROR, {CONFIG: {"level": 2}}, "nothing is divided; pass enable_parallel"),
    "a level with Dynamo": ("dynamo", ERROR, {CONFIG: {"level": 2}}, "nothing is divided; pass enable_parallel"),
    "switched off": (
        "step",
        WARNING,
        {"enable_parallel_optimizer": False, CONFIG: {"level": 3}},
        "with enable_parallel_optimizer=False",
    ),
    "alone": ("step", ERROR, ON | {"parallel_mode": "stand_alone"}, 'with parallel_mode="stand_alone"'),
    "no update": ("gradients", ERROR, ON, "without an optimizer: .*pass optimizer="),
    "owners": ("step", WARNING, ON | sharing(mode="broadcast", pad=True), 'with mode="broadcast"'),
    "one batch": ("step", WARNING, ON | sharing(gradient_accumulation_shard=True), "with accumulate_steps=1"),
    "memory of a module": (
        "module",
        ERROR,
        {"find_unused_parameters": True, "memory_limit": 1 << 30},
        "memory_limit=1073741824 with find_unused_parameters=True.*leave one of the two out",
    ),
    "memory of a schedule": (
        "module",
        ERROR,
        {"find_unused_parameters": True, "schedule": cf.ScheduleConfig(memory_limit=1 << 30)},
        "memory_limit=",
    ),
    "memory with Dynamo": ("dynamo", ERROR, {"memory_limit": 1 << 30}, 'memory_limit=.* with capture="dynamo"'),
    "buckets in order": (
        "module",
        WARNING,
        {"find_unused_parameters": True, "comm_fusion": {"allreduce": OPTIMAL}},
        "buckets of 25 MiB; use mode",
    ),
    "default prices": ("step", WARNING, {"cluster": "default"}, "cluster='default' has no effect without a plan by"),
    "two clusters": (
        "step",
        WARNING,
        {"cluster": "gloo-1gbit", "comm_fusion": {"allreduce": {"mode": "optimal", "config": "gloo-10gbit"}}},
        "cluster='gloo-1gbit' has no effect with another one of comm_fusion",
    ),
    "a search": ("step", WARNING, {"search_mode": "recursive_programming"}, 'data_parallel.*pass parallel_mode="auto"'),
    "a file to write": ("step", WARNING, {"strategy_ckpt_save_file": "found.json"}, "searches no strategies"),
    "a file to read": ("step", ERROR, {"strategy_ckpt_load_file": "found.json"}, "takes no strategies"),
    "strict": ("step", ERROR, {"parallel_mode": "auto", "strategy_ckpt_load_strict": True}, "nothing is loaded; give"),
    "regions": ("step", WARNING, {"inductor_regions": "layers"}, 'with backend="eager".*pass backend="inductor"'),
    "unused": ("step", WARNING, {"find_unused_parameters": True}, "an option of the module form"),
    "across": ("module", WARNING, {"schedule": ACROSS}, "across_steps=True has no effect with the module form"),
    "across without update": ("gradients", WARNING, {"schedule": ACROSS}, "across_steps=True has no effect without"),
    "a sum": ("step", ERROR, {"parallel_mode": "semi_auto", "gradients_mean": False}, "gradients_mean=False with"),
    "limits": ("step", WARNING, {"replan": cf.TrialLimits(steps=5)}, "without a plan from measurement"),
    "limits with Dynamo": ("dynamo", WARNING, {"replan": cf.TrialLimits()}, "replan="),
    "cuts": ("step", WARNING, {"parallel_mode": "stand_alone", "comm_fusion": CUTS}, "'index'.*no gradient is reduced"),
}


@pytest.mark.parametrize("name", IDLE)
def test_what_has_no_effect(name: str, caplog: pytest.LogCaptureFixture) -> None:
    form, then, options, says = IDLE[name]
    if then == ERROR:
        with pytest.raises(cf.ConfigValueError, match=says):
            made(form, "data_parallel", **options)
        return
    made(form, "data_parallel", **options)
    warned = [each.getMessage() for each in caplog.records if "has no effect" in each.getMessage()]
    assert len(warned) == 1 and re.search(says, warned[0]), warned


def test_what_is_only_listed(caplog: pytest.LogCaptureFixture) -> None:
    """What the context holds, which other models may use, and what the documents promise to do nothing."""
    set_auto_parallel_context(
        search_mode="recursive_programming", parallel_optimizer_config={"level": 3, "pad": True}, full_batch=True
    )
    fusion = {"openstate": False, "allreduce": {"mode": "size", "config": 1}}
    listed = ["search_mode=", 'parallel_optimizer_config["level"]=3', 'parallel_optimizer_config["pad"]=True']
    step = made("step", "data_parallel", comm_fusion=fusion, schedule="auto")
    explained = step.lower(torch.ones(16, 8), torch.ones(16, 8)).explain().text()
    for each in (*listed, 'comm_fusion["allreduce"]=', "schedule='auto' with device_num"):
        assert each in explained.replace(": with", " with"), each
    assert (
        'searches no strategies; pass parallel_mode="auto" as well, or leave search_mode out; the context' in explained
    )
    set_auto_parallel_context(enable_parallel_optimizer=True, parallel_optimizer_config=None)
    module = made("module", "data_parallel")
    assert config_of(module) == config_of(made("module", "data_parallel", enable_parallel_optimizer=False))
    for form in ("module", "dynamo"):
        text = made(form, "data_parallel").lower(torch.ones(16, 8)).explain().text()
        assert "enable_parallel_optimizer=True" in text and "full_batch=True" in text
    unmoved = made("step", "data_parallel", schedule="none", cluster="gloo-1gbit")
    assert "cluster='gloo-1gbit'" in [each.option for each in config_of(unmoved).without_effect]
    assert "gloo-1gbit" in unmoved.lower(torch.ones(16, 8), torch.ones(16, 8)).explain().text()  # what it predicts with
    assert not [each for each in caplog.records if "has no effect" in each.getMessage()]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("mode", PARALLEL_MODES[:3])
def test_defaults_that_are_given_ask_for_nothing(form: str, mode: str, caplog: pytest.LogCaptureFixture) -> None:
    own = {"device_num": 4, "global_rank": 0, "capture": "dynamo" if form == "dynamo" else "trace"}
    found = made(form, mode, **{**DEFAULTS, **own, "parallel_mode": mode, "replan": False, CONFIG: {}})
    assert not config_of(found).without_effect and not caplog.records


def test_a_warning_is_given_once_per_compiled_step(caplog: pytest.LogCaptureFixture) -> None:
    for count in (1, 2):
        step = made("step", "data_parallel", inductor_regions="layers")
        step.lower(torch.ones(16, 8), torch.ones(16, 8))
        step.lower(torch.ones(8, 8), torch.ones(8, 8))
        assert sum("inductor_regions" in each.getMessage() for each in caplog.records) == count
