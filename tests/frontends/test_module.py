"""What a compiled module is to its user, on one device: a module like any other, and errors that say what to do."""

from __future__ import annotations

import copy
import gc
import io
import json
import re
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import commfuse_fx as cf
from commfuse_fx import testing


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.second = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)
        self.scale = 1.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(torch.relu(self.norm(self.first(x)))) * self.scale
        return out

    def twice(self, x: torch.Tensor) -> torch.Tensor:
        return self(x) * 2


def pair() -> tuple[Any, Net, Net]:
    model = Net().double()
    twin = copy.deepcopy(model)
    return cf.compile(model, cpu_kernels=False), model, twin


def batch(seed: int = 0) -> torch.Tensor:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def assert_same_gradients(model: nn.Module, twin: nn.Module) -> None:
    for (name, param), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert (param.grad is None) == (other.grad is None), name
        if param.grad is not None:
            torch.testing.assert_close(param.grad, other.grad, rtol=0, atol=0, msg=name)


def test_the_arguments_decide_the_form() -> None:
    model = Net()
    adam = torch.optim.Adam(model.parameters())
    assert isinstance(cf.compile(model), cf.CompiledModule)
    assert isinstance(cf.compile(model, form="module"), cf.CompiledModule)
    assert isinstance(cf.compile(model, loss_fn=F.mse_loss), cf.CompiledStep)
    assert isinstance(cf.compile(model, optimizer=adam), cf.CompiledStep)
    assert isinstance(cf.compile(model, form="step"), cf.CompiledStep)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"form": "model"}, cf.ConfigValueError, "form is 'model'"),
        ({"form": "module", "loss_fn": F.mse_loss}, cf.ConfigValueError, 'form="module" with loss_fn=mse_loss'),
        ({"parallel_mode": "semi_auto"}, cf.NotAvailableError, "not available yet for the module form"),
        ({"parallel_mode": "auto"}, cf.NotAvailableError, "not available yet"),
        ({"pipeline_stages": 2}, cf.NotAvailableError, "not available yet"),
        ({"full_batch": True}, cf.ConfigValueError, "full_batch=True with the module form"),
        ({"device_ids": [0]}, cf.ConfigKeyError, "device_ids is an argument of DistributedDataParallel"),
        ({"dynamic": True}, cf.ConfigKeyError, 'dynamic is an argument of torch.compile.*backend="commfuse", dynamic'),
        ({"fullgraph": True, "capture": "dynamo"}, cf.ConfigKeyError, "fullgraph is an argument of torch.compile"),
        ({"bucket_cap_mb": 25}, cf.ConfigKeyError, "comm_fusion="),
        ({"buckets": 25}, cf.ConfigKeyError, r"'buckets' is not an option of compile\(\); use one of loss_fn, optimi"),
        ({"find_unused": True}, cf.ConfigKeyError, r"\(did you mean find_unused_parameters\?\); use one of"),
        ({"los_fn": len}, cf.ConfigKeyError, r"\(did you mean loss_fn\?\)"),
    ],
)
def test_options_that_a_form_does_not_have(options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        cf.compile(Net(), **options)


def test_a_compiled_module_is_not_compiled_again() -> None:
    compiled = cf.compile(Net())
    with pytest.raises(cf.ConfigTypeError, match="model is what compile.* has returned before: use model.module"):
        cf.compile(compiled)
    with pytest.raises(cf.ConfigTypeError, match="model.0 is what compile.* has returned before: use model.0.module"):
        cf.compile(nn.Sequential(compiled), loss_fn=F.mse_loss)


def test_it_is_the_model_to_its_user(tmp_path: Any) -> None:
    compiled, model, twin = pair()
    assert compiled.module is model and compiled.scale == 1.5 and compiled.first is model.first
    assert [*compiled.state_dict()] == [*model.state_dict()]
    assert [name for name, _ in compiled.named_parameters()] == [name for name, _ in model.named_parameters()]
    assert [name for name, _ in compiled.named_buffers()] == [name for name, _ in model.named_buffers()]
    assert (
        compiled.get_submodule("first") is model.first and compiled.get_parameter("first.weight") is model.first.weight
    )
    compiled.load_state_dict({name: torch.zeros_like(value) for name, value in compiled.state_dict().items()})
    assert not any(param.any() for param in model.parameters())
    torch.testing.assert_close(compiled.twice(batch()), model.twice(batch()))
    assert not compiled.eval().training and not model.norm.training
    compiled.train().requires_grad_(False)
    assert not any(param.requires_grad for param in model.parameters())
    torch.save(compiled.state_dict(), tmp_path / "state")
    twin.load_state_dict(torch.load(tmp_path / "state"))


@pytest.mark.parametrize("capture", ["trace", "dynamo"])
def test_what_the_model_has_is_set_and_deleted_there(capture: str) -> None:
    model = Net()
    twin = copy.deepcopy(model)
    compiled = cf.compile(model, cpu_kernels=False, capture=capture)
    for call in (compiled, twin):
        call(batch().float()).sum().backward()
        call.zero_grad()
        call.scale = 0.5
        call.second = nn.Linear(8, 3, bias=False)
        call.second.weight = nn.Parameter(torch.ones(3, 8))
        call(batch().float()).square().sum().backward()
    assert model.scale == 0.5 and [*compiled.state_dict()] == [*twin.state_dict()]
    assert_same_gradients(model, twin)
    del compiled.scale
    assert not hasattr(model, "scale")


def test_copies_and_files_of_one_process() -> None:
    compiled, model, twin = pair()
    compiled(batch()).sum().backward()
    file = io.BytesIO()
    torch.save(compiled, file)
    file.seek(0)
    twin(batch()).sum().backward()
    for copied in (copy.deepcopy(compiled), torch.load(file, weights_only=False)):
        copied.zero_grad()
        copied(batch()).sum().backward()
        assert copied.module is not model
        assert_same_gradients(copied.module, twin)


def test_values_modes_and_attributes_are_those_of_the_call() -> None:
    compiled, model, twin = pair()
    for change in (
        lambda net: None,
        lambda net: net.eval(),
        lambda net: net.train(),
        lambda net: setattr(net, "scale", 0.5),
        lambda net: net.first.requires_grad_(False),
        lambda net: net.norm.register_forward_hook(lambda module, args, out: out + 1),
    ):
        for net, call in ((model, compiled), (twin, twin)):
            change(net)
            net.zero_grad()
            call(batch()).square().sum().backward()
        assert_same_gradients(model, twin)
        torch.testing.assert_close([*model.buffers()], [*twin.buffers()])


def test_no_gradients_no_graph() -> None:
    compiled, _, twin = pair()
    with torch.no_grad():
        torch.testing.assert_close(compiled(batch()), twin(batch()))
    with torch.inference_mode():
        torch.testing.assert_close(compiled(batch()), twin(batch()))
    compiled.requires_grad_(False)
    assert not compiled(batch()).requires_grad
    x = batch().requires_grad_()
    compiled(x).sum().backward()
    other = batch().requires_grad_()
    twin(other).sum().backward()
    torch.testing.assert_close(x.grad, other.grad)


def test_a_module_that_is_compiled_in_inference_mode_trains_outside_of_it() -> None:
    model = nn.Linear(2, 2)
    with torch.inference_mode():
        compiled = cf.compile(model)
        compiled(torch.ones(1, 2))
    compiled(torch.ones(1, 2)).sum().backward()
    assert model.weight.grad is not None and torch.equal(model.weight.grad, torch.ones(2, 2))


def test_a_second_backward_needs_retain_graph() -> None:
    compiled, _, _ = pair()
    loss = compiled(batch()).sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


def test_gradients_of_gradients_are_refused() -> None:
    compiled, _, _ = pair()
    text = r"create_graph=True.* compute what needs gradients of gradients inside of the model's forward"
    with pytest.raises(cf.NotAvailableError, match=text), pytest.warns(UserWarning, match="cycle"):
        compiled(batch()).sum().backward(create_graph=True)


def test_sparse_gradients_are_refused_with_what_to_do() -> None:
    model = nn.Sequential(nn.Embedding(4, 3, sparse=True), nn.Linear(3, 2))
    with pytest.raises(cf.CaptureError, match="makes a sparse gradient.*: use sparse=False"):
        cf.compile(model)(torch.tensor([1, 2]))


def test_torch_compile_leaves_a_compiled_module_as_it_is() -> None:
    compiled, model, twin = pair()
    around = torch.compile(lambda x: compiled(x).square().sum(), backend="eager")
    around(batch()).backward()
    twin(batch()).square().sum().backward()
    assert_same_gradients(model, twin)


@pytest.mark.parametrize("what", ["parameter", "output"])
def test_what_the_backward_needs_may_not_be_changed_before(what: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid())
    compiled = cf.compile(model)
    out = compiled(torch.randn(2, 4).requires_grad_())
    with torch.no_grad():
        (model[0].weight if what == "parameter" else out).mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_an_output_that_is_a_view_may_be_changed_unless_the_backward_reads_it() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Unflatten(1, (2, 3)))
    twin = copy.deepcopy(model)
    compiled = cf.compile(model, cpu_kernels=False)
    x = torch.randn(5, 4)
    for call in (compiled, twin):
        out = call(x)
        out += 1
        out.mul_(2)
        out.square().sum().backward()
    assert_same_gradients(model, twin)
    compiled = cf.compile(nn.Sequential(nn.Linear(4, 6), nn.Sigmoid(), nn.Unflatten(1, (2, 3))))
    out = compiled(x)
    out.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation: output 0"):
        out.sum().backward()


