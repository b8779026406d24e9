from __future__ import annotations

import copy
import dataclasses
import json
import math
import os
import pickle
import random
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commfuse_fx.errors import CommFuseError, ConfigKeyError, ConfigTypeError, ConfigValueError
from commfuse_fx.machine.cluster import ClusterSpec
from commfuse_fx.machine.cluster_parts import Device, Level
from commfuse_fx.machine.presets import MAX_NODES, preset, preset_names, resolve_cluster
from commfuse_fx.support.documents import load_document

PAGE = Path(__file__).resolve().parents[2] / "docs" / "cost.md"
DEVICE = Device(name="d", flops={"f32": 1e12}, memory_bandwidth=1e11, memory_bytes=10**9, op_overhead=1e-6)


def level(name: Any = "net", **changes: Any) -> Level:
    return Level(**{"name": name, "alpha": 1e-6, "bandwidth": 1e9, **changes})


def cluster(*levels: Level, ranks: int | None = 8, device: Device = DEVICE, **changes: Any) -> ClusterSpec:
    return ClusterSpec(**{"name": "c", "device": device, "levels": levels, "ranks": ranks, **changes})


def hosts_of_four() -> ClusterSpec:
    return cluster(level("in", domains=4), level("out"))


def names(spec: ClusterSpec, *ranks: int) -> tuple[str, ...]:
    return tuple(each.name for each in spec.split(ranks).levels)


def test_numbers_become_floats_and_lists_tuples() -> None:
    raw = level("in", domains=[[0, 2], [1, 3]], alpha=0, bandwidth=10)
    spec = ClusterSpec(name="c", device=DEVICE, levels=[raw, level()], ranks=4)  # type: ignore[arg-type]
    first = spec.levels[0]
    assert isinstance(spec.levels, tuple) and first.domains == ((0, 2), (1, 3))
    assert (type(first.alpha), type(first.bandwidth)) == (float, float)


def test_a_cluster_can_be_hashed_copied_and_pickled() -> None:
    spec = hosts_of_four()
    spec.split((0, 1))
    assert len({spec, copy.deepcopy(spec), pickle.loads(pickle.dumps(spec)), hosts_of_four()}) == 1


@pytest.mark.parametrize("number", [0, -1.0, float("inf"), float("nan"), 10**400])
def test_bandwidth_must_be_finite_and_positive(number: float) -> None:
    with pytest.raises(ConfigValueError, match=r"^levels\[1\]\.bandwidth is .*; give a finite number > 0$"):
        cluster(level("in", domains=4), level("out", bandwidth=number))


@pytest.mark.parametrize("field", ["alpha", "host_seconds_per_byte"])
@pytest.mark.parametrize("number", [-1e-9, float("inf"), float("nan")])
def test_latency_and_host_time_must_be_finite_and_not_negative(field: str, number: float) -> None:
    with pytest.raises(ConfigValueError, match=rf"^levels\[0\]\.{field} is .*; give a finite number >= 0$"):
        cluster(level(**{field: number}))


@pytest.mark.parametrize("field", ["alpha", "bandwidth", "host_seconds_per_byte"])
@pytest.mark.parametrize("value", ["1", None, True])
def test_figures_must_be_numbers(field: str, value: object) -> None:
    with pytest.raises(ConfigTypeError, match=rf"^levels\[0\]\.{field} is {value!r}; give a finite number"):
        cluster(level(**{field: value}))


