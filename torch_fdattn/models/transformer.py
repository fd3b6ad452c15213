"""A dense decoder-only transformer in plain PyTorch over torch_fdattn's attention.

It is Llama; what other families do otherwise is an option of their `ModelConfig`, or in a file of their own (gemma.py).

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

from torch_fdattn.dist.kv_cache.mask_options import MaskOptions
from torch_fdattn.functional import attention
from torch_fdattn.models.config import ModelConfig
from torch_fdattn.models.norms import norm_of
from torch_fdattn.models.rope import Rotary
from torch_fdattn.ops.rotary import rotate

if TYPE_CHECKING:
    from torch_fdattn.models.inference import InferenceTransformer


class KVCache(Protocol):
    """What the model asks of a cache.

    A cache may also have `kv_slots(layer)`: a `torch_fdattn.ops.rotary.KVSlots`, where the inference form's kernel may write
    the step's keys and values itself, in place of a call of `append`; or None.
    """

    lengths: Tensor  # (B,) tokens stored before this step

    def append(self, layer: int, k: Tensor, v: Tensor) -> None: ...
    def attend(self, layer: int, q: Tensor, **options) -> Tensor: ...  # MaskOptions.keywords()
    def advance(self, tokens: int) -> None: ...


class Attention(nn.Module):
    """Causal self-attention with rotary positions and grouped KV heads; Qwen3 and Gemma 3 norm the heads of q and k.

    Attributes:
        mask_options: the layer's window, softcap and scale, a `torch_fdattn.dist.MaskOptions`.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.head_dim = layer, config.head_dim
        self.mask_options = config.mask_options(layer)
        hidden = config.hidden_size
        bias = config.attention_bias or config.family.qkv_bias
        q_size, kv_size = config.num_heads * self.head_dim, config.num_kv_heads * self.head_dim
        self.q_proj = nn.Linear(hidden, q_size, bias=bias)
        self.k_proj = nn.Linear(hidden, kv_size, bias=bias)
        self.v_proj = nn.Linear(hidden, kv_size, bias=bias)
        self.o_proj = nn.Linear(q_size, hidden, bias=config.attention_bias)
        if config.qk_norm:
            self.q_norm = norm_of(config, self.head_dim)
            self.k_norm = norm_of(config, self.head_dim)
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
        return self.o_proj(attend(self.layer, q, k, v, cache, self.mask_options))


def attend(
    layer: int, q: Tensor, k: Tensor, v: Tensor, cache: KVCache | None, options: MaskOptions
) -> Tensor:
    """q (B, H, T, D), k and v (B, K, T, D) -> (B, T, H · D): among these tokens, or over the cache they go into."""
    if cache is None:
        out, _ = attention(q, k, v, causal=True, **options.keywords())
    else:
        cache.append(layer, k, v)
        out = cache.attend(layer, q, **options.keywords())
    return out.transpose(1, 2).flatten(2)


class MLP(nn.Module):
    """SwiGLU, or GeGLU in Gemma (arXiv:2002.05202)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.activation = config.family.activation
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = nn.Linear(hidden, inner, bias=bias)
        self.up_proj = nn.Linear(hidden, inner, bias=bias)
        self.down_proj = nn.Linear(inner, hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate_proj(x)
        gate = F.silu(gate) if self.activation == "silu" else F.gelu(gate, approximate="tanh")
        return self.down_proj(gate * self.up_proj(x))


class Block(nn.Module):
    """Attention and an MLP, each behind a norm and added to its input."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = norm_of(config, config.hidden_size)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = norm_of(config, config.hidden_size)
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
        from torch_fdattn.models.gemma import GemmaBlock, ScaledEmbedding

        super().__init__()
        self.config = config
        embedding = ScaledEmbedding if config.family.scaled_embeddings else nn.Embedding
        block = GemmaBlock if config.family.post_norms else Block
        self.embed_tokens = embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(block(config, layer) for layer in range(config.num_layers))
        self.norm = norm_of(config, config.hidden_size)
        self.rotary = Rotary(config)
        self.rope_indices = config.rope_indices
        if not config.tie_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(
        self, tokens: Tensor, cache: KVCache | None = None, last_only: bool = False
    ) -> Tensor:
        x = self.hidden(tokens, cache)
        return self.logits(x[:, -1:] if last_only else x)

    def hidden(self, tokens: Tensor, cache: KVCache | None = None) -> Tensor:
        """tokens (B, T) -> (B, T, C) behind the last block: what `logits` takes, of some rows or of all."""
        angles = self.angles(tokens, cache)
        x = self.embed_tokens(tokens)
        for i, block in enumerate(self.layers):
            x = block(x, *angles[self.rope_indices[i]], cache)
        if cache is not None:
            cache.advance(tokens.shape[1])
        return x

    def angles(self, tokens: Tensor, cache: KVCache | None) -> list[tuple[Tensor, Tensor]]:
        """For each of `config.ropes`, cos and sin (B or 1, 1, T, D / 2) of the positions of the tokens (B, T)."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        if cache is not None:
            positions = cache.lengths[:, None] + positions
        return [self.rotary(positions, rope) for rope in range(len(self.rotary.frequencies))]

    def logits(self, x: Tensor) -> Tensor:
        """(…, C) behind the last block -> (…, vocab)."""
        x = self.norm(x)
        tied = self.config.tie_embeddings
        logits = F.linear(x, self.embed_tokens.weight) if tied else self.lm_head(x)
        cap = self.config.logit_softcap
        return cap * torch.tanh(logits / cap) if cap else logits

    def for_inference(self) -> InferenceTransformer:
        """This model in merged and fused layers: the same results in fewer launches, without gradients.

        q, k and v are one product, and so are gate and up; norms and rotary positions of q and k are one launch, SwiGLU
        is one or part of its product, and a residual's addition and the norm behind it are one. `LLM` asks for it
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
