"""Programs from text: the same text again, the facts that a text does not say, and errors that name the line."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import commfuse_fx as cf
from commfuse_fx.ir.core.meta import Stretch, TensorSpec, info
from commfuse_fx.ir.core.program import Program
from commfuse_fx.ir.json.write import to_dict, to_json
from commfuse_fx.ir.text.parse_text import parse_program
from commfuse_fx.ir.text.text_updates import FLAGS
from commfuse_fx.ir.text.write_text import canonical_text
from commfuse_fx.ir.updates.updates import is_scalar
from commfuse_fx.kernels.update_rules import RULES

SMALL = """
    in  %w: f32[4,4] = parameter
    in  %x: f32[2,4] = input
    fwd %/mm.0: f32[2,4] = aten.mm(%x, %w)
    fwd %/sum.0: f32[] = aten.sum(%/mm.0)
    bwd %/grad.expand.0: f32[2,4](0,0) = aten.expand(%/sum.0, [2, 4])
    bwd %/grad.t.0: f32[4,2](1,4) = aten.t(%x)
    bwd %/grad.mm.0: f32[4,4] = aten.mm(%/grad.t.0, %/grad.expand.0)
    bwd %reduce/w/all_reduce: f32[4,4] = _c10d_functional.all_reduce(%/grad.mm.0, sum, dp)  \
{group=dp(2) op=sum dtype=f32 bytes=64 members=[w]}
    bwd %reduce/w/wait: f32[4,4] = _c10d_functional.wait_tensor(%reduce/w/all_reduce)
    return [%/sum.0, %reduce/w/wait]
"""


class Net(nn.Module):
    """Users' collectives, a constant, a buffer, and an op with more results than a text shows."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.conv(x)).mean((2, 3))
        x = cf.ops.all_reduce(x, fusion=2) + torch.tensor([1.0, 2.0, -torch.inf, 4.0]).clamp(min=0)
        out: torch.Tensor = self.head(x)
        return out


def compiled(optimizer: Callable[[Any], Any] | None, **options: Any) -> Program:
    torch.manual_seed(0)
    model = Net()
    made = None if optimizer is None else optimizer(model.parameters())
    step = cf.compile(model, loss_fn=F.mse_loss, optimizer=made, device_num=4, **options)
    return step.lower(torch.randn(4, 2, 5, 5), torch.randn(4, 2))._program


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True)


def rmsprop(params: Any) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(params, lr=0.1, centered=True, momentum=0.5)


def adam(params: Any) -> torch.optim.Optimizer:
    """Two groups, whose flags differ."""
    rest: list[Any] = list(params)
    groups: list[dict[str, Any]] = [{"params": rest[:2]}, {"params": rest[2:], "amsgrad": True}]
    return torch.optim.Adam(groups, lr=0.1)


OFF = {"openstate": False}
CUTS = {"allreduce": {"mode": "index", "config": [1, 3]}}
OPTIMAL = {"allreduce": {"mode": "optimal", "config": "gloo-1gbit"}}
CASES: dict[str, tuple[Callable[[Any], Any] | None, dict[str, Any]]] = {
    "no optimizer": (None, {}),
    "sgd": (sgd, {"comm_fusion": CUTS, "broadcast_buffers": True}),
    "rmsprop": (rmsprop, {"comm_fusion": OFF}),
    "adam": (adam, {"comm_fusion": OPTIMAL}),
    "nadam": (lambda params: torch.optim.NAdam(params, decoupled_weight_decay=True), {"comm_fusion": CUTS}),
    "asgd": (torch.optim.ASGD, {"comm_fusion": CUTS}),
    "opaque": (lambda params: torch.optim.Adafactor(params), {"full_batch": True}),
    "clipped": (adam, {"clip_grad_norm": 0.5}),
    "accumulated": (adam, {"accumulate_steps": 2}),
    "compiled": (sgd, {"backend": "inductor"}),
    "across": (sgd, {"cluster": "gloo-1gbit", "schedule": cf.ScheduleConfig(across_steps=True)}),
}


@cache
def program_of(name: str) -> Program:
    optimizer, options = CASES[name]
    return compiled(optimizer, **options)


@pytest.mark.parametrize("name", CASES)
def test_the_text_of_a_program_gives_the_same_text(name: str) -> None:
    text = canonical_text(program_of(name))
    read = parse_program(text)
    assert canonical_text(read) == text
    assert canonical_text(read.copy()) == text