class Clipped(nn.Module):
    """Writes to a parameter in its forward, and counts its calls in a buffer that its backward reads."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(4, 3, dtype=torch.float64))
        self.register_buffer("factor", torch.ones(3, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.weight.clamp_(-0.5, 0.5)
        out = (x @ self.weight) * self.factor.clone()
        self.get_buffer("factor").add_(0.5)
        return out


def test_a_forward_that_writes_to_parameters_and_buffers() -> None:
    model = Clipped()
    twin = copy.deepcopy(model)
    compiled = cf.compile(model, cpu_kernels=False)
    for number in range(3):
        for net, call in ((model, compiled), (twin, twin)):
            call(batch(number)).square().sum().backward()
            with torch.no_grad():
                net.weight -= 0.1 * net.weight.grad
        assert_same_gradients(model, twin)
        torch.testing.assert_close([model.weight, model.factor], [twin.weight, twin.factor], rtol=0, atol=0)


def test_a_graph_that_nobody_needs_any_more_is_let_go() -> None:
    gc.freeze()  # or collecting looks through what all tests before have left
    compiled, _, _ = pair()
    out = compiled(batch())
    held = weakref.ref(out.grad_fn.call)
    gc.collect()
    gc.disable()
    try:
        del out
        assert held() is None, "by reference counts alone"
    finally:
        gc.enable()
    out = compiled(batch())
    out.sum().backward()
    assert out.grad_fn.call.forward.values is None


class Outputs(nn.Module):
    """Several outputs in a dict, one of them an input, one no tensor, one without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, Any]:
        a = self.one(x)
        return {"a": a, "b": (self.two(a), y), "count": 3, "best": a.argmax(1), "view": a[:, :2]}


