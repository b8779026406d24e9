"""Attention with a causal mask computes what it does with `is_causal=True`, and models that are traced get that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import commfuse_fx as cf
from commfuse_fx.ir.core.bound_arguments import arguments_of
from commfuse_fx.ir.core.halves import crossing
from commfuse_fx.ir.core.meta import info
from commfuse_fx.ir.core.program import Program
from commfuse_fx.ir.ops.fixed_values import held_values
from tests.capture.equivalence import assert_gradients_as_eager, assert_trains_as_eager
from tests.models import Case
from tests.sharding.divided_oracle import SINGLE, compare

aten = torch.ops.aten
FORWARD = aten._scaled_dot_product_flash_attention_for_cpu.default
BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=str
)
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 9), (33, 33), (70, 40), (40, 70), (530, 530)])
def test_the_flag_computes_what_the_mask_does(dtype: torch.dtype, tolerance: float, queries: int, keys: int) -> None:
    made = torch.Generator().manual_seed(0)
    for hidden in (-torch.inf, torch.finfo(dtype).min):
        for scale in (1.0, 50.0):  # weights that are alike, and weights of one key alone
            q, k, v, grad = (
                torch.randn(2, length, 2, 8, generator=made, dtype=torch.float64).transpose(1, 2).to(dtype)
                for length in (queries, keys, keys, queries)
            )
            q = q * scale
            mask = torch.zeros(queries, keys, dtype=dtype)
            mask = mask.masked_fill(torch.ones(queries, keys, dtype=torch.bool).triu(1), hidden)
            want = FORWARD(q, k, v, attn_mask=mask)
            have = FORWARD(q, k, v, 0.0, True)
            want += BACKWARD(grad, q, k, v, *want, 0.0, False, attn_mask=mask)
            have += BACKWARD(grad, q, k, v, *have, 0.0, True)
            for one, other in zip(want, have, strict=True):
                torch.testing.assert_close(other, one, rtol=tolerance, atol=tolerance * float(one.abs().max()))


class Attention(nn.Module):
    """One layer of attention with a mask that `make` makes of the length and the dtype."""

    def __init__(self, make: Callable[[int, torch.dtype], torch.Tensor]) -> None:
        super().__init__()
        self.inner, self.make = nn.Linear(8, 24), make

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, _ = x.shape
        q, k, v = (part.view(rows, length, 2, 4).transpose(1, 2) for part in self.inner(x).chunk(3, -1))
        mask = self.make(length, x.dtype)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).square().mean()


def bools(length: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.ones(length, length, dtype=torch.bool).tril()


def square(length: int, dtype: torch.dtype) -> torch.Tensor:
    return nn.Transformer.generate_square_subsequent_mask(length, dtype=dtype)


def lowest(length: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full((1, 1, length, length), torch.finfo(dtype).min, dtype=dtype).triu(1)


def nothing(length: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(length, length, dtype=dtype)


def window(length: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.ones(length, length, dtype=torch.bool).tril().triu(-2)


def attentions(program: Program) -> list[tuple[bool, bool]]:
    """Of each call of attention and of its backward: whether it has a mask, and whether it is told to be causal."""
    calls = [node for node in program.graph.nodes if node.target in (FORWARD, BACKWARD)]
    given = [arguments_of(node) for node in calls]
    return [(each["attn_mask"] is not None, each["is_causal"]) for each in given]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("make", [bools, square, lowest, nothing, window], ids=lambda make: make.__name__)
def test_masks_that_a_model_makes(make: Callable[[int, torch.dtype], torch.Tensor], dtype: torch.dtype) -> None:
    model = Attention(make).to(dtype)
    x = torch.randn(4, 6, 8).to(dtype)
    lowered = cf.compile(model, device_num=2, form="step").lower(x)
    assert attentions(lowered.program) == [(make is window, make not in (window, nothing))] * 2
    makers = (aten.triu.default, aten.tril.default, aten.where.self, aten.ones.default, aten.zeros.default)
    assert any(node.target in makers for node in lowered.program.graph.nodes) == (make is window)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    assert_gradients_as_eager(model, (x,), tolerance=tolerance)


def test_in_the_module_form_the_mask_does_not_cross() -> None:
    program = cf.compile(Attention(bools), device_num=2).lower(torch.randn(4, 6, 8)).program
    assert attentions(program) == [(False, True)] * 2
    assert not [info(node).name for node in crossing(program) if "where" in info(node).name]
    kept = cf.compile(Attention(window), device_num=2).lower(torch.randn(4, 6, 8)).program
    assert [info(node).name for node in held_values(kept) if "where" in info(node).name]


def test_an_encoder_layer_of_torch() -> None:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.layer(x, src_mask=square(x.shape[1], x.dtype))
            return out.square().mean()

    model, x = Encoder().double(), torch.randn(4, 6, 8, dtype=torch.float64)
    lowered = cf.compile(model, device_num=2, form="step").lower(x)
    assert attentions(lowered.program) == [(False, True)] * 2
    assert_trains_as_eager(model, [((x,), {})])


SMALL = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
SMALL |= {"intermediate_size": 24, "max_position_embeddings": 16, "use_cache": False}  # with it no mask is made
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": (
        "GPT2Config",
        "GPT2LMHeadModel",
        {"vocab_size": 40, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 16, "use_cache": False, **IDS}
        | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    ),
    "llama": ("LlamaConfig", "LlamaForCausalLM", {**SMALL, "num_key_value_heads": 2, **IDS}),
    "bert": (
        "BertConfig",
        "BertForMaskedLM",
        {**SMALL, "num_hidden_layers": 1, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    ),
}


def transformer(name: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config, model, settings = MODELS[name]
    made: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**settings))
    return made.double().train()


@pytest.mark.parametrize("is_masked", [False, True], ids=["plain", "padded"])
@pytest.mark.parametrize("name", MODELS)
def test_models_of_hugging_face(name: str, is_masked: bool) -> None:
    model = transformer(name)
    words = torch.randint(3, 40, (2, 8))
    given = {"input_ids": words, "labels": words.clone()}
    if is_masked:
        given["attention_mask"] = torch.ones(2, 8, dtype=torch.long)
        given["attention_mask"][1, 6:] = 0
    lowered = cf.compile(model, device_num=2, form="step").lower(**given)
    count = 2 * model.config.num_hidden_layers  # forward and backward
    assert attentions(lowered.program) == [(is_masked, name != "bert" and not is_masked)] * count
    notes = [note.reason for note in lowered.program.notes if note.topic == "attention without its mask"]
    assert notes == ["it is causal, and kernels are told so instead"] * (name != "bert" and not is_masked)
    assert_trains_as_eager(model, [((), given)])


class WithLabels(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> Any:
        return self.model(input_ids=tokens, labels=labels)


@pytest.mark.parametrize("mesh", [(2,), (2, 2)], ids=str)
def test_a_divided_step_divides_attention_that_is_causal(mesh: tuple[int, ...]) -> None:
    def mark(model: nn.Module) -> None:
        inner = model.get_submodule("model")
        cf.shard(inner, cf.plans.tensor_parallel(inner, axis="dp" if len(mesh) == 1 else "tp"))

    def batch(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        words = torch.randint(3, 40, (rows, 8))
        return words, words.clone()

    case = Case("llama", lambda: WithLabels(transformer("llama").float()), batch, None)
    found = compare(case, mesh, mark, tolerance=SINGLE, gradients=False)
    assert set(attentions(found.program)) == {(False, True)}
    heads = {info(node).spec[0].shape[1] for node in found.program.graph.nodes if node.target is FORWARD}
    assert heads == {4 // mesh[-1]}
