"""Checkpoints of a step on one device: complete, equal training afterwards, and whole or not at all."""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler

import commfuse_fx as cf
from commfuse_fx.checkpoints import tensor_writer
from tests.distributed.models_of_ranks import assert_same, snapshot
from tests.frontends.test_step_state import OPTIMIZERS, Counting, make, run

SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "multistep": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [1, 4]),
    "onecycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=9),
    "plateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=0),
    "sequential": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, total_iters=2), lr_scheduler.CosineAnnealingLR(optimizer, 5)],
        [2],
    ),
}


def train(step: cf.CompiledStep, scheduler: Any, data: torch.Generator, numbers: range) -> list[float]:
    """Losses of a loop that draws its batches, and sets learning rates."""
    losses = []
    for _ in numbers:
        x = torch.randn(5, 6, generator=data)
        losses.append(float(step(x, x.flip(1))))
        scheduler.step(*(losses[-1:] if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else ()))
    return losses


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("kind", SCHEDULERS)
def test_another_run_goes_on_with_the_same_bits(tmp_path: Path, kind: str, asynchronous: bool) -> None:
    step, data = make(), torch.Generator().manual_seed(3)
    scheduler = SCHEDULERS[kind](step.optimizer)
    train(step, scheduler, data, range(3))
    extra = {"scheduler": scheduler, "data": data, "epoch": 2, "best": {"loss": float("inf"), 3: torch.arange(2)}}
    saving = step.save(tmp_path / "kept", extra, asynchronous=asynchronous)
    want = train(step, scheduler, data, range(3, 7))
    saving.wait()
    assert saving.is_done

    torch.manual_seed(99)
    other, others = make(), torch.Generator()
    its = SCHEDULERS[kind](other.optimizer)
    rest = other.load(tmp_path / "kept", {"scheduler": its, "data": others})
    assert_same(rest, {"epoch": 2, "best": {"loss": float("inf"), 3: torch.arange(2)}})
    assert other.steps == 3
    assert train(other, its, others, range(3, 7)) == want
    assert_same(snapshot(other.model, other.optimizer), snapshot(step.model, step.optimizer))
    assert its.state_dict().keys() == scheduler.state_dict().keys()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_goes_on(tmp_path: Path, optimizer: str) -> None:
    step = make(optimizer)
    run(step, range(3))
    step.save(tmp_path / "kept")
    want = run(step, range(3, 6))
    other = make(optimizer)
    run(other, range(7, 9))
    other.load(tmp_path / "kept")
    assert run(other, range(3, 6)) == want
    assert_same(snapshot(other.model, other.optimizer), snapshot(step.model, step.optimizer))


def test_a_checkpoint_takes_the_place_of_the_one_before(tmp_path: Path) -> None:
    step = make()
    for number in range(3):
        run(step, range(1))
        step.save(tmp_path / "kept", {"number": number})
        assert os.listdir(tmp_path) == ["kept"]
    other = make()
    assert other.load(tmp_path / "kept") == {"number": 2} and other.steps == 3


def test_tied_tensors_are_stored_once(tmp_path: Path) -> None:
    step = make()
    step.save(tmp_path / "kept")
    index = (tmp_path / "kept" / "commfuse.json").read_text()
    assert '"model/tied.weight": {' in index and '"model/again.weight": {' not in index
    other = make()
    with torch.no_grad():
        other.model.tied.weight.zero_()
    other.load(tmp_path / "kept")
    assert other.model.again.weight is other.model.tied.weight
    assert torch.equal(other.model.tied.weight, step.model.tied.weight)


def test_extra_state_of_modules_and_objects_of_all_kinds(tmp_path: Path) -> None:
    model = Counting()
    step = cf.compile(model, loss_fn=F.mse_loss, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    average = copy.deepcopy(model)
    second = torch.optim.Adam(average.parameters())
    average(torch.randn(2, 6)).sum().backward()
    second.step()
    want = copy.deepcopy((average.state_dict(), second.state_dict()))
    step.save(tmp_path / "kept", {"average": average, "second": second, "scaler": torch.amp.GradScaler("cpu")})
    model.notes = {"seen": 5}
    with torch.no_grad():
        for param in average.parameters():
            param.zero_()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    fresh = torch.optim.Adam(average.parameters())
    assert step.load(tmp_path / "kept", {"average": average, "second": fresh, "scaler": scaler}) == {}
    assert model.notes == {"seen": 1} and scaler.get_scale() == 65536.0
    assert_same((average.state_dict(), fresh.state_dict()), want)
    rest = step.load(tmp_path / "kept")
    assert list(rest) == ["average", "second", "scaler"] and rest["scaler"]["scale"] == 65536.0


class Pair(NamedTuple):
    number: int
    tensors: list[torch.Tensor]


def test_tuples_with_names_are_tuples(tmp_path: Path) -> None:
    step = make()
    step.save(tmp_path / "kept", {"pair": Pair(1, [torch.ones(2)])})
    assert_same(step.load(tmp_path / "kept"), {"pair": (1, [torch.ones(2)])})


class Stubborn:
    """An object that takes only what suits it."""

    def __init__(self, value: int) -> None:
        self.value = value

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]
        if self.value == 13:
            raise LookupError("unlucky")


