"""The lockstep world itself."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import commfuse_fx as cf
from commfuse_fx.ir.core.collectives import is_wait
from commfuse_fx.ir.core.dependence import written_nodes
from commfuse_fx.ir.core.meta import info
from commfuse_fx.ir.core.order import reorder
from commfuse_fx.ir.core.program import Program
from commfuse_fx.virtual.virtual_world import LockstepWorld
from tests.models import MLP_CASE, TIED, WIDE, Case, shards
from tests.oracle import (
    ACROSS,
    ACROSS_STEPS,
    APART_ACROSS_STEPS,
    SLOW,
    assert_same,
    make_world,
    sgd,
    tensors_of,
    train_reference,
)


def test_one_result_per_rank() -> None:
    (batch,) = MLP_CASE.batches(1)
    world = make_world(MLP_CASE, MLP_CASE.model(), 4)
    results = world(shards(batch, 4))
    assert len(results) == len(world.models) == len(world.optimizers) == 4
    assert all(result.grads.keys() == dict(world.models[0].named_parameters()).keys() for result in results)
    with_optimizer = make_world(MLP_CASE, MLP_CASE.model(), 4, sgd)(shards(batch, 4))
    assert all(not result.grads for result in with_optimizer)


def test_evaluation_changes_nothing() -> None:
    (batch,) = MLP_CASE.batches(1)
    model = MLP_CASE.model()
    world = make_world(MLP_CASE, model, 2, sgd)
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    for each in world.models:
        each.eval()
    losses = [result.loss for result in world(shards(batch, 2))]
    torch.testing.assert_close(torch.stack(losses).mean(), F.cross_entropy(model(batch[0]), batch[1]).detach())
    assert all(torch.equal(param, before[name]) for name, param in model.named_parameters())


def test_other_shapes_are_traced_anew_and_share_the_state() -> None:
    model = MLP_CASE.model()
    batches = [*MLP_CASE.batches(2, rows=8), *MLP_CASE.batches(1, rows=4), *MLP_CASE.batches(1, rows=8)]
    want = train_reference(MLP_CASE, model, batches, 2, sgd)
    world = make_world(MLP_CASE, model, 2, sgd)
    for batch in batches:
        world(shards(batch, 2))
    assert_same(world.models, want)


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(self.layer(x), 0.5, self.training).square().mean()


def test_ranks_and_steps_draw_their_own_random_numbers() -> None:
    x = torch.randn(4, 12)

    def losses() -> list[float]:
        torch.manual_seed(0)
        world = LockstepWorld(cf.compile(Dropping(), device_num=2, global_rank=0, form="step"))
        return [float(result.loss) for _ in range(2) for result in world([(x,), (x,)])]

    first = losses()
    assert len(set(first)) == 4
    assert losses() == first


def test_what_is_read_before_its_wait_is_poisoned() -> None:
    (batch,) = MLP_CASE.batches(1)
    world = make_world(MLP_CASE, MLP_CASE.model(), 2)
    parts = shards(batch, 2)
    program = world.step.lower(*parts[0])._program
    for wait in [node for node in program.graph.nodes if is_wait(node)]:
        wait.replace_all_uses_with(wait.args[0])
        program.graph.erase_node(wait)
    assert all(bool(grad.isnan().all()) for result in world(parts) for grad in result.grads.values())


def test_bad_arguments() -> None:
    (batch,) = MLP_CASE.batches(1)
    world = make_world(MLP_CASE, MLP_CASE.model(), 2)
    parts = shards(batch, 2)
    with pytest.raises(cf.ConfigValueError, match="3 batches for 2 ranks"):
        world([*parts, parts[0]])
    with pytest.raises(cf.ConfigValueError, match=r"rank 1 .*f64\[4,12\] -> f64\[8,12\]"):
        world([parts[0], batch])
    with pytest.raises(cf.ConfigValueError, match="'nonsense' is not a collective"):
        world(parts, drop=["nonsense"])


# Communication that runs on into the next step.


def across(case: Case, steps: int, world: int = 2, **options: object) -> LockstepWorld:
    """A world after some steps, with updates that are still to come."""
    made = make_world(case, case.model(), world, sgd, **{**ACROSS_STEPS, **options})
    for batch in case.batches(steps):
        made(shards(batch, world))
        assert made.is_pending
    return made


def snapshot(world: LockstepWorld) -> list[dict[str, torch.Tensor]]:
    return [{name: value.detach().clone() for name, value in tensors_of(model).items()} for model in world.models]


def test_synchronize_finishes_what_a_step_has_left() -> None:
    world = across(MLP_CASE, 2)
    alias = world.models[1].get_parameter("0.weight")
    with torch._C.DisableTorchFunctionSubclass():
        before = alias.detach().clone()
        world.synchronize()
        assert not world.is_pending
        assert not torch.equal(alias, before)
    assert_same(world.models, train_reference(MLP_CASE, MLP_CASE.model(), MLP_CASE.batches(2), 2, sgd))
    world.synchronize()


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("what", ["parameter", "state", "state_dict", "eager call"])
def test_whoever_looks_sees_the_finished_step(rank: int, what: str) -> None:
    world = across(MLP_CASE, 2)
    model, optimizer = world.models[rank], world.optimizers[rank]
    assert optimizer is not None
    if what == "parameter":
        assert model.get_parameter("0.weight").sum().isfinite()
    elif what == "state":
        assert optimizer.state[model.get_parameter("0.weight")]["momentum_buffer"].sum().isfinite()
    elif what == "state_dict":
        assert {name: value.clone() for name, value in model.state_dict().items()}
    else:
        assert model(MLP_CASE.batches(1)[0][0]).isfinite().all()
    assert not world.is_pending
    assert all(type(param) is nn.Parameter for each in world.models for param in each.parameters())


def test_parameters_of_two_pending_steps_are_compared() -> None:
    """Whoever compares asks whether one is an instance of the other's class, before the values are read."""
    first, second = across(MLP_CASE, 2), across(MLP_CASE, 2)
    assert first.is_pending and second.is_pending
    for one, other in zip(first.models[0].parameters(), second.models[0].parameters(), strict=True):
        assert isinstance(one, type(other)) and not isinstance(torch.ones(2), type(other))
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_another_program_begins_when_the_step_is_complete() -> None:
    batches = [*MLP_CASE.batches(2), *MLP_CASE.batches(1, rows=4), *MLP_CASE.batches(1)]
    want = train_reference(MLP_CASE, MLP_CASE.model(), batches, 2, sgd)
    world = make_world(MLP_CASE, MLP_CASE.model(), 2, sgd, **ACROSS_STEPS)
    for batch in batches:
        world(shards(batch, 2))
        assert world.is_pending
    for model in world.models:
        model.eval()
    loss = world(shards(batches[0], 2))[0].loss
    assert not world.is_pending
    assert_same(world.models, want)
    torch.testing.assert_close(loss, F.cross_entropy(want[0](batches[0][0][:4]), batches[0][1][:4]).detach())


