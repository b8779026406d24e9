"""Simulated steps: schedules worked out by hand, compiled programs, and what must hold for any graph."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

import commfuse_fx as cf
from commfuse_fx.cost.model import OVERHEAD, CostModel
from commfuse_fx.cost.transfer import Transfer
from commfuse_fx.errors import ConfigValueError, VerificationError
from commfuse_fx.ir.core.meta import Stretch, info
from commfuse_fx.ir.core.program import Program
from commfuse_fx.ir.text.write_text import collective_text
from commfuse_fx.machine.cluster import ClusterSpec
from commfuse_fx.passes.schedule.stream_buckets import StreamBuckets
from commfuse_fx.simulate.simulation import Simulation, simulate
from tests.cost.graphs import CLUSTER, CORE, TCP, Graph, Priced, aten, f32
from tests.models import CONTRASTIVE, WIDE, Case
from tests.work import calls

UNFUSED = {"openstate": False}
THREE_BUCKETS = {"allreduce": {"mode": "index", "config": [2, 6]}}


def compiled(case: Case, comm_fusion: object = None) -> Program:
    model = case.model(torch.float32)
    optimizer = torch.optim.AdamW(model.parameters())
    options = {} if comm_fusion is None else {"comm_fusion": comm_fusion}
    step = cf.compile(model, loss_fn=case.loss_fn, optimizer=optimizer, device_num=8, global_rank=0, **options)
    return step.lower(*case.batches(1, rows=64, dtype=torch.float32)[0]).program


def streamed() -> Program:
    program = compiled(WIDE)
    assert StreamBuckets(piece=2**18)(program)
    return program


def check(simulation: Simulation) -> None:
    """What holds for every simulated step."""
    s, close = simulation, 1e-9
    assert s.bound_seconds <= s.step_seconds * (1 + close)
    assert s.gap >= 0
    assert s.exposed_seconds == pytest.approx(sum(each.exposed for each in s.collectives))
    computed = sorted([each for each in s.events if each.kind in ("compute", "issue")], key=lambda e: (e.begin, e.end))
    busy = sum(each.end - each.begin for each in computed)
    assert busy >= s.compute_seconds * (1 - close)
    assert s.step_seconds == pytest.approx(busy + s.exposed_seconds), "it computes or it waits"
    for one, after in pairwise(computed):
        assert one.end <= after.begin + close
    for each in s.collectives:
        assert each.issued <= each.begin <= each.end <= each.wait_left + close
        assert each.exposed == each.wait_left - each.wait_entered >= 0
        assert each.hidden >= 0 and each.seconds >= 0
        assert each.hidden + each.exposed == pytest.approx(each.end - each.issued if each.exposed else each.hidden)
        assert bool(each.reason) == (each.exposed > 0)


def two_buckets() -> tuple[Program, Priced]:
    """a(1) -> start(1 + 2) ; b(1) -> start(2) ; c(1.5) ; waits ; update(0.5)."""
    g = Graph()
    x = g.input("x")
    a = g.op("a", x)
    first = g.start("first", a)
    b = g.op("b", x)
    second = g.start("second", b)
    c = g.op("c", x)
    waits = [g.wait(first), g.wait(second)]
    update = g.op("update", *waits, phase="update")
    program = g.program(g.op("loss", update, c))
    moves = {"first": Transfer("dp", 1.0, 2.0), "second": Transfer("dp", 0.5, 1.5)}
    return program, Priced(computes={"a": 1.0, "b": 1.0, "c": 1.5, "update": 0.5}, moves=moves)


def test_a_step_worked_out_by_hand() -> None:
    program, model = two_buckets()
    s = simulate(program, model)
    check(s)
    first, second = s.collectives
    # first flies from 1 to 4, second from 4 to 6; computing is done at 3.5.
    assert (first.issued, first.begin, first.end) == (1.0, 1.0, 4.0)
    assert (first.wait_entered, first.wait_left) == (3.5, 4.0)
    assert (first.hidden, first.exposed, first.seconds) == (2.5, 0.5, 3.0)
    assert (second.issued, second.begin, second.end) == (2.0, 4.0, 6.0)
    assert (second.hidden, second.exposed) == (2.0, 2.0)
    assert first.reason == "no independent compute left"
    assert second.reason == "FIFO behind first (2e+03 ms)"
    assert (s.step_seconds, s.compute_seconds, s.exposed_seconds) == (6.5, 4.0, 2.5)
    # Communication takes 5, computing 4; a, first and update 4.5 (second: 3.5).
    assert (s.bound_seconds, s.bound_by) == (5.0, "communication on dp")
    assert s.gap == pytest.approx(0.3)


def test_text_and_json_of_a_step() -> None:
    program, model = two_buckets()
    s = simulate(program, model)
    lines = s.text().splitlines()
    assert lines[0] == ("simulated step: 6500.000 ms, 30.0% above its lower bound of 5000.000 ms (communication on dp)")
    assert lines[1].startswith("  compute 4000.000 ms, exposed communication 2500.000 ms, peak memory ")
    assert lines[2] == "2 collective(s)"
    assert "2000.000 ms hidden, 2000.000 ms exposed (FIFO behind first" in lines[4]
    data = json.loads(json.dumps(s.to_json()))
    assert data["step_seconds"] == 6.5 and data["gap"] == s.gap
    assert [each["name"] for each in data["collectives"]] == ["first", "second"]
    assert data["collectives"][0]["description"].startswith("all_reduce group=dp(2) op=sum dtype=f32 bytes=16")


def test_groups_have_streams_of_their_own_and_share_links() -> None:
    g = Graph()
    x = g.input("x")
    a, b = g.op("a", x), g.op("b", x)
    starts = [g.start("one", a), g.start("other", b, group="tp")]
    program = g.program(g.op("loss", *[g.wait(start) for start in starts]))
    moves = {"one": Transfer("dp", 0.0, 1.0, links=("net",)), "other": Transfer("tp", 0.0, 2.0, links=("net",))}
    s = simulate(program, Priced(moves=moves))
    check(s)
    assert [each.end for each in s.collectives] == [2.0, 3.0]
    assert (s.bound_seconds, s.bound_by) == (3.0, "communication on net")
    apart = {"one": Transfer("dp", 0.0, 1.0, links=("net",)), "other": Transfer("tp", 0.0, 2.0, links=("nvlink",))}
    assert simulate(program, Priced(moves=apart)).step_seconds == 2.0


def test_host_work_slows_computing_down_and_is_part_of_the_bound() -> None:
    g = Graph()
    x = g.input("x")
    a = g.op("a", x)
    start = g.start("reduce", a)
    b = g.op("b", x)
    program = g.program(g.op("loss", g.wait(start), b))
    model = Priced(computes={"a": 1.0, "b": 3.0}, moves={"reduce": Transfer("dp", 0.0, 4.0, host=1.0)})
    s = simulate(program, model)
    check(s)
    assert (s.step_seconds, s.compute_seconds) == (5.0, 4.0)
    assert (s.bound_seconds, s.bound_by) == (5.0, "compute")


def bucket_in_pieces() -> tuple[Program, Priced]:
    g = Graph()
    x = g.input("x", f32(2))
    storage = g.op("storage", [4], target=aten.empty.memory_format, spec=f32(4), kept=True)
    writes = []
    for number in range(2):
        place = g.op(f"place{number}", storage, [2], [1], 2 * number, target=aten.as_strided.default, spec=f32(2))
        writes.append(g.op(f"write{number}", place, x, target=aten.copy_.default, spec=f32(2)))
    start = g.start("bucket", storage, rest=(Stretch(2, 4),))
    info(writes[0]).sends = ((start, Stretch(0, 2)),)
    program = g.program(g.op("loss", g.wait(start)))
    return program, Priced(computes={"write0": 1.0, "write1": 3.0}, moves={"bucket": Transfer("dp", 0.5, 4.0)})


def test_a_bucket_in_pieces() -> None:
    program, model = bucket_in_pieces()
    s = simulate(program, model)
    check(s)
    (bucket,) = s.collectives
    # The first half flies from 1 to 3.5, the second from 4 to 6.5.
    assert (bucket.issued, bucket.begin, bucket.end, bucket.seconds) == (1.0, 1.0, 6.5, 5.0)
    assert (bucket.hidden, bucket.exposed, bucket.reason) == (3.0, 2.5, "dependency on write1")
    pieces = [each for each in s.events if each.kind == "communication"]
    assert [(each.name, each.issued, each.begin, each.end) for each in pieces] == [
        ("bucket.0", 1.0, 1.0, 3.5),
        ("bucket.1", 4.0, 4.0, 6.5),
    ]
    assert (s.bound_seconds, s.bound_by) == (6.5, "critical path")
    whole = bucket_in_pieces()[0]
    for node in whole.graph.nodes:
        info(node).sends = info(node).rest = ()
    assert simulate(whole, model).step_seconds == 8.5


def handing_over(seconds: float) -> ClusterSpec:
    return replace(CLUSTER, device=replace(CORE, collective_overhead=seconds))


def test_handing_a_message_over_is_an_event_of_the_compute_stream() -> None:
    program, model = bucket_in_pieces()
    s = simulate(program, replace(model, cluster=handing_over(0.25)))
    check(s)
    issues = [each for each in s.events if each.kind == "issue"]
    assert [(each.name, each.stream, each.begin, each.end, each.node) for each in issues] == [
        ("issue bucket.0", "compute", 1.0, 1.25, "bucket"),
        ("issue bucket.1", "compute", 4.25, 4.5, "bucket"),
    ]
    assert s.compute_seconds == 4.5
    assert sum(each.end - each.begin for each in s.events if each.kind in ("compute", "issue")) == 4.5
    assert [each.issued for each in s.events if each.kind == "communication"] == [1.25, 4.5]
    assert not any(each.kind == "issue" for each in simulate(program, model).events), "what takes no time is none"


def test_messages_of_the_next_step_are_handed_over_in_this_one() -> None:
    program, model = deferred()
    s = simulate(program, replace(model, cluster=handing_over(0.25)))
    check(s)
    (issue,) = [each for each in s.events if each.kind == "issue"]
    assert (issue.name, issue.begin, issue.end) == ("issue reduce", s.step_seconds - 0.25, s.step_seconds)
    assert s.collectives[0].issued == 0.0


def alone(after: Callable[[Graph, fx.Node, fx.Node], fx.Node], between: bool = False) -> str:
    """The reason for a collective of 3 s behind `made` (1 s), with a node `between` (1 s) or not."""
    g = Graph()
    x = g.input("x")
    start = g.start("reduce", g.op("made", x))
    if between:
        g.op("between", x)
    loss = after(g, x, g.wait(start))
    model = Priced(
        computes={"made": 1.0, "between": 1.0, "used": 1.0, "later": 2.5, "update": 5.0},
        moves={"reduce": Transfer("dp", 0.0, 3.0)},
    )
    s = simulate(g.program(loss), model)
    check(s)
    return s.collectives[0].reason


def test_reasons() -> None:
    assert alone(lambda g, x, result: g.op("used", result)) == "dependency on made"
    assert alone(lambda g, x, result: g.op("used", result), between=True) == "no independent compute left"
    early = alone(lambda g, x, result: g.op("loss", g.op("used", result), g.op("later", x)))
    assert early == "dependency on used, which needs it before 2.5e+03 ms of independent compute"
    # An update comes after all waits, so it is no cover, whatever it depends on.
    assert alone(lambda g, x, result: g.op("loss", result, g.op("update", x, phase="update"))) == "dependency on made"


def two_at_once(one: Transfer, other: Transfer) -> list[str]:
    """The reasons for two collectives sent before the same 2 s of compute, and waited for behind it."""
    g = Graph()
    x = g.input("x")
    starts = [g.start("one", g.op("a", x)), g.start("other", g.op("b", x), group=other.stream)]
    g.op("cover", x)
    program = g.program(g.op("loss", *[g.wait(start) for start in starts]))
    s = simulate(program, Priced(computes={"cover": 2.0}, moves={"one": one, "other": other}))
    check(s)
    return [each.reason for each in s.collectives]


def test_who_shares_the_wire_is_a_reason() -> None:
    # Each has half of the wire for 6 s, then the second one has it alone for 1 s.
    one, other = Transfer("dp", 0.5, 3.0, slowed=4.0), Transfer("dp", 0.5, 4.0, slowed=4.0)
    shared = ["shares the wire with other (3e+03 ms)", "shares the wire with one (3e+03 ms)"]
    assert two_at_once(one, other) == shared
    alone = replace(one, slowed=1.0, links=("net",))
    across = replace(other, slowed=1.0, links=("net",), stream="tp")
    assert two_at_once(alone, across) == shared, "one link of two groups"
    # 1.5 s and 2.5 s are exposed.
    assert two_at_once(alone, replace(across, links=("nvlink",))) == ["no independent compute left"] * 2
    # A latency loads nothing.
    assert two_at_once(one, replace(other, latency=7.0, transfer=0.1))[0] == "no independent compute left"


def test_a_hidden_collective_needs_no_reason() -> None:
    g = Graph()
    x = g.input("x")
    start = g.start("reduce", g.op("made", x))
    cover = g.op("cover", x)
    program = g.program(g.op("loss", g.wait(start), cover))
    s = simulate(program, Priced(computes={"cover": 3.0}, moves={"reduce": Transfer("dp", 0.0, 3.0)}))
    check(s)
    assert (s.collectives[0].reason, s.exposed_seconds, s.gap, s.bound_by) == ("", 0.0, 0.0, "compute")


def test_the_memory_cap_is_a_reason_where_a_note_says_so() -> None:
    program, model = two_buckets()
    program.note("memory cap", "second", "held back to stay below 1 GiB")
    assert [each.reason for each in simulate(program, model).collectives] == [
        "no independent compute left",
        "memory cap",
    ]


@pytest.mark.parametrize("case", [WIDE, CONTRASTIVE], ids=lambda case: case.name)
@pytest.mark.parametrize("fusion", [None, UNFUSED, THREE_BUCKETS], ids=["auto", "unfused", "three"])
def test_compiled_steps(case: Case, fusion: object) -> None:
    program = compiled(case, fusion if case is WIDE else (fusion if fusion is not THREE_BUCKETS else None))
    s = simulate(program, CostModel(CLUSTER))
    check(s)
    assert [each.name for each in s.collectives if each.exposed]
    names = {info(node).name for node in program.collectives()}
    assert {each.name for each in s.collectives} == names
    assert s.text() == simulate(program, CostModel(CLUSTER)).text()
    for each in s.collectives:
        details = next(info(node).collective for node in program.collectives() if info(node).name == each.name)
        assert details is not None
        assert each.description == f"{details.kind} {collective_text(details, 8)}"


def test_fusing_saves_latency() -> None:
    model = CostModel(CLUSTER)
    unfused, three, one = (simulate(compiled(WIDE, fusion), model) for fusion in (UNFUSED, THREE_BUCKETS, None))
    assert [len(each.collectives) for each in (unfused, three, one)] == [10, 3, 1]
    assert three.step_seconds < unfused.step_seconds and one.step_seconds < unfused.step_seconds


def test_streaming_a_bucket_hides_more_of_it() -> None:
    model = CostModel(replace(CLUSTER, levels=(replace(TCP, alpha=5e-6),)))
    whole, pieces = simulate(compiled(WIDE), model), simulate(streamed(), model)
    check(pieces)
    assert whole.collectives[0].hidden == 0 < pieces.collectives[0].hidden
    assert pieces.step_seconds < whole.step_seconds
    assert whole.compute_seconds == pieces.compute_seconds


def test_what_a_step_takes_besides_its_nodes_passes_in_all_of_them() -> None:
    program = compiled(WIDE)
    plain, more = (simulate(program, CostModel(CLUSTER, {OVERHEAD: seconds})) for seconds in (0.0, 0.5))
    check(more)
    assert more.compute_seconds == pytest.approx(plain.compute_seconds + 0.5)
    times = [{each.node: each.end - each.begin for each in s.events if each.kind == "compute"} for s in (plain, more)]
    stretches = [times[1][node] / seconds for node, seconds in times[0].items() if seconds > 1e-6]
    assert len(stretches) > 10
    assert stretches[0] > 1.01
    assert stretches == pytest.approx([stretches[0]] * len(stretches), rel=1e-6)


def test_measured_nodes_replace_the_model() -> None:
    program = compiled(WIDE)
    plain = simulate(program, CostModel(CLUSTER))
    mm = next(node for node in program.graph.nodes if node.target is aten.addmm.default)
    slow = simulate(program, CostModel(CLUSTER, {info(mm).name: 1.0}))
    assert slow.step_seconds == pytest.approx(plain.step_seconds + 1.0, rel=1e-3)


def deferred() -> tuple[Program, Priced]:
    """forward(2) ; backward(2) -> start(3) ; and in the next step, before forward2: wait, update(0.5)."""
    g = Graph()
    x = g.input("x")
    forward = g.op("forward", x, phase="forward")
    second = g.op("forward2", forward, phase="forward")
    storage = g.op("storage", [4], target=aten.empty.memory_format, kept=True)
    grad = g.op("backward", storage, second, target=aten.copy_.default)
    start = g.start("reduce", grad)
    wait = g.wait(start, next_step=second)
    g.op("update", x, wait, target=aten.add_.Tensor, phase="update", next_step=second)
    computes = {"forward": 1.0, "forward2": 1.0, "backward": 2.0, "update": 0.5}
    return g.program(second), Priced(computes=computes, moves={"reduce": Transfer("dp", 1.0, 2.0)})


def test_the_period_of_steps_that_reach_into_each_other() -> None:
    program, model = deferred()
    s = simulate(program, model)
    check(s)
    # Issued at the end of a step, it flies for 3 while the next one runs forward for 1 and then waits for 2.
    (reduce,) = s.collectives
    assert (reduce.issued, reduce.end, reduce.wait_entered, reduce.wait_left) == (0.0, 3.0, 1.0, 3.0)
    assert (s.step_seconds, s.compute_seconds, s.exposed_seconds) == (6.5, 4.5, 2.0)
    assert (s.bound_seconds, s.bound_by) == (4.5, "compute")
    order = [each.node for each in s.events if each.kind != "communication"]
    assert order == ["forward", "update", "forward2", "backward", "reduce.wait"]
    for steps in (1, 2, 7):
        assert simulate(program, model, steps=steps).step_seconds == 6.5
    # With twice the forward before the anchor nothing of it is seen.
    hidden = simulate(program, Priced(computes={**model.computes, "forward": 3.0}, moves=model.moves))
    check(hidden)
    assert (hidden.step_seconds, hidden.exposed_seconds, hidden.gap) == (6.5, 0.0, 0.0)


def test_a_collective_that_starts_in_the_next_step() -> None:
    g = Graph()
    x = g.input("x")
    forward = g.op("forward", x)
    backward = g.op("backward", forward)
    start = g.start("gather", backward, next_step=forward)
    g.wait(start, next_step=backward)
    program = g.program(backward)
    s = simulate(program, Priced(computes={"forward": 1.0, "backward": 1.0}, moves={"gather": Transfer("dp", 0, 3.0)}))
    check(s)
    assert (s.step_seconds, s.exposed_seconds) == (4.0, 2.0)
    assert (s.collectives[0].issued, s.collectives[0].wait_entered) == (0.0, 1.0)


def test_a_wait_must_not_come_before_its_start() -> None:
    g = Graph()
    x = g.input("x")
    anchor = g.op("anchor", x)
    start = g.start("reduce", g.op("made", x), next_step=anchor)
    program = g.program(g.op("loss", g.wait(start)))
    with pytest.raises(VerificationError, match=r"reduce.wait waits for reduce before"):
        simulate(program, Priced(moves={"reduce": Transfer("dp", 0.0, 1.0)}))


def test_at_least_one_step() -> None:
    program, model = two_buckets()
    assert simulate(program, model, steps=3).step_seconds == 6.5
    with pytest.raises(ConfigValueError, match="steps=0"):
        simulate(program, model, steps=0)


seconds = st.floats(0.0, 5.0).map(lambda value: round(value, 2))


@st.composite
def random_steps(draw: st.DrawFn) -> tuple[Program, Priced]:
    """Compute nodes with random inputs, starts of both groups, waits somewhere later, maybe in the next step."""
    g = Graph()
    x = g.input("x")
    anchor = g.op("anchor", x)
    values, computes = [x, anchor], {"anchor": draw(seconds)}
    flying: list[fx.Node] = []
    moves: dict[str, Transfer] = {}
    slowed = draw(st.sampled_from([1.0, 4.0]))
    for number in range(draw(st.integers(1, 10))):
        choice = draw(st.integers(0, 3))
        if choice == 0 and flying:
            values.append(g.wait(flying.pop(draw(st.integers(0, len(flying) - 1)))))
            continue
        picked = [values[draw(st.integers(0, len(values) - 1))] for _ in range(2)]
        made = g.op(f"op{number}", *picked)
        computes[f"op{number}"] = draw(seconds)
        if choice == 1:
            group = draw(st.sampled_from(["dp", "tp"]))
            flying.append(g.start(f"reduce{number}", made, group=group))
            transfer = draw(seconds)
            host = draw(st.sampled_from([0.0, 0.2, 1.5])) * transfer
            latency = draw(seconds)
            last = draw(st.sampled_from([0.0, 0.5, 1.0])) * latency
            moves[f"reduce{number}"] = Transfer(group, latency, transfer, host, ("net",), slowed=slowed, last=last)
        else:
            values.append(made)
    late = draw(st.booleans())
    for start in flying:
        values.append(g.wait(start, **({"next_step": anchor} if late else {})))
    cluster = handing_over(draw(st.sampled_from([0.0, 0.3])))
    return g.program(anchor), Priced(cluster, computes=computes, moves=moves)


@settings(max_examples=150, deadline=None)
@given(random_steps())
def test_a_step_is_never_below_its_bound(step: tuple[Program, Priced]) -> None:
    program, model = step
    s = simulate(program, model)
    check(s)
    assert {each.name for each in s.collectives} == set(model.moves)


def long_chain(nodes: int) -> Program:
    """Products in a row, every fifth of which also makes a gradient, whose collective is waited for at the end."""
    g = Graph()
    x = g.input("x", f32(64, 64))
    value, starts = x, []
    spec = info(x).spec
    for number in range(nodes):
        value = g.op(f"mm{number}", value, x, target=aten.mm.default, spec=spec)
        if number % 5 == 0:
            starts.append(g.start(f"reduce{number}", g.op(f"grad{number}", value, spec=spec)))
    for start in starts:
        value = g.op(f"use.{info(start).name}", value, g.wait(start), spec=spec)
    return g.program(value)


@pytest.mark.parametrize("latency", [1e-5, 1.0], ids=["hidden", "queued"])
def test_work_grows_with_the_graph(latency: float) -> None:
    """With 100,000 nodes a pass over all nodes for each of them would take hours; see the benchmark compile_cost."""
    model = CostModel(replace(CLUSTER, levels=(replace(TCP, alpha=latency),)))
    small, large = (calls(partial(simulate, long_chain(nodes), model)) for nodes in (1_000, 4_000))
    assert large < 4.4 * small