UNSAID = ("line", "origin", "module", "notes", "names", "fusion_id", "of", "constants")
"""What a text does not say: where a node is from, numbers of names to come, marks that no collective shows, and what
constants are called."""


@pytest.mark.parametrize("name", ["no optimizer", "sgd", "rmsprop", "adam", "nadam", "asgd", "across"])
def test_what_passes_know_of_a_program_follows_from_its_text(name: str) -> None:
    program = program_of(name)
    assert list(_differences(to_dict(program), to_dict(parse_program(canonical_text(program))))) == []


def _differences(one: Any, other: Any, place: str = "") -> Iterator[tuple[str, Any, Any]]:
    if isinstance(one, dict) and isinstance(other, dict):
        for key in {**one, **other}:
            if key not in UNSAID:
                yield from _differences(one.get(key), other.get(key), f"{place}.{key}")
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        if place.endswith(".writes"):
            one, other = (sorted(each, key=lambda write: write["begin"]) for each in (one, other))
        for i, (a, b) in enumerate(zip(one, other, strict=True)):
            yield from _differences(a, b, f"{place}[{i}]")
    elif one != other:
        yield place, one, other


def test_ten_lines_are_a_program() -> None:
    program = parse_program(SMALL)
    assert program.mesh.world == 2 and program.training and program.optimizer is None
    assert list(program.params) == list(program.grads) == ["w"]
    assert program.params["w"].trainable and program.params["w"].sequence == 0
    assert info(program.grads["w"]).name == "reduce/w/wait"
    (start,) = program.collectives()
    collective = info(start).collective
    assert collective is not None and (collective.role, collective.sequence) == ("gradient", 0)
    assert info(program.loss).module == "" and info(program.loss).phase == "forward"


def test_the_header_may_be_given_in_part() -> None:
    program = parse_program("# world: 8\n# mesh: dp=4xtp=2\n# step: eval\n" + SMALL.replace("dp(2)", "dp(4)"))
    assert str(program.mesh) == "dp=4xtp=2" and not program.training
    fused = parse_program("# comm_fusion.allreduce: size 3\n# schedule: none\n" + SMALL).config
    assert fused.comm_fusion.allreduce.config == 3 and fused.schedule == "none"
    others = parse_program("# backend: inductor\n# inductor_regions: layers\n# clip_grad_norm: 0.5\n" + SMALL).config
    assert (others.backend, others.inductor_regions, others.clip_grad_norm) == ("inductor", "layers", 0.5)
    named = "# comm_fusion.allreduce: optimal\n# cluster: gloo-1gbit\n"
    assert "# cluster: cluster gloo-1gbit " in canonical_text(parse_program(named + SMALL))


def test_the_context_of_the_process_decides_nothing() -> None:
    cf.set_auto_parallel_context(gradients_mean=False, comm_fusion={"openstate": False})
    config = parse_program(SMALL).config
    assert config.gradients_mean and config.comm_fusion.openstate


def test_an_optimizer_holds_the_parameters_that_have_gradients() -> None:
    program = parse_program("# optimizer: SGD (sgd)\n" + SMALL, flags={"momentum": True})
    assert program.optimizer is not None
    (group,) = program.optimizer.groups
    assert group.params == ("w",)
    assert dict(group.flags) == {"momentum": True, "nesterov": False, "maximize": False}


def test_flags_are_those_of_the_rules() -> None:
    made = {
        "adam": torch.optim.Adam,
        "adamw": torch.optim.AdamW,
        "sgd": torch.optim.SGD,
        "adagrad": torch.optim.Adagrad,
        "rmsprop": torch.optim.RMSprop,
        "nadam": torch.optim.NAdam,
        "radam": torch.optim.RAdam,
        "adamax": torch.optim.Adamax,
        "adadelta": torch.optim.Adadelta,
        "asgd": torch.optim.ASGD,
        "rprop": torch.optim.Rprop,
    }
    assert made.keys() == RULES.keys() == FLAGS.keys()
    for name, optimizer in made.items():
        (group,) = optimizer([torch.zeros(1)], lr=0.1).param_groups
        assert tuple(RULES[name].flags(group)) == FLAGS[name]
        assert all(is_scalar(state) and is_scalar(f"{state}s") for state in RULES[name].scalars)
        assert not any(is_scalar(state) for state in RULES[name].states(RULES[name].flags(group)))


TWO = """
    in  %a: f32[2] = parameter
    in  %b: f32[2] = parameter
    fwd %/sum.0: f32[] = aten.sum(%b)
    bwd %/grad.expand.0: f32[2](0) = aten.expand(%/sum.0, [2])
    return [%/sum.0, %/grad.expand.0]
"""