def check_nothing_changed(step: cf.CompiledStep, act: Callable[[], Any], error: type[Exception], said: str) -> None:
    """What fails changes neither parameters, optimizer state, nor random numbers."""
    before, steps, random = snapshot(step.model, step.optimizer), step.steps, torch.get_rng_state()
    with pytest.raises(error, match=said):
        act()
    assert_same(snapshot(step.model, step.optimizer), before)
    assert step.steps == steps and torch.equal(torch.get_rng_state(), random)


def test_an_object_that_refuses_its_state(tmp_path: Path) -> None:
    step, one, other = make(), Stubborn(1), Stubborn(13)
    run(step, range(2))
    step.save(tmp_path / "kept", {"one": one, "other": other})
    run(step, range(2))
    one.value, other.value = 2, 3
    extra = {"one": one, "other": other}
    check_nothing_changed(step, lambda: step.load(tmp_path / "kept", extra), LookupError, "unlucky")
    assert (one.value, other.value) == (2, 3)
    assert step.load(tmp_path / "kept", {"one": one}) == {"other": {"value": 13}} and one.value == 1


def part_of_itself() -> dict[str, Any]:
    found: dict[str, Any] = {}
    found["me"] = found
    return found


@pytest.mark.parametrize(
    ("extra", "error", "said"),
    [
        ([], TypeError, "extra is \\[\\]; give a dict"),
        ({3: 4}, TypeError, "extra has the name 3; give a str"),
        ({"a": object()}, cf.CheckpointError, "extra/values/a is <object.* which a checkpoint cannot hold"),
        ({"a": {"b": [torch.zeros(2).to_sparse()]}}, cf.CheckpointError, "extra/values/a/b/0 is a tensor that"),
        ({"a": part_of_itself()}, cf.CheckpointError, "extra/values/a/me/me/.* or is a part of itself.*nested less"),
        ({"a": torch.zeros(2, device="meta")}, cf.CheckpointError, "cannot hold \\(meta\\)"),
    ],
)
def test_what_cannot_be_saved(tmp_path: Path, extra: Any, error: type[Exception], said: str) -> None:
    step = make()
    step.save(tmp_path / "kept", {"number": 1})
    with pytest.raises(error, match=said) as caught:
        step.save(tmp_path / "kept", extra)
    assert isinstance(caught.value, cf.CommFuseError)
    assert step.load(tmp_path / "kept") == {"number": 1} and os.listdir(tmp_path) == ["kept"]


@pytest.mark.parametrize(
    ("extra", "error", "said"),
    [
        ({"epoch": 3}, TypeError, "extra\\['epoch'\\] is 3, into which nothing can be loaded: leave it out"),
        ({"other": Stubborn(0)}, cf.CheckpointError, "no object extra\\['other'\\]; its objects: one"),
        ({"epoch": Stubborn(0)}, cf.CheckpointError, "no object extra\\['epoch'\\]"),
    ],
)
def test_extras_that_are_not_there(tmp_path: Path, extra: Any, error: type[Exception], said: str) -> None:
    step = make()
    step.save(tmp_path / "kept", {"one": Stubborn(1), "epoch": 3})
    run(step, range(2))
    check_nothing_changed(step, lambda: step.load(tmp_path / "kept", extra), error, said)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda path: cut(path / "__0_0.distcp"), "bytes in place of .* copy it again"),
        (lambda path: flip(path / "__0_0.distcp"), "has other bytes than when it was written"),
        (lambda path: (path / "__0_0.distcp").unlink(), "is missing: copy the whole folder"),
        (lambda path: cut(path / "commfuse.json"), "the checkpoint cannot be read: .*not JSON.*; copy the folder"),
        (lambda path: (path / "commfuse.json").write_text(""), "is empty; copy the folder again"),
        (lambda path: (path / "commfuse.json").write_bytes(b"\xff\xfe"), "no UTF-8 text; copy the folder again"),
        (lambda path: (path / "commfuse.json").write_text("{}"), "schema"),
        (lambda path: (path / "commfuse.json").unlink(), "torch.distributed.checkpoint itself has written it"),
        (lambda path: path.rename(path.with_name("elsewhere")), "there is no folder"),
    ],
    ids=["cut", "flipped", "gone", "index cut", "index empty", "index binary", "index other", "index gone", "all gone"],
)
def test_a_damaged_checkpoint_changes_nothing(tmp_path: Path, damage: Callable[[Path], Any], said: str) -> None:
    step = make()
    run(step, range(2))
    step.save(tmp_path / "kept")
    run(step, range(2))
    damage(tmp_path / "kept")
    check_nothing_changed(step, lambda: step.load(tmp_path / "kept"), cf.CheckpointError, said)


