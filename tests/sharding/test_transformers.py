"""GPT-2, BERT and Llama divided over a mesh train as on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import commfuse_fx as cf
from tests.models import Batch, Case
from tests.sharding.divided_oracle import SINGLE, Divided, compare, divided, no_marks

WORDS, POSITIONS = 64, 16


class WithLabels(nn.Module):
    """A model of Hugging Face transformers, called with tokens, labels and an attention mask."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor | None = None) -> Any:
        return self.model(input_ids=tokens, labels=labels, attention_mask=mask)


def batch(rows: int) -> Batch:
    """Padding and ignored labels lie unevenly over the rows: some have none at all, one has nothing else."""
    tokens = torch.randint(3, WORDS, (rows, POSITIONS))
    labels = tokens.masked_fill(torch.rand(rows, POSITIONS) < 0.3, -100)
    labels[0] = -100
    labels[1] = tokens[1]
    mask = torch.ones_like(tokens)
    mask[1, 10:] = 0
    mask[5, 3:] = 0
    return tokens, labels, mask


SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 8}


def gpt2(attention: str, layers: int) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = GPT2Config(
        n_layer=layers,
        n_embd=32,
        n_head=8,
        n_positions=POSITIONS,
        vocab_size=WORDS,
        attn_implementation=attention,
        **none,
    )
    return WithLabels(GPT2LMHeadModel(config))


def llama(attention: str, layers: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**SIZES, num_hidden_layers=layers, num_key_value_heads=4, vocab_size=WORDS, use_cache=False)
    config._attn_implementation = attention
    return WithLabels(LlamaForCausalLM(config))


def bert(attention: str, layers: int) -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = BertConfig(
        **SIZES,
        num_hidden_layers=layers,
        vocab_size=WORDS,
        max_position_embeddings=16,
        attn_implementation=attention,
        **none,
    )
    return WithLabels(BertForMaskedLM(config))


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        d_model=32, d_kv=4, d_ff=64, num_layers=1, num_heads=8, vocab_size=WORDS, decoder_start_token_id=0,
        dropout_rate=0.0, use_cache=False,
    )  # fmt: skip
    return WithLabels(T5ForConditionalGeneration(config))


MODELS: dict[str, Callable[[str, int], nn.Module]] = {"gpt2": gpt2, "llama": llama, "bert": bert}
PLANS: dict[str, dict[str, bool]] = {
    "tensor": {},
    "vocabulary": {"vocabulary": True},
    "sequence": {"sequence": True},
    "mixed": {"vocabulary": True, "sequence": True},
}


def case_of(name: str, attention: str = "sdpa", layers: int = 2) -> Case:
    return Case(name, lambda: MODELS[name](attention, layers), batch, None)


def plan(name: str, axis: str) -> Callable[[nn.Module], object]:
    def mark(model: nn.Module) -> None:
        inner = model.get_submodule("model")
        cf.shard(inner, cf.plans.tensor_parallel(inner, axis=axis, **PLANS[name]))

    return no_marks if name == "data" else mark


@pytest.mark.parametrize(
    ("name", "attention", "how", "mesh"),
    [
        ("gpt2", "sdpa", "data", (8,)),
        ("gpt2", "sdpa", "tensor", (2, 4)),
        ("gpt2", "sdpa", "sequence", (8,)),
        ("gpt2", "sdpa", "mixed", (2, 2, 2)),
        ("gpt2", "eager", "vocabulary", (2, 2, 2)),
        ("llama", "sdpa", "data", (2, 4)),
        ("llama", "eager", "tensor", (2, 2, 2)),
        ("llama", "sdpa", "vocabulary", (8,)),  # fewer key and value heads than ranks
        ("llama", "sdpa", "mixed", (2, 4)),
        ("bert", "sdpa", "tensor", (8,)),
        ("bert", "sdpa", "sequence", (2, 4)),
    ],
)
def test_three_steps_as_on_one_device(name: str, attention: str, how: str, mesh: tuple[int, ...]) -> None:
    found = compare(
        case_of(name, attention, layers=1),
        mesh,
        plan(how, "dp" if len(mesh) == 1 else "tp"),
        tolerance=SINGLE,
        gradients=len(mesh) == 1,  # also without an optimizer: every model, and every kind of plan
    )
    assert bool(found.layouts()) == (how != "data")


def planned(name: str, how: str, mesh: tuple[int, ...]) -> Divided:
    case = case_of(name)
    model = case.model()
    found = divided(case, model, mesh, plan(how, "tp"))
    found.world.step.lower(*case.batches(1)[0])
    return found


@pytest.mark.parametrize("name", MODELS)
def test_a_block_takes_two_sums_forward_and_two_backward(name: str) -> None:
    found = planned(name, "tensor", (2, 4))
    assert found.collectives("tp") == {"forward all_reduce": 4, "backward all_reduce": 4}
    # The loss and its count, and all gradients together.
    assert found.collectives("dp") == {"forward all_reduce": 2, "backward all_reduce": 1}


def test_on_the_sequence_each_sum_becomes_a_scatter_and_a_gather() -> None:
    found = planned("gpt2", "sequence", (2, 4))
    have = found.collectives("tp")
    assert have == {
        "forward reduce_scatter": 4,
        "forward all_gather": 5,  # one for the head
        "backward reduce_scatter": 4,
        "backward all_gather": 4,
    }


@pytest.mark.parametrize("name", MODELS)
def test_data_parallel_sums_only_the_loss_and_the_gradients(name: str) -> None:
    found = planned(name, "data", (2, 4))
    assert found.collectives("dp,tp") == {"forward all_reduce": 2, "backward all_reduce": 1}
    assert len(list(found.program.collectives())) == 3
    assert found.layouts() == {}


def test_marks_by_hand_on_an_architecture_without_a_plan() -> None:
    def mark(model: nn.Module) -> None:
        for columns in ("**.q", "**.k", "**.v", "**.wi"):
            cf.shard(model, columns, weight=("tp", None))
        for rows in ("**.o", "**.wo"):
            cf.shard(model, rows, weight=(None, "tp"))

    case = Case("t5", t5, batch, None)
    found = compare(case, (2, 2), mark, tolerance=SINGLE, steps=2, gradients=False, comm_fusion={"openstate": False})
    # A block of the encoder has two pairs of layers, one of the decoder three.
    assert found.collectives("tp")["forward all_reduce"] == 5