def test_of_which_parameter_a_gradient_is_can_be_said() -> None:
    assert list(parse_program(TWO, gradients=["b"]).grads) == ["b"]
    assert list(parse_program(TWO.replace("%a: f32[2]", "%a: f32[3]")).grads) == ["b"]


def test_constants_have_the_values_that_are_given() -> None:
    text = TWO.replace("in  %b: f32[2] = parameter", "in  %b: f32[2] = constant")
    assert parse_program(text).constants["_constant_0"].device.type == "meta"
    given = torch.tensor([1.0, 2.0])
    assert parse_program(text, constants={"b": given}).constants["_constant_0"] is given


def test_specs_that_a_text_leaves_out_are_computed() -> None:
    program = program_of("rmsprop")
    read = parse_program(canonical_text(program))
    found = [info(node).spec for node in read.graph.nodes if isinstance(info(node).spec, tuple)]
    assert found == [info(node).spec for node in program.graph.nodes if isinstance(info(node).spec, tuple)]
    assert max(map(len, found)) > 4 and all(type(each) is tuple for each in found)  # type: ignore[arg-type]


def test_stretches_of_a_bucket_are_read() -> None:
    program = parse_program(SENT)
    (start,) = program.collectives()
    writes = [(info(node).name, stretch) for node, stretch in info(start).writes]
    assert writes == [("bucket.0/write.a", Stretch(0, 16)), ("bucket.0/write.b", Stretch(16, 32))]
    assert info(start).rest == (Stretch(16, 32),)
    assert [info(node).name for node in program.graph.nodes if info(node).sends] == ["bucket.0/write.a"]


SENT = """
    in  %a: f32[16] = parameter
    in  %b: f32[16] = parameter
    fwd %/dot.0: f32[] = aten.dot(%a, %b)
    bwd %/grad.mul.0: f32[16] = aten.mul.Tensor(%b, %/dot.0)
    bwd %/grad.mul.1: f32[16] = aten.mul.Tensor(%a, %/dot.0)
    bwd %bucket.0/storage: f32[32] = aten.empty.memory_format([32], dtype=f32, device=cpu)  {kept between steps}
    bwd %bucket.0/place.a: f32[16] = aten.as_strided(%bucket.0/storage, [16], [1], 0)
    bwd %bucket.0/write.a: f32[16] = aten.copy_(%bucket.0/place.a, %/grad.mul.0)  {sends bucket.0/in_place [0:16]}
    bwd %bucket.0/place.b: f32[16] = aten.as_strided(%bucket.0/storage, [16], [1], 16)
    bwd %bucket.0/write.b: f32[16] = aten.copy_(%bucket.0/place.b, %/grad.mul.1)
    bwd %bucket.0/in_place: f32[32] = _c10d_functional.all_reduce_(%bucket.0/storage, sum, dp)  \
{group=dp(2) op=sum dtype=f32 bytes=128 members=[a, b]}  {sends the rest: [16:32]}
    bwd %bucket.0/reduced: f32[32] = _c10d_functional.wait_tensor(%bucket.0/in_place)
    bwd %bucket.0/reduced.a: f32[16] = aten.as_strided(%bucket.0/reduced, [16], [1], 0)
    bwd %bucket.0/reduced.b: f32[16] = aten.as_strided(%bucket.0/reduced, [16], [1], 16)
    return [%/dot.0, %bucket.0/reduced.a, %bucket.0/reduced.b]
"""


def test_what_keeps_a_parameter_in_its_place_is_read() -> None:
    text = """
        in  %a: f32[16] = parameter in a larger storage
        in  %b: f32[16] = parameter shared with [c, d]
        in  %c: f32[16] = parameter shared with [b]
        in  %d: f32[16] = buffer
        in  %e: f32[4,4](8,1) = parameter
        fwd %/dot.0: f32[] = aten.dot(%a, %b)
        return [%/dot.0]
    """
    program = parse_program(text)
    kept = {name: (param.movable, param.is_block, param.shares) for name, param in program.params.items()}
    assert kept["a"] == (False, True, ())
    assert kept["b"] == (False, False, ("c", "d"))
    assert kept["e"] == (False, False, ())
    assert [line.strip() for line in text.splitlines()][1:6] == canonical_text(program).splitlines()[-7:-2]


