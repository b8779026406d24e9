from __future__ import annotations

import re

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.nn import functional as F

from commfuse_fx.errors import ConfigTypeError, ConfigValueError
from commfuse_fx.ir.core.mesh import Mesh
from commfuse_fx.ir.core.placement import P, R, S
from commfuse_fx.sharding.dividing.fit_marks import MarkedCall, MarkedTensor, refine, resolve
from commfuse_fx.sharding.marking.logical import kind_of_function, logical_dims
from commfuse_fx.sharding.marking.strategy import Axes, Counts, Placements, decode, encode, parse_tensor, parse_tensors

EIGHT = Mesh((8,), ("dp",))
TWO_FOUR = Mesh((2, 4), ("dp", "tp"))


def matmul(x, w, out=None, x_shape=(16, 16), w_shape=(16, 16), kind="matmul", place="train.py:1"):
    members = [
        MarkedTensor(f"in_strategy[{i}] of f", parse_tensor(each, "s"), shape, logical_dims(kind, f"in{i}", len(shape)))
        for i, (each, shape) in enumerate(((x, x_shape), (w, w_shape)))
    ]
    if out is not None:
        shape = (x_shape[0], w_shape[1])
        dims = logical_dims(kind, "out0", 2)
        members.append(MarkedTensor("out_strategy[0] of f", parse_tensor(out, "s"), shape, dims, True))
    return MarkedCall(tuple(members), place)


def one(strategy, shape=(16, 16), place="train.py:1"):
    dims = logical_dims("tensor", "in0", len(shape))
    return MarkedCall((MarkedTensor("the strategy of a tensor", parse_tensor(strategy, "s"), shape, dims),), place)


def texts(call, mesh):
    found, layouts = resolve([call], mesh)
    return str(found), [str(layout) for layout in layouts[0]]


# Notations.


