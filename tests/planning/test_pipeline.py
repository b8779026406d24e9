"""The pipeline's contract: order of passes, honest `modified`, verification, and one file per pass."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn

import commfuse_fx as cf
from commfuse_fx.config.compile_config import CompileConfig
from commfuse_fx.errors import VerificationError
from commfuse_fx.ir.core.collectives import c10d, wait_of
from commfuse_fx.ir.core.mesh import Mesh
from commfuse_fx.ir.core.meta import Stretch, info
from commfuse_fx.ir.core.program import Program
from commfuse_fx.ir.core.verify import verify
from commfuse_fx.passes.declaration import Scalar, Situation, Variant, Variants
from commfuse_fx.passes.rewrite import resend_rows
from commfuse_fx.passes.schedule import postpone_gradients
from commfuse_fx.passes.schedule.overlap import Overlap
from commfuse_fx.planning import compile_call
from commfuse_fx.planning.compile_call import plan_step
from commfuse_fx.planning.pipeline.pipeline import PassPipeline, PassRecord
from commfuse_fx.planning.pipeline.recipe import build_pipeline, skipped_passes
from commfuse_fx.planning.pipeline.registry import PASSES
from commfuse_fx.planning.variants.variants import affordable, offered
from commfuse_fx.solvers.effort import Effort
from commfuse_fx.testing import parse_program

OPTIMAL = {"allreduce": {"mode": "optimal", "config": None}}
ACROSS = cf.ScheduleConfig(across_steps=True)
FILES = Path(__file__).parents[2] / "passes"


def lower(**options: object) -> cf.Lowered:
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    step = cf.compile(model, loss_fn=nn.functional.cross_entropy, optimizer=optimizer, device_num=2, **options)
    return step.lower(torch.ones(8, 4), torch.zeros(8, dtype=torch.long))


def test_passes_are_frozen_dataclasses_named_after_their_files() -> None:
    files = [path for path in FILES.glob("*/**/*.py") if path.stem != "__init__"]
    assert sorted(PASSES) == sorted(path.stem for path in files)
    for path in files:
        made = PASSES[path.stem].make
        assert dataclasses.is_dataclass(made)
        assert made.__dataclass_params__.frozen  # type: ignore[attr-defined]
        folders = path.relative_to(FILES).parent.parts
        assert made.__module__ == ".".join(("commfuse_fx", "passes", *folders, path.stem))
        assert made.__name__ == "".join(word.capitalize() for word in path.stem.split("_"))


DATA_PARALLEL = (
    "simplify merge_equal plain_masks slice_full_batch lower_user_collectives broadcast_buffers channels_last "
    "weight_gradients"
)
DIVIDED = "simplify plain_masks range_lookups counter_random divide lower_redistributions"
FUSED = "fuse_collectives flatten_storage"
LOWERED = "split_updates lower_average"
END = "keep_gradients reinplace give_way"


@pytest.mark.parametrize(
    ("options", "choices", "order"),
    [
        (
            {},
            {},
            f"{DATA_PARALLEL} draw_masks reduce_gradients update_parameters compute_once gradients_first {FUSED} "
            f"{LOWERED} overlap stream_buckets {END}",
        ),
        (
            {"cluster": "gloo-1gbit"},
            {"resent": True, "postponed": 0.5},
            f"{DATA_PARALLEL} draw_masks reduce_gradients update_parameters compute_once gradients_first resend_rows "
            f"postpone_gradients {FUSED} tile_first_gradient {LOWERED} schedule vote_first {END}",
        ),
        (
            {"schedule": "none", "parallel_mode": "stand_alone"},
            {},
            f"{DATA_PARALLEL} reduce_gradients update_parameters compute_once {FUSED} {LOWERED} {END}",
        ),
        (
            {"parallel_mode": "semi_auto"},
            {},
            f"{DIVIDED} update_parameters compute_once gradients_first {FUSED} {LOWERED} overlap stream_buckets {END}",
        ),
    ],
    ids=["plain", "by-cost", "stand-alone", "divided"],
)
def test_the_passes_of_a_situation(
    options: dict[str, object], choices: dict[str, Scalar], order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    config = CompileConfig.resolve(options)
    situation = Situation(config, Mesh.of_sizes((2,)), Variant.of(**choices))
    assert [each.name for each in build_pipeline(situation).passes] == order.split()


@pytest.mark.parametrize("options", [{}, {"cluster": "gloo-1gbit", "comm_fusion": OPTIMAL}], ids=["plain", "by-cost"])
def test_passes_that_need_sizes_are_skipped_where_autograd_computes(options: dict[str, object]) -> None:
    config, mesh = CompileConfig.resolve(options), Mesh.of_sizes((2,))
    computed, by_autograd = Situation(config, mesh), Situation(config, mesh, by_autograd=True)
    passes = build_pipeline(by_autograd).passes
    assert not any(each.needs_sizes for each in passes) and {"overlap", "stream_buckets"} <= {p.name for p in passes}
    needing = [each.name for each in build_pipeline(computed).passes if each.needs_sizes]
    assert [each.name for each in skipped_passes(by_autograd)] == needing and not skipped_passes(computed)


PLAIN, WITHIN, AMPLE, RESENT = (
    Variant(),
    Variant.of(across_steps=False),
    Variant.of(postponed=postpone_gradients.AMPLE),
    Variant.of(resent=True),
)
STEP = """
    in  %x: i64[4] = input
    in  %w: f32[64,4] = parameter
    fwd %/embedding.0: f32[4,4] = aten.embedding(%w, %x)
    return [%/embedding.0]