def test_values_of_every_kind_are_read() -> None:
    text = """
        in  %x: bf16[2,3](1,2) = input
        fwd %a: f32[2,3] = aten._to_copy(%x, dtype=f32, layout=strided, device=cpu, memory_format=contiguous_format)
        fwd %b: f32[2,3] = aten.clamp(%a, -inf, 1e-05)
        fwd %c: f32[2,3] = aten.gelu(%b, approximate=tanh)
        fwd %d: (f32[2,3], i64[2,3]) = aten.sort(%c, -1, False)
        fwd %e: f32[2,3] = getitem(%d, 0)
        fwd %f: f32[4,3] = aten.cat([%e, %e], 0)
        fwd %g: f32[] = aten.sum(%f, dtype=None)
        return [%g]
    """
    program = parse_program(text)
    values = [value for node in program.graph.nodes for value in (*node.args, *node.kwargs.values())]
    for wanted in (torch.float32, torch.strided, torch.device("cpu"), torch.contiguous_format, -torch.inf, "tanh"):
        assert any(type(value) is type(wanted) and value == wanted for value in values), wanted
    assert info(next(iter(program.graph.nodes))).spec == TensorSpec((2, 3), torch.bfloat16, (1, 2))


def test_a_process_that_has_compiled_nothing_knows_what_graphs_call() -> None:
    text = """
        in  %x: f32[4] = input
        in  %seed: - = seed
        fwd %axis_index/dp: - = axis_index(dp)
        fwd %part: f32[2] = own_part(%x, %axis_index/dp, 2, 0, 1)
        fwd %mask: f32[2] = bernoulli_at([2], 0.5, %seed, 0, [%axis_index/dp], [4], f32, cpu)
        fwd %drawn: f32[2] = commfuse.bernoulli(%mask, 0.5)
        fwd %dot: f32[] = aten.dot(%part, %drawn)
        return [%dot]
    """
    saved = to_json(parse_program(text))
    script = "import sys; from commfuse_fx.ir import from_json; print(len(from_json(sys.stdin.read()).graph.nodes))"
    done = subprocess.run([sys.executable, "-c", script], input=saved, text=True, capture_output=True)
    assert (done.stdout.strip(), done.stderr) == ("8", "")


WRONG = {
    "aten.mm(%x, %w)": {
        "aten.mm(%x, %v)": r"line 4: it refers to %v, and no line before it has this name; .* 'fwd %/mm\.0: ",
        "aten.mm(%x, %w": "line 4: there is no whole call",
        "aten.nonsense(%x, %w)": "line 4: 'aten.nonsense' cannot be called: this version of torch has no such op",
        "os.system(%x)": "line 4: 'os.system' cannot be called",
        "aten.mm(%x)": "line 4: the op is called wrongly: its argument 'mat2' is missing",
        "aten.mm(%x, %w, *)": r"line 4: a number is left out \(\*\)",
        "aten.mm(%x, purple)": "line 4: 'purple' is no number, dtype, device, layout or memory format",
        "aten.mm(%x, [%w)": "line 4: a bracket is not closed",
        "aten.mm(%x, %w)  {very slow}": "line 4: 'very slow' is no remark that a node can have",
    },
    "fwd %/mm.0: f32[2,4]": {
        "fwd %/mm.0: f33[2,4]": "line 4: 'f33' is no dtype such as f32",
        "fwd %/mm.0: *": "line 4: the size is left out",
        "fwd %/mm.0: f32[2,4](1)": "line 4: .* has not as many strides as sizes",
        "fwd %x: f32[2,4]": "line 4: there are two nodes of the name 'x'",
        "mm = f32[2,4]": "line 4: .* does not begin like a node",
    },
    "{group=dp(2) op=sum": {
        "{group=dp(3) op=sum": r"line 9: group dp\(3\) is not that of the call; write group=dp, and the size",
        "{group=tp(2) op=sum": "line 9: no mesh axis 'tp'; axes are dp; name axes of the mesh",
        "{crowd=dp(2) op=sum": "line 9: 'crowd=.*' is no remark",
    },
    "= parameter": {
        "= secret": "line 2: 'secret' is no input; write one of parameter, buffer",
        "= state of 1 tensor(s)": r"line 2: 'w' belongs to no update; name it as in update\.0\.lr",
    },
    "return [%/sum.0, %reduce/w/wait]": {
        "": "line 10: the last line is not `return ...`",
        "return %/sum.0": r"line 11: it does not return a list of nodes; write `return \[%loss, %gradient\]`",
        "return [%/sum.0, %/mm.0]": "shapes do not tell which of 1 parameter.s. the 1 ",
    },
    "\n    in  %w": {
        "\n    # speed: high\n    in  %w": "in the header, 'speed' is no name of a header line; use schema, torch",
        "\n    # world: many\n    in  %w": "in the header, world is 'many'; write a number of ranks",
        "\n    # mesh: dp4\n    in  %w": "in the header, mesh is 'dp4'; write axes and sizes such as dp=2xtp=2",
        "\n    # schedule: never\n    in  %w": "in the header, schedule",
        "\n    # full_batch: maybe\n    in  %w": "in the header, full_batch is 'maybe'; write True or False",
        "\n    # accumulate_steps: 2.5\n    in  %w": "in the header, accumulate_steps is '2.5'; write a whole number",
        "\n    # clip_grad_norm: much\n    in  %w": "in the header, clip_grad_norm is 'much'; write a number",
        "\n    # clip_grad_norm: 0\n    in  %w": "in the header, clip_grad_norm is 0.0; give a number above 0",
        "\n    # cluster: cluster home 0123\n    in  %w": "in the header, cluster .* give the cluster= that",
        "\n    # optimizer: Lion (lion)\n    in  %w": "optimizer has the rule 'lion'; use one of adam",
    },
}


