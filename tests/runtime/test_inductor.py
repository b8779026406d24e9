"""Regions that Inductor compiles compute what the ops of the graph compute, or run as these."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.flop_counter import FlopCounterMode

import commfuse_fx as cf
from commfuse_fx.ir.core.dependence import Roots
from commfuse_fx.ir.core.meta import info
from commfuse_fx.ir.ops.regions import Region, regions_of
from commfuse_fx.passes.kernels.inductor_regions import InductorRegions
from commfuse_fx.runtime.execute.code.codegen import Generated, Sends, generate
from commfuse_fx.runtime.execute.inductor.inductor import _graph_module, compiled_regions
from commfuse_fx.runtime.execute.inductor.region_outputs import RecordedOutputs
from commfuse_fx.testing import parse_program
from tests.logs import logged


class Blocks(nn.Module):
    """Layers that are alike, with a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(2)])
        self.norm = nn.LayerNorm(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(self.norm(x)))
        return x


def images() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 6))


def made(model: Callable[[], nn.Module], *shape: int) -> tuple[nn.Module, nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    built = model().double()
    return built, copy.deepcopy(built), (torch.randn(shape, dtype=torch.float64), torch.randn(5, 6).double())


def assert_equal(one: nn.Module, other: nn.Module, gradients: bool) -> None:
    for (name, have), want in zip(one.named_parameters(), other.parameters(), strict=True):
        have, want = (each.grad if gradients else each for each in (have, want))
        torch.testing.assert_close(have, want, rtol=1e-10, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}")
    torch.testing.assert_close(dict(one.named_buffers()), dict(other.named_buffers()), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("limit", [None, 0.1])
def test_a_step_trains_as_eager_pytorch_does(limit: float | None) -> None:
    model, twin, (x, target) = made(images, 5, 3, 8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = cf.compile(model, loss_fn=F.mse_loss, optimizer=optimizer, backend="inductor", clip_grad_norm=limit)
    assert regions_of(step.lower(x, target).program)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        loss = F.mse_loss(twin(x), target)
        loss.backward()
        if limit is not None:
            assert nn.utils.clip_grad_norm_(twin.parameters(), limit) > 2 * limit
        optimizer.step()
        torch.testing.assert_close(step(x, target).detach(), loss.detach(), rtol=1e-10, atol=1e-10)
    assert_equal(model, twin, gradients=False)


def test_a_module_has_the_gradients_of_eager_pytorch() -> None:
    model, twin, (x, target) = made(Blocks, 5, 6)
    module = cf.compile(model, backend="inductor")
    for call in (module, twin):
        for _ in range(2):
            F.mse_loss(call(x), target).backward()
    assert_equal(model, twin, gradients=True)
    module.eval(), twin.eval()
    torch.testing.assert_close(module(x), twin(x), rtol=1e-10, atol=1e-10)


def test_masks_are_other_ones_each_time_and_those_of_eager_pytorch_where_inductor_is_told_so() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Tanh()).double()
    twin = copy.deepcopy(model)
    module, other = (cf.compile(each, backend="inductor") for each in (model, copy.deepcopy(model)))
    x = torch.randn(5, 6).double()
    torch.manual_seed(1)
    first, second = module(x), module(x)
    torch.manual_seed(1)
    assert torch.equal(module(x), first) and not torch.equal(first, second)
    with torch._inductor.config.patch(fallback_random=True):
        for call in (other, twin):
            torch.manual_seed(1)
            call(x).sum().backward()
            call(x).sum().backward()
    assert_equal(other.module, twin, gradients=True)


class DropsRows(nn.Module):
    """Dropout right after layer norm, of which Inductor makes one kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.norm, self.last = nn.Embedding(32, 64), nn.LayerNorm(64), nn.Linear(64, 3)

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(F.dropout(self.norm(self.rows(numbers)), 0.3, self.training)).tanh()
        return out


@pytest.mark.parametrize("form", ["module", "step"])
def test_masks_are_drawn_before_they_are_read(form: str) -> None:
    """Inductor writes masks into filled memory, and has let kernels read it before. That gave NaN in BERT."""
    torch.manual_seed(0)
    model = DropsRows().double()
    twin = copy.deepcopy(model)
    options: dict[str, Any] = {} if form == "module" else {"loss_fn": lambda out, target: (out * target).sum()}
    call = cf.compile(model, backend="inductor", **options)
    numbers, target = torch.randint(0, 32, (40,)), torch.randn(40, 3).double()
    with torch._inductor.config.patch(fallback_random=True):
        torch.manual_seed(1)
        (call(numbers) * target).sum().backward() if form == "module" else call(numbers, target)
    torch.manual_seed(1)
    (twin(numbers) * target).sum().backward()
    assert_equal(model, twin, gradients=True)


def test_an_op_that_has_no_name_in_python_runs_op_by_op(caplog: pytest.LogCaptureFixture) -> None:
    """`torch.ops.aten.random.from` cannot be written in Python, as Inductor has to."""
    model = nn.Linear(6, 6)
    step = cf.compile(
        model,
        loss_fn=lambda out, target: (out * torch.empty_like(out).random_(1, 2) - target).tanh().sum(),
        backend="inductor",
    )
    x, target = torch.randn(5, 6), torch.randn(5, 6)
    torch.testing.assert_close(step(x, target), (model(x) - target).tanh().sum().detach())
    assert "run op by op, as Inductor does not compile them" in caplog.text


def test_what_inductor_refuses_runs_op_by_op_and_one_line_says_why() -> None:
    model, twin, (x, target) = made(Blocks, 5, 6)
    module = cf.compile(model, backend="inductor")
    with (
        logged() as messages,
        mock.patch("torch._inductor.compile_fx.compile_fx", side_effect=RuntimeError("no compiler\nand more")),
    ):
        F.mse_loss(module(x), target).backward()
    F.mse_loss(twin(x), target).backward()
    assert_equal(model, twin, gradients=True)
    (line,) = [message for message in messages if "op by op" in message]
    assert "2 of 2 regions run op by op" in line and line.endswith("RuntimeError: no compiler")


def test_without_a_folder_for_code_a_step_runs_op_by_op(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "file" / "folder"))
    model, twin, (x, target) = made(Blocks, 5, 6)
    module = cf.compile(model, backend="inductor")
    with logged() as messages:
        F.mse_loss(module(x), target).backward()
    F.mse_loss(twin(x), target).backward()
    assert_equal(model, twin, gradients=True)
    (line,) = [message for message in messages if "op by op" in message]
    assert "2 regions run op by op" in line and str(tmp_path / "file" / "folder") in line


TWICE = """
    in  %a: f32[2,3] = parameter
    in  %b: f32[2,3] = parameter
    in  %c: f32[6] = parameter
    in  %d: f32[2,3] = parameter
    in  %x: f32[2,3] = input
    fwd %/neg.0: f32[2,3] = aten.neg(%x)
    fwd %/neg.1: f32[2,3] = aten.neg(%x)
    fwd %/view.0: f32[6] = aten.view(%/neg.1, [6])
    fwd %hidden: f32[2,3] = aten.add.Tensor(%x, 0)
    fwd %/sum.0: f32[] = aten.sum(%/neg.0)
    return [%/sum.0, %/neg.0, %/neg.1, %/view.0, %hidden]
"""


def test_results_get_memory_of_their_own_and_the_strides_of_the_graph() -> None:
    program = parse_program(TWICE, gradients=["a", "b", "c", "d"])
    assert InductorRegions()(program)
    (region,) = regions_of(program)
    names = [info(node).name for node in region.outputs]

    def code(given: list[torch.Tensor]) -> list[torch.Tensor]:
        """What a compiler may do: equal results are one tensor, what adds nothing is its input, strides are its own."""
        (x,) = given
        neg = (-x).t().contiguous().t()
        made = {"/neg.0": neg, "/neg.1": neg, "/view.0": neg.reshape(6), "hidden": x, "/sum.0": neg.sum()}
        given.clear()
        return [made[name] for name in names]

    run = RecordedOutputs(code, region, Roots(program.graph, program.aliases()))
    for _ in range(2):
        x = torch.randn(2, 3)
        found = dict(zip(names, run([x]), strict=True))
        assert {name: value.stride() for name, value in found.items() if name != "/sum.0"} == {
            "/neg.0": (3, 1),
            "/neg.1": (3, 1),
            "/view.0": (1,),
            "hidden": (3, 1),
        }
        for value in found.values():
            value.add_(1)
        assert torch.equal(found["/neg.0"], 1 - x) and torch.equal(found["hidden"], x + 1)


def test_code_that_returns_another_dtype_is_an_error_that_names_the_node() -> None:
    program = parse_program(TWICE, gradients=["a", "b", "c", "d"])
    assert InductorRegions()(program)
    (region,) = regions_of(program)
    run = RecordedOutputs(lambda given: [given[0].half()] * 5, region, Roots(program.graph, program.aliases()))
    with pytest.raises(cf.VerificationError, match=r"float16\[2, 3\] for node /neg.0, which is torch.float32\[2, 3\]"):
        run([torch.randn(2, 3)])


def test_modes_of_the_caller_do_not_get_into_the_code() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Softmax(-1))
    module, x = cf.compile(model, backend="inductor"), torch.randn(3, 4)
    active: list[object] = []

    def compiled(traced: Any, examples: object) -> Any:
        active.extend([torch.is_autocast_enabled("cpu"), torch.is_grad_enabled(), *_get_current_dispatch_mode_stack()])
        return lambda given: traced(*given)

    with (
        mock.patch("torch._inductor.compile_fx.compile_fx", compiled),
        torch.autocast("cpu", torch.bfloat16),
        FlopCounterMode(display=False),
    ):
        module(x).sum().backward()
    assert active and not any(active)


@pytest.mark.parametrize("custom", [False, True])
def test_ops_whose_results_may_be_laid_out_otherwise_are_in_no_region(custom: bool) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found = doubled(x * self.lstm.weight_ih_l0[0]) if custom else self.lstm(x)[0]
            result: torch.Tensor = torch.tanh(torch.tanh(found))
            return result

    model = Model()
    step = cf.compile(model, loss_fn=F.mse_loss, optimizer=torch.optim.SGD(model.parameters()), backend="inductor")
    program = step.lower(torch.randn(3, 2, 4), torch.randn(3, 2, 4)).program
    names = {str(node.target) for region in regions_of(program) for node in region.nodes}
    assert "aten.tanh.default" in names
    assert not any("lstm" in name or name.startswith("tests.") for name in names)
    assert any("lstm" in str(n.target) or str(n.target).startswith("tests.") for n in program.graph.nodes)


class JoinsNothing(nn.Module):
    """`torch.cat` of an empty tensor and a transposed one: contiguous, but Inductor leaves it transposed."""

    def __init__(self, by_strides: bool) -> None:
        super().__init__()
        self.linear, self.by_strides = nn.Linear(6, 6), by_strides

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        joined = torch.cat([torch.tensor([], dtype=x.dtype), self.linear(x).t() * 2])
        return (joined.as_strided((5, 6), (6, 1)) if self.by_strides else joined.view(5, 6)).tanh().exp()


@pytest.mark.parametrize("by_strides", [False, True])
def test_views_are_of_results_as_the_graph_has_them(by_strides: bool) -> None:
    model, twin, (x, target) = made(lambda: JoinsNothing(by_strides), 5, 6)
    module = cf.compile(model, backend="inductor")
    with logged() as messages:
        F.mse_loss(module(x), target).backward()
    F.mse_loss(twin(x), target).backward()
    assert_equal(model, twin, gradients=True)
    assert not [message for message in messages if "op by op" in message]


class Counts(nn.Module):
    """Rows counted in one precision and read in another, beside layer norm of as many rows."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.norm = nn.Embedding(32, 64), nn.LayerNorm(64)

    def forward(self, numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ones = torch.ones(64, dtype=torch.float32)
        counts = torch.zeros(40, 64, dtype=torch.float32).index_put((numbers,), ones, accumulate=True).double()
        return self.norm(self.rows(numbers)) * counts, counts


def test_what_is_scattered_is_complete_before_it_is_read() -> None:
    torch.manual_seed(0)
    model = Counts().double()
    numbers = torch.randint(0, 32, (40,))
    torch.testing.assert_close(cf.compile(model, backend="inductor")(numbers), model(numbers), rtol=1e-10, atol=1e-10)


def test_a_loss_with_fewer_labels_than_classes_is_that_of_eager_pytorch() -> None:
    """Inductor takes all places of the target as labels, those after the first -1 as class 0."""
    model, target = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Softmax(-1)), torch.tensor([[1, 2, -1, 0, 0, 0]] * 5)
    step = cf.compile(model, loss_fn=F.multilabel_margin_loss, backend="inductor")
    x = torch.randn(5, 6)
    torch.testing.assert_close(step(x, target), F.multilabel_margin_loss(model(x), target).detach())


class Gated(nn.Module):
    """Ops that Inductor computes less or more precisely than PyTorch, and one for which it draws other numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = F.hardsigmoid(self.linear(x))
        likely = 20 + gate.exp() * torch.bernoulli(gate.detach())
        return 1e9 * F.soft_margin_loss(likely, torch.ones_like(likely))


def test_what_inductor_computes_otherwise_is_that_of_eager_pytorch() -> None:
    model, twin, (x, _) = made(Gated, 5, 6)
    module = cf.compile(model, backend="inductor")
    with torch._inductor.config.patch(fallback_random=True):
        for call in (module, twin):
            torch.manual_seed(1)
            call(x).backward()
    assert_equal(model, twin, gradients=True)


def test_rrelu_has_its_noise_in_evaluation() -> None:
    model, twin, (x, target) = made(lambda: nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.RReLU()).eval(), 5, 6)
    module = cf.compile(model, backend="inductor")
    for call in (module, twin):
        F.mse_loss(call(x), target).backward()
    assert_equal(model, twin, gradients=True)


def test_an_op_that_inductor_refuses_is_in_no_region() -> None:
    def loss_fn(out: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.ctc_loss(out.tanh().log_softmax(-1), labels, (7, 7), (3, 2))

    step = cf.compile(nn.Linear(5, 6), loss_fn=loss_fn, backend="inductor")
    program = step.lower(torch.randn(7, 2, 5), torch.randint(1, 6, (2, 3))).program
    compiled = {node.target for region in regions_of(program) for node in region.nodes}
    assert torch.ops.aten._log_softmax.default in compiled
    assert torch.ops.aten._ctc_loss.default in {node.target for node in program.graph.nodes} - compiled


@torch.library.custom_op("tests::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


@doubled.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


doubled.register_autograd(lambda ctx, grad: 2 * grad)


def test_numbers_that_are_computed_once_are_no_inputs_of_a_region() -> None:
    program = parse_program(
        """
        in  %w: f32[4] = parameter
        fwd %/full.0: f32[] = aten.full([], 2.0, dtype=f32, device=cpu, pin_memory=False)  {computed once}
        fwd %/arange.0: f32[4] = aten.arange(4, dtype=f32, device=cpu, pin_memory=False)  {computed once}
        fwd %/mul.0: f32[4] = aten.mul.Tensor(%w, %/full.0)  {region 0}
        fwd %/add.0: f32[4] = aten.add.Tensor(%/mul.0, %/arange.0)  {region 0}
        fwd %/sum.0: f32[] = aten.sum(%/add.0)
        return [%/sum.0]
        """
    )
    (region,) = regions_of(program)
    assert [info(node).name for node in region.inputs] == ["w", "/arange.0"]
    assert [info(node).name for node in region.constants] == ["/full.0"]
    with mock.patch("torch._inductor.compile_fx.compile_fx", lambda module, examples: lambda given: module(*given)):
        (found,) = compiled_regions(program, 0)[0]([torch.ones(4), torch.arange(4.0)])
    assert torch.equal(found, torch.arange(4.0) + 2)


def test_what_is_computed_once_is_in_no_region() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            places = torch.arange(x.shape[0])
            mask = torch.where(places[:, None] >= places, 0.0, -torch.inf)
            return torch.tanh(self.layer(torch.softmax(x @ x.t() + mask, -1) @ x)) * torch.tensor(0.5)

    torch.manual_seed(0)
    model = Masked()
    twin, compiled, x = copy.deepcopy(model), cf.compile(model, backend="inductor"), torch.randn(6, 4)
    for each in (compiled, compiled, twin):
        each.zero_grad()
        each(x).square().sum().backward()
    torch.testing.assert_close(model.layer.weight.grad, twin.layer.weight.grad)
    nodes = [node for node in compiled.lower(x).program.graph.nodes if info(node).once]
    assert nodes and all(info(node).region is None for node in nodes)


FILLED = """
    in  %w: f32[4] = parameter
    in  %x: f32[2,4] = input
    fwd %/exp.0: f32[2,4] = aten.exp(%x)
    fwd %/memory: f32[4] = aten.empty.memory_format([4], dtype=f32, device=cpu)
    fwd %/sum.0: f32[4] = aten.sum.IntList_out(%/exp.0, [0], out=%/memory)
    fwd %/view.0: f32[2,2] = aten.view(%/memory, [2, 2])
    fwd %/sum.1: f32[] = aten.sum(%/exp.0)
    fwd %/mul.0: f32[2,2] = aten.mul.Tensor(%/view.0, %/sum.1)
    fwd %/sum.2: f32[] = aten.sum(%/mul.0)
    bwd %/grad.sum.0: f32[4] = aten.sum.dim_IntList(%x, [0])
    return [%/sum.2, %/grad.sum.0]
"""


def by_ops(region: Region) -> Callable[[list[torch.Tensor]], list[torch.Tensor]]:
    module = _graph_module(region)
    return lambda given: module(*given)


def code_of(text: str, send: Callable[[torch.Tensor], None] | None = None) -> Generated:
    """The code of a program whose regions run op by op. `send` gets %/memory once the first region has run."""
    program = parse_program(text, gradients=["w"])
    assert InductorRegions()(program)
    regions = regions_of(program)
    node = {info(node).name: node for node in program.graph.nodes}
    sends: Sends = {regions[0].nodes[-1]: [(send, node["/memory"])]} if send is not None else {}
    runs = {region.number: by_ops(region) for region in regions}
    return generate(program, lambda node: node.target, sends=sends, compiled=runs)


def test_a_view_between_the_nodes_of_a_region_drops_nothing_that_the_region_takes() -> None:
    x = torch.randn(2, 4)
    live, _ = code_of(FILLED).produce([torch.ones(4), x])
    torch.testing.assert_close(live[0], x.exp().sum() ** 2)


def test_what_a_region_completes_of_a_bucket_leaves_when_it_has_run() -> None:
    sent: list[torch.Tensor] = []
    x = torch.randn(2, 4)
    text = FILLED.replace("aten.sum.dim_IntList(%x, [0])", "aten.neg(%/memory)")
    code_of(text, lambda memory: sent.append(memory.clone())).produce([torch.ones(4), x])
    torch.testing.assert_close(sent, [x.exp().sum(0)])