@pytest.mark.parametrize(
    ("levels", "error", "message"),
    [
        ((), ConfigValueError, "levels is empty; give at least one Level"),
        ("net", ConfigTypeError, "levels is 'net'; give a tuple of Level"),
        (("net",), ConfigTypeError, r"levels\[0\] is 'net'; give a Level"),
        ((level(""),), ConfigValueError, r"levels\[0\]\.name is empty; give a name"),
        ((level(3),), ConfigTypeError, r"levels\[0\]\.name is 3; give a str"),
        ((level(source=None),), ConfigTypeError, r"levels\[0\]\.source is None; give a str"),
        ((level("a", domains=4), level("a")), ConfigValueError, r'levels\[1\]\.name is "a", as is that of another'),
        ((level(domains=0),), ConfigValueError, r"levels\[0\]\.domains is 0; give an int in 1..16777216"),
        ((level(domains=3), level("b")), ConfigValueError, r"levels\[0\]\.domains is 3, which does not divide the 8"),
        ((level(domains="x"),), ConfigTypeError, r"levels\[0\]\.domains is 'x'; give a block size, a tuple of tuples"),
        ((level(domains=(0, 1)),), ConfigTypeError, r"levels\[0\]\.domains is \(0, 1\); give a block size"),
        ((level(domains=((0, 1), ())),), ConfigValueError, r"levels\[0\]\.domains\[1\] is empty; leave it out"),
        ((level(domains=((0, 8),)),), ConfigValueError, r"levels\[0\]\.domains\[0\] has a rank that is 8; .*0\.\.7"),
        ((level(domains=((0, 1.0),)),), ConfigTypeError, r"levels\[0\]\.domains\[0\] has a rank that is 1\.0"),
        (
            (level(domains=((0, 1, 2, 3), (3, 4, 5, 6, 7))), level("b")),
            ConfigValueError,
            r"levels\[0\]\.domains\[1\] overlaps levels\[0\]\.domains\[0\]: both have rank 3",
        ),
        (
            (level(domains=((0, 1, 2, 3), (4, 5, 7))), level("b")),
            ConfigValueError,
            r"levels\[0\]\.domains skips rank 6; give every rank a domain",
        ),
        ((level(domains=4),), ConfigValueError, r'a level is missing: the last one, levels\[0\] "net" with domains 4'),
        ((level(domains=((0, 1, 2, 3), (4, 5, 6, 7))),), ConfigValueError, "a level is missing"),
        (
            (level("a", domains=4), level("b", domains=2), level("c")),
            ConfigValueError,
            r"levels\[0\]\.domains 4 do not nest in levels\[1\]\.domains 2",
        ),
        (
            (level("a", domains=2), level("b", domains=((0, 2, 4, 6), (1, 3, 5, 7))), level("c")),
            ConfigValueError,
            r"levels\[0\]\.domains 2 do not nest in levels\[1\]\.domains \(\(0, 2",
        ),
        (
            (level(domains=((0, 1, 2, 3), (4, 5, 6, 7, 5))), level("b")),
            ConfigValueError,
            r"^levels\[0\]\.domains\[1\] has rank 5 twice; give it once",
        ),
        (
            (level("a"), level("b")),
            ConfigValueError,
            r'^levels\[0\] "a" with domains None joins all ranks, so that levels\[1\] "b" would carry nothing',
        ),
        ((level("\ud800"),), ConfigValueError, r"levels\[0\]\.name is '\\ud800', which has half of a surrogate pair"),
    ],
)
def test_levels_that_are_no_network_are_refused(levels: Any, error: type[CommFuseError], message: str) -> None:
    with pytest.raises(error, match=message):
        cluster(levels=levels)


@pytest.mark.parametrize("domains", [8, 20, (tuple(range(8)),)])
def test_one_node_of_a_cluster_with_a_network(domains: Any) -> None:
    one = cluster(level("links", domains=domains), level("network"))
    assert [each.name for each in one.split(range(8)).levels] == ["links"]


