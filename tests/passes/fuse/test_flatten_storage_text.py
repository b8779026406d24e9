"""What `flatten_storage` makes of a few lines of text, and what it leaves."""

from commfuse_fx.passes.fuse.flatten_storage import FlattenStorage
from tests.passes.cases import check

INPUTS = """
    # optimizer: SGD (sgd)
    in  %a: f32[16] = parameter
    in  %b: f32[3] = parameter
    in  %update.0.weight_decay: number = hyper-parameter of the optimizer
    in  %update.0.momentum: number = hyper-parameter of the optimizer
    in  %update.0.lr: number = hyper-parameter of the optimizer
    in  %update.0.dampening: number = hyper-parameter of the optimizer
    in  %update.0.is_first_step: number = hyper-parameter of the optimizer
"""
BUCKET = """
    fwd %/sum.0: f32[] = aten.sum(%a)
    fwd %/sum.1: f32[] = aten.sum(%b)
    fwd %/mul.0: f32[] = aten.mul.Tensor(%/sum.0, %/sum.1)
    bwd %/grad.expand.0: f32[3](0) = aten.expand(%/sum.0, [3])
    bwd %/grad.mul.0: f32[16] = aten.mul.Tensor(%a, %/sum.1)
    bwd %bucket.0/flatten.0: f32[3](0) = aten.reshape(%/grad.expand.0, [-1])
    bwd %bucket.0/flatten.1: f32[16] = aten.view(%/grad.mul.0, [-1])
    bwd %bucket.0/concat: f32[19] = aten.cat([%bucket.0/flatten.0, %bucket.0/flatten.1], 0)
    bwd %bucket.0/all_reduce: f32[19] = _c10d_functional.all_reduce(%bucket.0/concat, sum, dp)  {group=dp(2) op=sum dtype=f32 bytes=76 members=[b, a]}
    bwd %bucket.0/wait: f32[19] = _c10d_functional.wait_tensor(%bucket.0/all_reduce)
    bwd %bucket.0/split: (f32[3], f32[16]) = aten.split_with_sizes(%bucket.0/wait, [3, 16], 0)
    bwd %bucket.0/part.0: f32[3] = getitem(%bucket.0/split, 0)
    bwd %bucket.0/part.1: f32[16] = getitem(%bucket.0/split, 1)
    bwd %bucket.0/restore.0: f32[3] = aten.view(%bucket.0/part.0, [3])
    bwd %bucket.0/restore.1: f32[16] = aten.view(%bucket.0/part.1, [16])
"""
UPDATE = """
    upd %update.0/sgd: - = aten._fused_sgd_([%a, %b], [%bucket.0/restore.1, %bucket.0/restore.0], [], weight_decay=%update.0.weight_decay, momentum=%update.0.momentum, lr=%update.0.lr, dampening=%update.0.dampening, nesterov=False, maximize=False, is_first_step=%update.0.is_first_step)
    return [%/mul.0]
"""


