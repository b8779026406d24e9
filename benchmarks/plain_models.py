"""GPT-2, Llama, ResNet-50 and an MLP in plain PyTorch, each of which returns its loss."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


def next_token_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross entropy of each position's logits with the token that follows, in float32 at least."""
    logits = logits[:, :-1].flatten(0, 1)
    logits = logits if logits.dtype is torch.float64 else logits.float()
    return F.cross_entropy(logits, labels[:, 1:].flatten())


def split_heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    """(batch, length, features) -> (batch, heads, length, features of a head)."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


class GPT2Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (split_heads(part, self.heads) for part in self.attend(self.norm1(x)).chunk(3, -1))
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        x = x + self.drop(self.project(mixed.transpose(1, 2).flatten(2)))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh")))


class GPT2(nn.Module):
    """The default is GPT-2 of 124 million parameters; the head shares the weight of the embedding."""

    def __init__(
        self,
        layers: int = 12,
        width: int = 768,
        heads: int = 12,
        vocabulary: int = 50304,
        length: int = 1024,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList([GPT2Block(width, heads, dropout) for _ in range(layers)])
        self.norm, self.drop = nn.LayerNorm(width), nn.Dropout(dropout)
        self.head = nn.Linear(width, vocabulary, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.02)
        self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device)))
        for block in self.blocks:
            x = block(x)
        return next_token_loss(self.head(self.norm(x)), labels)


def rotated(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """Rotary positions: pairs of a head's features, half a head apart, are turned by an angle per position."""
    first, second = x.chunk(2, -1)
    return x * cosine + torch.cat((-second, first), -1) * sine


class LlamaBlock(nn.Module):
    def __init__(self, width: int, heads: int, groups: int, inner: int) -> None:
        super().__init__()
        self.heads, self.groups = heads, groups
        self.norm1, self.norm2 = nn.RMSNorm(width, eps=1e-5), nn.RMSNorm(width, eps=1e-5)
        of_groups = width // heads * groups
        self.query, self.output = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.key, self.value = (nn.Linear(width, of_groups, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
        given = self.norm1(x)
        query = rotated(split_heads(self.query(given), self.heads), cosine, sine)
        key = rotated(split_heads(self.key(given), self.groups), cosine, sine)
        value = split_heads(self.value(given), self.groups)
        key, value = (part.repeat_interleave(self.heads // self.groups, 1) for part in (key, value))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.output(mixed.transpose(1, 2).flatten(2))
        given = self.norm2(x)
        return x + self.down(F.silu(self.gate(given)) * self.up(given))


class Llama(nn.Module):
    """The default has 1.1 thousand million parameters."""

    cosine: torch.Tensor
    sine: torch.Tensor

    def __init__(
        self,
        layers: int = 16,
        width: int = 2048,
        heads: int = 32,
        groups: int = 8,
        inner: int = 8192,
        vocabulary: int = 32000,
        length: int = 2048,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList([LlamaBlock(width, heads, groups, inner) for _ in range(layers)])
        self.norm, self.head = nn.RMSNorm(width, eps=1e-5), nn.Linear(width, vocabulary, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.02)
        size = width // heads
        rates = 10000.0 ** (-torch.arange(0, size, 2) / size)
        angles = torch.outer(torch.arange(length), rates).repeat(1, 2)
        self.register_buffer("cosine", angles.cos(), persistent=False)
        self.register_buffer("sine", angles.sin(), persistent=False)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x, length = self.tokens(ids), ids.shape[1]
        for block in self.blocks:
            x = block(x, self.cosine[:length], self.sine[:length])
        return next_token_loss(self.head(self.norm(x)), labels)


class Bottleneck(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.conv1, self.norm1 = nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.conv3, self.norm3 = nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs)
        self.short: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.short = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = F.relu(self.norm1(self.conv1(x)))
        inner = F.relu(self.norm2(self.conv2(inner)))
        return F.relu(self.norm3(self.conv3(inner)) + self.short(x))


class ResNet(nn.Module):
    """The default is ResNet-50."""

    def __init__(self, blocks: tuple[int, ...] = (3, 4, 6, 3), width: int = 64, classes: int = 1000) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, padding=3, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
        )
        layers: list[nn.Module] = []
        inputs = width
        for stage, count in enumerate(blocks):
            for number in range(count):
                layers.append(Bottleneck(inputs, width << stage, 2 if stage and not number else 1))
                inputs = 4 * (width << stage)
        self.layers, self.head = nn.Sequential(*layers), nn.Linear(inputs, classes)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        features = self.layers(self.stem(images)).mean((2, 3))
        return F.cross_entropy(self.head(features), labels)


class NormedMLP(nn.Module):
    """Linear layers of one width, each with GELU, a norm and dropout; ten classes."""

    def __init__(self, width: int = 256, layers: int = 16, dropout: float = 0.0) -> None:
        super().__init__()
        inner = [
            layer
            for _ in range(layers)
            for layer in (nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width), nn.Dropout(dropout))
        ]
        self.layers = nn.Sequential(*inner, nn.Linear(width, 10))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.layers(x), labels)