@pytest.mark.parametrize(
    ("levels", "message"),
    [
        ((level(domains=4),), "a level is missing"),
        ((level(domains=((0, 1),)),), "lists ranks, but ranks is None; give ranks"),
        ((level("a"), level("b", domains=4)), "joins all ranks"),
    ],
)
def test_levels_without_a_number_of_ranks(levels: tuple[Level, ...], message: str) -> None:
    with pytest.raises(ConfigValueError, match=message):
        cluster(*levels, ranks=None)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"name": ""}, ConfigValueError, "name is empty"),
        ({"ranks": 0}, ConfigValueError, "ranks is 0; give an int in 1..16777216"),
        ({"ranks": 8.0}, ConfigTypeError, "ranks is 8.0; give an int"),
        ({"notes": "x"}, ConfigTypeError, "notes is 'x'; give a mapping"),
        ({"notes": {"x": 1}}, ConfigTypeError, r"notes\['x'\] is 1; give a str"),
        ({"device": "gpu"}, ConfigTypeError, "device is 'gpu'; give a Device"),
    ],
)
def test_other_fields_of_a_cluster(changes: dict[str, Any], error: type[CommFuseError], message: str) -> None:
    with pytest.raises(error, match=message):
        cluster(level(), **changes)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"name": ""}, ConfigValueError, "device.name is empty"),
        ({"flops": {}}, ConfigValueError, "device.flops is empty; give FLOP/s by dtype"),
        ({"flops": 1e12}, ConfigTypeError, "device.flops is 1000000000000.0; give FLOP/s by dtype"),
        ({"flops": {"f32": 0}}, ConfigValueError, r"device.flops\['f32'\] is 0; give a finite number > 0"),
        ({"flops": {32: 1e9}}, ConfigTypeError, "a key of device.flops is 32; give a str"),
        ({"memory_bandwidth": -1}, ConfigValueError, "device.memory_bandwidth is -1; give"),
        ({"memory_bytes": 0}, ConfigValueError, "device.memory_bytes is 0; give"),
        ({"memory_bytes": 8e9}, ConfigTypeError, "device.memory_bytes is 8000000000.0; give"),
        ({"op_overhead": float("nan")}, ConfigValueError, "device.op_overhead is nan; give"),
        ({"source": 1}, ConfigTypeError, "device.source is 1; give a str"),
    ],
)
def test_fields_of_a_device(changes: dict[str, Any], error: type[CommFuseError], message: str) -> None:
    with pytest.raises(error, match=message):
        cluster(level(), device=dataclasses.replace(DEVICE, **changes))


def test_a_group_spans_the_levels_between_its_ranks() -> None:
    spec = hosts_of_four()
    assert names(spec, 0) == ()
    assert names(spec, 4, 5, 7) == ("in",)
    assert names(spec, 1, 5) == ("out",), "one rank per host: nothing runs inside the hosts"
    assert names(spec, *range(8)) == ("in", "out")
    assert names(spec, 3, 4) == ("out",), "neighbours of different hosts"
    assert spec.split(range(8)).parts == (4, 2)
    assert spec.split((0, 2, 4, 6)).parts == (2, 2)
    assert spec.split((0, 1, 2, 4)).parts is None, "three ranks of one host, one of the other"


def test_listed_domains_need_not_be_blocks() -> None:
    even_odd = cluster(level("in", domains=((1, 3, 5, 7), (0, 2, 4, 6))), level("out"))
    assert names(even_odd, 0, 2, 4) == ("in",)
    assert names(even_odd, 0, 1) == ("out",)
    assert names(even_odd, 0, 1, 2, 3) == ("in", "out")


def test_three_levels() -> None:
    spec = cluster(level("a", domains=2), level("b", domains=((0, 1, 2, 3), (4, 5, 6, 7))), level("c", domains=8))
    assert spec.split(range(8)).parts == (2, 2, 2)
    assert names(spec, 0, 2) == ("b",)
    assert names(spec, 0, 1, 4, 5) == ("a", "c")
    assert spec.split((0, 1, 4, 5)).parts == (2, 2)


@given(st.sets(st.integers(0, 63), min_size=1), st.randoms(use_true_random=False))
def test_parts_multiply_to_the_group_in_any_order(ranks: set[int], rng: random.Random) -> None:
    spec = cluster(level("a", domains=4), level("b", domains=16), level("c"), ranks=64)
    ordered = sorted(ranks)
    split = spec.split(ordered)
    rng.shuffle(ordered)
    assert split == spec.split(ordered)
    assert split.size == len(ranks) and bool(split.levels) == (len(ranks) > 1)
    if split.parts is not None:
        product = 1
        for part in split.parts:
            product *= part
        assert product == len(ranks) and all(part > 1 for part in split.parts)


def test_a_split_is_computed_once_per_group() -> None:
    spec = preset("h100-ib-512")
    world = tuple(range(4096))
    assert spec.split(world) is spec.split(range(4096))
    assert spec.split(world).parts == (8, 512)


