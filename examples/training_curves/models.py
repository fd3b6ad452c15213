"""A GPT and a T5-like encoder-decoder over bytes, in plain PyTorch; how they attend is an argument.

T5-like: root-mean-square norms, no positions but a learned bias by relative distance, in buckets that widen
with it, one for the encoder and one for the decoder, shared by their layers (arXiv:1910.10683, section 2.1).
Scores are scaled by head_dim ** -0.5, which T5 leaves to its initialisation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .text import VOCABULARY
from .ways import Attend

BUCKETS, FARTHEST = 32, 128


@dataclass(frozen=True)
class Size:
    """length: of GPT's window, and of T5's two halves together."""

    layers: int
    width: int
    heads: int
    length: int
    batch: int


SIZES = {"small": Size(6, 384, 6, 512, 32), "tiny": Size(2, 64, 2, 64, 8)}


class Attention(nn.Module):
    """Projections around `attend`; keys come from `memory` where there is one."""

    def __init__(self, size: Size, attend: Attend, causal: bool) -> None:
        super().__init__()
        self.heads, self.attend, self.causal = size.heads, attend, causal
        self.q, self.out = (nn.Linear(size.width, size.width, bias=False) for _ in range(2))
        self.kv = nn.Linear(size.width, 2 * size.width, bias=False)

    def forward(self, x: Tensor, memory: Tensor | None = None, bias: Tensor | None = None) -> Tensor:  # fmt: skip
        k, v = self.kv(x if memory is None else memory).chunk(2, -1)
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in (self.q(x), k, v))
        bias = None if bias is None else bias.to(q.dtype)
        return self.out(self.attend(q, k, v, self.causal, bias).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Pre-norm: attention, attention over an encoder's output where `cross`, and an MLP."""

    def __init__(self, size: Size, attend: Attend, causal: bool, norm: type[nn.Module], cross: bool = False) -> None:  # fmt: skip
        super().__init__()
        width = size.width
        self.norms = nn.ModuleList(norm(width) for _ in range(3 if cross else 2))
        self.own = Attention(size, attend, causal)
        self.cross = Attention(size, attend, False) if cross else None
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))  # fmt: skip

    def forward(self, x: Tensor, memory: Tensor | None = None, bias: Tensor | None = None) -> Tensor:  # fmt: skip
        x = x + self.own(self.norms[0](x), bias=bias)
        if self.cross is not None:
            x = x + self.cross(self.norms[1](x), memory)
        return x + self.mlp(self.norms[-1](x))


class GPT(nn.Module):
    """Learned positions, causal blocks; the loss of every next byte."""

    def __init__(self, size: Size, attend: Attend) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(VOCABULARY, size.width), nn.Embedding(size.length, size.width)  # fmt: skip
        self.blocks = nn.ModuleList(Block(size, attend, True, nn.LayerNorm) for _ in range(size.layers))  # fmt: skip
        self.norm, self.head = nn.LayerNorm(size.width), nn.Linear(size.width, VOCABULARY, bias=False)  # fmt: skip
        _initialise(self)

    def forward(self, tokens: Tensor) -> Tensor:
        """The mean loss over (B, length + 1) tokens."""
        x = tokens[:, :-1]
        x = self.bytes(x) + self.places(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            x = block(x)
        return _loss(self.head(self.norm(x)), tokens[:, 1:])


class T5(nn.Module):
    """Encodes the first half of a window, and predicts the second: prefix language modelling."""

    def __init__(self, size: Size, attend: Attend) -> None:
        super().__init__()
        self.bytes = nn.Embedding(VOCABULARY, size.width)
        layers = max(1, size.layers // 2)
        self.encoder = nn.ModuleList(Block(size, attend, False, nn.RMSNorm) for _ in range(layers))
        self.decoder = nn.ModuleList(Block(size, attend, True, nn.RMSNorm, True) for _ in range(layers))  # fmt: skip
        self.biases = nn.ModuleList(RelativeBias(size.heads, both) for both in (True, False))
        self.norms = nn.ModuleList(nn.RMSNorm(size.width) for _ in range(2))
        self.head = nn.Linear(size.width, VOCABULARY, bias=False)
        _initialise(self)

    def forward(self, tokens: Tensor) -> Tensor:
        half = tokens.shape[1] // 2
        source, target = tokens[:, :half], tokens[:, half - 1 : 2 * half]
        x, bias = self.bytes(source), self.biases[0](half, tokens.device)
        for block in self.encoder:
            x = block(x, bias=bias)
        memory, x = self.norms[0](x), self.bytes(target[:, :-1])
        bias = self.biases[1](x.shape[1], tokens.device)
        for block in self.decoder:
            x = block(x, memory, bias)
        return _loss(self.head(self.norms[1](x)), target[:, 1:])


class RelativeBias(nn.Module):
    """(1, H, S, S): a learned number by head and bucket of k_pos - q_pos."""

    def __init__(self, heads: int, both_ways: bool) -> None:
        super().__init__()
        self.table, self.both_ways = nn.Embedding(BUCKETS, heads), both_ways

    def forward(self, length: int, device: torch.device) -> Tensor:
        place = torch.arange(length, device=device)
        found = buckets(place[None, :] - place[:, None], self.both_ways)
        return self.table(found).permute(2, 0, 1)[None].contiguous()


def buckets(distance: Tensor, both_ways: bool) -> Tensor:
    """Half of the buckets for single small distances, the others wider and wider up to FARTHEST."""
    count, first = BUCKETS, torch.zeros_like(distance)
    if both_ways:  # keys behind the query have the upper half
        count //= 2
        first, distance = (distance > 0) * count, distance.abs()
    else:
        distance = (-distance).clamp(min=0)
    exact = count // 2
    wide = exact + (distance.clamp(min=1) / exact).log() / math.log(FARTHEST / exact) * (
        count - exact
    )
    return first + torch.where(distance < exact, distance, wide.long().clamp(max=count - 1))


def _initialise(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)


def _loss(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), target.flatten())


MODELS: dict[str, type[nn.Module]] = {"gpt": GPT, "t5": T5}
