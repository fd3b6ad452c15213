"""A dense decoder-only transformer, Llama and Qwen3, in plain PyTorch over torch_fdattn's attention.

On GPUs and without gradients its blocks take fewer launches than there are modules (`fewer_launches.py`).

Parameter names are those of Hugging Face checkpoints without the leading `model.`. One forward serves
training and scoring (no cache: causal attention over the tokens given) and generation (a cache: the
new tokens are stored, then attend to everything stored). How a cache stores its tokens, on one
process or spread over many, is the cache's matter: see torch_fdattn.dist.ShardedKVCache.

B batch, T new tokens, H query heads, K key-value heads, D head_dim, C hidden size.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torch_fdattn.functional import attention
from torch_fdattn.models.config import ModelConfig
from torch_fdattn.models.fewer_launches import added_and_normed, gated, projected
from torch_fdattn.models.rope import Rotary
from torch_fdattn.ops.norms import is_hooked
from torch_fdattn.ops.rotary import norm_and_rotate
from torch_fdattn.ops.side_by_side import AsOne, lay_side_by_side


class KVCache(Protocol):
    """What the model asks of a cache."""

    lengths: Tensor  # (B,) tokens stored before this step

    def append(self, layer: int, k: Tensor, v: Tensor) -> None: ...
    def attend(self, layer: int, q: Tensor) -> Tensor: ...
    def advance(self, tokens: int) -> None: ...


class Residual(NamedTuple):
    """What a layer's result is added to, and the norm behind it: a tensor-parallel layer may do all in one pass."""

    x: Tensor
    norm: nn.RMSNorm

    def add(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """(the sum, its norm)."""
        return added_and_normed(self.x, y, self.norm)


class _OfOneInput(nn.Module):
    """A layer whose first projections have one input."""

    def __init__(self) -> None:
        super().__init__()
        self._as_one = AsOne()

    def _apply(self, fn, recurse: bool = True):
        self._as_one.forget()
        return super()._apply(fn, recurse)


class Attention(_OfOneInput):
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

    def of_one_input(self) -> tuple[nn.Linear, ...]:
        return self.q_proj, self.k_proj, self.v_proj

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim))  # (B, T, H or K, D)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, cache: KVCache | None, residual: Residual | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
        """The layer's result, or what `residual` makes of it."""
        q, k, v = (self._heads(y) for y in projected(x, self.of_one_input(), self._as_one))
        q, k = norm_and_rotate(q, k, self.q_norm, self.k_norm, cos, sin)
        v = v.transpose(1, 2)
        if cache is None:
            out, _ = attention(q, k, v, causal=True)
        else:
            cache.append(self.layer, k, v)
            out = cache.attend(self.layer, q)
        y = self.o_proj(out.transpose(1, 2).flatten(2))
        return y if residual is None else residual.add(y)


class MLP(_OfOneInput):
    #: That forward takes a `Residual`; an MLP that somebody puts here need not.
    takes_residual = True

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = nn.Linear(hidden, inner, bias=bias)
        self.up_proj = nn.Linear(hidden, inner, bias=bias)
        self.down_proj = nn.Linear(inner, hidden, bias=bias)

    def of_one_input(self) -> tuple[nn.Linear, ...]:
        return self.gate_proj, self.up_proj

    def forward(
        self, x: Tensor, residual: Residual | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """As `Attention.forward`."""
        y = self.down_proj(gated(x, *self.of_one_input(), self._as_one))
        return y if residual is None else residual.add(y)


class Block(nn.Module):
    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = MLP(config)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, cache: KVCache | None, normed: Tensor | None = None,
        following: nn.RMSNorm | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
        """x, or with the norm that follows the block (x, its norm by that); normed: x's own, where there is one."""
        normed = self.input_layernorm(x) if normed is None else normed
        residual = Residual(x, self.post_attention_layernorm)
        x, normed = self.self_attn(normed, cos, sin, cache, residual)
        if following is None:
            return x + self.mlp(normed)
        return self.mlp(normed, Residual(x, following))

    def is_plain(self) -> bool:
        """Whether nobody sees what comes out of it or of its MLP, and the MLP takes a `Residual`."""
        mlp = self._modules["mlp"]
        seen = is_hooked(self) or is_hooked(mlp) or self._compiled_call_impl is not None
        return not seen and getattr(mlp, "takes_residual", False)


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
        positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        if cache is not None:
            positions = cache.lengths[:, None] + positions
        cos, sin = self.rotary(positions)
        x = self.embed_tokens(tokens)
        normed = None
        for block, following in zip(self.layers, self._norms_between(), strict=True):
            between = () if normed is None and following is None else (normed, following)
            found = block(x, cos, sin, cache, *between)
            x, normed = (found, None) if following is None else found
        if cache is not None:
            cache.advance(tokens.shape[1])
        x = self.norm(x[:, -1:] if last_only else x)
        if self.config.tie_embeddings:
            return F.linear(x, self.embed_tokens.weight)
        return self.lm_head(x)

    def lay_side_by_side(self) -> None:
        """Moves projections of one input to where one product takes them all, without gradients; `load_model` does so
        on GPUs.

        Parameters stay what they are, but not where: call it before graphs are captured. Moving or copying the model
        undoes it. Parameters then share storages: of safetensors `save_file` takes the state dict, `save_model` takes
        no such model.
        """
        for block in self.layers:
            for layer in (block.self_attn, block.mlp):
                if isinstance(layer, (Attention, MLP)):  # no parallel form, which does so itself
                    lay_side_by_side(*layer.of_one_input())
            if self.norm.weight.is_cuda:
                torch.cuda.empty_cache()  # of parts that no larger tensor can take the place of

    def _norms_between(self) -> list[nn.RMSNorm | None]:
        """For each block the next one's first norm, where the block may compute it: an all-reduce can have it in its
        launch. Not where anybody would see that: gradients, compilers, hooks."""
        blocks = list(self.layers)
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return [None] * len(blocks)
        plain = [type(x) is Block and x.is_plain() for x in blocks]
        pairs = zip(plain, plain[1:], blocks[1:], strict=False)
        norms = [after.input_layernorm if here and there else None for here, there, after in pairs]
        return [*norms, None]
