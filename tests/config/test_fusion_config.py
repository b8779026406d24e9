from __future__ import annotations

from dataclasses import FrozenInstanceError
from itertools import combinations

import pytest

from commfuse_fx.config.compile_config import CompileConfig, FusionConfig, KindFusion
from commfuse_fx.errors import (
    ConfigKeyError,
    ConfigTypeError,
    ConfigValueError,
)
from tests.config.configs import AUTO, CLUSTER, KINDS, MIB, auto, index, optimal, raises_naming, size

# --- comm_fusion: what is accepted


def test_fusion_defaults():
    config = FusionConfig.parse(None)
    assert config == FusionConfig.parse({}) == FusionConfig()
    assert config.as_dict() == {
        "openstate": True,
        "allreduce": AUTO,
        "allgather": AUTO,
        "reducescatter": AUTO,
    }


def test_fusion_parse_returns_a_parsed_config_as_it_is():
    config = FusionConfig.parse({"allgather": size(3)})
    assert FusionConfig.parse(config) is config


@pytest.mark.parametrize(
    "given",
    [
        {"openstate": False},
        {"allreduce": AUTO},
        {"allreduce": index([20, 35])},
        {"allreduce": index([1])},
        {"allgather": size(16), "reducescatter": size(32)},
        {"reducescatter": size(1), "openstate": False, "allreduce": size(10**6)},
    ],
)
def test_fusion_keeps_what_is_given_and_defaults_the_rest(given):
    config = FusionConfig.parse(given)
    assert config.as_dict() == {**FusionConfig().as_dict(), **given}
    assert FusionConfig.parse(config.as_dict()) == config
    assert hash(config) == hash(FusionConfig.parse(given))


def test_fusion_holds_no_reference_to_the_users_lists():
    cuts = [20, 35]
    config = FusionConfig.parse({"allreduce": index(cuts)})
    cuts.append(1)
    config.as_dict()["allreduce"]["config"].append(2)
    assert config.allreduce == KindFusion("index", (20, 35))
    with pytest.raises(FrozenInstanceError):
        config.openstate = False


@pytest.mark.parametrize(
    ("fusion", "threshold", "cuts"),
    [
        (KindFusion("auto", None), 64 * MIB, None),
        (KindFusion("size", 1), MIB, None),
        (KindFusion("size", 32), 32 * MIB, None),
        (KindFusion("index", (20, 35)), None, (20, 35)),
        (KindFusion("optimal", "gloo-1gbit"), None, None),
    ],
)
def test_threshold_and_cuts(fusion, threshold, cuts):
    assert fusion.threshold_bytes == threshold
    assert fusion.cuts == cuts


def test_for_kind():
    config = FusionConfig.parse({"allreduce": size(1), "allgather": size(2), "reducescatter": size(3)})
    assert [config.for_kind(op).config for op in ("all_reduce", "all_gather", "reduce_scatter")] == [1, 2, 3]
    with raises_naming(ConfigKeyError, "'broadcast'", "all_reduce", "reduce_scatter"):
        config.for_kind("broadcast")


def test_updated_replaces_only_what_is_given():
    config = FusionConfig.parse({"allreduce": index([4]), "openstate": False}).updated({"allgather": size(8)})
    assert config == FusionConfig(openstate=False, allreduce=KindFusion("index", (4,)), allgather=KindFusion("size", 8))


# --- comm_fusion: what is refused