@pytest.mark.parametrize("content", [None, b"", b"cos\nsystem\n(S'exit 1'\ntR."])
def test_nobody_loads_the_pickle_of_torch(tmp_path: Path, content: bytes | None) -> None:
    step = make()
    step.save(tmp_path / "kept", {"number": 1})
    (tmp_path / "kept" / ".metadata").unlink()
    if content is not None:
        (tmp_path / "kept" / ".metadata").write_bytes(content)
    assert step.load(tmp_path / "kept") == {"number": 1}


def test_a_checkpoint_of_another_model_or_optimizer(tmp_path: Path) -> None:
    make(width=12).save(tmp_path / "wide")
    make("momentum").save(tmp_path / "momentum")
    make("none").save(tmp_path / "none")
    step = make()
    run(step, range(2))
    for name, said in (
        ("wide", r"first.weight is \[12, 6\] in the checkpoint, and \[8, 6\] here"),
        ("momentum", "the optimizer has 1 param groups in the checkpoint, and 2 here"),
        ("none", "dict of the dicts model, step, optimizer"),
    ):
        check_nothing_changed(step, lambda name=name: step.load(tmp_path / name), cf.CheckpointError, said)
    with pytest.raises(cf.CheckpointError, match="the state has optimizer, and this step has none"):
        make("none").load(tmp_path / "momentum")


def test_where_nothing_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = make()
    run(step, range(2))
    (tmp_path / "file").touch()
    for folder, said in (
        (tmp_path / "file", "is a file: give the path of a folder"),
        (tmp_path / "file" / "kept", "cannot write there: .*File exists.*Make room or give the right to write"),
        (tmp_path / ("x" * 300), "cannot write there: File name too long"),
        (tmp_path, "has other files than those of a checkpoint"),
        ("/proc/kept", "cannot write there"),
    ):
        check_nothing_changed(step, lambda folder=folder: step.save(folder), cf.CheckpointError, said)
    assert os.listdir(tmp_path) == ["file"]
    with pytest.raises(TypeError, match="the folder of a checkpoint is None"):
        step.save(None)
    with pytest.raises(TypeError, match="asynchronous is 1; give True or False"):
        step.save(tmp_path / "kept", asynchronous=1)


def test_a_disk_that_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = make()
    step.save(tmp_path / "kept", {"number": 1})

    def full(*_: Any, **__: Any) -> Any:
        raise OSError(28, "No space left on device", "__0_0.distcp")

    for name in ("write_share", "write_metadata"):
        with monkeypatch.context() as patch:
            patch.setattr(tensor_writer, name, full)
            with pytest.raises(cf.CheckpointError, match="No space left on device.*Make room"):
                step.save(tmp_path / "kept")
            saving = step.save(tmp_path / "kept", asynchronous=True)
            with pytest.raises(cf.CheckpointError, match="No space left on device"):
                saving.wait()
            step.save(tmp_path / "kept", asynchronous=True)
            with pytest.raises(cf.CheckpointError, match="No space left on device"):  # of the one before
                step.save(tmp_path / "other")
            assert not (tmp_path / "other").exists()
        assert step.load(tmp_path / "kept") == {"number": 1} and os.listdir(tmp_path) == ["kept"]
    step.save(tmp_path / "kept", {"number": 2})
    assert step.load(tmp_path / "kept") == {"number": 2}


def test_an_asynchronous_save_holds_the_values_of_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step, go_on = make(), threading.Event()
    run(step, range(2))
    real = tensor_writer.write_share

    def later(*args: Any) -> Any:
        assert go_on.wait(60)
        return real(*args)

    tensor = torch.arange(3.0)
    with monkeypatch.context() as patch:
        patch.setattr(tensor_writer, "write_share", later)
        want = copy.deepcopy(step.state_dict())
        saving = step.save(tmp_path / "kept", {"tensor": tensor}, asynchronous=True)
        assert not saving.is_done and not (tmp_path / "kept").exists()
        run(step, range(2, 5))
        tensor.zero_()
        go_on.set()
        saving.wait()
        saving.wait()
    other = make()
    assert_same(other.load(tmp_path / "kept"), {"tensor": torch.arange(3.0)})
    assert_same(other.state_dict(), want)


