"""A dense decoder-only transformer, Llama and Qwen3, in plain PyTorch over torch_fdattn's attention.

Parameter names are those of Hugging Face checkpoints without the leading `model.`. One forward serves
training and scoring (no cache: causal attention over the tokens given) and generation (a cache: the
new tokens are stored, then attend to everything stored). How a cache stores its tokens, on one
process or spread over many, is the cache's matter: see torch_fdattn.dist.ShardedKVCache.
`Transformer.for_inference` gives the same model in merged and fused layers (`inference.py`).

B batch, T new tokens, H query heads, K key-value heads, D head_dim, C hidden size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torch_fdattn.functional import attention
from torch_fdattn.models.config import ModelConfig
from torch_fdattn.models.rope import Rotary
from torch_fdattn.ops.rotary import rotate

if TYPE_CHECKING:
    from torch_fdattn.models.inference import InferenceTransformer


class KVCache(Protocol):
    """What the model asks of a cache."""

    lengths: Tensor  # (B,) tokens stored before this step

    def append(self, layer: int, k: Tensor, v: Tensor) -> None: ...
    def attend(self, layer: int, q: Tensor) -> Tensor: ...
    def advance(self, tokens: int) -> None: ...


class Attention(nn.Module):
    """Causal self-attention with rotary positions and grouped KV heads; Qwen3 also norms the heads of q and k."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.head_dim = layer, config.head_dim
        hidden, bias = config.hidden_size, config.attention_bias
        q_size, kv_size = config.num_heads * self.head_dim, config.num_kv_heads * self.head_dim
        self.q_proj = nn.Linear(hidden, q_size, bias=bias)
        self.k_proj = nn.Linear(hidden, kv_size, bias=bias)
        self.v_proj = nn.Linear(hidden, kv_size, bias=bias)
        self.o_proj = nn.Linear(q_size, hidden, bias=bias)
        if config.qk_norm:
            self.q_norm = nn.RMSNorm(self.head_dim, config.norm_eps)
            self.k_norm = nn.RMSNorm(self.head_dim, config.norm_eps)
        else:
            self.q_norm = self.k_norm = nn.Identity()

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim))  # (B, T, H or K, D)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: KVCache | None) -> Tensor:
        """x (B, T, C) -> (B, T, C); cos and sin (B or 1, 1, T, D / 2) of the tokens' positions."""
        q = self.q_norm(self._heads(self.q_proj(x))).transpose(1, 2)  # (B, H, T, D)
        k = self.k_norm(self._heads(self.k_proj(x))).transpose(1, 2)  # (B, K, T, D)
        v = self._heads(self.v_proj(x)).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        return self.o_proj(attend(self.layer, q, k, v, cache))


def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, cache: KVCache | None) -> Tensor:
    """q (B, H, T, D), k and v (B, K, T, D) -> (B, T, H · D): among these tokens, or over the cache they go into."""
    if cache is None:
        out, _ = attention(q, k, v, causal=True)
    else:
        cache.append(layer, k, v)
        out = cache.attend(layer, q)
    return out.transpose(1, 2).flatten(2)


class MLP(nn.Module):
    """SwiGLU (arXiv:2002.05202)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = nn.Linear(hidden, inner, bias=bias)
        self.up_proj = nn.Linear(hidden, inner, bias=bias)
        self.down_proj = nn.Linear(inner, hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """Attention and an MLP, each behind a norm and added to its input."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: KVCache | None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, cache)
        return x + self.mlp(self.post_attention_layernorm(x))


class Transformer(nn.Module):
    """tokens (B, T) -> logits (B, T, vocab), or (B, 1, vocab) with last_only.

    Examples:
        >>> config = torch_fdattn.models.ModelConfig("qwen3", 64, 32, 48, 2, 4, 2, 16, 128)
        >>> model = torch_fdattn.models.Transformer(config)
        >>> tokens = torch.randint(64, (2, 10))
        >>> logits = model(tokens)
        >>> logits.shape
        torch.Size([2, 10, 64])
        >>> torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()

        With a cache, a prompt and a step:

        >>> cache = torch_fdattn.dist.ShardedKVCache(2, 2, 2, 32, 16, dtype=torch.float32, device="cpu")
        >>> with torch.no_grad():
        ...     _ = model(tokens, cache)
        ...     model(tokens[:, :1], cache, last_only=True).shape
        torch.Size([2, 1, 64])
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, layer) for layer in range(config.num_layers))
        self.norm = nn.RMSNorm(config.hidden_size, config.norm_eps)
        self.rotary = Rotary(config)
        if not config.tie_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(
        self, tokens: Tensor, cache: KVCache | None = None, last_only: bool = False
    ) -> Tensor:
        x = self.hidden(tokens, cache)
        return self.logits(x[:, -1:] if last_only else x)

    def hidden(self, tokens: Tensor, cache: KVCache | None = None) -> Tensor:
        """tokens (B, T) -> (B, T, C) behind the last block: what `logits` takes, of some rows or of all."""
        cos, sin = self.angles(tokens, cache)
        x = self.embed_tokens(tokens)
        for block in self.layers:
            x = block(x, cos, sin, cache)
        if cache is not None:
            cache.advance(tokens.shape[1])
        return x

    def angles(self, tokens: Tensor, cache: KVCache | None) -> tuple[Tensor, Tensor]:
        """cos and sin (B or 1, 1, T, D / 2) of the positions that the tokens (B, T) stand at."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        if cache is not None:
            positions = cache.lengths[:, None] + positions
        return self.rotary(positions)

    def logits(self, x: Tensor) -> Tensor:
        """(…, C) behind the last block -> (…, vocab)."""
        x = self.norm(x)
        if self.config.tie_embeddings:
            return F.linear(x, self.embed_tokens.weight)
        return self.lm_head(x)

    def for_inference(self) -> InferenceTransformer:
        """This model in merged and fused layers: the same results in fewer launches, without gradients.

        q, k and v are one product, and so are gate and up; norms and rotary positions of q and k are one launch, SwiGLU
        is one or part of its product, and a residual's addition and the norm behind it are one. `Engine` asks for it
        itself.

        **Weights.** The form has parameters of its own over this model's memory. So that gate and up (and q, k and v) lie
        together, this model's parameters become views of the merged weights: the same objects with the same values.
        Both models can be used at the same time, and both see what is written into a parameter in place (`load_state_dict`,
        an optimiser). What gives this model other memory (`.to`, `.data = …`, `load_state_dict(assign=True)`) does not
        reach the form: call this again afterwards. Two parameters then share a storage, which safetensors' `save_model`
        refuses; `save_file` of the state dict takes it.

        **What it does not do.** It has no gradients: its parameters do not require any, and a call for which some are
        wanted raises. Forward hooks of this model's modules, set before or after, do not run in it. Modules that it does
        not know (blocks, attention, MLPs or linear layers of other types, DTensors) are called as they are.

        Returns:
            An `InferenceTransformer`, with this model's forward and in evaluation mode.

        Examples:
            >>> config = torch_fdattn.models.ModelConfig("llama", 64, 32, 48, 1, 2, 1, 16, 8)
            >>> fused = torch_fdattn.models.Transformer(config).for_inference()
            >>> q, k, v = fused.layers[0].self_attn.qkv_proj(torch.ones(1, 32))
            >>> q.shape
            torch.Size([1, 32])
        """
        from torch_fdattn.models.inference import InferenceTransformer

        return InferenceTransformer(self)
