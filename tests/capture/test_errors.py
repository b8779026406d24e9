"""What cannot be one graph gets an error that names the module, the source line and the fix."""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import commfuse_fx as cf
from tests.capture.equivalence import assert_trains_as_eager


class Fn(nn.Module):
    def __init__(self, run: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)
        self.run = run
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args: Any) -> Any:
        return self.run(self, *args)


def square(output: torch.Tensor, target: Any) -> torch.Tensor:
    return output.square().mean()


def error_of(model: nn.Module, *args: Any, loss_fn: Any = square) -> str:
    before = {name: (value, value.clone()) for name, value in model.state_dict(keep_vars=True).items()}
    step = cf.compile(model, loss_fn=loss_fn, device_num=2, global_rank=0, form="step")
    with pytest.raises(cf.CommFuseError) as raised:
        step.lower(*args)
    assert isinstance(raised.value, cf.CaptureError)
    for name, value in model.state_dict(keep_vars=True).items():
        assert value is before[name][0] and torch.equal(value, before[name][1]), f"{name} was left changed"
    return str(raised.value)


def _if(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = m.lin(x)
    if y.sum() > 0:
        return y * 2
    return y


def _while(m: Any, x: torch.Tensor) -> torch.Tensor:
    while x.norm() > 1:
        x = x / 2
    return m.lin(x)


def _packed(m: Any, x: torch.Tensor) -> torch.Tensor:
    return nn.utils.rnn.pack_padded_sequence(m.lin(x)[None], [4], batch_first=True).data


def _loop_over_values(m: Any, x: torch.Tensor) -> torch.Tensor:
    return sum((m.lin(x[int(i)]) for i in x.argmax(1)), torch.zeros(8))


DATA_DEPENDENT: dict[str, Callable[..., Any]] = {
    "if": _if,
    "while": _while,
    "item": lambda m, x: m.lin(x) * x.max().item(),
    "float": lambda m, x: m.lin(x) * float(x.max()),
    "tolist": lambda m, x: m.lin(x) * x[0].tolist()[0],
    "nonzero": lambda m, x: m.lin(x)[x.nonzero()[:, 0]],
    "boolean_mask": lambda m, x: m.lin(x)[x > 0],
    "masked_select": lambda m, x: torch.masked_select(m.lin(x), x > 0),
    "unique": lambda m, x: m.lin(x) * torch.unique(x).sum(),
    "range": lambda m, x: m.lin(x)[: int(x.argmax())],
    "loop": _loop_over_values,
    "repeat_interleave": lambda m, x: m.lin(x).repeat_interleave(x[:, 0].long(), dim=0),
    "numpy": lambda m, x: m.lin(x) * torch.from_numpy(x.detach().numpy()),
    "gaussian_nll": lambda m, x: F.gaussian_nll_loss(m.lin(x), x, x.square()),
    "ctc_lengths": lambda m, x: F.ctc_loss(
        m.lin(x)[:, None].log_softmax(2), torch.ones(1, 2).long(), torch.tensor([4]), torch.tensor([2])
    ),
    "packed": _packed,
}


@pytest.mark.parametrize("name", list(DATA_DEPENDENT))
def test_data_dependence_names_module_line_and_fix(name: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), Fn(DATA_DEPENDENT[name]))
    message = error_of(model, torch.randn(4, 8), None)
    assert re.search(r"cannot trace (module )?1(\.lin)?\b", message), message
    assert re.search(r"test_errors\.py:\d+", message), message
    assert re.search(r"torch\.where|mask|tuples of int", message), message


def test_the_line_is_the_one_of_the_decision() -> None:
    line = _if.__code__.co_firstlineno + 2
    assert f"test_errors.py:{line}" in error_of(Fn(_if), torch.randn(4, 8), None)