def test_gradients_and_parameters_of_a_bucket_lie_in_flat_storage_padded_to_cache_lines() -> None:
    check(
        INPUTS + BUCKET + UPDATE,
        FlattenStorage(),
        """
        in  %a: f32[16] = parameter
        in  %b: f32[3] = parameter
        in  %update.0.weight_decay: number = hyper-parameter of the optimizer
        in  %update.0.momentum: number = hyper-parameter of the optimizer
        in  %update.0.lr: number = hyper-parameter of the optimizer
        in  %update.0.dampening: number = hyper-parameter of the optimizer
        in  %update.0.is_first_step: number = hyper-parameter of the optimizer
        in  %update.0.a: f32[32] = flat [a@0, b@16]
        fwd %/sum.0: f32[] = aten.sum(%a)
        fwd %/sum.1: f32[] = aten.sum(%b)
        fwd %/mul.0: f32[] = aten.mul.Tensor(%/sum.0, %/sum.1)
        bwd %bucket.0/storage: f32[32] = aten.empty.memory_format([32], dtype=f32, device=cpu)  {kept between steps}
        bwd %bucket.0/padding.0: f32[16] = aten.as_strided(%bucket.0/storage, [16], [1], 16)
        bwd %bucket.0/padding.0.zero: f32[16] = aten.zero_(%bucket.0/padding.0)
        bwd %/grad.expand.0: f32[3](0) = aten.expand(%/sum.0, [3])
        bwd %bucket.0/place.b: f32[3] = aten.as_strided(%bucket.0/storage, [3], [1], 16)
        bwd %bucket.0/write.b: f32[3] = aten.copy_(%bucket.0/place.b, %/grad.expand.0)
        bwd %bucket.0/place.a: f32[16] = aten.as_strided(%bucket.0/storage, [16], [1], 0)
        bwd %bucket.0/write.a: f32[16] = aten.mul.out(%a, %/sum.1, out=%bucket.0/place.a)
        bwd %bucket.0/in_place: f32[32] = _c10d_functional.all_reduce_(%bucket.0/storage, sum, dp)  {group=dp(2) op=sum dtype=f32 bytes=76 members=[b, a]}
        bwd %bucket.0/reduced: f32[32] = _c10d_functional.wait_tensor(%bucket.0/in_place)
        upd %update.0/grads.a: f32[32] = aten.as_strided(%bucket.0/reduced, [32], [1], 0)
        upd %update.0/sgd: - = aten._fused_sgd_([%update.0.a], [%update.0/grads.a], [], weight_decay=%update.0.weight_decay, momentum=%update.0.momentum, lr=%update.0.lr, dampening=%update.0.dampening, nesterov=False, maximize=False, is_first_step=%update.0.is_first_step)
        return [%/mul.0]
        """,
    )


def test_without_an_optimizer_results_are_views_of_the_bucket() -> None:
    inputs = "\n".join(line for line in INPUTS.splitlines() if "= parameter" in line)
    check(
        f"{inputs}{BUCKET}return [%/mul.0, %bucket.0/restore.1, %bucket.0/restore.0]",
        FlattenStorage(),
        """
        in  %a: f32[16] = parameter
        in  %b: f32[3] = parameter
        fwd %/sum.0: f32[] = aten.sum(%a)
        fwd %/sum.1: f32[] = aten.sum(%b)
        fwd %/mul.0: f32[] = aten.mul.Tensor(%/sum.0, %/sum.1)
        bwd %bucket.0/storage: f32[32] = aten.empty.memory_format([32], dtype=f32, device=cpu)
        bwd %bucket.0/padding.0: f32[16] = aten.as_strided(%bucket.0/storage, [16], [1], 16)
        bwd %bucket.0/padding.0.zero: f32[16] = aten.zero_(%bucket.0/padding.0)
        bwd %/grad.expand.0: f32[3](0) = aten.expand(%/sum.0, [3])
        bwd %bucket.0/place.b: f32[3] = aten.as_strided(%bucket.0/storage, [3], [1], 16)
        bwd %bucket.0/write.b: f32[3] = aten.copy_(%bucket.0/place.b, %/grad.expand.0)
        bwd %bucket.0/place.a: f32[16] = aten.as_strided(%bucket.0/storage, [16], [1], 0)
        bwd %bucket.0/write.a: f32[16] = aten.mul.out(%a, %/sum.1, out=%bucket.0/place.a)
        bwd %bucket.0/in_place: f32[32] = _c10d_functional.all_reduce_(%bucket.0/storage, sum, dp)  {group=dp(2) op=sum dtype=f32 bytes=76 members=[b, a]}
        bwd %bucket.0/reduced: f32[32] = _c10d_functional.wait_tensor(%bucket.0/in_place)
        bwd %bucket.0/reduced.b: f32[3] = aten.as_strided(%bucket.0/reduced, [3], [1], 16)
        bwd %bucket.0/reduced.a: f32[16] = aten.as_strided(%bucket.0/reduced, [16], [1], 0)
        return [%/mul.0, %bucket.0/reduced.a, %bucket.0/reduced.b]
        """,
    )


