"""Marks with `cross_batch=True`: what a divided step computes with each rank's own part of the batch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import commfuse_fx as cf
from commfuse_fx.sharding.marking.marks import collect
from commfuse_fx.sharding.marking.marks_json import marks_from_dict, marks_to_dict
from tests.sharding.marked_models import Run, here

ROWS = 16
Batches = Sequence[tuple[torch.Tensor, torch.Tensor]]


def convolutions(norm: nn.Module | None = None) -> nn.Sequential:
    torch.manual_seed(0)
    layers = (nn.Conv2d(2, 4, 3, padding=1), norm or nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 5))
    return nn.Sequential(*layers).double()


def images() -> Batches:
    """The samples of later ranks are larger, and three targets of the first rank do not count."""
    torch.manual_seed(1)
    scale = torch.arange(1, ROWS + 1)[:, None, None, None]
    targets = torch.randint(0, 5, (2, ROWS))
    targets[:, :3] = -100
    return [(torch.randn(ROWS, 2, 3, 3).double() * scale, each) for each in targets]


def over_all(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A mean of as many numbers on each rank."""
    return F.cross_entropy(output, target, reduction="none").mean()


def trained(model: nn.Module, loss_fn: Any, mode: str, mesh: tuple[int, ...] = (4,), **options: Any) -> Any:
    """Two steps of all ranks: the world, and the results of the steps."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    ranks = torch.Size(mesh).numel()
    step = cf.compile(
        model, loss_fn=loss_fn, optimizer=optimizer, parallel_mode=mode, mesh=mesh, device_num=ranks, **options
    )
    x, y = images()[0]
    parts = 1 if options.get("full_batch") else 4 if mode == "auto" else mesh[0]
    world = cf.lockstep(step.lower(x[: ROWS // parts], y[: ROWS // parts]))
    results = [world(*batch) for batch in images()]
    assert world.disagreement is None, world.report()
    return world, results


def assert_alike(found: Any, wanted: Any) -> None:
    """Losses and gradients of all steps, and what each rank holds then."""
    for one, other in zip(found[1], wanted[1], strict=True):
        torch.testing.assert_close(one.loss, other.loss)
        for name, grad in other.grads.items():
            torch.testing.assert_close(one.grads[name], grad, msg=lambda text, name=name: f"{name}: {text}")
    share = len(found[0].models) // len(wanted[0].models)
    for rank, model in enumerate(found[0].models):
        held = model.state_dict()
        for name, tensor in wanted[0].models[rank // share].state_dict().items():
            torch.testing.assert_close(held[name], tensor, msg=lambda text, name=name: f"{name}: {text}")


def differ(found: Any, wanted: Any) -> bool:
    return any(not torch.allclose(grad, found[1][0].grads[name]) for name, grad in wanted[1][0].grads.items())


def marked_convolutions() -> nn.Module:
    return cf.shard(convolutions(), "1", cross_batch=True)


@pytest.mark.parametrize(("mode", "mesh"), [("semi_auto", (4,)), ("auto", (4,)), ("auto", (2, 2))])
def test_a_marked_norm_is_that_of_data_parallel(mode: str, mesh: tuple[int, ...]) -> None:
    wanted = trained(convolutions(), over_all, "data_parallel")
    found = trained(marked_convolutions(), over_all, mode, mesh)
    assert_alike(found, wanted)
    (note,) = (note for note in found[0].lowered.explain().notes if note.topic == "own part of the batch")
    assert note.subject == "1" and note.reason.startswith("each of 4 parts by itself: test_cross_batch.py:")
    means = [model.state_dict()["1.running_mean"] for model in found[0].models]
    assert not any(torch.equal(mean, means[0]) for mean in means[1:])


def test_ranks_with_the_same_part_have_the_same_statistics() -> None:
    """Over the axis of the model a norm is divided as other layers are."""
    model = cf.shard(convolutions(), {"1": cf.plans.Layouts(cross_batch=True)})
    cf.shard(model, "0", weight=("tp", None, None, None), bias=("tp",))
    wanted = trained(convolutions(), over_all, "data_parallel", (2,))
    assert_alike(trained(model, over_all, "semi_auto", (2, 2)), wanted)


def test_ranks_that_get_the_whole_batch() -> None:
    wanted = trained(convolutions(), over_all, "data_parallel", full_batch=True)
    assert_alike(trained(marked_convolutions(), over_all, "semi_auto", full_batch=True), wanted)


def test_micro_batches() -> None:
    """The gradient of the norm's input needs that of its weight, of this micro-batch alone."""
    wanted = trained(convolutions(), over_all, "data_parallel", accumulate_steps=2)
    found = trained(marked_convolutions(), over_all, "semi_auto", accumulate_steps=2)
    assert not torch.equal(wanted[0].models[0][4].weight, convolutions()[4].weight)
    for name, tensor in wanted[0].models[0].state_dict().items():
        torch.testing.assert_close(
            found[0].models[0].state_dict()[name], tensor, msg=lambda text, name=name: name + text
        )


