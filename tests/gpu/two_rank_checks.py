"""Checks of two ranks on one device against DistributedDataParallel: on one GPU over NCCL, on a CPU over Gloo.

As a program under torchrun, `two_rank_checks.py DEVICE FOLDER` runs all of them, and each rank writes what it found.
"""

from __future__ import annotations

import copy
import json
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commfuse_fx as cf
from benchmarks.two_ranks import FUSIONS, join_as_host_of_its_own
from tests.distributed.quick_trials import MOST_STEPS, quickly
from tests.gpu import divided_checks
from tests.gpu.device_models import MODELS, RECURRENT, WITH_DROPOUT, DeviceModel
from tests.gpu.step_checks import STEPS, assert_near, flat, has_graphs, no_host_synchronisation

Options = dict[str, Any]
CLOSE = 1e-10
LOOKED_AT = "two steps"
"""What the profiler calls the steps that it looks at."""


def ddp(model: nn.Module, **options: Any) -> DistributedDataParallel:
    device = next(model.parameters()).device
    return DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None, **options)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def check_step(device: torch.device, case: DeviceModel, options: Options) -> None:
    """A step equals DDP, and makes no host wait once it runs."""
    model = case.on(device, torch.float64)
    twin = copy.deepcopy(model)
    theirs, optimizer = ddp(twin, broadcast_buffers=False), adamw(twin)
    step = cf.compile(model, optimizer=adamw(model), **options)
    batches = case.batches(device, torch.float64, STEPS, seed=dist.get_rank())
    for batch in batches:
        loss = step(**batch)
        optimizer.zero_grad()
        want = theirs(**batch)
        want.backward()
        optimizer.step()
        assert_near([loss], [want], CLOSE)
    step.synchronize()
    assert_near(model.parameters(), twin.parameters(), CLOSE)
    with no_host_synchronisation(device):
        step(**batches[0])
    step.synchronize()


def check_equal_bits(device: torch.device, options: Options) -> None:
    """In float32 the sum of two ranks' gradients has one order, so that a step equals DDP bit for bit."""
    case = MODELS["mlp"]
    model = case.on(device, torch.float32)
    twin = copy.deepcopy(model)
    theirs, optimizer = ddp(twin), adamw(twin)
    step = cf.compile(model, optimizer=adamw(model), **options)
    for batch in case.batches(device, torch.float32, STEPS, seed=dist.get_rank()):
        step(**batch)
        optimizer.zero_grad()
        theirs(**batch).backward()
        optimizer.step()
    step.synchronize()
    assert torch.equal(flat(model.parameters()), flat(twin.parameters()))


def check_module(device: torch.device, case: DeviceModel, options: Options, past: bool = True) -> None:
    """A module equals DDP, with a micro-batch under no_sync(), gradients that come past the module, and buffers."""
    model = case.on(device, torch.float64)
    twin = copy.deepcopy(model)
    ours = cf.compile(model, **options)
    theirs = ddp(twin, find_unused_parameters=bool(options.get("find_unused_parameters")))
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9) for net in (model, twin)]
    rank = dist.get_rank()
    for number, batch in enumerate(case.batches(device, torch.float64, 4, seed=rank)):
        for call, net, optimizer in ((ours, model, optimizers[0]), (theirs, twin, optimizers[1])):
            optimizer.zero_grad()
            torch.manual_seed(number + rank)
            if number == 2:
                with call.no_sync():
                    call(**batch).backward()
            loss = call(**batch)
            if past:  # a part that differs between the ranks and is no output of the module
                loss = loss + rank * 0.01 * next(net.parameters()).square().sum()
            loss.backward()
            optimizer.step()
    assert_near(model.parameters(), twin.parameters(), CLOSE)
    if not rank:  # the others get buffers in another part of the step than with DDP
        torch.testing.assert_close([*model.buffers()], [*twin.buffers()])
    if not options.get("find_unused_parameters"):  # which reads on the host what other ranks have used, as DDP does
        with no_host_synchronisation(device):
            model.zero_grad()
            ours(**batch).backward()


def check_tensor_parallel(device: torch.device) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).to(device, torch.float64)
    twin = copy.deepcopy(model)
    cf.shard(model[0], weight=("tp", None))
    cf.shard(model[2], weight=(None, "tp"))
    loss_fn = nn.functional.cross_entropy
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    step = cf.compile(model, loss_fn=loss_fn, optimizer=sgd, parallel_mode="semi_auto", mesh=(1, 2))
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    x = torch.randn(6, 8, dtype=torch.float64).to(device)
    labels = torch.randint(0, 4, (6,)).to(device)
    for _ in range(3):
        step(x, labels)
        optimizer.zero_grad()
        loss_fn(twin(x), labels).backward()
        optimizer.step()
    have = model.state_dict()
    assert_near([have[name] for name, _ in twin.named_parameters()], twin.parameters(), CLOSE)


