"""Small models of many kinds, with batches to train them on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import commfuse_fx as cf

LossFn = Callable[[Any, Any], torch.Tensor]
Batch = tuple[Any, ...]


@dataclass(frozen=True)
class Case:
    """`batch(rows)` makes the arguments of one call; all its tensors have `rows` in dimension 0.

    `coupled`: rows influence each other inside the model, so ranks with their own batches are not one
    device with the global batch.
    """

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    loss_fn: LossFn | None = F.cross_entropy
    coupled: bool = False

    def model(self, dtype: torch.dtype = torch.float64) -> nn.Module:
        torch.manual_seed(0)
        return randomised(self.build()).to(dtype)

    def batches(self, count: int, rows: int = 8, dtype: torch.dtype = torch.float64) -> list[Batch]:
        torch.manual_seed(1)
        return [_cast(self.batch(rows), dtype) for _ in range(count)]


def _cast(batch: Batch, dtype: torch.dtype) -> Batch:
    cast: Batch = pytree.tree_map_only(torch.Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, batch)
    return cast


def shards(batch: Batch, world: int) -> list[Batch]:
    """The ranks' parts of a global batch."""
    return [
        pytree.tree_map_only(torch.Tensor, lambda t, rank=rank: t.chunk(world)[rank], batch) for rank in range(world)
    ]


def randomised(model: nn.Module) -> nn.Module:
    """Biases, norms and running statistics away from the zeros and ones that hide mistakes."""
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.ndim <= 1 and tensor.is_floating_point():
                tensor.add_(torch.rand_like(tensor) * 0.2 + 0.05)
    return model


class DenseLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_mapping = nn.Linear(10, 32)
        self.output_mapping = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.output_mapping(self.input_mapping(x))


class TwoLayers(nn.Module):
    """Two layers without a forward: tests say what it is."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 2)


class DigitsNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.flatten = nn.Flatten()
        self.head = nn.Linear(8 * 8, 10)
        self.layer1 = DenseLayer()
        self.layer2 = DenseLayer()
        self.layer3 = DenseLayer()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer3(self.layer2(self.layer1(self.head(self.flatten(x)))))


class MLP(nn.Sequential):
    def __init__(self, width: int = 16, depth: int = 2, inputs: int = 12, classes: int = 5) -> None:
        layers: list[nn.Module] = [nn.Linear(inputs, width), nn.GELU()]
        for _ in range(depth):
            layers += [nn.Linear(width, width), nn.Tanh()]
        super().__init__(*layers, nn.Linear(width, classes))


class ConvNet(nn.Module):
    """Also has NHWC weights, whose memory is dense but not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 3, padding=1)
        self.norm1 = nn.BatchNorm2d(6)
        self.conv2 = nn.Conv2d(6, 4, 3, stride=2).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.norm2 = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norm1(self.conv1(x)))
        x = F.relu(self.norm2(self.conv2(x)))
        return self.head(x.mean((2, 3)))


class TiedLanguageModel(nn.Module):
    """Embedding and output projection are one parameter; a linear layer is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, 8)
        self.mix = nn.Linear(8, 8)
        self.project = nn.Linear(8, 17, bias=False)
        self.project.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.mix(self.embed(tokens)))
        return self.project(torch.tanh(self.mix(x))).flatten(0, 1)


class PartlyTrained(nn.Module):
    """One parameter is frozen, one takes no part in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 16)
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.unused = nn.Linear(16, 16)
        self.last = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.frozen(torch.tanh(self.first(x)))))


class SharedGradient(nn.Module):
    """`a` and `b` appear only as a + b: their gradients are one value."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(12, 5))
        self.b = nn.Parameter(torch.randn(12, 5))
        self.c = nn.Parameter(torch.randn(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ (self.a + self.b)) + self.c


@dataclass
class Output:
    loss: torch.Tensor
    logits: torch.Tensor


class Structured(nn.Module):
    """Takes a dict, returns a dataclass that carries the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(6, 8)
        self.right = nn.Linear(4, 8)
        self.head = nn.Linear(8, 5)

    def forward(self, features: dict[str, torch.Tensor], labels: torch.Tensor) -> Output:
        logits = self.head(torch.sigmoid(self.left(features["left"]) * self.right(features["right"])))
        return Output(F.cross_entropy(logits, labels), logits)


class Contrastive(nn.Module):
    """Normalises by the mean over all ranks and scores every row against the rows of all ranks.

    On one device the collectives do nothing, so the global batch there is the reference.
    """

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(12, 8)
        self.project = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.encode(x))
        x = self.project(x - cf.ops.all_reduce(x.mean(0), "avg"))
        return x @ cf.ops.all_gather(x).t()


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=32, n_head=2, n_positions=16, vocab_size=61, **none))


def _bert_config() -> Any:
    from transformers import BertConfig

    return BertConfig(
        vocab_size=61,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=48,
        max_position_embeddings=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=3,
    )


def bert_mlm() -> nn.Module:
    from transformers import BertForMaskedLM

    return BertForMaskedLM(_bert_config())


def bert_classifier() -> nn.Module:
    from transformers import BertForSequenceClassification

    return BertForSequenceClassification(_bert_config())


class WithLabels(nn.Module):
    """A Hugging Face model called with its tokens and labels."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> Any:
        return self.model(input_ids=tokens, labels=labels)


def _rows(*shape: int, classes: int = 5) -> Callable[[int], Batch]:
    return lambda rows: (torch.randn(rows, *shape), torch.randint(classes, (rows,)))


def _language(rows: int) -> Batch:
    tokens = torch.randint(61, (rows, 9))
    return tokens, tokens


def _next_token(output: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output, tokens.flatten())


DIGITS = Case("digits", DigitsNet, _rows(8, 8, classes=10))
MLP_CASE = Case("mlp", MLP, _rows(12))
BF16 = Case("bf16", MLP, _rows(12))
WIDE = Case("wide", lambda: MLP(width=256, depth=3), _rows(12))
CONV = Case("conv", ConvNet, _rows(3, 9, 9), coupled=True)
TIED = Case(
    "tied", TiedLanguageModel, lambda rows: (torch.randint(17, (rows, 6)), torch.randint(17, (rows, 6))), _next_token
)
PARTLY = Case("partly", PartlyTrained, _rows(12))
SHARED = Case("shared", SharedGradient, _rows(12))
STRUCTURED = Case(
    "structured",
    Structured,
    lambda rows: ({"left": torch.randn(rows, 6), "right": torch.randn(rows, 4)}, torch.randint(5, (rows,))),
    None,
)
CONTRASTIVE = Case("contrastive", Contrastive, lambda rows: (torch.randn(rows, 12), torch.arange(rows)))
GPT2 = Case("gpt2", lambda: WithLabels(gpt2()), _language, None)
BERT_MLM = Case("bert_mlm", lambda: WithLabels(bert_mlm()), _language, None)
BERT_CLASSIFIER = Case(
    "bert_classifier",
    lambda: WithLabels(bert_classifier()),
    lambda rows: (torch.randint(61, (rows, 9)), torch.randint(3, (rows,))),
    None,
)

CASES: Sequence[Case] = (
    DIGITS, MLP_CASE, WIDE, CONV, TIED, PARTLY, SHARED, STRUCTURED, CONTRASTIVE, GPT2, BERT_MLM, BERT_CLASSIFIER,
)  # fmt: skip