def test_loss_must_be_a_scalar() -> None:
    model = nn.Linear(8, 8)
    assert "pass loss_fn" in error_of(model, torch.randn(4, 8), loss_fn=None)
    assert re.search(r"\(4,\).*\.mean\(\)", error_of(model, torch.randn(4, 8), None, loss_fn=lambda o, t: o.sum(1)))
    assert "not a tensor" in error_of(model, torch.randn(4, 8), None, loss_fn=lambda o, t: 1.0)
    assert "floating-point" in error_of(model, torch.randn(4, 8), None, loss_fn=lambda o, t: o.argmax())
    assert "pass loss_fn" in error_of(Fn(lambda m, x: {"logits": m.lin(x)}), torch.randn(4, 8), loss_fn=None)
    assert "pass loss_fn" in error_of(Fn(lambda m, x: (m.lin(x).sum(), x)), torch.randn(4, 8), loss_fn=None)


def test_all_parameters_frozen() -> None:
    assert "requires_grad_(True)" in error_of(nn.Linear(8, 8).requires_grad_(False), torch.randn(4, 8), None)


def test_detached_loss() -> None:
    assert "detach()" in error_of(Fn(lambda m, x: m.lin(x).detach()), torch.randn(4, 8), None)


def test_lazy_module() -> None:
    step = cf.compile(nn.Sequential(nn.LazyLinear(3)), loss_fn=square)
    with pytest.raises(cf.CaptureError, match=r"0\.(weight|bias) is not initialised.*run the model once"):
        step(torch.randn(4, 8), None)


def test_sparse_gradients() -> None:
    model = nn.Sequential(nn.Embedding(10, 8, sparse=True))
    assert "sparse=False" in error_of(model, torch.randint(0, 10, (4,)), None)