@pytest.mark.parametrize(
    "used", [("a",), ("b",), ("view",), ("a", "b"), ("a", "view"), ("a", "b", "view")], ids="+".join
)
def test_losses_that_use_some_outputs(used: tuple[str, ...]) -> None:
    model = Outputs().double()
    twin = copy.deepcopy(model)
    compiled = cf.compile(model, cpu_kernels=False)
    for _ in range(2):
        for net, call in ((model, compiled), (twin, twin)):
            net.zero_grad()
            y = batch(1)
            out = call(batch(), y)
            assert out["b"][1] is y or torch.equal(out["b"][1], y)
            assert out["count"] == 3 and out["best"].dtype == torch.int64
            parts = {"a": out["a"], "b": out["b"][0], "view": out["view"]}
            sum(parts[name].square().sum() for name in used).backward()
        assert_same_gradients(model, twin)


class Twice(nn.Module):
    """Returns a tensor twice, and in an object what is computed from it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(4, 3), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, Any, torch.Tensor, torch.Tensor]:
        a = self.one(x)
        return a, torch.distributions.Categorical(logits=a), a, self.two(x)


def test_a_tensor_that_is_several_outputs() -> None:
    model = Twice().double()
    twin = copy.deepcopy(model)
    for call in (cf.compile(model, cpu_kernels=False), twin):
        a, spread, again, b = call(batch())
        chosen = spread.log_prob(torch.tensor([0, 1, 2, 0, 1, 2]))
        (a.sum() + (chosen * b.detach()[:, 0]).mean() + again.exp().sum() + b.square().mean()).backward()
    assert_same_gradients(model, twin)


def test_outputs_that_share_their_memory() -> None:
    """What is detached has no gradient, and takes none from the tensor that it shows."""

    class Shows(nn.Linear):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            y = super().forward(x)
            return y.detach(), y, self.weight, self.weight.detach(), x.detach(), x

    model = Shows(4, 2).double()
    twin = copy.deepcopy(model)
    gradients = []
    for call in (cf.compile(model, cpu_kernels=False), twin):
        x = batch().requires_grad_()
        found = call(x)
        assert [each.requires_grad for each in found] == [False, True, True, False, False, True]
        assert [each.data_ptr() for each in found[::2]] == [each.data_ptr() for each in found[1::2]]
        (found[1].square().sum() + found[2].exp().sum() + found[5].sum()).backward()
        gradients.append(x.grad)
    assert_same_gradients(model, twin)
    torch.testing.assert_close(*gradients, rtol=0, atol=0)


@pytest.mark.parametrize("changed", [0, 1])
def test_outputs_that_share_a_gradient_may_not_be_changed_in_place(changed: int) -> None:
    class Halves(nn.Linear):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y = super().forward(x)
            return y, y[:, :1]

    found = cf.compile(Halves(4, 2).double(), cpu_kernels=False)(batch())
    with pytest.raises(RuntimeError, match="is being modified inplace"):
        found[changed].mul_(2)


def test_activation_checkpointing_and_autocast() -> None:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = checkpoint(lambda x, layer=layer: F.dropout(torch.tanh(layer(x)), 0.3), x, use_reentrant=False)
            return x

    model = Deep()
    twin = copy.deepcopy(model)
    compiled = cf.compile(model, cpu_kernels=False)
    x = torch.randn(4, 8)
    for dtype in (torch.float32, torch.bfloat16):
        for net, call in ((model, compiled), (twin, twin)):
            net.zero_grad()
            torch.manual_seed(1)
            with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
                loss = call(x).square().mean()
            loss.backward()
        assert_same_gradients(model, twin)


def test_a_loss_scale_that_overflows_is_skipped() -> None:
    model = nn.Linear(4, 1)
    compiled = cf.compile(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**120)
    before = model.weight.detach().clone()
    scaler.scale(compiled(torch.full((2, 4), 1e30)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(model.weight, before) and scaler.get_scale() < 2.0**120


def test_it_is_lowered_and_described(tmp_path: Path) -> None:
    lowered = cf.compile(Net(), device_num=4).lower(torch.randn(6, 4))
    text = lowered.text()
    forward, backward = text.split("hand_over(")
    assert "# form: module" in forward and "bwd " not in forward and "fwd " not in backward
    assert [collective.phase for collective in lowered.collectives] == ["backward"] * len(lowered.collectives)
    assert {collective.kind for collective in lowered.collectives} == {"all_reduce", "broadcast"}
    assert cf.diff(lowered, lowered.dump(tmp_path)).kind == "identical"
    testing.assert_collectives(lowered, all_reduce=1, broadcast=2)
    explained, simulated = lowered.explain("gloo-1gbit"), lowered.simulate("gloo-1gbit")
    names = [each.name for each in explained.collectives]
    assert [each.name for each in simulated.collectives] == names and len(names) == len(lowered.collectives)
    assert all(name in explained.text() for name in names) and simulated.step_seconds > 0
    (found,) = re.findall(r'<script id="data" type="application/json">(.*?)</script>', lowered.report("gloo-1gbit"))
    data = json.loads(found)
    assert [each["name"] for each in data["collectives"]] == names
    phases = [node["phase"] for node in data["nodes"]]
    assert phases.index("backward") > max(number for number, phase in enumerate(phases) if phase == "forward")


def test_every_compile_of_a_module_is_dumped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMMFUSE_DUMP", str(tmp_path))
    compiled, *_ = pair()
    for rows in (6, 6, 4):
        compiled(batch()[:rows]).sum().backward()
    folders = sorted(tmp_path.iterdir())
    assert [cf.load(folder).fingerprint for folder in folders] == [
        compiled.lower(batch()[:rows]).fingerprint for rows in (6, 4)
    ]


def test_buckets_are_those_of_the_step(tmp_path: Path) -> None:
    """In every mode of fusion, with ids of their own, and priced by a cluster: the diff shows no other collective."""

    def marked() -> Net:
        net = Net()
        first, second, *_, last = net.parameters()
        first.comm_fusion, second.comm_fusion, last.comm_fusion = 0, 3, 3  # type: ignore[attr-defined]
        return net

    def wide() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 600), *(nn.Linear(600, 600) for _ in range(3)), nn.Linear(600, 2))

    file = tmp_path / "cluster.json"
    cf.resolve_cluster("gloo-1gbit").save(file)
    x, y = torch.randn(6, 4), torch.randn(6, 2)
    optimal = {"allreduce": {"mode": "optimal", "config": None}}
    counts = []
    for make, options in (
        (Net, {}),
        (Net, {"comm_fusion": {"openstate": False}}),
        (Net, {"comm_fusion": {"allreduce": {"mode": "index", "config": [2, 4]}}}),
        (Net, {"comm_fusion": optimal, "cluster": "gloo-1gbit"}),
        (marked, {"comm_fusion": {"allreduce": {"mode": "size", "config": 1}}, "cluster": "gloo-1gbit"}),
        (marked, {"comm_fusion": optimal, "cluster": "gloo-10gbit"}),
        (wide, {"comm_fusion": {"allreduce": {"mode": "size", "config": 2}}}),
        (wide, {"comm_fusion": optimal, "cluster": file}),
    ):
        step = cf.compile(make(), loss_fn=F.mse_loss, device_num=4, **options).lower(x, y)  # type: ignore[call-overload]
        module = cf.compile(make(), device_num=4, broadcast_buffers=False, **options).lower(x)  # type: ignore[call-overload]
        assert step.collectives and cf.diff(step, module).collectives == ()
        assert [each.members for each in module.collectives] == [each.members for each in step.collectives]
        counts.append(len(module.collectives))
    assert counts == [1, 6, 3, 1, 3, 3, 3, 3]


def test_lockstep_is_for_steps() -> None:
    with pytest.raises(cf.NotAvailableError, match="module form"):
        cf.lockstep(cf.compile(Net(), device_num=2).lower(torch.randn(2, 4)))


def test_a_virtual_world_runs_nothing() -> None:
    with pytest.raises(cf.VirtualWorldError, match="has no devices to run on"):
        cf.compile(Net(), device_num=2)(torch.randn(2, 4))
