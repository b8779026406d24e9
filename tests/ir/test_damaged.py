"""Files that are damaged, or made to do harm: an error that names the file and the place, and nothing is run."""

from __future__ import annotations

import builtins
import importlib
import json
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import commfuse_fx as cf
from commfuse_fx.ir.json.read import from_json
from commfuse_fx.ir.ops.known_ops import find_target
from commfuse_fx.planning.pipeline.pipeline_json import captured_json, pipeline_of, read_marks
from commfuse_fx.support import strict_json
from tests.inspect.steps import Net, train

CUT = {"allreduce": {"mode": "index", "config": [2, 6]}}
FILE = "graph.json"


@cache
def sound() -> tuple[str, str]:
    """A final and a captured graph, by cost and with communication across steps."""
    lowered = train(Net(2), CUT, cluster="gloo-10gbit", schedule=cf.ScheduleConfig(across_steps=True))
    assert lowered.captured is not None
    return lowered.to_json(), captured_json(lowered.captured, lowered.pipeline)


def read(text: str) -> str:
    """The message of the error, "" where the text was read."""
    message = ""
    try:
        program = from_json(text, FILE)
        read_marks(json.loads(text), program, FILE)
        pipeline_of(json.loads(text), program, FILE)
    except cf.ConfigValueError as error:
        message = str(error)
    assert not message or message.startswith(FILE), message
    return message


def changed(edit: Callable[[dict[str, Any]], Any], which: int = 0) -> str:
    """What is said of the JSON after this edit."""
    data = json.loads(sound()[which])
    edit(data)
    return read(json.dumps(data))


def node(data: dict[str, Any], op: str) -> dict[str, Any]:
    found: dict[str, Any] = next(each for each in data["nodes"] if each["op"] == op)
    return found