@pytest.mark.parametrize(
    ("ranks", "error", "message"),
    [
        ((), ConfigValueError, "the group is empty"),
        (
            (0, 8),
            ConfigValueError,
            r"the group has rank 8, but cluster c has 8 ranks \(0\.\.7\); give a larger cluster",
        ),
        ((-1, 0), ConfigValueError, "the group has rank -1; ranks begin at 0"),
        ((0, 0), ConfigValueError, r"the group \(0, 0\) has a rank twice"),
        ((0, 1.5), ConfigTypeError, "the group has rank 1.5; give ints"),
        (("0",), ConfigTypeError, "the group has rank '0'; give ints"),
        ([[0, 1]], ConfigTypeError, r"the group has rank \[0, 1\]; give ints"),
    ],
)
def test_groups_that_the_cluster_cannot_have(ranks: Any, error: type[CommFuseError], message: str) -> None:
    spec = hosts_of_four()
    for ask in (spec.check_ranks, spec.split):
        with pytest.raises(error, match=message):
            ask(ranks)


def test_a_group_is_a_sequence() -> None:
    with pytest.raises(ConfigTypeError, match="the group is 8; give a sequence of ranks"):
        hosts_of_four().split(8)  # type: ignore[arg-type]


def test_without_a_number_of_ranks_every_rank_exists() -> None:
    preset("gloo-10gbit").check_ranks(range(5000))


# JSON


def full_cluster() -> ClusterSpec:
    listed = level("in", domains=((0, 2), (1, 3)), alpha=0.1 + 0.2, host_seconds_per_byte=1e-10, source='Übung "x"')
    return cluster(listed, level("out", domains=4, bandwidth=1e9 / 3), ranks=4, notes={"a": "b", "c": ""})


@pytest.mark.parametrize("name", ["gloo-1gbit", "h100-node", "h100-ib-3", "pcie-node"])
def test_presets_survive_json(name: str, tmp_path: Path) -> None:
    spec = preset(name)
    spec.save(tmp_path / "c.json")
    assert ClusterSpec.load(tmp_path / "c.json") == spec
    assert ClusterSpec.load(str(tmp_path / "c.json")) == spec


def test_every_field_survives_json() -> None:
    spec = full_cluster()
    text = spec.to_json()
    assert ClusterSpec.from_json(text) == spec and ClusterSpec.from_json(text).to_json() == text
    assert {"schema": 1, "kind": "cluster"}.items() <= json.loads(text).items()
    assert "[0, 2],\n" in text, "a domain is one line"