def test_without_the_mark_a_norm_is_that_of_one_device() -> None:
    model = convolutions()
    found = trained(model, over_all, "semi_auto")
    x, y = images()[0]
    over_all(model(x), y).backward()
    for name, param in model.named_parameters():
        torch.testing.assert_close(found[1][0].grads[name], param.grad)
    assert differ(found, trained(convolutions(), over_all, "data_parallel"))


class Twice(nn.Module):
    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output, target) * 2


def twice(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return cf.shard(F.cross_entropy, cross_batch=True)(output, target) * 2


@pytest.mark.parametrize("mode", ["semi_auto", "auto"])
def test_a_marked_loss_is_a_mean_of_the_ranks_means(mode: str) -> None:
    """The first rank's other targets count more than those of other ranks."""
    model = convolutions(nn.Identity())
    wanted = trained(model, Twice(), "data_parallel")
    assert_alike(trained(model, twice, mode), wanted)
    assert_alike(trained(model, cf.shard(Twice(), cross_batch=True), mode), wanted)
    assert differ(trained(model, Twice(), mode), wanted)


class Centred(nn.Module):
    """Subtracts the mean of the batch, and scales what is left, with weights that other layers use as well."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3, 3))
        self.again = again

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        centre = cf.shard(self.centred, cross_batch=True)
        found = checkpoint(centre, x, self.scale, use_reentrant=False) if self.again else centre(x, self.scale)
        return found + self.scale

    @staticmethod
    def centred(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return (x - x.mean(0)) / x.std() * scale


@pytest.mark.parametrize("again", [False, True], ids=["plain", "checkpoint"])
def test_a_marked_function(again: bool) -> None:
    model = convolutions(Centred(again))
    assert_alike(trained(model, over_all, "semi_auto"), trained(model, over_all, "data_parallel"))


class Dropping(nn.Module):
    """Notes what a dropout has kept of each channel."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(4)
        self.register_buffer("kept", torch.zeros(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept.copy_(F.dropout(x.flatten()[:64] * 0 + 1, 0.5))
        return self.norm(x)


@pytest.mark.parametrize(("mode", "mesh"), [("semi_auto", (4,)), ("auto", (2, 2))])
def test_ranks_draw_random_numbers_of_their_own(mode: str, mesh: tuple[int, ...]) -> None:
    world, _ = trained(convolutions(cf.shard(Dropping(), cross_batch=True)), over_all, mode, mesh)
    kept = {tuple(model.state_dict()["1.kept"].tolist()) for model in world.models}
    assert len(kept) == 4 and all(set(each) == {0.0, 2.0} for each in kept)


def test_a_norm_in_evaluation_may_be_marked() -> None:
    model = marked_convolutions()
    model[1].eval()
    plain = convolutions()
    plain[1].eval()
    assert_alike(trained(model, over_all, "semi_auto"), trained(plain, over_all, "data_parallel"))


def test_outside_of_a_divided_step_a_mark_changes_nothing() -> None:
    (x, y), *_ = images()
    assert torch.equal(marked_convolutions()(x), convolutions()(x))
    assert torch.equal(twice(x.flatten(1), y), Twice()(x.flatten(1), y))
    assert_alike(
        trained(marked_convolutions(), over_all, "data_parallel"), trained(convolutions(), over_all, "data_parallel")
    )


def test_marks_are_written_to_files() -> None:
    marks = collect(marked_convolutions())
    data = marks_to_dict(marks)
    assert data["modules"][0]["cross_batch"] is True and marks_from_dict(data, "here") == marks


# What is refused


def lowered(model: nn.Module, loss_fn: Any = F.mse_loss) -> None:
    step = cf.compile(model, loss_fn=loss_fn, form="step", parallel_mode="semi_auto", device_num=4)
    step.lower(torch.randn(4, 8), torch.randn(4, 8))


def marked(function: Callable[..., Any], *args: Any) -> Any:
    return cf.shard(function, cross_batch=True)(*args)


def centre(x: torch.Tensor) -> torch.Tensor:
    return x - x.mean(0)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda x, w: marked(torch.mm, x, w), "mm with cross_batch=True combines no samples of the batch"),
        (lambda x, w: x @ w - marked(torch.mean, x, 0), "returns a tensor of shape (8,) and torch.float32"),
        (lambda x, w: x @ w / marked(torch.std, x), "returns one number, which /div.0"),
        (lambda x, w: marked(lambda y: centre(y @ w), x), "is no result of it"),
        (lambda x, w: marked(lambda y, z: centre(y) + z.mean(), x @ w, x.T), "whose dimension 0 is not the batch"),
        (lambda x, w: marked(lambda y, z: centre(y) @ z, x @ w, torch.ones(32, 8)), "does not follow from the batch"),
        (lambda x, w: x @ marked(centre, w), "gets no tensor whose dimension 0 is the batch of 16 rows"),
    ],
)
def test_marks_that_cannot_mean_the_same(function: Any, said: str) -> None:
    with pytest.raises(cf.ConfigValueError, match="test_cross_batch.py") as raised:
        lowered(Run(function, w=(8, 8)))
    assert said in str(raised.value)