@pytest.mark.parametrize(
    ("value", "expected", "text"),
    [
        ((2, 1), Counts((2, 1)), "(2, 1)"),
        ([2, 1], Counts((2, 1)), "(2, 1)"),
        ((), Counts(()), "()"),
        ((8,), Counts((8,)), "(8,)"),
        (((2, 1),), Counts((2, 1)), "(2, 1)"),
        (("dp", None), Axes((("dp",), ())), "('dp', None)"),
        ((("dp", "tp"), None), Axes((("dp", "tp"), ())), "(('dp', 'tp'), None)"),
        (("tp",), Axes((("tp",),)), "('tp',)"),
        ((None, None), Axes(((), ())), "(None, None)"),
        ([Shard(0), Replicate()], Placements(((0, S(0)), (1, R)), 2), "[S(0), R]"),
        ((Shard(-1), None), Placements(((0, S(-1)),), 2), "[S(-1), None]"),
        ((S(1, 3),), Placements(((0, S(1, 3)),), 1), "[S(1;3)]"),
        (Shard(1), Placements(((0, S(1)),), 1), "[S(1)]"),
        ({"tp": "S(1;3)", "dp": Replicate()}, Placements((("tp", S(1, 3)), ("dp", R))), "{'tp': S(1;3), 'dp': R}"),
    ],
)
def test_notations(value, expected, text):
    strategy = parse_tensor(value, "in_strategy")
    assert strategy == expected
    assert str(strategy) == text
    assert decode(encode(strategy)) == strategy
    assert parse_tensor(strategy, "again") is strategy


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, ()),
        (((2, 1), (1, 4)), (Counts((2, 1)), Counts((1, 4)))),
        (((2, 1), None), (Counts((2, 1)), None)),
        ((2, 1), (Counts((2, 1)),)),
        (("dp", None), (Axes((("dp",), ())),)),
        ((("dp", None), ("dp", "tp")), (Axes((("dp",), ())), Axes((("dp",), ("tp",))))),
        ({"tp": "R"}, (Placements((("tp", R),)),)),
        (({"tp": "R"}, None), (Placements((("tp", R),)), None)),
        ([Shard(0), Replicate()], (Placements(((0, S(0)), (1, R)), 2),)),
        ([[Shard(0)], [Replicate()]], (Placements(((0, S(0)),), 1), Placements(((0, R),), 1))),
    ],
)
def test_one_strategy_per_tensor_or_a_bare_one(value, expected):
    assert parse_tensors(value, "in_strategy") == expected


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (3, ConfigTypeError, "s is 3; give slices per dimension such as (2, 1)"),
        ("dp", ConfigTypeError, "s is 'dp'; give slices"),
        ((2, True), ConfigTypeError, "s is (2, True), in which entry 1 is True; give the number of slices as an int"),
        ((2, 1.0), ConfigTypeError, "s is (2, 1.0), in which entry 1 is 1.0; give the number of slices as an int"),
        ((2, 0), ConfigValueError, "s is (2, 0), in which entry 1 is 0; give a count >= 1"),
        ((-2, 1), ConfigValueError, "entry 0 is -2; give a count >= 1"),
        (("dp", 2), ConfigTypeError, "entry 1 is 2: counts and axis names do not mix"),
        (("dp", "dp"), ConfigValueError, "s is ('dp', 'dp'), which uses axis 'dp' twice (dimensions 0 and 1)"),
        ((("dp", "dp"), None), ConfigValueError, "uses axis 'dp' twice (dimensions 0 and 0)"),
        ((Shard(0), 1), ConfigTypeError, "entry 1 is 1; give one placement per mesh axis"),
        ((Shard(0), Partial()), ConfigValueError, "a mark cannot ask for partial sums; leave the axis open"),
        ({"tp": P}, ConfigValueError, "s['tp'] is Partial(): a mark cannot ask for partial sums"),
        ({"tp": "S1"}, ConfigTypeError, "s['tp'] is 'S1'; give Shard(dim), Replicate(), \"S(dim)\""),
        ({"tp": 1}, ConfigTypeError, "s['tp'] is 1; give Shard(dim)"),
        ({0: "R"}, ConfigTypeError, "the key 0 is no name of a mesh axis"),
    ],
)
def test_bad_strategies_are_refused(value, error, message):
    with pytest.raises(error, match=re.escape(message)):
        parse_tensor(value, "s")


def test_the_number_of_the_tensor_is_named():
    with pytest.raises(ConfigValueError, match=re.escape("in_strategy of f[1] is (0, 1)")):
        parse_tensors(((2, 1), (0, 1)), "in_strategy of f")


# Counts on a mesh.


@pytest.mark.parametrize(
    ("mesh", "x", "w", "out", "expected_mesh", "expected"),
    [
        (TWO_FOUR, (2, 1), (1, 4), None, "dp=2xtp=4", ["S(0) on dp, R on tp", "R on dp, S(1) on tp"]),
        (TWO_FOUR, (4, 1), (1, 2), None, "dp=2xtp=4", ["R on dp, S(0) on tp", "S(1) on dp, R on tp"]),
        (TWO_FOUR, (8, 1), (1, 1), None, "dp=2xtp=4", ["S(0) on dp, S(0) on tp", "R on dp, R on tp"]),
        (TWO_FOUR, (2, 4), (4, 1), (2, 1), "dp=2xtp=4",
         ["S(0) on dp, S(1) on tp", "R on dp, S(0) on tp", "S(0) on dp, R on tp"]),
        # A sum over the contraction may be scattered: the result takes the axes that the contraction leaves.
        (TWO_FOUR, (2, 4), (4, 1), (2, 4), "dp=2xtp=4",
         ["S(0) on dp, S(1) on tp", "R on dp, S(0) on tp", "S(0) on dp, S(1) on tp"]),
        (TWO_FOUR, (2, 4), (4, 1), (8, 1), "dp=2xtp=4",
         ["S(0) on dp, S(1) on tp", "R on dp, S(0) on tp", "S(0) on dp, S(0) on tp"]),
        (EIGHT, (2, 1), (1, 4), None, "dp.0=2xdp.1=4", ["S(0) on dp.0, R on dp.1", "R on dp.0, S(1) on dp.1"]),
        (EIGHT, (2, 2), (2, 2), None, "dp.0=2xdp.1=2xdp.2=2",
         ["S(0) on dp.0, S(1) on dp.1, R on dp.2", "R on dp.0, S(0) on dp.1, S(1) on dp.2"]),
        (EIGHT, (8, 1), (1, 1), None, "dp=8", ["S(0) on dp", "R on dp"]),
        (EIGHT, (4, 1), (1, 1), None, "dp.0=4xdp.1=2", ["S(0) on dp.0, R on dp.1", "R on dp.0, R on dp.1"]),
    ],
)  # fmt: skip
def test_counts_of_a_matmul(mesh, x, w, out, expected_mesh, expected):
    assert texts(matmul(x, w, out), mesh) == (expected_mesh, expected)