def test_the_example_of_the_documentation_loads() -> None:
    (text,) = re.findall(r"^```json\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    spec = ClusterSpec.from_json(text)
    assert names(spec, 0, 1, 2, 3) == ("pcie", "tcp") and spec.notes == {"cable": "direct"}


def edited(*path: str | int, value: Any = ..., key: str | None = None) -> str:
    """The JSON of a valid cluster with the value at `path` replaced (or removed), or `key` renamed there."""
    document = json.loads(full_cluster().to_json())
    place = document
    for step in path[:-1]:
        place = place[step]
    if key is not None:
        place[key] = place.pop(path[-1])
    elif value is ...:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return json.dumps(document)


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        (" ", ConfigValueError, "FILE, line 1, column 2: not JSON .*; correct it there"),
        ('{"schema": 1,\n "kind" 3}', ConfigValueError, "FILE, line 2, column 9: not JSON"),
        ("[1]", ConfigTypeError, r"FILE is \[1\]; give a JSON object"),
        ("[" * 100_000, ConfigValueError, "FILE is nested too deeply"),
        ('{"schema": NaN, "kind": "cluster"}', ConfigTypeError, "FILE: schema is nan; give 1"),
        ('{"kind": "a", "kind": "b"}', ConfigKeyError, "FILE: the key 'kind' stands twice in one object"),
        (edited("schema"), ConfigKeyError, 'FILE: key "schema" is missing; give "schema": 1'),
        (edited("kind"), ConfigKeyError, 'FILE: key "kind" is missing'),
        (
            edited("schema", value=2),
            ConfigValueError,
            "FILE: schema is 2, and this version .* reads schemas up to 1; update",
        ),
        (edited("schema", value=0), ConfigValueError, "FILE: schema is 0, not a version number; give 1"),
        (edited("schema", value="1"), ConfigTypeError, "FILE: schema is '1'; give 1"),
        (edited("kind", value=7), ConfigTypeError, "FILE: kind is 7; give a str"),
        (edited("kind", value="recipe"), ConfigValueError, "FILE: kind is 'recipe'"),
        (edited("levels"), ConfigKeyError, 'FILE: key "levels" is missing; give name, device, levels'),
        (edited("ranks", key="rank"), ConfigKeyError, "FILE: key 'rank' is unknown; use name, device, levels, ranks"),
        (edited("levels", value={}), ConfigTypeError, "FILE: levels is {}; give a list of objects"),
        (edited("levels", value=[]), ConfigValueError, "FILE: levels is empty"),
        (edited("levels", 0, value=3), ConfigTypeError, r"FILE: levels\[0\] is 3; give a JSON object"),
        (edited("levels", 1, "alpha"), ConfigKeyError, r'FILE: levels\[1\]: key "alpha" is missing; give name, alpha'),
        (edited("levels", 1, "alpha", key="latency"), ConfigKeyError, r'FILE: levels\[1\]: key "alpha" is missing'),
        (
            edited("levels", 0, "source", key="src"),
            ConfigKeyError,
            r"FILE: levels\[0\]: key 'src' is unknown; use name",
        ),
        (edited("levels", 1, "bandwidth", value=-5), ConfigValueError, r"FILE: levels\[1\]\.bandwidth is -5; give"),
        (edited("levels", 1, "bandwidth", value="5"), ConfigTypeError, r"FILE: levels\[1\]\.bandwidth is '5'; give"),
        (
            edited("levels", 1, "alpha", value=math.nan),
            ConfigValueError,
            r"FILE: levels\[1\]\.alpha is nan; give a finite",
        ),
        (
            edited("device", "op_overhead", value=math.inf),
            ConfigValueError,
            r"FILE: device\.op_overhead is inf; give a",
        ),
        (edited("ranks", value=-math.inf), ConfigTypeError, "FILE: ranks is -inf; give an int"),
        (edited("name", value="\ud800"), ConfigValueError, r"FILE: name is '\\ud800', which has half of a surrogate"),
        (edited("levels", 0, "domains", value=[[0, 1]]), ConfigValueError, r"FILE: levels\[0\]\.domains skips rank 2"),
        (edited("device", value=None), ConfigTypeError, "FILE: device is None; give a JSON object"),
        (edited("device", "flops"), ConfigKeyError, 'FILE: device: key "flops" is missing; give name, flops'),
        (edited("device", "flops", value=[1]), ConfigTypeError, r"FILE: device.flops is \[1\]; give FLOP/s by dtype"),
        (edited("ranks", value=4.0), ConfigTypeError, "FILE: ranks is 4.0; give an int"),
    ],
)
def test_bad_documents(text: str, error: type[CommFuseError], message: str, tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    path.write_text(text)
    message = message.replace("FILE", re.escape(str(path)))
    with pytest.raises(error, match=message):
        ClusterSpec.load(path)
    with pytest.raises(error, match=message):
        resolve_cluster(str(path))


def test_what_is_neither_text_nor_path() -> None:
    for text in (5, b"{}", None):
        with pytest.raises(ConfigTypeError, match=rf"^the text is {text!r}; give a str, or the path of a file to load"):
            ClusterSpec.from_json(text)  # type: ignore[arg-type]
    for use in (ClusterSpec.load, load_document, full_cluster().save):
        with pytest.raises(ConfigTypeError, match="^path is 5; give the path of a JSON file"):
            use(5)  # type: ignore[arg-type]


def test_large_numbers_are_out_of_range_not_a_crash() -> None:
    text = full_cluster().to_json().replace("333333333.3333333", "1e999")
    with pytest.raises(ConfigValueError, match=r"levels\[1\]\.bandwidth is inf; give"):
        ClusterSpec.from_json(text)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigValueError, match=r"there is no file .*missing\.json'; give the path of a JSON file"):
        ClusterSpec.load(tmp_path / "missing.json")
    with pytest.raises(ConfigValueError, match="is no regular file; give the path of a JSON file"):
        ClusterSpec.load(tmp_path)
    os.mkfifo(tmp_path / "pipe.json")  # nobody writes to it, so reading it would never end
    with pytest.raises(ConfigValueError, match=r"pipe\.json' is no regular file"):
        ClusterSpec.load(tmp_path / "pipe.json")
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigValueError, match=r"bytes\.json', which cannot be read: it is no UTF-8 text"):
        ClusterSpec.load(tmp_path / "bytes.json")


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)
    )
)
def test_any_json_is_refused_by_our_own_errors(value: Any) -> None:
    for document in (value, {"schema": 1, "kind": "cluster", "name": "n", "device": value, "levels": [value]}):
        with pytest.raises(CommFuseError, match="^text"):
            ClusterSpec.from_json(json.dumps(document), "text")


