"""The data and the file of the HTML report; tests/browser opens it."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import asdict
from functools import cache
from pathlib import Path

import pytest

import commfuse_fx as cf
from commfuse_fx.inspect.report import page as page_module
from commfuse_fx.inspect.report.collective_rows import ranks_text
from commfuse_fx.inspect.report.data import ReportData, report_data
from commfuse_fx.inspect.report.fusion import fusion
from commfuse_fx.inspect.report.page import embedded, report
from commfuse_fx.machine.timeline import Span, Timeline
from tests.inspect.steps import Net, train

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

CUT = {"allreduce": {"mode": "index", "config": [2, 6]}}
ROOT = Path(__file__).resolve().parents[2]


@cache
def step() -> cf.Lowered:
    return train(Net(), CUT, cluster="gloo-1gbit")


@cache
def data() -> ReportData:
    return report_data(step(), None, None)


def data_in(html: str) -> object:
    (found,) = re.findall(r'<script id="data" type="application/json">(.*?)</script>', html, re.DOTALL)
    return json.loads(found)


def test_the_file_holds_the_data_and_fetches_nothing() -> None:
    html = report(step())
    assert html == step().report()
    assert data_in(html) == json.loads(json.dumps(asdict(data())))
    assert html == report(train(Net(), CUT, cluster="gloo-1gbit")), "the same at every run"
    assert set(re.findall(r"""(?:src|href)=["']?([^#"'>]*)""", html.partition("<script")[0])) <= {"data:,", ""}
    assert "http" not in re.sub(r"http-equiv", "", html)
    assert "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:" in html


def test_json_in_a_script_element_has_no_markup() -> None:
    text = "</script><!--&\u2028\u2029\ud800@script@"
    found = embedded({text: [text]})
    assert found.isascii() and not set("<>&") & set(found)
    assert json.loads(found) == {text: [text]}
    html = page_module.page({"nodes": text})
    assert data_in(html) == {"nodes": text}, "what looks like a slot of the page is data here"


def test_nodes_are_those_of_the_graph() -> None:
    program, lines = step().program, step().text().splitlines()
    rows = data().nodes
    assert len(rows) == len(program.graph.nodes)
    assert [row.line for row in rows] == [line for line in lines if not line.startswith("# ")]
    by_name = {row.name: row for row in rows}
    product = by_name["layers.1/addmm.0"]
    assert (product.op, product.path, product.value) == ("aten.addmm", ("layers", "1"), "f32[4,8]")
    assert "layers.1.bias" in [rows[i].name for i in product.inputs]
    assert by_name["layers.1.bias"].path == ("layers", "1") and by_name["update.0.lr"].path == ("update.0",)
    issues = [bar for bar in data().lanes[0].bars if bar.kind == "issue"]
    assert len(issues) == 3, "the host needs time to hand a transfer over"
    seconds = sum(row.seconds for row in rows) + sum(bar.end - bar.begin for bar in issues)
    # What runs beside a transfer is a little slower than alone.
    assert seconds == pytest.approx(step().simulate().compute_seconds, rel=0.01)
    assert sum(row.sent for row in rows) == sum(each.bytes for each in step().collectives)


def test_collectives_agree_with_the_other_reports() -> None:
    explained = {each.name: each for each in step().explain().collectives}
    assert len(data().collectives) == len(step().collectives) == 3
    for row, each in zip(data().collectives, step().collectives, strict=True):
        other = explained[row.name]
        assert (row.bytes, list(row.members), row.phase) == (each.bytes, each.members, each.phase)
        assert (row.issued_at, row.waited_at, row.reason) == (other.issued_at, other.waited_at, other.reason)
        assert (row.hidden, row.exposed) == (pytest.approx(other.hidden), pytest.approx(other.exposed))
        assert data().nodes[row.node].name == row.name
        writes = [data().nodes[i].name for i in row.after]
        bucket = row.name.partition("/")[0]
        assert set(writes) >= {f"{bucket}/write.{name}" for name in row.members if len(row.members) > 1}
    assert [(t.kind, t.phase, t.count) for t in data().totals] == [("all_reduce", "backward", 3)]


def test_another_cluster_changes_the_times_only() -> None:
    other = report_data(step(), "gloo-25gbit", None)
    assert "gloo-25gbit" in other.cluster and "gloo-1gbit" in data().cluster
    assert other.prediction.step < data().prediction.step
    assert other.fusion == data().fusion and other.fingerprint == data().fingerprint
    with pytest.raises(cf.ConfigValueError, match="cluster"):
        report(step(), "no such cluster")


def test_fusion_is_aligned_with_the_stage_before() -> None:
    found = data().fusion
    assert found.stage and len(found.before) == 8 and found.gone == ()
    assert sorted(i for part in found.parts for i in part) == list(range(8))
    for part, each in zip(found.parts, step().collectives, strict=True):
        assert [found.before[i].members for i in part] == [(name,) for name in each.members]
        assert sum(found.before[i].bytes or 0 for i in part) == each.bytes


def test_fusion_is_derived_where_only_the_final_graph_is_known() -> None:
    last = dict([list(step().stages.items())[-1]])
    found = fusion(step().program, last)
    full = data().fusion
    assert found.stage == ""
    assert [[found.before[i] for i in part] for part in found.parts] == [
        [full.before[i] for i in part] for part in full.parts
    ]


def test_measured_spans_begin_at_the_predicted_first_issue() -> None:
    first, second, *_ = step().simulate().collectives
    timeline = Timeline()
    timeline.begin_step()
    timeline.begin_step()
    timeline.steps[1] = [
        Span(f"{second.name}.1", "", 7.5, 8.0, 8.5, 8.6),
        Span(first.name, "", 7.0, 7.25, 8.0, 8.5),
        Span("agreement", "", 9.0, 9.5, 9.0, 9.5),
    ]
    (lane,) = report_data(step(), None, timeline).measured
    zero = min(each.issued for each in step().simulate().collectives)
    assert lane.title == "measured step 1"
    assert [bar.begin - zero for bar in lane.bars] == pytest.approx([0.0, 0.5, 2.0])
    names = [data().nodes[bar.node].name if bar.node >= 0 else None for bar in lane.bars]
    assert names == [first.name, second.name, None]
    assert lane.bars[0].waits == pytest.approx((1.0 + zero, 1.5 + zero))


def test_steps_without_collectives_or_stages() -> None:
    alone = report_data(train(Net(), device_num=1), None, None)
    assert alone.collectives == () and alone.totals == () and alone.fusion.before == ()
    assert [lane.title for lane in alone.lanes] == ["compute"]


@pytest.mark.parametrize(
    "ranks, text",
    [
        ((3,), "3"),
        (range(8), "0-7"),
        ((0, 1, 4, 5), "0-1, 4-5"),
        (range(1, 64, 8), "1-57 step 8"),
        ((0, 2, 5, 6), "0, 2, 5-6"),
    ],
)
def test_ranks_in_few_words(ranks: tuple[int, ...], text: str) -> None:
    assert ranks_text(tuple(ranks)) == text


def test_a_build_contains_the_parts_of_the_page() -> None:
    folder = Path(page_module.__file__).parent
    with (ROOT / "pyproject.toml").open("rb") as file:
        patterns = tomllib.load(file)["tool"]["setuptools"]["package-data"]["commfuse_fx.inspect.report"]
    packed = {path.name for pattern in patterns for path in folder.glob(pattern)}
    assert packed == {path.name for path in folder.iterdir() if path.is_file() and path.suffix != ".py"}
    assert set(page_module.SCRIPTS) == {name for name in packed if name.endswith(".js")}