def test_lowering_and_listing_finish_the_step() -> None:
    (batch,) = MLP_CASE.batches(1)
    part = shards(batch, 2)[0]
    world = across(MLP_CASE, 1)
    assert world.step.lower(*part).collectives
    assert not world.is_pending
    world = across(MLP_CASE, 1)
    assert world.collectives(part)
    assert not world.is_pending


def test_memory_that_the_user_replaces_between_two_steps_is_taken_over() -> None:
    batches = MLP_CASE.batches(3)
    want = train_reference(MLP_CASE, MLP_CASE.model(), batches, 2, sgd)
    world = make_world(MLP_CASE, MLP_CASE.model(), 2, sgd, **ACROSS_STEPS)
    for batch in batches:
        world(shards(batch, 2))
        for param in world.models[1].parameters():
            param.data = param.data.clone()
    assert_same(world.models, want)


def test_gradient_memory_is_dropped_with_the_last_plan_that_uses_it() -> None:
    gc.freeze()  # or collecting looks through what all tests before have left
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    step = cf.compile(net, loss_fn=nn.MSELoss(), optimizer=torch.optim.SGD(net.parameters(), lr=0.1), device_num=2)
    world = LockstepWorld(step)
    batches = [(torch.ones(2, 8), torch.ones(2, 8))] * 2

    def sizes() -> list[int]:
        return [memory.numel() for memory in world._ranks[1]._pool._memory.values()]

    world(batches)
    (whole,) = sizes()
    net[0].weight.comm_fusion = 0
    world(batches)
    assert len(sizes()) == 2  # both plans may run again
    step.planner.plans.clear()
    net[1].weight.comm_fusion = 0
    world(batches)
    gc.collect()
    net[1].bias.comm_fusion = 0
    world(batches)
    assert whole not in sizes() and len(sizes()) <= 2


def test_a_step_that_fails_leaves_the_one_before_complete() -> None:
    batches = MLP_CASE.batches(3)
    world = across(MLP_CASE, 2)
    x, y = batches[2]
    with pytest.raises(IndexError):
        world(shards((x, y + 100), 2))
    assert not world.is_pending
    assert_same(world.models, train_reference(MLP_CASE, MLP_CASE.model(), batches[:2], 2, sgd))
    world(shards(batches[2], 2))
    assert_same(world.models, train_reference(MLP_CASE, MLP_CASE.model(), batches, 2, sgd))


def test_a_dropped_collective_stays_dropped_in_the_next_step() -> None:
    batches = MLP_CASE.batches(2)
    world = make_world(MLP_CASE, MLP_CASE.model(), 2, sgd, cluster=SLOW, schedule=ACROSS)
    (name,) = world.collectives(shards(batches[0], 2)[0])
    world(shards(batches[0], 2), drop=[name])
    world(shards(batches[1], 2))
    first, second = snapshot(world)
    assert not any(torch.equal(first[key], second[key]) for key in first)