ALONE = """
    in  %a: f32[16] = parameter
    fwd %/sum.0: f32[] = aten.sum(%a)
    bwd %/grad.mul.0: f32[16] = aten.mul.Tensor(%a, %/sum.0)
    bwd %reduce/a/all_reduce: f32[16] = _c10d_functional.all_reduce(%/grad.mul.0, sum, dp)  {group=dp(2) op=sum dtype=f32 bytes=64 members=[a]}
    bwd %reduce/a/wait: f32[16] = _c10d_functional.wait_tensor(%reduce/a/all_reduce)
    return [%/sum.0, %reduce/a/wait]
"""


def test_a_gradient_that_is_reduced_alone_gets_storage_if_that_is_asked_for() -> None:
    check(ALONE, FlattenStorage(), None)
    check(ALONE, FlattenStorage(singles=True, least=65), None)
    check(
        ALONE,
        FlattenStorage(singles=True),
        """
        in  %a: f32[16] = parameter
        fwd %/sum.0: f32[] = aten.sum(%a)
        bwd %reduce/a/storage: f32[16] = aten.empty.memory_format([16], dtype=f32, device=cpu)
        bwd %reduce/a/place.a: f32[16] = aten.as_strided(%reduce/a/storage, [16], [1], 0)
        bwd %reduce/a/write.a: f32[16] = aten.mul.out(%a, %/sum.0, out=%reduce/a/place.a)
        bwd %reduce/a/in_place: f32[16] = _c10d_functional.all_reduce_(%reduce/a/storage, sum, dp)  {group=dp(2) op=sum dtype=f32 bytes=64 members=[a]}
        bwd %reduce/a/reduced: f32[16] = _c10d_functional.wait_tensor(%reduce/a/in_place)
        bwd %reduce/a/reduced.a: f32[16] = aten.as_strided(%reduce/a/reduced, [16], [1], 0)
        return [%/sum.0, %reduce/a/reduced.a]
        """,
    )


def test_a_gradient_that_was_rounded_on_its_way_stays_so() -> None:
    before = """
        in  %a: f32[16] = parameter
        fwd %/sum.0: f32[] = aten.sum(%a)
        bwd %/grad.mul.0: f32[16] = aten.mul.Tensor(%a, %/sum.0)
        bwd %/grad._to_copy.0: bf16[16] = aten._to_copy(%/grad.mul.0, dtype=bf16)
        bwd %/grad._to_copy.1: f32[16] = aten._to_copy(%/grad._to_copy.0, dtype=f32)
        bwd %reduce/a/all_reduce: f32[16] = _c10d_functional.all_reduce(%/grad._to_copy.1, sum, dp)  {group=dp(2) op=sum dtype=f32 bytes=64 members=[a]}
        bwd %reduce/a/wait: f32[16] = _c10d_functional.wait_tensor(%reduce/a/all_reduce)
        return [%/sum.0, %reduce/a/wait]
    """
    check(
        before,
        FlattenStorage(singles=True),
        """
        in  %a: f32[16] = parameter
        fwd %/sum.0: f32[] = aten.sum(%a)
        bwd %/grad.mul.0: f32[16] = aten.mul.Tensor(%a, %/sum.0)
        bwd %reduce/a/storage: f32[16] = aten.empty.memory_format([16], dtype=f32, device=cpu)
        bwd %/grad._to_copy.0: bf16[16] = aten._to_copy(%/grad.mul.0, dtype=bf16)
        bwd %reduce/a/place.a: f32[16] = aten.as_strided(%reduce/a/storage, [16], [1], 0)
        bwd %reduce/a/write.a: f32[16] = aten.copy_(%reduce/a/place.a, %/grad._to_copy.0)
        bwd %reduce/a/in_place: f32[16] = _c10d_functional.all_reduce_(%reduce/a/storage, sum, dp)  {group=dp(2) op=sum dtype=f32 bytes=64 members=[a]}
        bwd %reduce/a/reduced: f32[16] = _c10d_functional.wait_tensor(%reduce/a/in_place)
        bwd %reduce/a/reduced.a: f32[16] = aten.as_strided(%reduce/a/reduced, [16], [1], 0)
        return [%/sum.0, %reduce/a/reduced.a]
        """,
    )


