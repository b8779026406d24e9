"""What `use_all_parameters` makes of a few lines of text, and what it leaves."""

from commfuse_fx.passes.distribute.use_all_parameters import UseAllParameters
from commfuse_fx.testing import assert_pass

MODULE = """
    in  %w: f32[2,2] = parameter
    in  %unused: f32[2,3](1,2) = parameter
    in  %x: f32[2,2] = input
    fwd %/mm.0: f32[2,2] = aten.mm(%x, %w)
    fwd %outputs: (f32[2,2]) = hand_over([%/mm.0])
    bwd %output.grad: f32[2,2] = getitem(%outputs, 0)
    bwd %/grad.mm.0: f32[2,2] = aten.mm(%x, %output.grad)
    return [%outputs, %/grad.mm.0]
"""


def test_an_unused_parameter_gets_zeros_and_ranks_count_who_has_used_it() -> None:
    program = assert_pass(
        MODULE,
        UseAllParameters("dp"),
        """
        in  %w: f32[2,2] = parameter
        in  %unused: f32[2,3](1,2) = parameter
        in  %x: f32[2,2] = input
        fwd %/mm.0: f32[2,2] = aten.mm(%x, %w)
        fwd %outputs: (f32[2,2]) = hand_over([%/mm.0])
        bwd %output.grad: f32[2,2] = getitem(%outputs, 0)
        bwd %/grad.mm.0: f32[2,2] = aten.mm(%x, %output.grad)
        in  %constant.0: i32[2] = constant
        bwd %used parameters/all_reduce: i32[2] = _c10d_functional.all_reduce(%constant.0, sum, dp)  {group=dp(2) op=sum dtype=i32 bytes=8 members=[used parameters]}
        bwd %used parameters/wait: i32[2] = _c10d_functional.wait_tensor(%used parameters/all_reduce)
        bwd %reduce/unused/unused/memory: f32[2,3](1,2) = aten.empty_strided([2, 3], [1, 2], dtype=f32, device=cpu)
        bwd %reduce/unused/unused: f32[2,3](1,2) = aten.zero_(%reduce/unused/unused/memory)
        return [%outputs, %/grad.mm.0, %reduce/unused/unused, %used parameters/wait]
        """,
    )
    assert program.constants["_used_parameters"].tolist() == [1, 0]


def test_what_earlier_backwards_have_reached_counts_as_well() -> None:
    assert_pass(
        MODULE,
        UseAllParameters("dp", accumulates=True),
        """
        in  %w: f32[2,2] = parameter
        in  %unused: f32[2,3](1,2) = parameter
        in  %x: f32[2,2] = input
        in  %used parameters: i32[2] = gradient
        fwd %/mm.0: f32[2,2] = aten.mm(%x, %w)
        fwd %outputs: (f32[2,2]) = hand_over([%/mm.0])
        bwd %output.grad: f32[2,2] = getitem(%outputs, 0)
        bwd %/grad.mm.0: f32[2,2] = aten.mm(%x, %output.grad)
        in  %constant.0: i32[2] = constant
        bwd %used parameters/sum: i32[2] = aten.add.Tensor(%constant.0, %used parameters)
        bwd %used parameters/all_reduce: i32[2] = _c10d_functional.all_reduce(%used parameters/sum, sum, dp)  {group=dp(2) op=sum dtype=i32 bytes=8 members=[used parameters]}
        bwd %used parameters/wait: i32[2] = _c10d_functional.wait_tensor(%used parameters/all_reduce)
        bwd %reduce/unused/unused/memory: f32[2,3](1,2) = aten.empty_strided([2, 3], [1, 2], dtype=f32, device=cpu)
        bwd %reduce/unused/unused: f32[2,3](1,2) = aten.zero_(%reduce/unused/unused/memory)
        return [%outputs, %/grad.mm.0, %reduce/unused/unused, %used parameters/wait]
        """,
    )


def test_one_rank_uses_what_it_uses() -> None:
    assert_pass(f"# world: 1\n{MODULE}", UseAllParameters("dp"), None)