def test_a_save_waits_for_the_one_before_and_so_does_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = make()
    running: list[str] = []
    real = tensor_writer.write_share

    def alone(folder: Path, *args: Any) -> Any:
        assert not running
        running.append(folder.name)
        found = real(folder, *args)
        running.clear()
        return found

    monkeypatch.setattr(tensor_writer, "write_share", alone)
    for number in range(4):
        step.save(tmp_path / str(number), asynchronous=bool(number % 2))
    step.load(tmp_path / "3")
    step.save(tmp_path / "4", asynchronous=True)
    step.close()
    assert sorted(os.listdir(tmp_path)) == ["0", "1", "2", "3", "4"]
    with pytest.raises(cf.CommFuseError, match="closed"):
        step.save(tmp_path / "5")


def test_ctrl_c_while_saving_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = make()
    step.save(tmp_path / "kept", {"number": 1})

    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(tensor_writer, "write_share", interrupted)
        with pytest.raises(KeyboardInterrupt):
            step.save(tmp_path / "kept", {"number": 2})
    assert os.listdir(tmp_path) == ["kept"] and step.load(tmp_path / "kept") == {"number": 1}


def test_ctrl_c_while_loading_changes_nothing(tmp_path: Path) -> None:
    step = make()
    step.save(tmp_path / "kept", {"one": Stubborn(1)})
    run(step, range(2))

    class Interrupting(Stubborn):
        def load_state_dict(self, state: dict[str, int]) -> None:
            super().load_state_dict(state)
            if state["value"] == 1:
                raise KeyboardInterrupt

    one = Interrupting(7)
    check_nothing_changed(step, lambda: step.load(tmp_path / "kept", {"one": one}), KeyboardInterrupt, "^$")
    assert one.value == 7


def test_saving_draws_no_random_numbers_and_changes_no_training(tmp_path: Path) -> None:
    one, other = make(), make()
    torch.manual_seed(5)
    want = run(one, range(4))
    torch.manual_seed(5)
    have = []
    for number in range(4):
        have += run(other, range(number, number + 1))
        other.save(tmp_path / "kept", asynchronous=bool(number % 2))
    assert have == want


@pytest.mark.parametrize("mode", [torch.inference_mode, lambda: torch.device("meta")], ids=["inference", "device"])
def test_in_modes_of_the_caller(tmp_path: Path, mode: Callable[[], Any]) -> None:
    step, other = make(), make()
    run(step, range(2))
    with mode():
        step.save(tmp_path / "kept", asynchronous=True).wait()
    want = run(step, range(2, 4))
    with mode():
        other.load(tmp_path / "kept")
    assert run(other, range(2, 4)) == want


def test_between_micro_batches(tmp_path: Path) -> None:
    """Gradients that wait for an update are no part of a checkpoint; a load forgets them."""
    step, other = make(accumulate_steps=3), make(accumulate_steps=3)
    run(step, range(3))
    step.save(tmp_path / "kept")
    run(step, range(3, 5))
    said = "2 of 3 micro-batches have added to gradients since the last update.*save after the update, or call"
    for act in (lambda: step.save(tmp_path / "kept"), step.state_dict):
        check_nothing_changed(step, act, cf.CheckpointError, said)
    assert step.steps == 1
    step.load(tmp_path / "kept")
    want = run(step, range(5, 11))
    other.load(tmp_path / "kept")
    assert run(other, range(5, 11)) == want and other.steps == step.steps == 3
    assert_same(snapshot(other.model, other.optimizer), snapshot(step.model, step.optimizer))


def test_a_virtual_step_has_nothing_to_save(tmp_path: Path) -> None:
    step = make(device_num=4)
    for act in (step.save, step.load):
        with pytest.raises(cf.VirtualWorldError, match="is for real ranks"):
            act(tmp_path / "kept")
    assert set(step.state_dict()) == {"model", "optimizer", "step"}


def test_hyper_parameters_that_are_no_plain_values(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Fancy(torch.optim.SGD):
        def __init__(self, params: Any) -> None:
            super().__init__(params, lr=0.1, momentum=0.5)
            self.param_groups[0]["hook"] = len

    def made() -> cf.CompiledStep:
        torch.manual_seed(0)
        model = nn.Linear(6, 6)
        return cf.compile(model, loss_fn=F.mse_loss, optimizer=Fancy(model.parameters()))

    step = made()
    run(step, range(2))
    step.save(tmp_path / "kept")
    assert "leaves out 'hook' of the optimizer's param_groups" in caplog.text
    want = run(step, range(2, 4))
    other = made()
    other.load(tmp_path / "kept")
    assert other.optimizer.param_groups[0]["hook"] is len and run(other, range(2, 4)) == want