def options(pipeline: list[dict[str, Any]], name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(each["options"] for each in pipeline if each["pass"] == name)
    return found


ADDMM, SGD, REDUCE = "aten.addmm", "aten._fused_sgd_", "_c10d_functional.all_reduce_"


@pytest.mark.parametrize(
    "edit, place, problem",
    [
        (lambda d: d.update(schema=2), FILE, "reads schemas up to 1; update commfuse-fx"),
        (lambda d: d.update(schema=0), FILE, "not a version number"),
        (lambda d: d.pop("schema"), FILE, 'key "schema" is missing'),
        (lambda d: d.pop("program"), "the file", '"program" is missing'),
        (lambda d: d["program"].pop("mesh"), "program", '"mesh" is missing'),
        (lambda d: d["program"]["config"].pop("full_batch"), "program.config", '"full_batch" is missing'),
        (lambda d: d["program"]["config"].update(schedule="late"), "program.config", "use one of"),
        (
            lambda d: d["program"]["config"].update(cluster="gloo-10gbit"),
            "program.config",
            "neither null nor an object",
        ),
        (lambda d: d["program"]["config"]["cluster"].update(levels=3), "program.config", "levels"),
        (lambda d: d["program"]["mesh"].update(shape=[3]), "", "this is not what the rest of the file says"),
        (lambda d: d["program"]["mesh"].update(shape=[1 << 40]), "program.mesh", "at most 1048576 ranks"),
        (lambda d: d["program"].update(batch_axes="pp"), "program.batch_axes", "'pp' is no axis of the mesh dp=2"),
        (lambda d: d["program"].update(training=1), "program.training", "no boolean"),
        (lambda d: d["program"]["parameters"][0]["spec"].update(shape=[2**80, 1]), "parameters[0]", "too large"),
        (lambda d: d["program"]["parameters"][0]["spec"].update(shape=[2**62, 2**62]), "parameters[0]", "no tensor"),
        (lambda d: d["program"]["parameters"].pop(), "", "there is no parameter 'layers.1.bias'"),
        (lambda d: d["program"].update(loss={"node": "nobody"}), "program.loss", "refers to 'nobody'"),
        (lambda d: d["program"]["inputs"].pop(), "program.inputs", "not the inputs of the graph"),
        (lambda d: d["program"]["updates"].clear(), "", "there is no update 1"),
        (lambda d: d["nodes"].pop(), "nodes", 'the last one is not the "output"'),
        (lambda d: d["nodes"].insert(0, d["nodes"][-1]), "nodes[0]", "the output stands before other nodes"),
        (lambda d: d["nodes"].insert(1, d["nodes"][0]), "nodes[1]", "two nodes of the name"),
        (lambda d: d["nodes"].insert(3, node(d, SGD)), "nodes[3] (update.", "no node before it has this name"),
        (lambda d: d["nodes"].remove(node(d, REDUCE)), "/reduced).args[0]", "no node before it has this name"),
        (lambda d: node(d, ADDMM).update(args=[{"node": node(d, ADDMM)["name"]}] * 3), "args[0]", "no node before it"),
        (lambda d: node(d, ADDMM).update(args=[[[]] * 3]), "(layers.0/addmm.0)", "'mat1' is missing"),
        (lambda d: node(d, ADDMM).update(args=[1] * 9), "(layers.0/addmm.0)", "takes 3 positional argument(s), not 9"),
        (lambda d: node(d, ADDMM).update(kwargs={"self": 1}), "(layers.0/addmm.0)", "no argument 'self', or has it"),
        (lambda d: node(d, ADDMM)["args"].__setitem__(0, {"dtype": "f31"}), "args[0]", "'f31' is no dtype"),
        (lambda d: node(d, ADDMM)["args"].__setitem__(0, {"device": "disk"}), "args[0]", "is no device"),
        (lambda d: node(d, ADDMM)["args"].__setitem__(0, {"text": "a"}), "args[0]", "written for people"),
        (lambda d: node(d, ADDMM)["args"].__setitem__(0, {"call": "a"}), "args[0]", "no kind of value"),
        (lambda d: node(d, ADDMM)["value"].update(dtype="object"), "value.dtype", "'object' is no dtype"),
        (lambda d: node(d, ADDMM)["value"].update(stride=[1]), ".value", "not as many numbers"),
        (lambda d: node(d, ADDMM)["value"].update(shape=[-1, 8]), ".value", "not as many numbers"),
        (lambda d: node(d, ADDMM).update(phase="later"), ".phase", "'later' is none of input"),
        (lambda d: node(d, ADDMM).update(line="/root/a.py:1"), ".line", "not what the rest of the file says"),
        (lambda d: node(d, ADDMM).update(colour="red"), ".colour", "not what the rest of the file says"),
        (lambda d: node(d, REDUCE).pop("collective"), "bucket", "carries no collective metadata"),
        (lambda d: node(d, REDUCE)["collective"].update(group="tp"), "collective.group", "'tp' is no axis"),
        (lambda d: node(d, REDUCE)["collective"].update(bytes=True), "collective.bytes", "no integer"),
        (lambda d: node(d, "input").update(source="file"), ".source", "'file' is none of parameter"),
        (lambda d: node(d, "input").update(owner=1), "nodes[0]", "an input of an update has its number as owner"),
        (lambda d: d["header"].update(world="9"), "header.world", "not what the rest of the file says"),
    ],
)
def test_what_is_wrong_where(edit: Callable[[dict[str, Any]], Any], place: str, problem: str) -> None:
    message = changed(edit)
    assert place in message and problem in message
    assert "write the dump again" in message or "give" in message or "update commfuse-fx" in message


@pytest.mark.parametrize(
    "edit, problem",
    [
        (lambda p: p[0].update({"pass": "eval"}), "there is no pass 'eval'"),
        (lambda p: p[0]["options"].update(x=1), "has no option 'x'"),
        (lambda p: options(p, "keep_gradients").update(at_least=-1), "give an int >= 0"),
        (lambda p: options(p, "keep_gradients").clear(), "lacks an option"),
        (lambda p: p.reverse(), "requires"),
    ],
)
def test_pipelines(edit: Callable[[list[dict[str, Any]]], Any], problem: str) -> None:
    assert problem in changed(lambda data: edit(data["pipeline"]), which=1)


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("marks", [], "marks"),
        ("marks", {"modules": [], "parameters": [{"name": "w", "strategy": "?"}]}, "marks.parameters[0]"),
        ("layouts", [], "layouts"),
        ("layouts", {"w": [["dp"]]}, "layouts.w[0]"),
        ("layouts", {"w": [["dp", "Z"]]}, "'Z' is no placement"),
    ],
)
def test_marks_and_layouts(key: str, value: Any, problem: str) -> None:
    assert problem in changed(lambda data: data.update({key: value}), which=1)


@pytest.mark.parametrize(
    "name",
    ["os.system", "builtins.eval", "eval", "__import__", "aten.__class__", "aten.mm.__call__", "aten.mm.op", "aten",
     "aten.mm.default", "torch.load", "commfuse.__dict__", "aten.name", "operator.attrgetter", "attrgetter", "getattr",
     "symbolic.x", "aten.mm\n", "profiler._record_function_enter", "", "a" * 1000],
)  # fmt: skip
def test_names_that_no_graph_may_call(name: str) -> None:
    with pytest.raises(LookupError):
        find_target(name)
    assert "cannot be called" in changed(lambda data: node(data, ADDMM).update(op=name))


def test_reading_imports_and_runs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = sound()
    assert [read(text) for text in texts] == ["", ""]  # what is loaded on first use is loaded
    done: list[str] = []
    for module, name in ((importlib, "import_module"), (builtins, "eval"), (builtins, "exec"), (os, "system")):
        monkeypatch.setattr(module, name, lambda *args, name=name, **kwargs: done.append(name))
    for name in ("os.system", "subprocess.run", "builtins.exec"):
        for text in texts:
            assert "cannot be called" in read(text.replace(f'"{ADDMM}"', f'"{name}"'))
    assert [read(text) for text in texts] == ["", ""] and done == []