CLIPPED = """
    upd %update/norms: (f32[], f32[]) = aten._foreach_norm.Scalar([%bucket.0/restore.1, %bucket.0/restore.0], 2)
    upd %update/stacked: f32[2] = aten.stack(%update/norms)
    upd %update/coefficient: f32[] = aten.linalg_vector_norm(%update/stacked, 2)
    upd %update/clipped.a: f32[16] = aten.mul.Tensor(%bucket.0/restore.1, %update/coefficient)
    upd %update/clipped.b: f32[3] = aten.mul.Tensor(%bucket.0/restore.0, %update/coefficient)
"""
IN_PLACE = """
    bwd %bucket.0/storage: f32[32] = aten.empty.memory_format([32], dtype=f32, device=cpu)  {kept between steps}
    bwd %bucket.0/padding.0: f32[16] = aten.as_strided(%bucket.0/storage, [16], [1], 16)
    bwd %bucket.0/padding.0.zero: f32[16] = aten.zero_(%bucket.0/padding.0)
    bwd %/grad.expand.0: f32[3](0) = aten.expand(%/sum.0, [3])
    bwd %bucket.0/place.b: f32[3] = aten.as_strided(%bucket.0/storage, [3], [1], 16)
    bwd %bucket.0/write.b: f32[3] = aten.copy_(%bucket.0/place.b, %/grad.expand.0)
    bwd %bucket.0/place.a: f32[16] = aten.as_strided(%bucket.0/storage, [16], [1], 0)
    bwd %bucket.0/write.a: f32[16] = aten.mul.out(%a, %/sum.1, out=%bucket.0/place.a)
    bwd %bucket.0/in_place: f32[32] = _c10d_functional.all_reduce_(%bucket.0/storage, sum, dp)  {group=dp(2) op=sum dtype=f32 bytes=76 members=[b, a]}
    bwd %bucket.0/reduced: f32[32] = _c10d_functional.wait_tensor(%bucket.0/in_place)
    bwd %bucket.0/reduced.b: f32[3] = aten.as_strided(%bucket.0/reduced, [3], [1], 16)
    bwd %bucket.0/reduced.a: f32[16] = aten.as_strided(%bucket.0/reduced, [16], [1], 0)
"""
FORWARD = "\n".join(line for line in BUCKET.splitlines() if "fwd %" in line)
FLAT = "in  %update.0.a: f32[32] = flat [a@0, b@16]"


def test_clipped_gradients_are_scaled_where_they_lie_as_one_tensor() -> None:
    step = (
        INPUTS
        + BUCKET
        + CLIPPED
        + UPDATE.replace("%bucket.0/restore.1, %bucket.0/restore.0", "%update/clipped.a, %update/clipped.b")
    )
    check(
        step,
        FlattenStorage(),
        f"""
        {INPUTS.partition("(sgd)")[2]}
        {FLAT}
        {FORWARD}
        {IN_PLACE}
        upd %update/norms: (f32[], f32[]) = aten._foreach_norm.Scalar([%bucket.0/reduced.a, %bucket.0/reduced.b], 2)
        upd %update/stacked: f32[2] = aten.stack(%update/norms)
        upd %update/coefficient: f32[] = aten.linalg_vector_norm(%update/stacked, 2)
        upd %update.0/grads.a: f32[32] = aten.as_strided(%bucket.0/reduced, [32], [1], 0)
        upd %update.0/grads.a.clipped: f32[32] = aten.mul_.Tensor(%update.0/grads.a, %update/coefficient)
        {UPDATE.replace("[%a, %b], [%bucket.0/restore.1, %bucket.0/restore.0]", "[%update.0.a], [%update.0/grads.a.clipped]")}
        """,
    )
