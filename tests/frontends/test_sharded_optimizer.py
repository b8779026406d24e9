"""A sharded optimizer on one device and in virtual worlds: what it takes, what it refuses, and what it behaves like."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import commfuse_fx as cf


class Lamb(torch.optim.SGD):
    """Its update mixes the elements of a parameter."""


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(128, 256), nn.Tanh(), nn.Linear(256, 90))


def made(**options: Any) -> cf.ShardedOptimizer:
    return cf.ShardedOptimizer(cf.compile(net(), device_num=4), torch.optim.AdamW, **options)


def test_on_one_device_it_is_the_optimizer() -> None:
    model, twin = net(), net()
    compiled = cf.compile(model, cpu_kernels=False)
    optimizer: torch.optim.Optimizer = cf.ShardedOptimizer(compiled, torch.optim.Adam, lr=0.01, amsgrad=True)
    plain = torch.optim.Adam(twin.parameters(), lr=0.01, amsgrad=True, fused=True)
    for number in range(3):
        x = torch.randn(8, 128, generator=torch.Generator().manual_seed(number))
        for call, each in ((compiled, optimizer), (twin, plain)):
            each.zero_grad()
            call(x).square().mean().backward()
            each.step()
    assert isinstance(optimizer, torch.optim.Optimizer) and optimizer.defaults["lr"] == 0.01
    assert all(map(torch.equal, model.parameters(), twin.parameters()))
    assert set(optimizer.state) == set(model.parameters())
    torch.testing.assert_close(optimizer.state_dict()["state"], plain.state_dict()["state"], rtol=0, atol=0)
    assert "amsgrad: True" in repr(optimizer)


def test_hooks_and_schedulers_see_its_steps() -> None:
    compiled = cf.compile(net())
    optimizer = cf.ShardedOptimizer(compiled, torch.optim.SGD, lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    seen: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    optimizer.register_state_dict_post_hook(lambda *_: seen.append("state"))
    optimizer.register_load_state_dict_post_hook(lambda _: seen.append("loaded"))
    compiled(torch.randn(2, 128)).sum().backward()
    optimizer.step()
    scheduler.step()
    state = optimizer.state_dict()
    assert state["param_groups"][0]["lr"] == 0.05
    optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["lr"] == 0.05 and seen == ["before", "after", "state", "loaded"]


def test_a_group_of_another_model_is_not_added() -> None:
    optimizer = made()
    with pytest.raises(cf.ConfigValueError, match="parameter 0 of param group 1 .* is not a parameter of the model"):
        optimizer.add_param_group({"params": list(nn.Linear(2, 2).parameters())})
    assert len(optimizer.param_groups) == 1


def test_it_shows_what_is_divided() -> None:
    lowered = made().lower()
    notes = {note.subject: note.reason for note in lowered.explain().notes}
    assert notes == {
        "0.weight": "4 ranks over dp update 64 rows each",
        "0.bias": "it has 1 KiB, less than parallel_optimizer_threshold=64",
        "2.weight": "its first dimension of 90 does not divide by 4 ranks; "
        'parallel_optimizer_config={"pad": True} pads it',
        "2.bias": "it has 0.352 KiB, less than parallel_optimizer_threshold=64",
    }
    assert [(each.kind, each.members, each.bytes) for each in lowered.collectives] == [
        ("all_gather", ["0.weight"], 4 * 128 * 256)
    ]
    held = {each.kind: (each.whole, each.per_rank) for each in lowered.explain().memory.held}
    numel, small = sum(param.numel() for param in net().parameters()), 256 + 256 * 90 + 90
    assert held["gradients"] == held["parameters"] == (4 * numel, 4 * numel)  # a module hands out whole ones
    counts = 4 * 4
    assert held["optimizer state"] == (8 * numel + counts, 8 * (small + 128 * 256 // 4) + counts)


def test_options_come_from_the_context_and_fusion_from_the_module() -> None:
    small = {"parallel_optimizer_threshold": 0, "pad": True}
    cf.set_auto_parallel_context(parallel_optimizer_config=small)
    try:
        assert len(made().lower().collectives) == 1
        apart = cf.compile(net(), {"openstate": False}, device_num=4)
        assert len(cf.ShardedOptimizer(apart, torch.optim.AdamW).lower().collectives) == 4
        assert not made(parallel_optimizer_config={"parallel_optimizer_threshold": 999}).lower().collectives
        asked = cf.compile(net(), device_num=4, parallel_optimizer_config={"parallel_optimizer_threshold": 999})
        assert not cf.ShardedOptimizer(asked, torch.optim.AdamW).lower().collectives
    finally:
        cf.reset_auto_parallel_context()
    marked = net()
    marked[0].weight.parallel_optimizer = False
    assert not cf.ShardedOptimizer(cf.compile(marked, device_num=4), torch.optim.AdamW).lower().collectives


def test_a_pad_that_has_no_effect_is_told(caplog: pytest.LogCaptureFixture) -> None:
    for options in ({"mode": "broadcast", "pad": True}, {"pad": True}, {"mode": "broadcast"}):
        made(parallel_optimizer_config=options)
    (said,) = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert said.startswith('parallel_optimizer_config["pad"]=True has no effect with mode="broadcast"')


def of_a_step() -> Any:
    return cf.compile(net(), loss_fn=F.mse_loss)


@pytest.mark.parametrize(
    ("model", "cls", "options", "error", "message"),
    [
        (net, torch.optim.AdamW, {}, TypeError, r"model is a Sequential, not a compiled module: pass what compile\("),
        (of_a_step, torch.optim.AdamW, {}, TypeError, "a step updates by itself: pass optimizer= and enable_parallel"),
        (lambda: 1, torch.optim.AdamW, {}, TypeError, "model is a int, not a compiled module"),
        (lambda: nn.Linear, torch.optim.AdamW, {}, TypeError, "model is Linear, a class, not a compiled module"),
        (None, "adamw", {}, TypeError, "optimizer_class is 'adamw': pass a class of torch.optim"),
        (
            None,
            torch.optim.AdamW([nn.Parameter(torch.ones(1))]),
            {},
            TypeError,
            r"is an instance of AdamW: pass the class and its options, as in ShardedOptimizer\(model, torch",
        ),
        (None, Lamb, {"lr": 0.1}, ValueError, "ShardedOptimizer with Lamb: Lamb has no rule in the compiler, so"),
        (None, torch.optim.LBFGS, {}, ValueError, "LBFGS, which evaluates the loss several times.*use LBFGS as it is"),
        (None, torch.optim.AdamW, {"params": 0.1}, TypeError, "params is 0.1; give parameters or param groups.*lr="),
        (None, torch.optim.AdamW, {"params": [nn.Parameter(torch.ones(1))]}, ValueError, "is not a parameter of the"),
        (None, torch.optim.AdamW, {"params": []}, ValueError, "optimizer got an empty parameter list"),
        (
            None,
            torch.optim.AdamW,
            {"parallel_optimizer_config": {"level": 3}},
            ValueError,
            "compile it with enable_parallel_optimizer=True",
        ),
        (
            lambda: divided(),
            torch.optim.AdamW,
            {"parallel_optimizer_config": {"pad": True}},
            ValueError,
            "has pad=True, and the module was compiled with level=3: leave it out here",
        ),
        (
            None,
            torch.optim.AdamW,
            {"parallel_optimizer_config": {"gradient_accumulation_shard": True}},
            cf.NotAvailableError,
            "leave it out, or pass loss_fn, optimizer and accumulate_steps",
        ),
        (None, torch.optim.AdamW, {"parallel_optimizer_config": {"level": 4}}, ValueError, "level"),
        (None, torch.optim.AdamW, {"parallel_optimizer_config": {"pads": 1}}, KeyError, "did you mean pad"),
        (None, torch.optim.AdamW, {"parallel_optimizer_config": 3}, TypeError, "give a dict of options"),
        (
            None,
            torch.optim.AdamW,
            {"parallel_optimizer_config": {"optimizer_weight_shard_size": 3}},
            ValueError,
            "is 3, which does not divide the 4 ranks",
        ),
    ],
)  # fmt: skip
def test_what_it_cannot_take(model: Any, cls: Any, options: dict[str, Any], error: Any, message: str) -> None:
    given = cf.compile(net(), device_num=4) if model is None else model()
    with pytest.raises(error, match=message):
        cf.ShardedOptimizer(given, cls, **options)


def test_in_a_virtual_world_it_is_only_read() -> None:
    with pytest.raises(cf.VirtualWorldError, match="device_num=4.*leave device_num out"):
        made().step()


@pytest.mark.parametrize("take", [copy.deepcopy, pickle.dumps])
def test_it_cannot_be_copied(take: Any) -> None:
    with pytest.raises(cf.NotAvailableError, match=r"copy or save its state_dict\(\)"):
        take(made())


def divided(**options: Any) -> Any:
    options = {"device_num": 4, "parallel_optimizer_config": {"level": 3}, **options}
    return cf.compile(net(), enable_parallel_optimizer=True, **options)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"parallel_optimizer_config": {}},
            ValueError,
            r"update with cf\.ShardedOptimizer\(model.*\"level\": 3",
        ),
        (
            {"parallel_optimizer_config": {"level": 2, "mode": "broadcast"}},
            cf.NotAvailableError,
            'level=2 is not available yet with mode="broadcast"',
        ),
        (
            {"parallel_optimizer_config": {"level": 2, "gradient_accumulation_shard": True}},
            ValueError,
            r"True with the module form and level=2.* out, and run micro-batches without no_sync\(\)",
        ),
        ({"capture": "dynamo"}, cf.NotAvailableError, r'level=3 is not available yet with capture="dynamo".*"trace"'),
        ({"schedule": "auto"}, cf.NotAvailableError, r'schedule="auto" is not available yet with .*level=3'),
        ({"parallel_optimizer_config": {"level": 3, "mode": "broadcast"}}, ValueError, "each has one owner"),
    ],
)
def test_a_module_divides_gradients_or_parameters(options: dict[str, Any], error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        divided(**options)


def test_a_divided_module_shows_what_each_rank_holds() -> None:
    model = divided()
    lowered = model.lower(torch.ones(4, 128))
    assert [(each.phase, each.kind, each.members) for each in lowered.collectives] == [
        ("forward", "all_gather", ["0.weight"]),
        ("backward", "reduce_scatter", ["0.weight"]),
        ("backward", "all_reduce", ["2.weight", "2.bias", "0.bias"]),
    ]
    notes = {note.subject: note.reason for note in lowered.explain().notes}
    assert notes["0.weight"] == "4 ranks over dp update 64 rows each"
    assert notes["0.bias"] == "it has 1 KiB, less than parallel_optimizer_threshold=64"
    whole, rows = 4 * sum(param.numel() for param in net().parameters()), 4 * 128 * 256
    update = cf.ShardedOptimizer(model, torch.optim.AdamW).lower()
    assert not update.collectives
    for each in (lowered, update):
        held = {kind.kind: (kind.whole, kind.per_rank) for kind in each.explain().memory.held}
        assert held["parameters"] == held["gradients"] == (whole, whole - rows + rows // 4)
    assert held["optimizer state"] == (2 * whole + 16, 2 * (whole - rows + rows // 4) + 16)


def test_a_module_may_divide_gradients_alone() -> None:
    model = divided(parallel_optimizer_config={"level": 2})
    lowered = model.lower(torch.ones(4, 128))
    assert [(each.phase, each.kind, each.members) for each in lowered.collectives] == [
        ("backward", "reduce_scatter", ["0.weight"]),
        ("backward", "all_reduce", ["2.weight", "2.bias", "0.bias"]),
    ]
    whole, rows = 4 * sum(param.numel() for param in net().parameters()), 4 * 128 * 256
    update = cf.ShardedOptimizer(model, torch.optim.AdamW).lower()
    assert [(each.kind, each.members) for each in update.collectives] == [("all_gather", ["0.weight"])]
    for each in (lowered, update):
        held = {kind.kind: (kind.whole, kind.per_rank) for kind in each.explain().memory.held}
        assert held["parameters"] == (whole, whole)
        assert held["gradients"] == (whole, whole - rows + rows // 4)


def test_a_divided_parameter_is_not_written_by_the_model() -> None:
    class Decays(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.weight.mul_(0.9)
            return super().forward(x)

    model = cf.compile(
        Decays(256, 256), device_num=4, enable_parallel_optimizer=True, parallel_optimizer_config={"level": 3}
    )
    with pytest.raises(cf.NotAvailableError, match="weight is written by the model.*parallel_optimizer = False"):
        model.lower(torch.ones(4, 256))
    model.module.weight.parallel_optimizer = False
    assert [each.kind for each in model.lower(torch.ones(4, 256)).collectives] == ["all_reduce"]