def test_a_result_without_rows_that_looks_as_if_it_had_some() -> None:
    model = Run(lambda x, w: x @ w - marked(torch.mean, x.repeat_interleave(2, 0), 0)[:8], w=(8, 8))
    with pytest.raises(cf.ConfigValueError, match="returns a tensor whose dimension 0 is not the batch"):
        lowered(model)


def test_a_norm_of_all_ranks() -> None:
    with pytest.raises(cf.ConfigValueError, match="0 with cross_batch=True has a SyncBatchNorm"):
        lowered(nn.Sequential(cf.shard(nn.SyncBatchNorm(8), cross_batch=True), nn.Linear(8, 8)))


@pytest.mark.parametrize(
    ("mark", "error", "said"),
    [
        (lambda model: cf.shard(model.weight, cross_batch=True), cf.ConfigValueError, "for a tensor, which computes"),
        (lambda model: cf.shard(model, "weight", cross_batch=True), cf.ConfigValueError, "for parameter weight"),
        (lambda model: cf.shard(model, {}, cross_batch=True), cf.ConfigTypeError, "write it in the plan"),
        (lambda model: cf.shard(model, cross_batch=1), cf.ConfigTypeError, "cross_batch"),
        (lambda model: cf.shard(model), cf.ConfigTypeError, "or cross_batch=True"),
    ],
)
def test_bad_marks(mark: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=here("test_cross_batch", "")) as raised:
        mark(nn.Linear(4, 4))
    assert said in str(raised.value)