CONFIG_ERRORS = [
    # every kind: size
    *(
        (error, {kind: size(value)}, f'comm_fusion["{kind}"]["config"]', value, "MiB")
        for kind in KINDS
        for error, value in [
            (ConfigTypeError, True),
            (ConfigTypeError, False),
            (ConfigTypeError, "32"),
            (ConfigTypeError, 32.0),
            (ConfigTypeError, None),
            (ConfigTypeError, [32]),
            (ConfigValueError, 0),
            (ConfigValueError, -5),
        ]
    ),
    # every kind: auto
    *(
        (ConfigValueError, {kind: auto(value)}, f'comm_fusion["{kind}"]["config"]', value, "None")
        for kind in KINDS
        for value in [64, 0, False, "64", [20, 35], []]
    ),
    # index
    *(
        (error, {"allreduce": index(value)}, 'comm_fusion["allreduce"]["config"]', value, "[20, 35]")
        for error, value in [
            (ConfigTypeError, (20, 35)),
            (ConfigTypeError, None),
            (ConfigTypeError, 20),
            (ConfigTypeError, "20,35"),
            (ConfigTypeError, {20: 35}),
            (ConfigTypeError, [20, "35"]),
            (ConfigTypeError, [20, 35.0]),
            (ConfigTypeError, [True, 20]),
            (ConfigTypeError, [20, None]),
            (ConfigTypeError, [0, "35"]),
            (ConfigValueError, []),
            (ConfigValueError, [35, 20]),
            (ConfigValueError, [20, 20]),
            (ConfigValueError, [20, 35, 20]),
            (ConfigValueError, [0]),
            (ConfigValueError, [0, 20]),
            (ConfigValueError, [-1, 20]),
        ]
    ),
    # containers
    *(
        (ConfigTypeError, value, "comm_fusion", value, "None")
        for value in ["auto", 64, True, False, [], (), {"allreduce"}, [("allreduce", AUTO)]]
    ),
    *(
        (ConfigTypeError, {kind: value}, f'comm_fusion["{kind}"]', value, '{"mode": "auto", "config": None}')
        for kind in KINDS
        for value in ["auto", None, 64, True, [], ("auto", None)]
    ),
    *(
        (ConfigTypeError, {"openstate": value}, 'comm_fusion["openstate"]', value, "True or False")
        for value in [1, 0, None, "True", []]
    ),
    # unknown kinds
    *(
        (ConfigKeyError, {key: AUTO}, where, AUTO, '"allreduce", "allgather", "reducescatter"')
        for key, where in [
            ("all_reduce", 'comm_fusion["all_reduce"]'),
            ("AllReduce", 'comm_fusion["AllReduce"]'),
            ("broadcast", 'comm_fusion["broadcast"]'),
            ("", 'comm_fusion[""]'),
            (1, "comm_fusion[1]"),
            (None, "comm_fusion[None]"),
            (("allreduce",), "comm_fusion[('allreduce',)]"),
        ]
    ),
    # keys of a kind
    *(
        (ConfigKeyError, {kind: value}, f'comm_fusion["{kind}"]', value, '{"mode": "auto", "config": None}')
        for kind in KINDS
        for value in [{}, {"mode": "auto"}, {"config": None}, {"mode": "size"}, {"config": 32}]
    ),
    *(
        (ConfigKeyError, {kind: {**AUTO, key: 1}}, where, 1, "remove")
        for kind in KINDS
        for key, where in [
            ("size", f'comm_fusion["{kind}"]["size"]'),
            ("Mode", f'comm_fusion["{kind}"]["Mode"]'),
            (3, f'comm_fusion["{kind}"][3]'),
        ]
    ),
    # modes
    *(
        (ConfigKeyError, {kind: {**AUTO, "mode": mode}}, f'comm_fusion["{kind}"]["mode"]', mode, '"size"')
        for kind in KINDS
        for mode in ["best", "AUTO", "", None, 1, True, ["auto"]]
    ),
    *(
        (ConfigKeyError, {kind: index(config)}, f'comm_fusion["{kind}"]["mode"]', None, '"auto", "size"')
        for kind in ("allgather", "reducescatter")
        for config in ([20, 35], None, [])
    ),
    # optimal
    *(
        (ConfigTypeError, {kind: optimal(config)}, f'comm_fusion["{kind}"]["config"]', config, "the name of a preset")
        for kind in KINDS
        for config in (32, True, [20, 35], {}, 1.5)
    ),
    *(
        (ConfigValueError, {kind: optimal(config)}, f'comm_fusion["{kind}"]["config"]', config, "no preset; use one of")
        for kind in KINDS
        for config in ("best", "", "H100")
    ),
]  # fmt: skip


