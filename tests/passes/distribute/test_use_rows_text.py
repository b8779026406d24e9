"""What `use_rows` makes of a few lines of text, and what it leaves."""

from dataclasses import replace

from commfuse_fx.ir.core.placement import S
from commfuse_fx.ir.core.program import Program
from commfuse_fx.passes.distribute.use_rows import UseRows
from commfuse_fx.testing import assert_pass
from tests.passes.cases import read

EVALUATION = """
    # step: eval
    in  %a: f32[3,2] = parameter
    in  %b: f32[2] = parameter
    in  %c: f32[4] = parameter
    in  %x: f32[2] = input
    fwd %/mv.0: f32[3] = aten.mv(%a, %x)
    fwd %/t.0: f32[2,3](1,2) = aten.t(%a)
    fwd %/mv.1: f32[2] = aten.mv(%/t.0, %/mv.0)
    fwd %/dot.0: f32[] = aten.dot(%/mv.1, %b)
    return [%/dot.0]
"""


def marked(text: str) -> Program:
    """A program whose training step keeps rows of "a" and "c", and divides the update of "b" alone."""
    program = read(text)
    for name in ("a", "b", "c"):
        program.params[name] = replace(program.params[name], shard="dp", rows_alone=name != "b")
    return program


def test_rows_are_gathered_once_where_they_are_used_first() -> None:
    made = assert_pass(
        marked(EVALUATION),
        UseRows(),
        """
        in  %a: f32[2,2] = parameter
        in  %b: f32[2] = parameter
        in  %c: f32[2] = parameter
        in  %x: f32[2] = input
        fwd %shard/a/all_gather: f32[4,2] = _c10d_functional.all_gather_into_tensor(%a, 2, dp)  {group=dp(2) dtype=f32 bytes=24 members=[a]}
        fwd %shard/a/wait: f32[4,2] = _c10d_functional.wait_tensor(%shard/a/all_gather)
        fwd %shard/a/without_padding: f32[3,2] = aten.narrow(%shard/a/wait, 0, 0, 3)
        fwd %/mv.0: f32[3] = aten.mv(%shard/a/without_padding, %x)
        fwd %/t.0: f32[2,3](1,2) = aten.t(%shard/a/without_padding)
        fwd %/mv.1: f32[2] = aten.mv(%/t.0, %/mv.0)
        fwd %/dot.0: f32[] = aten.dot(%/mv.1, %b)
        return [%/dot.0]
        """,
    )
    assert {name: (param.shard, param.layout) for name, param in made.params.items()} == {
        "a": ("", (("dp", S(0)),)),
        "b": ("dp", ()),
        "c": ("", (("dp", S(0)),)),
    }


def test_whole_parameters_are_left() -> None:
    assert_pass(read(EVALUATION), UseRows(), None)


def test_a_training_step_is_left_to_shard_optimizer() -> None:
    training = EVALUATION.replace("# step: eval\n", "")
    assert_pass(marked(training), UseRows(), None)