@pytest.mark.parametrize(
    ("shape", "strategy", "mesh", "expected_mesh", "expected"),
    [
        # A run of whole axes goes before a part of one.
        ((16, 16), (4, 2), Mesh((2, 2, 2), ("a", "b", "c")), "a=2xb=2xc=2", "S(0) on a, S(0) on b, S(1) on c"),
        # A whole axis goes before a run.
        ((16, 16), (4, 1), Mesh((2, 2, 4), ("a", "b", "c")), "a=2xb=2xc=4", "R on a, R on b, S(0) on c"),
        # A part of the first axis that divides, not of the first axis.
        ((16, 16), (3, 1), Mesh((4, 6), ("a", "b")), "a=4xb.0=3xb.1=2", "R on a, S(0) on b.0, R on b.1"),
        # A whole axis and a part of the next.
        ((16, 16), (8, 2), Mesh((4, 4), ("a", "b")), "a=4xb.0=2xb.1=2", "S(0) on a, S(0) on b.0, S(1) on b.1"),
        ((16, 16), (1, 1), TWO_FOUR, "dp=2xtp=4", "R on dp, R on tp"),
        ((), (), TWO_FOUR, "dp=2xtp=4", "R on dp, R on tp"),
    ],
)
def test_counts_of_one_tensor(shape, strategy, mesh, expected_mesh, expected):
    if strategy == (3, 1):
        shape = (12, 16)
    assert texts(one(strategy, shape), mesh) == (expected_mesh, [expected])


def test_all_calls_share_one_refinement():
    mesh, layouts = resolve([one((2, 1)), one((4, 2)), one(("dp", None)), one((8, 1))], EIGHT)
    assert mesh == Mesh((2, 2, 2), ("dp.0", "dp.1", "dp.2"))
    assert [str(members[0]) for members in layouts] == [
        "S(0) on dp.0, R on dp.1, R on dp.2",
        "S(0) on dp.0, S(0) on dp.1, S(1) on dp.2",
        "S(0) on dp.0, S(0) on dp.1, S(0) on dp.2",
        "S(0) on dp.0, S(0) on dp.1, S(0) on dp.2",
    ]


def test_a_refined_mesh_has_the_same_ranks_in_the_same_order():
    mesh = Mesh((2, 4), ("dp", "tp"), (7, 6, 5, 4, 3, 2, 1, 0))
    refined = refine(mesh, {"tp": (2, 2)})
    assert refined == Mesh((2, 2, 2), ("dp", "tp.0", "tp.1"), mesh.devices)
    assert all(refined.ranks("tp.0,tp.1", rank) == mesh.ranks("tp", rank) for rank in range(8))
    assert refine(mesh, {}) == mesh
    with pytest.raises(
        ConfigValueError, match=re.escape("factors of axis 'tp' are (3, 2); give factors whose product")
    ):
        refine(mesh, {"tp": (3, 2)})


