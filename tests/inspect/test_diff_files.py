"""Files that are damaged, of another kind or of a newer version: an error that says so, and never another one."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

import commfuse_fx as cf
from tests.inspect.steps import Net, chain, train, written

CUT = {"allreduce": {"mode": "index", "config": [2, 6]}}


@cache
def sound() -> tuple[str, str]:
    """A step as text and as JSON."""
    lowered = train(Net(), CUT, schedule=cf.ScheduleConfig(across_steps=True))
    return lowered.text(), lowered.to_json()


def read(source: Any) -> str:
    """The message of the error, "" where it was read."""
    try:
        cf.diff(source, source)
    except cf.ConfigValueError as error:
        return str(error)
    return ""


def changed(edit: Callable[[dict[str, Any]], Any]) -> str:
    """What is said of the JSON after this edit."""
    data = json.loads(sound()[1])
    edit(data)
    return read(json.dumps(data))


def node(data: dict[str, Any], name: str) -> dict[str, Any]:
    return next(each for each in data["nodes"] if each.get("name") == name)


def some(data: dict[str, Any]) -> dict[str, Any]:
    return node(data, "layers.1/addmm.0")


@pytest.mark.parametrize("source", [None, 3, b"# schema: 1\n", ["a"], Net()])
def test_other_types(source: object) -> None:
    with pytest.raises(cf.ConfigTypeError, match="b is of type .*give a Lowered"):
        cf.diff(chain(2), source)


def test_newer_schemas_say_what_to_update(tmp_path: Path) -> None:
    text, data = sound()
    for source in (text.replace("# schema: 1", "# schema: 2", 1), data.replace('"schema": 1', '"schema": 2', 1)):
        assert "schema is 2" in read(source) and "reads schemas up to 1; update commfuse-fx" in read(source)
    folder = train(Net()).dump(tmp_path)
    index = folder / "index.json"
    index.write_text(index.read_text().replace('"schema": 1', '"schema": 7', 1))
    assert f"{index}: schema is 7" in read(tmp_path)


@pytest.mark.parametrize("schema", ["0", "-1", "1.5", "one", "", "²", "1" * 5000])
def test_schemas_that_are_no_version(schema: str) -> None:
    assert "not a version number" in read(chain(2).replace("# schema: 1", f"# schema: {schema}", 1))


def test_paths_that_lead_nowhere(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "latin.txt").write_bytes(b"# schema: \xff\n")
    os.mkfifo(tmp_path / "pipe")
    assert "there is no file" in read(tmp_path / "missing.json")
    assert "there is no file" in read("missing.json")
    assert "is empty" in read(tmp_path / "empty.txt")
    assert "neither index.json nor rank<r>/" in read(tmp_path / "empty")
    (tmp_path / "dumps" / "000-train" / "rank0").mkdir(parents=True)
    assert "dumps' holds a dump per folder; give one of them: 000-train" in read(tmp_path / "dumps")
    assert "no UTF-8 text" in read(tmp_path / "latin.txt")
    assert "no regular file" in read(tmp_path / "pipe")
    assert "cannot be read" in read("x" * 10_000)
    assert "give a file" in read("nul\0byte")
    assert read("")


def test_large_files_are_not_read(tmp_path: Path) -> None:
    with (tmp_path / "large.json").open("wb") as file:
        file.truncate((1 << 30) + 1)
    assert "are read" in read(tmp_path / "large.json")


def test_damaged_dumps(tmp_path: Path) -> None:
    folder = train(Net()).dump(tmp_path)
    index = folder / "index.json"
    sound_index = index.read_text()
    for name in ("../graph.json", "/etc/passwd", "", 3, None):
        index.write_text(json.dumps({**json.loads(sound_index), "text": name}))
        assert '"text" is not the name of a file beside it' in read(tmp_path)
    index.write_text(sound_index[:40])
    assert f"{index}, line" in read(tmp_path) and "not JSON" in read(tmp_path)
    index.write_text(sound_index)
    assert read(tmp_path) == ""
    (folder / "graph.json").write_text("of another version")
    assert read(tmp_path) == "", "the text says it all"
    (folder / "graph.txt").unlink()
    assert "there is no file" in read(tmp_path)


def test_every_key_is_asked_for() -> None:
    for key in ("name", "phase", "op", "args"):
        data = json.loads(sound()[1])
        del some(data)[key]
        assert f'"{key}" is missing' in read(json.dumps(data))
    for key in ("schema", "header", "nodes"):
        data = json.loads(sound()[1])
        del data[key]
        assert f'"{key}"' in read(json.dumps(data))


@pytest.mark.parametrize(
    "edit, message",
    [
        (lambda d: d["nodes"].pop(), 'the last one is not the "output"'),
        (lambda d: d["nodes"].insert(1, d["nodes"][0]), "two nodes of the name"),
        (lambda d: d["nodes"].insert(3, 5), "nodes[3]: this is no object"),
        (lambda d: some(d).update(phase="later"), "'later' is none of input, forward, backward, update"),
        (lambda d: some(d).update(args=[{"node": "nobody"}]), "refers to 'nobody'"),
        (lambda d: some(d).update(args=[{"node": ["a"]}]), 'args[0]: this is no {"node": name}'),
        (lambda d: some(d).update(args=[{"other": 1}]), "args[0]: 'other' is no kind of value"),
        (lambda d: some(d).update(args=["]"]), "is called wrongly: its argument 'mat1' is missing"),
        (lambda d: some(d).update(value=3), "neither a tensor nor a list of them"),
        (lambda d: some(d)["value"].update(shape=[2**80]), "value.shape[0]: this number is too large"),
        (lambda d: some(d)["value"].update(stride=[True]), "value.stride[0]: this is no integer"),
        (lambda d: d["header"].update(world=2), "header.world: this is not what the rest of the file says"),
        (
            lambda d: node(d, "bucket.0/in_place")["collective"].update(bytes="8"),
            "collective.bytes: this is no integer",
        ),
        (lambda d: node(d, "bucket.0/in_place")["collective"].update(bytes=10**30), "this number is too large"),
        (lambda d: node(d, "bucket.0/in_place")["collective"].update(members=[1]), "members[0]: this is no text"),
        (lambda d: node(d, "bucket.0/reduced").update(next_step={"node": "x?"}), "refers to 'x?'"),
        (lambda d: node(d, "bucket.0/reduced").update(rest=[[1]]), 'rest[0]: "end" is missing'),
        (lambda d: node(d, "bucket.0/reduced").update(sends=[{}]), 'sends[0]: "collective" is missing'),
    ],
)
def test_damaged_json_names_the_place(edit: Callable[[dict[str, Any]], Any], message: str) -> None:
    assert message in changed(edit)
    assert "nodes" in changed(edit) or "header" in changed(edit)


@pytest.mark.parametrize(
    "source, message",
    [
        ('{"schema": 1,', "line 1, column 14: not JSON"),
        ('{"a":' * 100_000, "nested too deeply"),
        ('{"schema": 1, "header": {}, "nodes": ' + "9" * 5000 + "}", "cannot be read"),
        ("{}", 'key "schema" is missing'),
        ('{"schema": true}', "schema is True; give 1"),
        ('{"schema": -1}', "not a version number"),
        ("[1,\n2]", "is [1, 2]; give a JSON object"),
        ("no graph\nat all\n", "line 1: a canonical text begins with `# schema: <version>`"),
        ("# schema: 1\n", "the file was cut off"),
        ("# schema: 1\n# torch\n", "line 2: this is not a header line"),
    ],
)
def test_what_is_no_graph(source: str, message: str) -> None:
    assert message in read(source)


def test_deeply_nested_arguments() -> None:
    nested: Any = []
    for _ in range(600):
        nested = [nested]
    assert "nested too deeply" in changed(lambda d: some(d).update(args=nested))


def test_ops_that_this_process_does_not_know() -> None:
    text, data = sound()
    before, after = (data.replace('"aten.addmm"', f'"{name}"') for name in ("mine.addmm", "mine.addmm.other"))
    assert before != data and cf.diff(before, text.replace("aten.addmm(", "mine.addmm(")).is_same
    assert "mine.addmm.other" in cf.diff(before, after).text()
    assert "'no op' cannot be called" in read(data.replace('"aten.addmm"', '"no op"'))


@pytest.mark.parametrize(
    "line, message",
    [
        ("fwd m/sin.0: f32[4] = aten.sin(%x)", "does not begin like a node"),
        ("fwd %m/sin.0", "there is no `: value = op(...)`"),
        ("fwd %m/sin.0: f32[4] = aten.sin(%x", "no whole call"),
        ("fwd %m/sin.0: f32[4] = (%x)", "no whole call"),
        ("fwd %m/sin.0: f32[4] = aten.sin(%y)", "refers to %y, and no node has this name"),
        ("fwd %m/sin.0: f32[4] = aten.sin([%x)", "a bracket is not closed"),
        ("fwd %m/sin.0: f32[4] = aten.sin(%x])", "a bracket is closed that was not opened"),
        ("fwd %x: f32[4] = aten.sin(%x)", "two nodes of the name 'x'"),
        ("fwd %m/sin.0: f32[4] = aten.sin(%x)  {kept", "the last brace is not closed"),
        ("fwd %m/sin.0: f32[4] = aten.sin(%x)  {sends nobody [0:4]}", "it sends nobody"),
        ("fwd %m/sin.0: f32[4] = aten.sin(%x)  {group=dp(2) bytes=many}", "a collective is described as"),
    ],
)
def test_damaged_text_names_the_line(line: str, message: str) -> None:
    error = read(written("in  %x: f32[4] = input", line, result="x"))
    assert message in error and "a, line 5: " in error and "write the dump again" in error


@given(st.integers(0, 1_000_000))
@settings(deadline=None, max_examples=60)
def test_text_and_json_that_were_cut_off(length: int) -> None:
    for text in sound():
        cut = text[: length % (len(text) - 1)]
        if cut.strip() != text.strip():
            assert (read(cut) and "line" in read(cut)) or "write" in read(cut) or "give" in read(cut)


@given(st.data())
@settings(deadline=None, max_examples=120)
def test_changed_characters_never_give_another_error(data: st.DataObject) -> None:
    text = data.draw(st.sampled_from(sound()))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(text) - 1))
        text = text[:at] + data.draw(st.text(max_size=3)) + text[at + data.draw(st.integers(0, 3)) :]
    read(text)


SPECIAL = st.sampled_from(['{"schema": 1, "nodes": [', "# schema: 1\n", "return [%", "fwd %a: ", " = f(", ")  {", "\n"])


@given(st.lists(st.one_of(SPECIAL, st.text(max_size=8)), max_size=12).map("".join))
@example("# schema: 1\nreturn [%")
@settings(deadline=None, max_examples=100)
def test_any_content_never_gives_another_error(content: str) -> None:
    read(content + "\n")


def anything() -> st.SearchStrategy[Any]:
    leaves = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=4))
    keys = st.sampled_from(["node", "name", "op", "args", "dtype", "shape", "stride", "members", "x"])
    return st.recursive(
        leaves, lambda s: st.one_of(st.lists(s, max_size=3), st.dictionaries(keys, s, max_size=3)), max_leaves=8
    )


@given(st.data())
@settings(deadline=None, max_examples=100)
def test_any_value_in_any_place_of_the_json_never_gives_another_error(data: st.DataObject) -> None:
    graph = json.loads(sound()[1])
    record = data.draw(st.sampled_from([graph, graph["header"], *graph["nodes"]]))
    while nested := [each for each in record.values() if isinstance(each, dict)]:
        if data.draw(st.booleans()):
            break
        record = data.draw(st.sampled_from(nested))
    assume(record)  # the graph has empty objects, too
    record[data.draw(st.sampled_from(list(record)))] = data.draw(anything())
    read(json.dumps(graph))


@given(st.binary(max_size=60))
@settings(deadline=None, max_examples=60)
def test_any_bytes_in_a_file(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.mktemp("bytes") / "graph.json"
    path.write_bytes(content)
    assert read(path), "none of these is a graph"
