"""What a PyTorch user writes without us: eager torch and NCCL (gloo on the CPU), on the same weights.

Tensor parallelism the common way: activations replicated, one `dist.all_reduce` after each layer;
attention by scaled_dot_product_attention over a preallocated cache.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from torch_fdattn.dist import TPMLP, ShardedKVCache, TPAttention
from torch_fdattn.models import Transformer
from torch_fdattn.ops.rotary import rotate


def mlp(layer: TPMLP, x: Tensor) -> Tensor:
    """x replicated (M, C), or (B, T, C)."""
    inner = F.silu(F.linear(x, layer.gate_proj.weight)) * F.linear(x, layer.up_proj.weight)
    out = F.linear(inner, layer.down_proj.weight)
    dist.all_reduce(out)
    return out


def attention(
    layer: TPAttention, x: Tensor, cos: Tensor, sin: Tensor, cache: tuple[Tensor, Tensor] | None,
    held: int,
) -> Tensor:  # fmt: skip
    """x replicated (B, T, C); the cache's K and V (B, K, capacity, D) hold `held` tokens."""
    q, k, v = (
        F.linear(x, linear.weight).unflatten(-1, (-1, layer.head_dim))
        for linear in (layer.q_proj, layer.k_proj, layer.v_proj)
    )
    q = rotate(layer.q_norm(q).transpose(1, 2), cos, sin)
    k, v = rotate(layer.k_norm(k).transpose(1, 2), cos, sin), v.transpose(1, 2)
    length = q.shape[2]
    if cache is not None:
        for stored, new in zip(cache, (k, v), strict=True):
            stored[:, :, held : held + length] = new
        k, v = (stored[:, :, : held + length] for stored in cache)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=length > 1, enable_gqa=True)
    out = F.linear(out.transpose(1, 2).flatten(2), layer.o_proj.weight)
    dist.all_reduce(out)
    return out


def gather(own: Tensor, shares: Sequence[int], dim: int) -> Tensor:
    """All ranks' parts in one; uneven ones are padded on the way, since gloo takes no others."""
    most = max(shares)
    if (short := most - own.shape[dim]) > 0:
        shape = list(own.shape)
        shape[dim] = short
        own = torch.cat([own, own.new_zeros(shape)], dim)
    parts = [torch.empty_like(own) for _ in shares]
    dist.all_gather(parts, own)
    return torch.cat([p.narrow(dim, 0, n) for p, n in zip(parts, shares, strict=True)], dim)


class TorchModel:
    """A parallelised Transformer's weights in eager torch; the cache is the engine's storage."""

    def __init__(self, model: Transformer, cache: ShardedKVCache, ranks: int) -> None:
        self._model, self._ranks = model, ranks
        self._cache = [cache.layer(i) for i in range(model.config.num_layers)]

    @torch.inference_mode()
    def __call__(self, tokens: Tensor, held: int) -> Tensor:
        """Logits (B, vocab) of the last of tokens (B, T), after `held` tokens (0 if T > 1)."""
        model = self._model
        positions = torch.arange(held, held + tokens.shape[1], device=tokens.device)[None]
        cos, sin = model.rotary(positions)
        x = model.embed_tokens(tokens)
        for block, cache in zip(model.layers, self._cache, strict=True):
            x = x + attention(block.self_attn, block.input_layernorm(x), cos, sin, cache, held)
            x = x + mlp(block.mlp, block.post_attention_layernorm(x))
        return self._head(model.norm(x[:, -1]))

    def _head(self, x: Tensor) -> Tensor:
        model = self._model
        if model.config.tie_embeddings:
            return F.linear(x, model.embed_tokens.weight)
        local = F.linear(x, model.lm_head.weight)
        if self._ranks == 1:
            return local
        return gather(local, model.lm_head.shares, -1)