def check_masks_differ_between_ranks(device: torch.device) -> None:
    """Ranks that have one seed and one batch draw other masks, and each the same again."""
    case = WITH_DROPOUT["mlp"]
    losses = []
    for _ in range(2):
        model = case.on(device, torch.float64)
        step = cf.compile(model, optimizer=adamw(model))
        torch.manual_seed(5)
        losses.append(torch.stack([step(**batch) for batch in case.batches(device, torch.float64, 2)]))
    assert torch.equal(*losses)
    everybody = [torch.empty_like(losses[0]) for _ in range(dist.get_world_size())]
    dist.all_gather(everybody, losses[0])
    assert not torch.equal(*everybody)


def check_streams(device: torch.device) -> None:
    """On CUDA collectives run on streams of their own, compute waits for them there, and the host waits for nothing."""
    case = MODELS["gpt2"]
    model = case.on(device, torch.float32)
    step = cf.compile(model, optimizer=adamw(model), cuda_graph=False, **FUSIONS["optimal"])
    batch = case.batches(device, torch.float32, 1, seed=dist.get_rank())[0]
    for _ in range(3):
        step(**batch)
    if device.type == "cuda":
        torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU]
    activities += [torch.profiler.ProfilerActivity.CUDA] if device.type == "cuda" else []
    with torch.profiler.profile(activities=activities) as profiler:
        with torch.profiler.record_function(LOOKED_AT):
            for _ in range(2):
                step(**batch)
        if device.type == "cuda":
            torch.cuda.synchronize()
    if device.type != "cuda":
        return
    events: list[Any] = list(profiler.profiler.kineto_results.events())
    on_cuda = torch.autograd.DeviceType.CUDA
    kernels = [
        each
        for each in events
        if each.device_type() == on_cuda
        and not each.is_user_annotation()
        and not each.name().startswith((LOOKED_AT, "Mem"))
    ]
    streams = [
        {each.device_resource_id() for each in kernels if each.name().startswith("nccl") == sends}
        for sends in (True, False)
    ]
    assert all(streams) and streams[0].isdisjoint(streams[1]), streams
    steps = next(each for each in events if each.name() == LOOKED_AT and each.device_type() != on_cuda)
    during = [each.name() for each in events if steps.start_ns() <= each.start_ns() < steps.end_ns()]
    assert "cudaStreamWaitEvent" in during
    assert not [name for name in during if name.startswith("cuda") and name.endswith("Synchronize")]


def check_other_streams(device: torch.device) -> None:
    """Steps on two streams in turns, of which each leaves updates to the next, and reads on a third one, equal DDP."""
    case = MODELS["gpt2"]
    model = case.on(device, torch.float64)
    twin = copy.deepcopy(model)
    theirs, optimizer = ddp(twin), adamw(twin)
    step = cf.compile(model, optimizer=adamw(model), **FUSIONS["across steps"])
    streams = [torch.cuda.Stream(device) for _ in range(3)] if device.type == "cuda" else [None] * 3
    for number, batch in enumerate(case.batches(device, torch.float64, 6, seed=dist.get_rank())):
        with _after(streams[number % 2], device):
            step(**batch)
        if number % 3 == 2:
            with _after(streams[2], device):
                total = flat(model.parameters()).sum()
            assert torch.isfinite(total)
        optimizer.zero_grad()
        theirs(**batch).backward()
        optimizer.step()
    step.synchronize()
    assert_near(model.parameters(), twin.parameters(), CLOSE)


@contextmanager
def _after(stream: Any, device: torch.device) -> Iterator[None]:
    """Work on a stream that begins when the present one is done, and that the present one waits for."""
    if stream is None:
        yield
        return
    present = torch.cuda.current_stream(device)
    stream.wait_stream(present)
    with torch.cuda.stream(stream):
        yield
    present.wait_stream(stream)


def check_recorded_communication(device: torch.device) -> None:
    """Every collective of two steps has been in flight, and its times are in order."""
    case = MODELS["mlp"]
    model = case.on(device, torch.float32)
    step = cf.compile(model, optimizer=adamw(model), comm_fusion={"openstate": False})
    batch = case.batches(device, torch.float32, 1)[0]
    step(**batch)
    with step.record_communication() as timeline:
        for _ in range(2):
            step(**batch)
    gradients = sum(param.requires_grad for param in model.parameters())
    for spans in timeline.steps:
        assert len([span for span in spans if span.name != "agreement"]) == gradients
        assert all(span.issued <= span.wait_left and span.wait_entered <= span.wait_left for span in spans)
        assert all(span.done is None or span.issued <= span.done for span in spans)
    assert 0 < timeline.in_flight < 60 and timeline.text().startswith("measured communication, mean of 2 step(s)")