@pytest.mark.parametrize(
    "change",
    [
        lambda y: y.as_subclass(torch.Tensor),
        lambda y: torch.Tensor._make_subclass(torch.Tensor, y),
        lambda y: y + y.detach().as_subclass(torch.Tensor),
    ],
)
def test_a_tensor_that_tracing_loses_sight_of(change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    message = error_of(Fn(lambda m, x: change(m.lin(x)) + m.lin(x)), torch.randn(4, 8), None)
    assert "a call that tracing cannot follow" in message and "test_errors.py" in message


def test_attribute_that_is_no_buffer() -> None:
    def in_place(m: Any, x: torch.Tensor) -> torch.Tensor:
        m.count.add_(1)
        return m.lin(x) * m.count

    def reassigned(m: Any, x: torch.Tensor) -> torch.Tensor:
        m.count = m.count + 1
        return m.lin(x) * m.count

    for run in (in_place, reassigned):
        inner = Fn(run, count=torch.zeros(()))
        message = error_of(nn.Sequential(inner), torch.randn(4, 8), None)
        assert "0.count" in message and "register_buffer" in message
        assert torch.equal(inner.count, torch.zeros(()))


def test_attribute_that_is_only_written_leaves_no_trace(caplog: pytest.LogCaptureFixture) -> None:
    def run(m: Any, x: torch.Tensor) -> torch.Tensor:
        m.last = m.lin(x)
        m.seen.append(m.last)
        m.new = m.last * 2
        return m.last

    inner = Fn(run, last=None, seen=[])
    with caplog.at_level(logging.WARNING, "commfuse_fx"):
        cf.compile(nn.Sequential(inner), loss_fn=square)(torch.randn(4, 8), None)
    assert inner.last is None and inner.seen == [] and not hasattr(inner, "new")
    assert "0.last" in caplog.text and "buffer" in caplog.text


def test_buffer_that_changes_shape() -> None:
    def run(m: Any, x: torch.Tensor) -> torch.Tensor:
        m.memory = torch.cat([m.memory, x.detach()])
        return m.lin(x)

    model = Fn(run)
    model.register_buffer("memory", torch.zeros(1, 8))
    message = error_of(model, torch.randn(4, 8), None)
    assert "buffer memory" in message and "keeps its shape" in message


@pytest.mark.parametrize("of", [lambda m, x: x, lambda m, x: x[1:], lambda m, x: m.lin.weight])
def test_storage_offset_of_what_a_call_brings(of: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
    """Where an input begins in its memory is no part of what makes a new graph."""

    def run(m: Any, x: torch.Tensor) -> torch.Tensor:
        tensor = of(m, x)
        return m.lin(x) * tensor.as_strided((8,), (1,), tensor.storage_offset() + 1)

    message = error_of(Fn(run), torch.randn(6, 8)[2:], None)
    assert "test_errors.py" in message and "as_strided() without an offset" in message


def test_storage_offset_of_a_result() -> None:
    def run(m: Any, x: torch.Tensor) -> torch.Tensor:
        y = m.lin(x)[1:]
        return y.as_strided((8,), (1,), y.storage_offset() + 1)

    assert_trains_as_eager(Fn(run), [((torch.randn(4, 8), None), {})], square, tolerance=1e-5)


def test_seeding_in_forward() -> None:
    def run(m: Any, x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(0)
        return m.lin(x)

    assert "seed before the step" in error_of(Fn(run), torch.randn(4, 8), None)


def test_post_accumulate_hook() -> None:
    model = nn.Linear(8, 8)
    model.weight.register_post_accumulate_grad_hook(lambda p: None)
    assert "post-accumulate-grad hook" in error_of(model, torch.randn(4, 8), None)


def test_errors_of_the_model_pass_unchanged() -> None:
    def run(m: Any, x: torch.Tensor) -> torch.Tensor:
        raise KeyError("mine")

    model = Fn(run)
    with pytest.raises(KeyError, match="mine"):
        cf.compile(model, loss_fn=square)(torch.randn(4, 8), None)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied|same reduction dim"):
        cf.compile(nn.Linear(8, 8), loss_fn=square)(torch.randn(4, 5), None)


def test_a_model_that_failed_still_trains_in_eager_and_compiled() -> None:
    model = Fn(_if, plain=True)
    error_of(model, torch.randn(4, 8), None)
    model.run = lambda m, x: m.lin(x)
    assert_trains_as_eager(model, [((torch.randn(4, 8), None), {})], square, tolerance=1e-5)


def test_references_taken_before_compiling_reach_the_traced_parameters() -> None:
    """A regulariser written over a list of parameters, the usual way to write one."""

    class Penalised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(8, 8)
            self.watched = [self.lin.weight]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.lin(x).square().mean() + sum((p.square().sum() for p in self.watched), torch.zeros(()))

    model = Penalised()
    assert copy.deepcopy(model).watched[0] is not model.lin.weight
    assert_trains_as_eager(model, [((torch.randn(4, 8),), {})], tolerance=1e-5)


@pytest.mark.parametrize("whole_step", [True, False])
def test_autocast(whole_step: bool) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))
    assert_trains_as_eager(
        model,
        [((torch.randn(4, 8), None), {})],
        square,
        around=lambda: torch.autocast("cpu", dtype=torch.bfloat16),
        tolerance=1e-5,
        whole_step=whole_step,
    )


def test_bfloat16_model_with_float32_norm() -> None:
    model = nn.Sequential(
        nn.Linear(8, 8).bfloat16(), Fn(lambda m, x: m.norm(x.float()).bfloat16(), norm=nn.LayerNorm(8))
    )
    assert_trains_as_eager(model, [((torch.randn(4, 8).bfloat16(), None), {})], square, tolerance=1e-5)


def test_keyword_only_input() -> None:
    class Keyword(nn.Linear):
        def forward(self, *, x: torch.Tensor, scale: float = 1.0, extra: Any = None) -> torch.Tensor:  # type: ignore[override]
            return {"loss": super().forward(x).square().mean() * scale}  # type: ignore[return-value]

    batches = [((), {"x": torch.randn(4, 8), "scale": 2.0, "extra": None}), ((), {"x": torch.randn(2, 8)})]
    assert_trains_as_eager(Keyword(8, 8), batches, tolerance=1e-5)
