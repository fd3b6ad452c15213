"""What Gemma 2 and 3 do otherwise: norms behind attention and MLP too, and embeddings scaled by their size.

Their other differences are options of the plain layers: norms by 1 + weight (norms.py), GeGLU, windows, softcaps and
scales (`MaskOptions`), and for Gemma 3 a rotary base for the layers with a window. Sources: arXiv:2408.00118,
arXiv:2503.19786.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torch_fdattn.models.config import ModelConfig
from torch_fdattn.models.norms import norm_of
from torch_fdattn.models.transformer import MLP, Attention, KVCache


class ScaledEmbedding(nn.Embedding):
    """An embedding times the square root of its size, which is rounded to its dtype as in Gemma's own code."""

    def forward(self, tokens: Tensor) -> Tensor:
        scale = torch.tensor(self.embedding_dim**0.5, dtype=self.weight.dtype, device="cpu")
        return F.embedding(tokens, self.weight) * scale


class GemmaBlock(nn.Module):
    """Attention and an MLP, each between two norms and added to its input."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = norm_of(config, config.hidden_size)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = norm_of(config, config.hidden_size)
        self.pre_feedforward_layernorm = norm_of(config, config.hidden_size)
        self.mlp = MLP(config)
        self.post_feedforward_layernorm = norm_of(config, config.hidden_size)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: KVCache | None) -> Tensor:
        attended = self.self_attn(self.input_layernorm(x), cos, sin, cache)
        x = x + self.post_attention_layernorm(attended)
        inner = self.mlp(self.pre_feedforward_layernorm(x))
        return x + self.post_feedforward_layernorm(inner)
