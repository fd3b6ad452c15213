"""Tensor-parallel attention: a drop-in replacement of a dense decoder's attention layer.

Each rank holds whole KV groups, or, with more ranks than KV heads, a part of one group's query heads
and that group's KV head (`head_sharding.py`). Strategies and gradients: `layers.py`.

B batch, T new tokens, H and K this rank's query and key-value heads, D head_dim, C hidden size.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from torch_fdattn.dist.groups import Group, name_of, rank_and_size
from torch_fdattn.dist.kv_cache.mask_options import MaskOptions
from torch_fdattn.dist.tensor_parallel.head_sharding import shard_heads
from torch_fdattn.dist.tensor_parallel.layers import TokenRows, TPLayer
from torch_fdattn.dist.tensor_parallel.weights import (
    expect_linear,
    sliced_linear,
    sum_gradient,
    sum_kv_gradient,
)
from torch_fdattn.functional import attention
from torch_fdattn.ops.rotary import rotate

#: Attention layers of this form, by package: others have the same parts and another meaning (rotary positions in
#: pairs, differential heads, layers without positions).
_SUPPORTED = {
    "torch_fdattn": ("Attention", "FusedAttention"),
    "transformers": ("LlamaAttention", "Qwen3Attention", "Qwen2Attention", "MistralAttention"),
}


def check_attention(module: nn.Module, world_size: int) -> None:
    """Refuses an attention that is not plain and causal, or that has fewer query heads than ranks."""
    expect_linear(module, "q_proj", "k_proj", "v_proj", "o_proj")
    kind = type(module)
    if kind.__name__ not in _SUPPORTED.get(kind.__module__.split(".")[0], ()):
        raise TypeError(
            "module must be the attention of a torch_fdattn Transformer or transformers' "
            f"{', '.join(_SUPPORTED['transformers'])}, got {kind.__module__}.{kind.__name__}"
        )
    for name, plain in (("sliding_window", None), ("attention_dropout", 0.0), ("is_causal", True)):
        if (value := getattr(module, name, plain)) != plain:
            raise ValueError(f"module's {name} must be {plain}, got {value}")
    shard_heads(*_head_counts(module), 0, world_size)


def _head_counts(module: nn.Module) -> tuple[int, int]:
    """(query heads, key-value heads) of a dense attention layer."""
    head_dim = module.head_dim
    return module.q_proj.out_features // head_dim, module.k_proj.out_features // head_dim


def _check_mask(mask: object) -> None:
    if mask is None or (isinstance(mask, Tensor) and mask.dim() == 4):
        return
    got = f"shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
    raise TypeError(
        "attention_mask must be None or a tensor (B, 1, T, S), as transformers' 'sdpa' and 'eager' "
        f"attention have it, got {got}"
    )


class TPAttention(TPLayer):
    """Causal self-attention with rotary positions, grouped KV heads and optional norms of q and k.

    forward(x, cos, sin, cache=None) as torch_fdattn.models.transformer.Attention: x and the result are (m_r, C) with
    ag_rs and (B, T, C) with all_reduce (auto: as `tokens` has it); cos and sin (B or 1, 1, T, D / 2) speak of all
    tokens; the cache stores this rank's KV heads.

    Attributes:
        heads, kv_heads: how many of them this rank holds.
        mask_options: the layer's window, softcap and scale.

    Examples:
        >>> config = torch_fdattn.models.ModelConfig("llama", 64, 32, 48, 1, 2, 2, 16, 128)
        >>> model = torch_fdattn.models.Transformer(config)
        >>> attention = model.layers[0].self_attn
        >>> parallel = torch_fdattn.dist.TPAttention.from_module(attention, None, "all_reduce")
        >>> x, (cos, sin) = torch.randn(2, 5, 32), model.rotary(torch.arange(5)[None])
        >>> torch.allclose(parallel(x, cos, sin), attention(x, cos, sin, None), atol=1e-5)
        True
    """

    def __init__(
        self, module: nn.Module, group: Group, strategy: str, allreduce_method: str,
        tokens: TokenRows | None, linear_strategy: str,
    ) -> None:  # fmt: skip
        """Called by `from_module`."""
        group_name = name_of(group)
        super().__init__(group_name, strategy, allreduce_method, tokens, linear_strategy)
        rank, world_size = rank_and_size(group_name)
        check_attention(module, world_size)
        self.head_dim, self.scale = module.head_dim, getattr(module, "scaling", None)
        self.mask_options = getattr(module, "mask_options", MaskOptions())
        self.layer = module.layer_idx if hasattr(module, "layer_idx") else module.layer
        all_heads, all_kv_heads = _head_counts(module)
        shard = shard_heads(all_heads, all_kv_heads, rank, world_size)
        self.heads, self.kv_heads = shard.q_heads, shard.kv_heads
        most = shard_heads(all_heads, all_kv_heads, 0, world_size)
        features_of_all = (most.q_heads + 2 * most.kv_heads) * self.head_dim
        self._largest = features_of_all, most.q_heads * self.head_dim

        def features(start: int, count: int) -> slice:
            return slice(start * self.head_dim, (start + count) * self.head_dim)

        q, kv = features(shard.q_start, self.heads), features(shard.kv_start, self.kv_heads)
        self.q_proj = sliced_linear(module.q_proj, rows=q)
        self.k_proj = sliced_linear(module.k_proj, rows=kv)
        self.v_proj = sliced_linear(module.v_proj, rows=kv)
        self.o_proj = sliced_linear(module.o_proj, columns=q)
        self.q_norm = copy.deepcopy(getattr(module, "q_norm", nn.Identity()))
        self.k_norm = copy.deepcopy(getattr(module, "k_norm", nn.Identity()))

        # Norms of heads see this rank's heads alone, the output's bias this rank's rows.
        for norm in (self.q_norm, self.k_norm):
            for parameter in norm.parameters():
                sum_gradient(parameter, group_name)
        if shard.replicated:
            for linear in (self.k_proj, self.v_proj):
                for parameter in (linear.weight, linear.bias):
                    sum_kv_gradient(parameter, shard.kv_start, all_kv_heads, group_name)
        if strategy == "ag_rs":
            sum_gradient(self.o_proj.bias, group_name)

    @staticmethod
    def from_module(
        module: nn.Module, group: Group, strategy: str, allreduce_method: str = "auto",
        tokens: TokenRows | None = None, linear_strategy: str = "auto",
    ) -> TPAttention:  # fmt: skip
        """This rank's heads of an attention layer: ours, or transformers' LlamaAttention and
        Qwen3Attention (whose forward the result then has).

        Raises:
            ValueError, TypeError: fewer query heads than ranks, an attention that is not plain causal, or an
                unknown strategy or method.
        """
        kind = TransformersTPAttention if hasattr(module, "layer_idx") else TPAttention
        return kind(module, group, strategy, allreduce_method, tokens, linear_strategy)

    def for_inference(self) -> TPLayer:
        """A `FusedTPAttention` over this layer's weights; the layer itself where they cannot be merged (DTensors), or
        the norms of q and k are no RMSNorms with one epsilon."""
        from torch_fdattn.dist.tensor_parallel.inference import fused_attention

        return fused_attention(self)

    def _qkv(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q (B, H, T, D), k and v (B, K, T, D) of all tokens, from this rank's x."""
        q, k, v = self._heads(x, cos, (self.q_proj, self.k_proj, self.v_proj))
        q, k = self.q_norm(q).transpose(1, 2), self.k_norm(k).transpose(1, 2)
        return rotate(q, cos, sin), rotate(k, cos, sin), v.transpose(1, 2)

    def _heads(self, x: Tensor, cos: Tensor, linears: Sequence[nn.Module]) -> list[Tensor]:
        """Every linear layer of all tokens, as heads (B, T, heads, D)."""
        tokens, length = self._all_tokens(x), cos.shape[2]
        if tokens % length:
            raise ValueError(
                f"x must hold whole sequences of {length} tokens like cos, got {tokens} tokens over all ranks"
            )
        return [
            y.view(tokens // length, length, y.shape[-1] // self.head_dim, self.head_dim)
            for y in self._columns(x, linears)
        ]

    def _attended(self, x: Tensor, cos: Tensor, sin: Tensor, cache) -> Tensor:
        """What attention gives for this rank's heads: (B, H, T, D)."""
        q, k, v = self._qkv(x, cos, sin)
        if cache is None:
            return attention(q, k, v, causal=True, **self.mask_options.keywords())[0]
        cache.append(self.layer, k, v)
        return cache.attend(self.layer, q, **self.mask_options.keywords())

    def _flat(self, out: Tensor) -> Tensor:
        """out (B, H, T, D) as `_row` takes it."""
        out = out.transpose(1, 2).flatten(2)
        return out.flatten(0, 1) if self.form == "ag_rs" else out

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: Any = None) -> Tensor:
        return self._row(self._flat(self._attended(x, cos, sin, cache)), self.o_proj)


class TransformersTPAttention(TPAttention):
    """`TPAttention` with the forward of transformers' LlamaAttention and Qwen3Attention.

    Without a mask attention is causal, by torch_fdattn.attention; with one, by torch's
    scaled_dot_product_attention. Further keywords are those that transformers gives to every attention
    (position_ids, use_cache, …) and mean nothing here. No attention weights are returned.
    """

    def forward(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None, cache=None, past_key_values=None, **kwargs,
    ) -> tuple[Tensor, None]:  # fmt: skip
        _check_mask(attention_mask)
        # transformers repeats the angles for both halves of a head: (B, T, D) -> (B, 1, T, D / 2).
        cos, sin = (x[:, None, :, : self.head_dim // 2] for x in position_embeddings)
        q, k, v = self._qkv(hidden_states, cos, sin)
        if cache is None:
            cache = past_key_values  # its name before transformers 5.24
        if cache is not None:
            k, v = cache.update(k, v, self.layer)
        if attention_mask is None:
            out, _ = attention(q, k, v, causal=True, scale=self.scale)
        else:
            out = F.scaled_dot_product_attention(
                q, k, v, attention_mask, scale=self.scale, enable_gqa=True
            )
        return self._row(self._flat(out), self.o_proj), None