# Wrong graphs, which have to give wrong numbers.


def program_of(world: LockstepWorld, case: Case) -> Program:
    """The program that calls with a batch of this case run, to be changed."""
    return world.step.lower(*shards(case.batches(1)[0], len(world.models))[0])._program


def is_noticed(world: LockstepWorld, case: Case) -> bool:
    """Whether three steps differ from one device: wrong, or not a number."""
    batches = case.batches(3)
    want = train_reference(case, case.model(), batches, len(world.models), sgd)
    for batch in batches:
        world(shards(batch, len(world.models)))
    return not all(
        torch.allclose(have[name], value, rtol=1e-9, atol=1e-11)
        for have, reference in zip(snapshot(world), want, strict=True)
        for name, value in tensors_of(reference).items()
    )


def deferred(program: Program) -> list[torch.fx.Node]:
    return [node for node in program.graph.nodes if info(node).next_step is not None]


def test_parameters_read_before_their_update_are_noticed() -> None:
    world = make_world(MLP_CASE, MLP_CASE.model(), 2, sgd, **APART_ACROSS_STEPS)
    program = program_of(world, MLP_CASE)
    backward = next(node for node in program.graph.nodes if info(node).phase == "backward")
    for node in deferred(program):
        info(node).next_step = backward
    assert is_noticed(world, MLP_CASE)


@pytest.mark.parametrize("waits_too", [True, False], ids=["on the wire", "before its last reading"])
@pytest.mark.parametrize("case", [MLP_CASE, TIED], ids=lambda case: case.name)
def test_a_bucket_overwritten_too_early_is_noticed(case: Case, waits_too: bool) -> None:
    """The update runs when the next step's gradients are in the same memory; here by the numbers of one update, since
    the forward that has read old parameters is noticed as well."""
    first, second = case.batches(2)

    def run(late: bool) -> list[torch.Tensor]:
        world = make_world(case, case.model(), 2, sgd, cluster=SLOW, schedule=ACROSS)
        program = program_of(world, case)
        place = next(program.collectives()) if late else next(n for n in program.graph.nodes if "grad" in info(n).name)
        for node in deferred(program):
            if waits_too or not is_wait(node):
                info(node).next_step = place
        world(shards(first, 2))
        world(shards(second, 2))
        if waits_too:  # the arrival puts everything back that it overwrites, gradients of the second step included
            world.synchronize()
        with torch._C.DisableTorchFunctionSubclass():
            return [param.detach().clone() for param in world.models[0].parameters()]

    same = [torch.allclose(a, b, rtol=1e-9, atol=1e-11) for a, b in zip(run(late=True), run(late=False), strict=True)]
    assert not any(same)


def pieces_of(program: Program) -> list[tuple[torch.fx.Node, torch.fx.Node]]:
    """(node after which a piece is sent, start) for each piece."""
    return [(node, start) for node in program.graph.nodes for start, _ in info(node).sends]


def test_a_write_to_a_piece_on_the_wire_is_noticed() -> None:
    """A piece leaves before all that it consists of has been written."""
    options = {"cluster": SLOW, "schedule": ACROSS}
    assert not is_noticed(make_world(WIDE, WIDE.model(), 2, sgd, **options), WIDE)
    world = make_world(WIDE, WIDE.model(), 2, sgd, **options)
    program = program_of(world, WIDE)
    (carrier, start), *_ = pieces_of(program)
    writers = [write for write, _ in info(start).writes]
    storage = start.all_input_nodes[0]
    info(storage).sends, info(carrier).sends = info(carrier).sends, ()
    assert list(program.graph.nodes).index(storage) < min(list(program.graph.nodes).index(w) for w in writers)
    assert is_noticed(world, WIDE)


def test_a_piece_that_is_never_sent_is_noticed() -> None:
    world = make_world(WIDE, WIDE.model(), 2, sgd, cluster=SLOW, schedule=ACROSS)
    program = program_of(world, WIDE)
    carrier, _ = pieces_of(program)[0]
    info(carrier).sends = ()
    assert is_noticed(world, WIDE)


def test_memory_that_was_never_written_is_noticed() -> None:
    world = make_world(MLP_CASE, MLP_CASE.model(), 2, sgd)
    program = program_of(world, MLP_CASE)
    nodes = list(program.graph.nodes)
    start = next(program.collectives())
    late = next(node for node, _ in info(start).writes)
    assert written_nodes(late)
    at = nodes.index(start)
    order = [node for node in nodes if node is not late]
    order.insert(order.index(nodes[at]) + 1, late)
    reorder(program.graph, order)
    assert is_noticed(world, MLP_CASE)