def check_profile(device: torch.device) -> None:
    """A profile has a time for each node, the same on both ranks, and leaves parameters as they were."""
    case = MODELS["mlp"]
    model = case.on(device, torch.float32)
    step = cf.compile(model, optimizer=adamw(model))
    batch = case.batches(device, torch.float32, 1)[0]
    step(**batch)
    before = flat(model.parameters())
    profile = step.profile(**batch, rounds=2)
    assert torch.equal(flat(model.parameters()), before)
    seconds = [profile.node_seconds[key] for key in sorted(profile.node_seconds)]
    assert sum(seconds) > 0 and all(0 <= each < 60 for each in seconds)
    mine = torch.tensor(seconds, dtype=torch.float64).to(device)
    everybody = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everybody, mine)
    assert torch.equal(*everybody)


def check_trials(device: torch.device) -> None:
    """A step that tries plans while it trains equals DDP bit for bit, and comes to one plan on both ranks."""
    case = MODELS["mlp"]
    model = case.on(device, torch.float32)
    twin = copy.deepcopy(model)
    theirs, optimizer = ddp(twin), adamw(twin)
    batches = case.batches(device, torch.float32, STEPS, seed=dist.get_rank())
    with quickly():
        step = cf.compile(model, optimizer=adamw(model), schedule="auto")
        assert step.session.replan is not None
        more, number = STEPS, 0
        while more:
            assert number < MOST_STEPS
            step(**batches[number % STEPS])
            optimizer.zero_grad()
            theirs(**batches[number % STEPS]).backward()
            optimizer.step()
            number, more = number + 1, more - step.session.replan.is_settled
    step.synchronize()
    assert torch.equal(flat(model.parameters()), flat(twin.parameters()))
    profile = step.profile_used()
    assert profile is not None and sum(profile.node_seconds.values()) > 0
    found: list[Any] = [None, None]
    dist.all_gather_object(found, (profile.to_json(), step.lower(**batches[0]).fingerprint))
    assert found[0] == found[1]
    tried = [note for note in step.lower(**batches[0]).explain().notes if note.topic == "plans tried"]
    assert len(tried) > 2


def _cases() -> dict[str, Callable[[torch.device], None]]:
    """All checks by name, in the order in which ranks run them."""
    small: Options = {"comm_fusion": {"allreduce": {"mode": "size", "config": 1}}}
    found: dict[str, Callable[[torch.device], None]] = {}
    for name, case in {**MODELS, "lstm": RECURRENT["lstm"]}.items():
        found[f"step {name}"] = lambda device, case=case: check_step(device, case, {})
        found[f"module {name}"] = lambda device, case=case: check_module(device, case, {})
    for fusion, options in FUSIONS.items():
        found[f"step by {fusion}"] = lambda device, options=options: check_step(device, MODELS["gpt2"], options)
        found[f"equal bits by {fusion}"] = lambda device, options=options: check_equal_bits(device, options)
    for name, options in {"small buckets": small, "unused": {"find_unused_parameters": True}}.items():
        found[f"module, {name}"] = lambda device, options=options: check_module(device, MODELS["resnet"], options)
    found["module, inductor"] = lambda device: check_module(device, MODELS["mlp"], {"backend": "inductor"})
    found["module, dynamo"] = lambda device: check_module(device, MODELS["mlp"], {"capture": "dynamo"})
    found["module, dropout"] = lambda device: check_module_of_dropout(device)
    found["step, inductor"] = lambda device: check_step(device, MODELS["gpt2"], {"backend": "inductor"})
    found["tensor parallel"] = check_tensor_parallel
    found["masks"] = check_masks_differ_between_ranks
    found["streams"] = check_streams
    found["other streams"] = check_other_streams
    found["recorded communication"] = check_recorded_communication
    found["profile"] = check_profile
    found["trials"] = check_trials
    return found | divided_checks.CASES


def check_module_of_dropout(device: torch.device) -> None:
    check_module(device, WITH_DROPOUT["mlp"], {})


CASES = _cases()
GRAPHS: dict[str, Callable[[torch.device], None]] = {
    f"equal bits by {fusion}, in a CUDA graph": (
        lambda device, options=options: check_equal_bits(device, {**options, "cuda_graph": True})
    )
    for fusion, options in FUSIONS.items()
}
"""Checks of a version that captures steps in CUDA graphs, on CUDA."""


def cases_on(device: torch.device) -> dict[str, Callable[[torch.device], None]]:
    return CASES | GRAPHS if has_graphs(device) else CASES


def run_all(device: torch.device, folder: Path) -> None:
    """Run the checks until one fails: what comes after it might wait for a rank that has left."""
    results: dict[str, str] = {}
    for name, check in cases_on(device).items():
        try:
            check(device)
            results[name] = ""
        except BaseException:
            results[name] = traceback.format_exc()
        (folder / f"{dist.get_rank()}.json").write_text(json.dumps(results))
        if results[name]:
            raise SystemExit(1)


if __name__ == "__main__":
    join_as_host_of_its_own()
    run_all(torch.device(sys.argv[1]), Path(sys.argv[2]))
    dist.destroy_process_group()