@pytest.mark.parametrize(("old", "new"), [(old, new) for old, changes in WRONG.items() for new in changes])
def test_an_error_names_the_line_and_the_fix(old: str, new: str) -> None:
    assert old in SMALL
    with pytest.raises(cf.ConfigValueError, match=WRONG[old][new]) as caught:
        parse_program(SMALL.replace(old, new, 1))
    assert str(caught.value).startswith("text of a program, line ")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"text": 5}, "text is 5; give a str"),
        ({"gradients": "w"}, "gradients is 'w'; give a list of names"),
        ({"flags": ["momentum"]}, r"flags is \['momentum'\]; give a dict"),
        ({"cluster": 7}, "cluster"),
    ],
)
def test_arguments_of_other_types_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(cf.ConfigTypeError, match=f"parse_program: {message}"):
        parse_program(**{"text": SMALL, **given})


def test_arguments_that_do_not_fit_the_text_are_refused() -> None:
    with pytest.raises(cf.ConfigValueError, match="constants= has 'x', and no constant of the text has this name"):
        parse_program(SMALL, constants={"x": torch.zeros(2, 4)})
    with pytest.raises(cf.ConfigValueError, match="flags has 'speed'; sgd has momentum, nesterov, maximize"):
        parse_program("# optimizer: SGD (sgd)\n" + SMALL, flags={"speed": True})


def test_what_is_never_true_of_a_program_is_refused() -> None:
    lines = SMALL.replace("_c10d_functional.wait_tensor(%reduce/w/all_reduce)", "aten.neg(%reduce/w/all_reduce)")
    with pytest.raises(cf.ConfigValueError, match="line 9: node reduce/w/all_reduce.* waits"):
        parse_program(lines)


def test_gradients_that_could_be_of_several_parameters_are_asked_for() -> None:
    with pytest.raises(cf.ConfigValueError, match="the 1 returned gradient.s. belong to; name them with gradients="):
        parse_program(TWO)
    with pytest.raises(cf.ConfigValueError, match="'c' is no parameter"):
        parse_program(TWO, gradients=["c"])


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_damaged_text_is_read_or_refused(data: st.DataObject) -> None:
    text = canonical_text(program_of(data.draw(st.sampled_from(["sgd", "across"])))) + SENT.replace("    ", "")
    lines = data.draw(st.sampled_from([SENT, SMALL, text])).split("\n")
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(lines) - 1))
        line, other = lines[at], lines[data.draw(st.integers(0, len(lines) - 1))]
        cut, end = data.draw(st.integers(0, len(line))), data.draw(st.integers(0, len(other)))
        piece = data.draw(st.sampled_from(["", other[end:], "[", "]", "%", "0", "-", ", ", "  {", "state"]))
        lines[at] = line[:cut] + piece + line[cut + data.draw(st.integers(0, 4)) :]
    with contextlib.suppress(cf.ConfigValueError):
        parse_program("\n".join(lines))


def test_a_copy_of_a_program_shares_nothing_that_can_be_changed() -> None:
    program = parse_program(SMALL)
    copied = program.copy()
    for name, value in vars(program).items():
        assert not isinstance(value, (dict, list)) or vars(copied)[name] is not value, name