"""


def found(**options: object) -> Variants:
    """What passes offer for a step, by default with searched buckets."""
    config = CompileConfig.resolve({"cluster": "gloo-1gbit", "comm_fusion": OPTIMAL, **options})
    return offered(Situation(config, Mesh.of_sizes((2,))), parse_program(STEP))


def test_larger_graphs_compare_fewer_plans() -> None:
    effort = Effort(12_000)
    assert [effort.plans(nodes) for nodes in (0, 500, 999, 1_000, 1_001, 5_000, 12_000, 100_000)] == [
        12_000,
        24,
        12,
        12,
        11,
        2,
        1,
        1,
    ]
    across = found(schedule=ACROSS)
    assert [len(affordable(across, plans).searched) for plans in (30, 7, 6, 2, 1)] == [7, 7, 6, 2, 1]
    assert [bool(affordable(across, plans).fixed) for plans in (30, 8, 7, 6, 1)] == [True, True, False, False, False]


def test_variants_stand_in_the_order_in_which_they_promise_most(monkeypatch: pytest.MonkeyPatch) -> None:
    half, quarter = (Variant.of(postponed=part) for part in postpone_gradients.SCANT)
    across = (PLAIN, AMPLE, WITHIN, Variant.of(cut_within=True), half, quarter, WITHIN.but(postponed=1.0))
    assert found(schedule=ACROSS).searched == across
    assert found().searched == (PLAIN, Variant.of(postponed=1.0))
    by_size = tuple(PLAIN.but(fused_mib=mib) for mib in (1 << 20, 64, 25, 1, 0))
    assert found(schedule="none") == Variants((PLAIN,), by_size)
    assert found(comm_fusion=None, schedule=ACROSS) == Variants((PLAIN, WITHIN), (WITHIN.but(stored=False),))
    assert found(comm_fusion=None) == Variants((PLAIN,), (PLAIN.but(stored=False),))
    fixed = found(schedule=ACROSS).fixed
    assert fixed[:3] == tuple(each.but(fused_mib=1 << 20) for each in (PLAIN, WITHIN, WITHIN.but(stored=False)))
    assert len(fixed) == 15
    monkeypatch.setattr(resend_rows, "may_resend", lambda program: True)
    first = (RESENT, PLAIN, AMPLE.but(resent=True), WITHIN.but(resent=True))
    assert found(schedule=ACROSS).searched == (*first, *across[1:])
    assert found().searched == (RESENT, PLAIN, Variant.of(postponed=1.0, resent=True), Variant.of(postponed=1.0))
    assert found(schedule="none").searched == (RESENT,)
    assert found(comm_fusion=None).searched == (PLAIN,)
    assert found(parallel_mode="semi_auto").searched == (PLAIN, Variant.of(postponed=1.0))


def test_an_order_without_a_required_fact_is_refused() -> None:
    with pytest.raises(VerificationError, match=r"overlap requires averaged"):
        PassPipeline((Overlap(),))


@pytest.mark.parametrize(
    "options",
    [{}, {"cluster": "gloo-1gbit"}, {"comm_fusion": OPTIMAL}, {"comm_fusion": OPTIMAL, "schedule": ACROSS}],
    ids=["plain", "cluster", "optimal", "across"],
)
def test_modified_is_honest(options: dict[str, object]) -> None:
    """A pass that says it changed nothing left the text as it was, and one that changed it says so."""
    stages = list(lower(**options).stages.values())
    for before, after in pairwise(stages):
        assert after.modified == (before.text() != after.text()), after.name


def test_stages_start_with_the_capture_and_end_with_the_final_graph() -> None:
    lowered = lower()
    assert next(iter(lowered.stages)) == "capture"
    assert list(lowered.stages.values())[-1].text() == lowered.text()


def test_verification_notices_a_collective_without_wait() -> None:
    lowered = lower()
    program = lowered._program
    start = next(program.collectives())
    wait = wait_of(start)
    wait.replace_all_uses_with(start)
    program.graph.erase_node(wait)
    with pytest.raises(VerificationError, match=r"after pass broken: node bucket.0.*0 waits, not one"):
        verify(program, "broken")


def test_verification_notices_memory_touched_on_the_wire() -> None:
    program = lower()._program
    start = next(program.collectives())
    storage = start.all_input_nodes[0]
    with program.graph.inserting_after(start):
        late = program.graph.call_function(torch.ops.aten.zero_.default, (storage,))
    late.meta["commfuse"] = info(start).derive(None, name="late")
    with pytest.raises(VerificationError, match=r"late.*touches memory of bucket.0.* while it is on the wire"):
        verify(program, "broken")


def test_verification_notices_duplicate_names_and_missing_metadata() -> None:
    program = lower()._program
    start = next(program.collectives())
    info(start).name = info(wait_of(start)).name
    with pytest.raises(VerificationError, match="not unique"):
        verify(program, "broken")
    del start.meta["commfuse"]
    with pytest.raises(VerificationError, match="no metadata"):
        verify(program, "broken")


def test_updates_come_after_the_last_wait() -> None:
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(6)])
    for number, layer in enumerate(model):
        cf.set_comm_fusion(layer, number + 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = cf.compile(model, loss_fn=nn.functional.mse_loss, optimizer=optimizer, device_num=4)
    program = step.lower(torch.ones(2, 64), torch.ones(2, 64))._program
    kinds = [
        "start" if info(n).collective else "wait" if n.target is c10d.wait_tensor.default else info(n).phase
        for n in program.graph.nodes
        if n.op == "call_function"
    ]
    assert kinds.count("start") == kinds.count("wait") == 6
    assert kinds.index("update") > max(i for i, kind in enumerate(kinds) if kind == "wait")
    # Each start stands right after the gradient that completes its bucket; the waits stand together at the end.
    first_wait = kinds.index("wait")
    assert kinds[first_wait : first_wait + 6] == ["wait"] * 6
    assert "backward" in kinds[kinds.index("start") : first_wait]


def test_gradients_are_computed_straight_into_flat_storage() -> None:
    text = lower().text()
    assert "aten.mm.out(" in text
    assert "aten.cat(" not in text
    assert "aten.split" not in text
    assert text.count("aten._fused_adamw_(") == 1
    assert "grad_scale=" in text  # the mean costs no pass over memory
    assert "= flat [" in text


def test_unfused_gradients_need_no_flat_storage() -> None:
    text = lower(comm_fusion={"openstate": False}).text()
    assert "= flat [" not in text
    assert "storage" not in text


def test_padding_in_a_bucket_is_zeroed() -> None:
    text = lower().text()  # a bias of 3 elements does not fill a cache line
    assert "padding.0.zero" in text


def test_an_average_without_a_fused_update_is_a_division() -> None:
    model = nn.Linear(4, 3)
    step = cf.compile(model, loss_fn=nn.functional.mse_loss, device_num=2)
    assert "aten.div_.Scalar(" in step.lower(torch.ones(2, 4), torch.ones(2, 3)).text()
    step = cf.compile(model, loss_fn=nn.functional.mse_loss, device_num=2, gradients_mean=False)
    assert "aten.div" not in step.lower(torch.ones(2, 4), torch.ones(2, 3)).text().split("reduced")[1]


def test_schedule_none_keeps_the_order_of_the_trace() -> None:
    assert "overlap" in lower().stages
    assert "overlap" not in lower(schedule="none").stages


def wide(layers: int, width: int, comm_fusion: object = None, optimizer: bool = True) -> cf.Lowered:
    model = nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)])
    made = torch.optim.SGD(model.parameters(), lr=0.1) if optimizer else None
    step = cf.compile(model, comm_fusion, loss_fn=nn.functional.mse_loss, optimizer=made, device_num=2)
    return step.lower(torch.ones(2, width), torch.ones(2, width))


@pytest.mark.parametrize("optimizer", [True, False])
def test_a_large_bucket_is_sent_in_pieces_that_cover_it_once(optimizer: bool) -> None:
    lowered = wide(8, 1024, optimizer=optimizer)  # 8 x 4 MiB in one bucket
    (only,) = lowered.collectives
    assert only.bytes == 8 * (1024 * 1024 + 1024) * 4
    program = lowered._program
    nodes = list(program.graph.nodes)
    start = next(program.collectives())
    sends = [(nodes.index(n), stretch) for n in nodes for bucket, stretch in info(n).sends if bucket is start]
    assert len(sends) >= 2
    assert all(at < nodes.index(start) for at, _ in sends)
    stretches = sorted([stretch for _, stretch in sends] + list(info(start).rest), key=lambda each: each.begin)
    assert stretches[0].begin == 0
    assert all(before.end == after.begin for before, after in pairwise(stretches))
    assert stretches[-1].end == info(start).spec.numel  # type: ignore[union-attr]
    # Nothing is sent before everything in it has been written.
    writes = dict(info(start).writes)
    for at, sent in sends:
        late = [s for node, s in writes.items() if nodes.index(node) > at and s.begin < sent.end and sent.begin < s.end]
        assert late == []
    assert "sends bucket.0/in_place [" in lowered.text()
    assert "sends the rest: [" in lowered.text()


def test_the_first_piece_of_a_step_is_a_small_one() -> None:
    def mebibytes(stretch: Stretch) -> float:
        return stretch.size * 4 / 2**20

    cut = {"allreduce": {"mode": "size", "config": 16}}
    program = wide(40, 512, cut)._program  # 40 x 1 MiB, in three buckets
    sends = [mebibytes(stretch) for node in program.graph.nodes for _, stretch in info(node).sends]
    starts = list(program.collectives())
    assert len(starts) == 3 and all(info(start).rest for start in starts)
    assert 1 <= sends[0] < 2
    assert len(sends) >= 3 and all(8 <= each < 10 for each in sends[1:])


def test_a_small_bucket_is_sent_at_once() -> None:
    assert "sends" not in wide(3, 64).text()


def test_bucket_memory_is_kept_unless_the_user_keeps_the_gradients() -> None:
    assert wide(3, 64).text().count("{kept between steps}") == 1
    assert "{kept between steps}" not in wide(3, 64, optimizer=False).text()


def test_gradients_of_one_process_are_kept_only_below_the_peak() -> None:
    def text(model: nn.Module, *batch: torch.Tensor) -> str:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = cf.compile(model, loss_fn=nn.functional.mse_loss, optimizer=optimizer, device_num=1)
        return step.lower(*batch).text()

    # Parameters dominate: all but the last gradient can stay without a higher peak.
    large = nn.Sequential(*[nn.Linear(512, 512) for _ in range(6)])
    assert 4 <= text(large, torch.ones(2, 512), torch.ones(2, 512)).count("{kept between steps}") <= 6
    # Activations dominate: the peak is in the forward, and nothing is kept on top of it.
    small = nn.Sequential(*[m for _ in range(6) for m in (nn.Linear(256, 256), nn.Tanh())])
    assert "{kept between steps}" not in text(small, torch.ones(8192, 256), torch.ones(8192, 256))


def test_verification_notices_a_piece_that_is_touched_after_it_was_sent() -> None:
    program = wide(8, 1024)._program
    verify(program, "none")
    sender = next(node for node in program.graph.nodes if info(node).sends)
    (start, _) = info(sender).sends[0]
    with program.graph.inserting_after(sender):
        late = program.graph.call_function(torch.ops.aten.zero_.default, (start.all_input_nodes[0],))
    late.meta["commfuse"] = info(start).derive(None, name="late")
    with pytest.raises(VerificationError, match=r"late.*touches memory of bucket.0/in_place of which pieces"):
        verify(program, "broken")


def test_explain_counts_pieces_and_what_hides_them() -> None:
    (report,) = wide(8, 1024).explain().collectives
    assert report.pieces >= 3
    assert report.compute_between >= 3


def test_the_networkx_graph_has_every_value_and_its_flow() -> None:
    lowered = lower()
    graph = lowered.to_networkx()
    assert "bucket.0/in_place" in graph
    assert graph.nodes["bucket.0/in_place"]["collective"].kind == "all_reduce"
    assert list(graph.successors("bucket.0/in_place")) == ["bucket.0/reduced"]
    assert len(graph) == sum(line.startswith(("in ", "fwd", "bwd", "upd")) for line in lowered.text().splitlines())


class Counter:
    """A watcher that counts the plans made: each ends with reinplace."""

    def __init__(self) -> None:
        self.plans = 0

    def before(self, name: str, program: Program) -> None:
        pass

    def after(self, record: PassRecord, program: Program) -> None:
        self.plans += record.name == "reinplace"

    def failed(self, name: str, error: Exception) -> None:
        pass


@pytest.mark.parametrize(("bandwidth", "plans"), [(1e15, 1), (1e6, 7)], ids=["fast", "slow"])
def test_no_buckets_are_searched_for_after_a_plan_that_only_computes(
    bandwidth: float, plans: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = cf.Device(name="core", flops={"f32": 1e9}, memory_bandwidth=1e9, memory_bytes=1 << 30, op_overhead=0.0)
    level = cf.Level(name="link", alpha=0.0, bandwidth=bandwidth)
    cluster = cf.ClusterSpec(name="pair", device=core, levels=(level,), ranks=2)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(6)))
    options = {"comm_fusion": OPTIMAL, "schedule": ACROSS, "cluster": cluster}
    step = cf.compile(
        model,
        loss_fn=nn.functional.mse_loss,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        device_num=2,
        global_rank=0,
        **options,
    )
    captured = step.planner.read(step.planner.take_apart((torch.ones(4, 16), torch.ones(4, 16)), {})).captured
    assert captured is not None
    without_fixed = Variants(offered(Situation(step.config, step.mesh), captured).searched)
    monkeypatch.setattr(compile_call, "variants", lambda *_: without_fixed)
    counter = Counter()
    plan_step(captured, step.config, watcher=counter)
    assert counter.plans == plans