def test_broadcasting_aligns_from_the_right():
    call = matmul((2, 1, 4), (4,), x_shape=(16, 16, 16), w_shape=(16,), kind="broadcast")
    assert texts(call, TWO_FOUR)[1] == ["S(0) on dp, S(2) on tp", "R on dp, S(0) on tp"]


def test_named_axes_of_a_call_go_before_counts():
    call = matmul((2, 1), (None, "dp"), w_shape=(16, 16))
    assert texts(call, Mesh((2, 2), ("dp", "tp")))[1] == ["R on dp, S(0) on tp", "S(1) on dp, R on tp"]


# Names and placements on a mesh.


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        (("dp", None), "S(0) on dp, R on tp"),
        ((("dp", "tp"), None), "S(0) on dp, S(0) on tp"),
        ((None, None), "R on dp, R on tp"),
        ([Shard(-1), Replicate()], "S(1) on dp, R on tp"),
        ([None, Shard(0)], "S(0) on tp"),
        ([Shard(0), Shard(0)], "S(0) on dp, S(0) on tp"),
        ({"tp": "S(-2)"}, "S(0) on tp"),
        ({"tp": "S(1;2)"}, "S(1;2) on tp"),
        (Placements(((-1, S(1)),)), "S(1) on tp"),
    ],
)
def test_names_and_placements(strategy, expected):
    assert texts(one(strategy), TWO_FOUR) == ("dp=2xtp=4", [expected])


def test_blocks_survive_a_refinement():
    _, layouts = resolve([one({"dp": "S(1;3)"}, (16, 48)), one((2, 1))], EIGHT)
    assert str(layouts[0][0]) == "S(1;3) on dp.0, S(1;3) on dp.1"


