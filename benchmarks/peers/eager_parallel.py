"""What a PyTorch user writes without us: eager torch and NCCL (gloo on the CPU), on the same weights.

Tensor parallelism the common way: activations replicated, one `dist.all_reduce` after each layer;
attention by scaled_dot_product_attention over a preallocated cache.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from torch_fdattn.dist import TPMLP, ShardedKVCache, TPAttention
from torch_fdattn.models import Transformer
from torch_fdattn.ops.rotary import rotate

from . import torch_symm
from ..ranks import Ranks, all_gather


class Linears:
    """How a layer's matmuls meet their collectives: eager torch, activations replicated."""

    def enter(self, x: Tensor) -> Tensor:
        """Activations (B, T, C) as the layers take them."""
        return x

    def leave(self, x: Tensor, shape: torch.Size) -> Tensor:
        """(B, T, C) again; shape: (B, T)."""
        return x

    def columns(self, x: Tensor, linears: Sequence[nn.Linear]) -> list[Tensor]:
        return [F.linear(x, linear.weight) for linear in linears]

    def row(self, x: Tensor, linear: nn.Linear) -> Tensor:
        out = F.linear(x, linear.weight)
        dist.all_reduce(out)
        return out


class Alone(Linears):
    """No communication: what is left is wrong, and what the rest costs."""

    def row(self, x: Tensor, linear: nn.Linear) -> Tensor:
        return F.linear(x, linear.weight)


class FusedLinears(Linears):
    """torch's fused ops: activations (m_r, C) sharded along tokens."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks, self._group_name = ranks, ranks.group_name

    def enter(self, x: Tensor) -> Tensor:
        return x.flatten(0, 1).chunk(self._ranks.size)[self._ranks.rank].contiguous()

    def leave(self, x: Tensor, shape: torch.Size) -> Tensor:
        whole = x.new_empty(self._ranks.size, *x.shape)
        all_gather(whole, x, self._ranks)
        return whole.view(*shape, -1)

    def columns(self, x: Tensor, linears: Sequence[nn.Linear]) -> list[Tensor]:
        return torch_symm.gather(x, [linear.weight for linear in linears], self._group_name)

    def row(self, x: Tensor, linear: nn.Linear) -> Tensor:
        return torch_symm.scatter(x.flatten(0, -2), linear.weight, self._group_name)


class SymmetricLinears(Linears):
    """torch's all-reduces over symmetric memory."""

    def __init__(self, all_reduce: torch_symm.AllReduce, method: str) -> None:
        self._all_reduce, self._method = all_reduce, method

    def row(self, x: Tensor, linear: nn.Linear) -> Tensor:
        out = self._all_reduce(x.flatten(0, -2), linear.weight, self._method)
        return out.view(*x.shape[:-1], out.shape[-1])


EAGER = Linears()


def fused(
    ranks: Ranks, tokens: int, hidden: int, dtype: torch.dtype, replicated: bool
) -> dict[str, Linears]:
    """torch's own over symmetric memory by name, with a form for so many tokens; none on CPUs and on one rank."""
    if ranks.device.type != "cuda" or ranks.size == 1:
        return {}
    name = torch_symm.NAME
    if not replicated:
        return {} if tokens % ranks.size else {name: FusedLinears(ranks)}
    made = torch_symm.AllReduce(tokens, hidden, dtype, ranks.device, ranks.group_name)
    return {f"{name}/{by}": SymmetricLinears(made, by) for by in torch_symm.METHODS}


def mlp(layer: TPMLP, x: Tensor, by: Linears = EAGER) -> Tensor:
    """x replicated (M, C), or (B, T, C)."""
    gate, up = by.columns(x, (layer.gate_proj, layer.up_proj))
    return by.row(F.silu(gate) * up, layer.down_proj)


def attention(
    layer: TPAttention, x: Tensor, cos: Tensor, sin: Tensor, cache: tuple[Tensor, Tensor] | None,
    held: int, by: Linears = EAGER,
) -> Tensor:  # fmt: skip
    """x replicated (B, T, C), or as `by` has it; the cache's K and V (B, K, capacity, D) hold `held` tokens."""
    length = cos.shape[2]
    q, k, v = (
        y.view(-1, length, y.shape[-1] // layer.head_dim, layer.head_dim)
        for y in by.columns(x, (layer.q_proj, layer.k_proj, layer.v_proj))
    )
    q = rotate(layer.q_norm(q).transpose(1, 2), cos, sin)
    k, v = rotate(layer.k_norm(k).transpose(1, 2), cos, sin), v.transpose(1, 2)
    if cache is not None:
        for stored, new in zip(cache, (k, v), strict=True):
            stored[:, :, held : held + length] = new
        k, v = (stored[:, :, : held + length] for stored in cache)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=length > 1, enable_gqa=True)
    return by.row(out.transpose(1, 2).flatten(2), layer.o_proj)


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
    def __call__(self, tokens: Tensor, held: int, by: Linears = EAGER) -> Tensor:
        """Logits (B, vocab) of the last of tokens (B, T), after `held` tokens (0 if T > 1)."""
        model = self._model
        positions = torch.arange(held, held + tokens.shape[1], device=tokens.device)[None]
        cos, sin = model.rotary(positions)
        x = by.enter(model.embed_tokens(tokens))
        for block, cache in zip(model.layers, self._cache, strict=True):
            x = x + attention(block.self_attn, block.input_layernorm(x), cos, sin, cache, held, by)
            x = x + mlp(block.mlp, block.post_attention_layernorm(x), by)
        x = by.leave(x, tokens.shape)
        return self._head(model.norm(x[:, -1]))

    def _head(self, x: Tensor) -> Tensor:
        model = self._model
        if model.config.tie_embeddings:
            return F.linear(x, model.embed_tokens.weight)
        local = F.linear(x, model.lm_head.weight)
        if self._ranks == 1:
            return local
        return gather(local, model.lm_head.shares, -1)