# Presets and resolve_cluster


@pytest.mark.parametrize("name", preset_names())
def test_presets_load_and_give_their_sources(name: str) -> None:
    spec = preset(name)
    assert spec.name == name and spec.device.source and all(each.source for each in spec.levels)
    assert {"f64", "f32", "bf16", "f16"} <= set(spec.device.flops)
    assert spec.ranks is None or len(spec.split(range(spec.ranks)).levels) == len(spec.levels)


@pytest.mark.parametrize("nodes", [2, 3, 100, MAX_NODES])
@pytest.mark.parametrize("family", ["h100-ib", "a100-ib"])
def test_any_number_of_nodes(family: str, nodes: int) -> None:
    spec = preset(f"{family}-{nodes}")
    assert spec.ranks == 8 * nodes and spec.split(range(8 * nodes)).parts == (8, nodes)


@pytest.mark.parametrize("count", ["0", "1", "513", "-4", "007", "9" * 5000])
def test_numbers_of_nodes_out_of_range(count: str) -> None:
    with pytest.raises(ConfigValueError, match=r"^preset is .*; give h100-ib-<n> with n in 2\.\.512$"):
        preset(f"h100-ib-{count}")


@pytest.mark.parametrize("name", ["h100", "", "h100-ib-", "h100-ib-two", "tpu-ib-4"])
def test_unknown_presets(name: str) -> None:
    with pytest.raises(ConfigValueError, match=rf"^where is '{name}', which is no preset; use one of gloo-1gbit, .*"):
        resolve_cluster(name, "where")


def test_what_a_cluster_can_be_given_as(tmp_path: Path) -> None:
    spec = hosts_of_four()
    assert resolve_cluster(spec) is spec
    assert resolve_cluster("h100-node") == preset("h100-node")
    for path in (tmp_path / "no_suffix", tmp_path / "c.json"):
        spec.save(path)
        assert resolve_cluster(path) == resolve_cluster(str(path)) == spec


def test_a_relative_name_ending_in_json_is_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    hosts_of_four().save("mine.json")
    assert resolve_cluster("mine.json") == hosts_of_four()


@pytest.mark.parametrize("value", [None, 8, b"h100-node", ["h100-node"]])
def test_what_a_cluster_cannot_be_given_as(value: object) -> None:
    with pytest.raises(ConfigTypeError, match="^option is .*; give a ClusterSpec, the name of a preset, or a path"):
        resolve_cluster(value, "option")


def test_the_tables_of_the_documentation_have_the_figures_of_the_presets() -> None:
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in PAGE.read_text().splitlines()]
    links = {row[0]: row[1:4] for row in rows if len(row) == 5 and row[2].endswith(" us")}
    assert len(links) == 8
    for name, (level_name, alpha, bandwidth) in links.items():
        outer = preset(name).levels[-1]
        shown = (outer.name, f"{outer.alpha * 1e6:g} us", f"{outer.bandwidth / 1e9:.3g} GB/s")
        assert shown == (level_name, alpha, bandwidth)
    devices = {row[0]: row[2:] for row in rows if len(row) == 6 and row[5].endswith(" us")}
    for name in links:
        device = preset(name).device
        speeds = [f"{device.flops[dtype] / 1e12:g} TFLOP/s" for dtype in ("f32", "bf16")]
        assert devices[device.name] == [
            *speeds,
            f"{device.memory_bandwidth / 1e9:g} GB/s",
            f"{device.op_overhead * 1e6:g} us",
        ]