@pytest.mark.parametrize(
    "text, problem",
    [
        ("", "not JSON"),
        ("{", "line 1, column 2: not JSON"),
        ("[" * 200_000, "nested too deeply"),
        ('{"schema":' * 200_000, "nested too deeply"),
        ("[1]", "is [1]; give a JSON object"),
        ('{"schema": 1, "schema": 1}', "the key 'schema' stands twice"),
        ('{"schema": NaN}', "NaN is no number of JSON"),
        ('{"schema": ' + "9" * 5000 + "}", "cannot be read"),
        ('{"schema": ' + "9" * 30 + "}", "not a version number"),
        ('{"schema": "\\ud800"}', "half of a character"),
        ("# schema: 1\n", "not JSON"),
    ],
)
def test_what_is_no_graph(text: str, problem: str) -> None:
    assert problem in read(text)


def test_values_that_are_nested_too_deeply() -> None:
    deep: Any = 1
    for _ in range(200):
        deep = [deep]
    assert "nested too deeply" in changed(lambda data: node(data, ADDMM).update(args=[deep, 1, 2]))
    assert "nested too deeply" in changed(lambda data: node(data, ADDMM).update(value=deep))


def test_large_texts_are_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strict_json, "MOST_CHARACTERS", 1000)
    assert "at most 1000 are read" in read(sound()[0])


def test_paths(tmp_path: Path) -> None:
    (tmp_path / "latin.json").write_bytes(b'{"schema": \xff')
    (tmp_path / "empty").mkdir()
    with (tmp_path / "large.json").open("wb") as file:
        file.truncate(200 << 20)
    for path, problem in (
        (tmp_path / "latin.json", "no UTF-8 text"),
        (tmp_path / "large.json", "at most 134217728 are read"),
        (tmp_path / "missing.json", "there is no file"),
        (tmp_path / "empty", "neither index.json nor rank<r>/"),
        ("nul\0byte", "there is no file|cannot be read"),
    ):
        with pytest.raises(cf.ConfigValueError, match=problem):
            cf.load(path)
    for wrong in (None, 3, b"graph.json", Net()):
        with pytest.raises(cf.ConfigTypeError, match="give a folder that Lowered.dump wrote"):
            cf.load(wrong)  # type: ignore[arg-type]


def test_dumps_whose_files_do_not_belong_together(tmp_path: Path) -> None:
    folder = train(Net(2)).dump(tmp_path / "a")
    train(Net(3)).dump(tmp_path / "b")
    index = json.loads((folder / "index.json").read_text())
    (folder / "graph.json").write_bytes((tmp_path / "b" / "rank0" / "graph.json").read_bytes())
    with pytest.raises(cf.ConfigValueError, match="graph.json is another graph than the one that was dumped here"):
        cf.load(folder)
    for key, value, problem in (
        ("rank", 7, "the mesh dp=2 has no rank 7"),
        ("json", "../b/rank0/graph.json", "not the name of a file beside it"),
        ("captured", "index.json", '"header" is missing'),
    ):
        folder = train(Net(2)).dump(tmp_path / "a")
        (folder / "index.json").write_text(json.dumps({**index, key: value}))
        with pytest.raises(cf.ConfigValueError, match=problem):
            cf.load(folder)


def anything() -> st.SearchStrategy[Any]:
    leaves = st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=4), st.just("aten.mm"), st.just(2**64)
    )
    keys = st.sampled_from(["node", "tuple", "dtype", "complex", "number", "device", "begin", "name", "x"])
    return st.recursive(
        leaves, lambda s: st.one_of(st.lists(s, max_size=3), st.dictionaries(keys, s, max_size=3)), max_leaves=6
    )


@given(st.data())
@settings(deadline=None, max_examples=120)
def test_any_value_in_any_place(data: st.DataObject) -> None:
    graph = json.loads(data.draw(st.sampled_from(sound())))
    place: Any = data.draw(st.sampled_from([graph, graph["program"], *graph["nodes"], graph["program"]["config"]]))
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        key = data.draw(st.sampled_from(keys))
        if not isinstance(place[key], (dict, list)) or not place[key] or data.draw(st.booleans()):
            break
        place = place[key]
    if data.draw(st.booleans()):
        place[key] = data.draw(anything())
    else:
        del place[key]
    read(json.dumps(graph))


@given(st.data())
@settings(deadline=None, max_examples=120)
def test_changed_characters(data: st.DataObject) -> None:
    text = data.draw(st.sampled_from(sound()))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(text) - 1))
        text = text[:at] + data.draw(st.text(max_size=2)) + text[at + data.draw(st.integers(0, 2)) :]
    read(text)


@given(st.integers(0, 1 << 20), st.integers(1, 255))
@settings(deadline=None, max_examples=60)
def test_flipped_bits_in_a_file(tmp_path_factory: pytest.TempPathFactory, at: int, flip: int) -> None:
    content = bytearray(sound()[0].encode())
    content[at % len(content)] ^= flip
    path = tmp_path_factory.mktemp("flipped") / FILE
    path.write_bytes(content)
    message = FILE
    try:
        cf.load(path)
    except cf.ConfigValueError as error:
        message = str(error)
    assert FILE in message