@pytest.mark.parametrize("openstate", [None, True, False])
@pytest.mark.parametrize(("error", "given", "where", "value", "fix"), CONFIG_ERRORS)
def test_fusion_refuses(error, given, where, value, fix, openstate):
    if openstate is not None and isinstance(given, dict) and "openstate" not in given:
        given = {"openstate": openstate, **given}
    shown = [] if value is None else [repr(value)]
    with raises_naming(error, where + " is ", fix, *shown):
        FusionConfig.parse(given)


@pytest.mark.parametrize("kind", KINDS)
def test_optimal_takes_a_cluster_or_none(kind, tmp_path):
    CLUSTER.save(tmp_path / "cluster.json")
    for config in (None, CLUSTER, "gloo-1gbit", "h100-ib-4", str(tmp_path / "cluster.json"), tmp_path / "cluster.json"):
        fusion = FusionConfig.parse({kind: optimal(config)})
        assert fusion.as_dict()[kind] == optimal(config)
        assert fusion.is_optimal and fusion.optimal_cluster == config
        assert not FusionConfig.parse({kind: optimal(config), "openstate": False}).is_optimal
    assert not FusionConfig().is_optimal and FusionConfig().optimal_cluster is None
    assert KindFusion("optimal").threshold_bytes is None and KindFusion("optimal").cuts is None


FILES = {
    "missing": (None, "there is no file"),
    "not json": ("clusters", "not JSON"),
    "another kind": ('{"schema": 1, "kind": "strategy"}', "kind is 'strategy'"),
    "a cluster with a key too many": ('{"schema": 1, "kind": "cluster", "speed": 1}', "key"),
}


@pytest.mark.parametrize("content", FILES)
@pytest.mark.parametrize("given", ["cluster", "config"])
def test_files_that_are_refused(content, given, tmp_path):
    text, part = FILES[content]
    path = tmp_path / "given.json"
    if text is not None:
        path.write_text(text)
    options = {"cluster": str(path)} if given == "cluster" else {"comm_fusion": {"allreduce": optimal(str(path))}}
    with pytest.raises((ConfigValueError, ConfigKeyError), match="given.json") as caught:
        CompileConfig.resolve(options)
    assert part in str(caught.value)


IN_ORDER_OF_CHECKS = [
    (ConfigTypeError, "allgather", "auto"),  # container
    (ConfigKeyError, "broadcast", AUTO),  # kind
    (ConfigKeyError, "reducescatter", {"mode": "best"}),  # missing key
    (ConfigKeyError, "allgather", {"mode": "best", "config": None}),  # mode
    (ConfigKeyError, "reducescatter", index("no list")),  # index is not for this kind
    (ConfigTypeError, "allgather", size("no int")),  # type of config
    (ConfigValueError, "allreduce", index([])),  # value of config
]
PAIRS_OF_CHECKS = [(a, b) for a, b in combinations(IN_ORDER_OF_CHECKS, 2) if a[1] != b[1]]


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(("first", "second"), PAIRS_OF_CHECKS)
def test_the_first_check_that_fails_decides_in_whatever_order_keys_stand(first, second, reverse):
    entries = [(first[1], first[2]), (second[1], second[2])]
    with raises_naming(first[0], f'comm_fusion["{first[1]}"]'):
        FusionConfig.parse(dict(reversed(entries) if reverse else entries))


def test_a_long_value_is_cut_in_the_message():
    with pytest.raises(ConfigValueError) as caught:
        FusionConfig.parse({"allreduce": index(list(range(10_000)))})
    assert len(str(caught.value)) < 400