@pytest.mark.parametrize(
    ("strategy", "shape", "mesh", "message"),
    [
        ((2, 1, 1), (16, 16), EIGHT, "the strategy of a tensor is (2, 1, 1), which has 3 entries, but the tensor has 2 "
         "dimensions (shape (16, 16)); give one entry per dimension"),
        (("dp",), (16, 16), EIGHT, "is ('dp',), which has 1 entries"),
        ((4, 1), (6, 16), EIGHT, "is (4, 1): dimension 0 of shape (6, 16) has size 6, which does not divide into 4 "
         "slices; give a number of slices that divides 6"),
        (("dp", None), (12, 16), EIGHT, "dimension 0 of shape (12, 16) has size 12, which does not "
         "divide into 8 slices"),
        ({"dp": "S(1;3)"}, (16, 16), EIGHT, "which does not divide into 8 slices of each of 3 blocks"),
        ((16, 1), (16, 16), EIGHT, "16 slices in all, which does not divide the world of 8 ranks (mesh dp=8); give "
         "counts whose product divides 8"),
        ((4, 4), (16, 16), EIGHT, "is (4, 4): 16 slices in all, which does not divide the world of 8 ranks"),
        (("xp", None), (16, 16), TWO_FOUR, "is ('xp', None), which names no mesh axis: 'xp'; axes are dp, tp"),
        (("tpp", None), (16, 16), TWO_FOUR, "(did you mean 'tp'?)"),
        ({"xp": "R"}, (16, 16), TWO_FOUR, "which names no mesh axis: 'xp'; axes are dp, tp"),
        ((("tp", "dp"), None), (16, 16), TWO_FOUR, "in another order than the mesh dp=2xtp=4; write ('dp', 'tp')"),
        ([Shard(0)], (16, 16), TWO_FOUR, "is [S(0)]: 1 placements, but mesh dp=2xtp=4 has 2 axes; give one placement "
         "per axis"),
        ([Shard(2), None], (16, 16), TWO_FOUR, "divides dimension 2, but the tensor has shape (16, 16); give a "
         "dimension in -2..1"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(strategy, shape, mesh, message):
    with pytest.raises(ConfigValueError, match=re.escape(message)) as caught:
        resolve([one(strategy, shape)], mesh)
    assert str(caught.value).startswith("train.py:1: the strategy of a tensor is ")


@pytest.mark.parametrize(
    ("call", "mesh", "message"),
    [
        (matmul((8, 1), (1, 8)), EIGHT, "in_strategy[1] of f is (1, 8): 8 slices of dimension 1 do not fit what is "
         "left of mesh dp=8, of which other dimensions take 8 of dp=8"),
        (matmul((2, 4), (2, 1)), TWO_FOUR, "in_strategy[1] of f is (2, 1), which divides dimension 0 by 2, but another "
         "tensor of the same call divides the same dimension by 4; give both the same count, or 1"),
        (matmul((8, 1), (1, 8), kind="broadcast"), EIGHT, "in_strategy[1] of f is (1, 8): 8 slices of dimension 1 do "
         "not fit"),
    ],
)  # fmt: skip
def test_calls_that_do_not_fit_together(call, mesh, message):
    with pytest.raises(ConfigValueError, match=re.escape(message)):
        resolve([call], mesh)


def test_cuts_that_do_not_nest_name_both_marks():
    calls = [one((2, 1), (12, 12), "a.py:1"), one((3, 1), (12, 12), "b.py:2")]
    message = (
        "axis 'dp' of size 6 would have to be cut into 2 parts for the strategy of a tensor (a.py:1) and into 3 parts "
        "for the strategy of a tensor (b.py:2); give counts of which one divides the other"
    )
    with pytest.raises(ConfigValueError, match=re.escape(message)):
        resolve(calls, Mesh((6,), ("dp",)))


# Logical dimensions.


@pytest.mark.parametrize(
    ("function", "ndims", "kind"),
    [
        (torch.matmul, (2, 2), "matmul"),
        (torch.matmul, (3, 1), "matvec"),
        (torch.matmul, (1, 2), "vecmat"),
        (torch.matmul, (1, 1), "dot"),
        (torch.bmm, (3, 3), "matmul"),
        (torch.Tensor.matmul, (2, 2), "matmul"),
        (torch.addmm, (1, 2, 2), "addmm"),
        (F.linear, (3, 2, 1), "linear"),
        (F.embedding, (2, 2), "embedding"),
        (torch.mul, (2, 2), "broadcast"),
    ],
)
def test_kinds_of_functions(function, ndims, kind):
    assert kind_of_function(function, ndims) == kind


@pytest.mark.parametrize(
    ("kind", "positions"),
    [
        ("matmul", {"in0": "b1 b0 m k", "in1": "b0 k n", "out0": "b1 b0 m n"}),
        ("matvec", {"in0": "b0 m k", "in1": "k", "out0": "b0 m"}),
        ("vecmat", {"in0": "k", "in1": "b0 k n", "out0": "b0 n"}),
        ("dot", {"in0": "k", "in1": "k"}),
        ("addmm", {"in0": "n", "in1": "m k", "in2": "k n", "out0": "m n"}),
        ("linear", {"in0": "b1 b0 k", "weight": "n k", "bias": "n", "out0": "b1 b0 n", "in1": "n k", "in2": "n"}),
        ("conv1d", {"in0": "b1 b0 k", "weight": "k n", "bias": "n", "out0": "b1 b0 n"}),
        ("embedding", {"in0": "b1 b0", "weight": "v h", "out0": "b1 b0 h"}),
        ("broadcast", {"in0": "-2 -1", "in1": "-1", "weight": "-1", "out0": "-3 -2 -1"}),
        ("module", {"in0": "-2 -1", "out0": "-2 -1"}),
    ],
)
def test_logical_dimensions(kind, positions):
    names = {"b0": "batch -1", "b1": "batch -2"}
    for position, labels in positions.items():
        expected = tuple(names.get(label, label) for label in labels.split())
        assert logical_dims(kind, position, len(expected)) == expected


def test_parameters_of_unknown_modules_have_dimensions_of_their_own():
    assert logical_dims("module", "weight", 2) == ("weight 0", "weight 1")
