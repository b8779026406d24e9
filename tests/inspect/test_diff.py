"""What a diff says about two steps."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import commfuse_fx as cf
from commfuse_fx.cli import main
from commfuse_fx.inspect.diff.sequence import common, increasing
from tests.inspect.steps import Net, chain, evaluate, train, written

CUT = {"allreduce": {"mode": "index", "config": [2, 6]}}


def names(changes: tuple[object, ...], side: str = "after") -> list[str]:
    return [getattr(each, side) for each in changes]


def figures(diff: cf.GraphDiff) -> dict[str, tuple[float, float]]:
    return {each.name: (each.before, each.after) for each in diff.deltas}


def only(diff: cf.GraphDiff, *fields: str) -> None:
    """Nothing is listed but in these fields."""
    lists = ("header", "added", "removed", "changed", "renamed", "renumbered", "moved", "collectives")
    assert [name for name in lists if getattr(diff, name)] == list(fields)


def test_two_compilations_of_one_step_are_identical() -> None:
    diff = cf.diff(train(Net()), train(Net()))
    assert diff.is_same and diff.kind == "identical"
    only(diff)
    assert diff.nodes[0] == diff.nodes[1] > 40
    assert all(each.before == each.after for each in diff.deltas)
    assert diff.text().startswith("identical (")


def test_text_json_file_and_lowered_are_one_graph(tmp_path: Path) -> None:
    lowered = train(Net(), CUT, schedule=cf.ScheduleConfig(across_steps=True))
    folder = lowered.dump(tmp_path)
    sources = [
        lowered,
        lowered.text(),
        lowered.to_json(),
        json.dumps(json.loads(lowered.to_json())),
        tmp_path,
        str(folder),
        folder / "graph.json",
        str(folder / "graph.txt"),
    ]
    for source in sources:
        assert cf.diff(lowered, source).is_same
        assert cf.diff(source, lowered).is_same


def test_pieces_of_a_bucket_read_the_same_from_text_and_json() -> None:
    model = nn.Sequential(nn.Linear(8, 1200), nn.Linear(1200, 2000), nn.Linear(2000, 8))
    lowered = train(model)
    assert "{sends the rest: " in lowered.text()
    assert cf.diff(lowered.text(), lowered.to_json()).is_same
    whole = train(model, schedule="none")
    found = cf.diff(whole, lowered)
    assert any("now sends the rest" in text for each in found.changed for text in each.details)
    assert found.kind == "communication changed"


def test_a_dump_of_several_ranks_is_read_from_the_first(tmp_path: Path) -> None:
    for rank in (1, 0):
        train(Net(), rank=rank).dump(tmp_path)
    assert cf.diff(tmp_path, train(Net())).before.endswith(str(Path("rank0") / "graph.txt"))


def test_stages_can_be_compared(tmp_path: Path) -> None:
    folder = train(Net()).dump(tmp_path)
    first = next(iter(sorted((folder / "stages").iterdir())))
    found = cf.diff(first, folder)
    assert found.kind == "compute changed" or found.kind == "communication changed"
    assert figures(found)["collectives"][1] == 1


def test_a_renamed_module_is_renamed_and_nothing_else() -> None:
    diff = cf.diff(evaluate(Net(name="layers")), evaluate(Net(name="blocks")))
    assert diff.kind == "renamed" and not diff.is_same
    only(diff, "renamed")
    assert ("layers.0.weight", "blocks.0.weight") in [(each.before, each.after) for each in diff.renamed]
    assert ("layers.3/addmm.0", "blocks.3/addmm.0") in [(each.before, each.after) for each in diff.renamed]


def test_a_node_elsewhere_is_the_only_one_that_moved() -> None:
    start = "in  %x: f32[4] = input"
    one, two, three = (f"fwd %m/{op}.0: f32[4] = aten.{op}(%x)" for op in ("sin", "cos", "tan"))
    end = "fwd %m/stack.0: f32[3,4] = aten.stack([%m/sin.0, %m/cos.0, %m/tan.0])"
    before, after = (
        written(start, *lines, end, result="m/stack.0") for lines in ((one, two, three), (two, three, one))
    )
    diff = cf.diff(before, after)
    assert diff.kind == "reordered"
    only(diff, "moved")
    assert names(diff.moved) == ["m/sin.0"]
    assert diff.moved[0].details == ("at node 3, after m/tan.0",)


def test_other_buckets_are_named_with_their_members() -> None:
    diff = cf.diff(train(Net()), train(Net(), CUT))
    assert diff.kind == "communication changed"
    assert [each.name for each in diff.header] == ["comm_fusion.allreduce"]
    assert {each.kind for each in (*diff.added, *diff.removed, *diff.changed)} == {"communication changed"}
    whole, first = diff.collectives[0], diff.collectives[1]
    assert (whole.before, whole.after) == ("bucket.0/in_place", "bucket.0/in_place")
    assert len(whole.old_members) == 8 and whole.new_members == ("layers.3.weight", "layers.3.bias")
    assert (first.before, first.after) == ("", "bucket.1/in_place")
    assert figures(diff)["collectives"] == (1, 3)
    total = 4 * sum(p.numel() for p in Net().parameters())
    assert figures(diff)["bytes.all_reduce"] == (total, total)
    assert "bucket.1/in_place" in diff.text() and "members: layers.3.weight, layers.3.bias" in diff.text()


def test_fused_and_not_fused_differ_in_communication_alone() -> None:
    diff = cf.diff(train(Net()), train(Net(), {"openstate": False}))
    assert diff.kind == "communication changed"
    assert figures(diff)["collectives.backward"] == (1, 8)
    back = cf.diff(train(Net(), {"openstate": False}), train(Net()))
    assert [len(back.added), len(back.removed)] == [len(diff.removed), len(diff.added)]


def test_one_more_relu_in_150_nodes_is_one_added_node_and_its_rewired_reader() -> None:
    before, after = evaluate(Net(29)), evaluate(Net(29, twice=14))
    diff = cf.diff(before, after)
    assert diff.nodes == (149, 150)
    only(diff, "added", "changed", "renumbered")
    assert [(each.after, each.op) for each in diff.added] == [("/relu.15", "aten.relu_")]
    (reader,) = diff.changed
    assert (reader.before, reader.after) == ("layers.15/addmm.0", "layers.15/addmm.0")
    assert reader.details == ("argument 1: %/relu.14 -> %/relu.15 (added)",)
    assert diff.kind == "compute changed"
    only(cf.diff(after, before), "removed", "changed", "renumbered")


def test_one_more_relu_in_a_training_step_adds_its_backward_too() -> None:
    diff = cf.diff(train(Net(8)), train(Net(8, twice=3)))
    assert [each.op for each in diff.added] == ["aten.relu", "aten.threshold_backward.grad_input"]
    only(diff, "added", "changed", "renumbered")
    assert len(diff.changed) == 3, "the next layer's output and weight gradient, and the ReLU's gradient"


def test_a_module_inserted_in_a_sequential_renames_what_is_behind() -> None:
    def build(*extra: nn.Module) -> cf.Lowered:
        linears = [nn.Linear(8, 8) for _ in range(8)]
        return evaluate(nn.Sequential(*linears[:4], *extra, *linears[4:]))

    diff = cf.diff(build(), build(nn.ReLU()))
    only(diff, "added", "changed", "renamed")
    assert names(diff.added) == ["4/relu.0"]
    assert [(each.before, each.after) for each in diff.changed] == [("4/addmm.0", "5/addmm.0")]
    assert ("7.weight", "8.weight") in [(each.before, each.after) for each in diff.renamed]


def test_another_shape_is_a_change_of_the_same_nodes() -> None:
    diff = cf.diff(evaluate(Net(3)), evaluate(Net(3, width=16)))
    only(diff, "changed")
    assert diff.kind == "compute changed"
    weight = next(each for each in diff.changed if each.after == "layers.1.weight")
    assert weight.details == ("value: f32[8,8] -> f32[16,16]",)


def test_figures_hold_predicted_times_only_for_lowered_steps() -> None:
    one, other = train(Net()), train(Net(), {"openstate": False})
    found = figures(cf.diff(one, other))
    assert found["step_seconds"] == (one.simulate().step_seconds, other.simulate().step_seconds)
    assert found["exposed_seconds"] == (one.simulate().exposed_seconds, other.simulate().exposed_seconds)
    assert "predicted step time: " in cf.diff(one, other).text()
    assert "step_seconds" not in figures(cf.diff(one, other.text()))
    preset = cf.preset_names()[0]
    assert figures(cf.diff(one, other, preset))["step_seconds"][0] == one.simulate(preset).step_seconds
    with pytest.raises(cf.ConfigValueError, match="cluster= is given"):
        cf.diff(one.text(), other, preset)


def test_a_header_alone_is_a_difference() -> None:
    text = chain(3)
    diff = cf.diff(text, text.replace("# world: 2", "# world: 4"))
    assert diff.kind == "identical" and not diff.is_same
    assert [(each.name, each.before, each.after) for each in diff.header] == [("world", "2", "4")]
    assert "- world: 2\n  + world: 4" in diff.text()


@pytest.mark.parametrize(
    "old, new, kind, detail",
    [
        ("op=sum", "op=max", "communication changed", "op: sum -> max"),
        ("dp(2)", "tp(2)", "communication changed", "group: dp(2) -> tp(2)"),
        ("dtype=f32", "dtype=bf16", "communication changed", "dtype: f32 -> bf16"),
        ("fusion_id=1 ", "", "communication changed", "fusion_id: 1 -> None"),
        ("{kept", "{not kept", "communication changed", "kept between steps -> not kept between steps"),
        ("aten.sin(%x)", "aten.sin(%x, 2)", "compute changed", "argument 1 added: 2"),
        ("aten.sin", "aten.cos", "compute changed", "op: aten.sin -> aten.cos"),
        ("fwd %m/sin", "bwd %m/sin", "compute changed", "phase: forward -> backward"),
    ],
)
def test_each_kind_of_change(old: str, new: str, kind: str, detail: str) -> None:
    text = written(
        "in  %x: f32[4] = input",
        "fwd %m/sin.0: f32[4] = aten.sin(%x)  {kept between steps}",
        "bwd %r/all_reduce: f32[4] = _c10d_functional.all_reduce_(%m/sin.0, sum, dp)  "
        "{group=dp(2) op=sum dtype=f32 bytes=16 fusion_id=1 members=[w]}",
        result="r/all_reduce",
    )
    assert old in text
    diff = cf.diff(text, text.replace(old, new))
    only(diff, "changed", *(("collectives",) if "all_reduce" in diff.changed[0].after else ()))
    (change,) = diff.changed
    assert (change.kind, change.details) == (kind, (detail,))
    assert diff.kind == kind


@pytest.mark.parametrize("remark", ["computed once", "region 3"])
def test_remarks_on_how_something_is_computed(remark: str) -> None:
    text = written("in  %x: f32[4] = input", "fwd %m/sin.0: f32[4] = aten.sin(%x)", result="m/sin.0")
    (change,) = cf.diff(text, text.replace("(%x)", f"(%x)  {{{remark}}}")).changed
    assert (change.kind, change.details) == ("compute changed", (f"now {remark}",))


def test_names_with_delimiters_are_read_from_text_as_from_json() -> None:
    model = nn.Sequential()
    for name in ("a, b", "c: d", "g [h", "per%cent", "i] = j", "(k)"):
        model.add_module(name, nn.Linear(8, 8))
    lowered = evaluate(model)
    assert "%a, b/t.0" in lowered.text()
    assert cf.diff(lowered.to_json(), lowered.text()).is_same


def test_ten_thousand_nodes() -> None:
    before, after = chain(10_000), chain(10_000, relu_after=5_000)
    assert cf.diff(before, before).is_same
    diff = cf.diff(before, after)
    assert diff.nodes == (10_002, 10_003)
    assert len(diff.added) == 1 and len(diff.changed) == 1 and not diff.removed and not diff.moved
    assert diff.added[0].op == "aten.relu"


def test_ten_thousand_nodes_that_have_little_in_common() -> None:
    draw = random.Random(0)

    def graph() -> str:
        lines, made = ["in  %x: f32[4] = input"], ["x"]
        for i in range(10_000):
            name = f"m{draw.randrange(50)}/{draw.choice(('sin', 'cos', 'mul'))}.{i}"
            operands = ", ".join(f"%{draw.choice(made)}" for _ in range(2))
            lines.append(f"fwd %{name}: f32[{draw.randrange(3)}] = aten.{draw.choice(('a', 'b'))}({operands})")
            made.append(name)
        return written(*lines, result=made[-1])

    diff = cf.diff(graph(), graph())
    kept = diff.nodes[0] - len(diff.removed)
    assert kept == diff.nodes[1] - len(diff.added) > 0
    assert diff.kind == "compute changed"


def test_diffs_are_deterministic_and_mirror_each_other() -> None:
    one, other = train(Net()).text(), train(Net(5, twice=1), CUT).text()
    first, second = cf.diff(one, other), cf.diff(one, other)
    assert first == second and first.to_json() == second.to_json() and first.markdown() == second.markdown()
    back = cf.diff(other, one)
    assert figures(back) == {name: (after, before) for name, (before, after) in figures(first).items()}


def test_json_holds_all_of_it() -> None:
    diff = cf.diff(train(Net()), train(Net(), CUT))
    data = json.loads(diff.to_json())
    assert data["schema"] == 1 and data["kind"] == diff.kind and data["is_same"] is False
    assert [each["after"] for each in data["added"]] == names(diff.added)
    assert data["collectives"][0]["new_members"] == list(diff.collectives[0].new_members)


def test_nothing_in_a_name_becomes_markup() -> None:
    evil = "</details><img src=x>```\x1b[31m@user"
    lines = ("in  %x: f32[4] = input", f"fwd %m/{evil}: f32[4] = aten.sin(%x)")
    text = cf.diff(written(lines[0], result="x"), written(*lines, result="x")).markdown()
    fences = [line for line in text.splitlines() if line.startswith("```")]
    assert "\x1b" not in text and "````text" in fences and fences.count("````") == 1
    outside, inside = [], False
    for line in text.splitlines():
        if line.startswith("```"):
            inside = not inside
        elif not inside:
            outside.append(line)
    assert not any("img" in line or "@user" in line for line in outside)
    assert "<details><summary>added</summary>" in outside


def test_long_markdown_fits_in_a_comment() -> None:
    lines = [f"fwd %m/{'very_long_name' * 20}.{i}: f32[4] = aten.sin(%x)" for i in range(2_000)]
    start = "in  %x: f32[4] = input"
    text = cf.diff(written(start, result="x"), written(start, *lines, result="x")).markdown()
    assert len(text) < 65_536 and "... and 1960 more lines" in text


def dumps(folder: Path) -> tuple[str, str]:
    train(Net()).dump(folder / "one")
    train(Net(), CUT).dump(folder / "other")
    return str(folder / "one"), str(folder / "other")


def test_exit_codes_and_output_of_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = dumps(tmp_path)
    assert main(["diff", one, one]) == 0
    assert capsys.readouterr().out.startswith("identical (")
    assert main(["diff", one, other]) == 1
    assert capsys.readouterr().out == cf.diff(one, other).text()
    assert main(["diff", one, other, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["kind"] == "communication changed"
    assert main(["diff", one, other, "--markdown"]) == 1
    assert capsys.readouterr().out == cf.diff(one, other).markdown()


def test_bad_usage_of_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, _ = dumps(tmp_path)
    assert main(["diff", one, str(tmp_path / "missing")]) == 2
    assert "there is no file" in capsys.readouterr().err
    assert main(["diff", one]) == 2
    assert main(["diff", one, one, "--json", "--markdown"]) == 2
    assert main(["diff", "--help"]) == 0
    assert "commfuse diff before after" in capsys.readouterr().out


def longest(a: list[int], b: list[int]) -> int:
    table = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
    for i, x in enumerate(a):
        for j, y in enumerate(b):
            table[i + 1][j + 1] = table[i][j] + 1 if x == y else max(table[i][j + 1], table[i + 1][j])
    return table[-1][-1]


@given(st.lists(st.integers(0, 3), max_size=12), st.lists(st.integers(0, 3), max_size=12))
@settings(deadline=None, max_examples=120)
def test_common_subsequences(a: list[int], b: list[int]) -> None:
    pairs = common(a, b)
    assert all(a[i] == b[j] for i, j in pairs)
    assert all(p[0] < q[0] and p[1] < q[1] for p, q in pairwise(pairs))
    assert len(pairs) <= longest(a, b)
    if a == b:
        assert len(pairs) == len(a)


@given(st.permutations(range(9)))
@settings(deadline=None, max_examples=100)
def test_longest_increasing_subsequence(values: list[int]) -> None:
    found = [values[i] for i in increasing(values)]
    assert found == sorted(found) and len(found) == longest(list(values), sorted(values))
