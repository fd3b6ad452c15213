"""The inference form of a `Transformer`: the same model in merged and fused layers (`Transformer.for_inference`).

A block's kernels on one GPU, besides attention:

    q, k, v · norms and rotation, and storing K and V in the engine's pages · o · add + norm ·
    gate, up · SwiGLU (or in the product before it) · down · add + norm

q, k, v, o and down of up to 16 rows are products of our own where these take less time than BLAS's
(`torch_fdattn.ops.inference_linear`). With tensor parallelism an all-reduce of our own takes the add + norm behind it
into its launch (`torch_fdattn.dist.tensor_parallel.inference`).

One H100, against separate launches in the same run, in CUDA graphs: decode of 1, 8, 16, 64, 128 sequences 0.84, 0.85,
0.86, 0.86, 0.88 for Qwen3-8B, 0.86, 0.86, 0.86, 0.87, 0.87 for Llama-3-8B, 0.74, 0.74, 0.76, 0.78, 0.83 for Qwen3-0.6B.
Prefills of 128 tokens 0.77 to 0.86, of 512 0.82 to 0.95, of 4096 0.92 to 0.99, where all three count alike.

Shapes are named as in `transformer.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from torch_fdattn.dist.tensor_parallel.attention import TPAttention
from torch_fdattn.dist.tensor_parallel.fused_inference import (
    add_norm,
    glu_linear,
    norm_and_rotate_heads,
    rotate_and_append,
)
from torch_fdattn.dist.tensor_parallel.inference import FusedTPLayer
from torch_fdattn.dist.tensor_parallel.layers import TPMLP
from torch_fdattn.models.gemma import GemmaBlock
from torch_fdattn.models.transformer import (
    MLP,
    Attention,
    Block,
    KVCache,
    Transformer,
    attend,
)
from torch_fdattn.ops.inference_linear import InferenceLinear
from torch_fdattn.ops.merged_linear import can_merge, frozen_copy, merge_linears, refuse_gradients

if TYPE_CHECKING:
    from torch_fdattn.models.parallelize import ShardedTokens


def _projection(module: nn.Module) -> nn.Module:
    """A frozen copy of a layer; of a plain linear layer as an `InferenceLinear`."""
    return frozen_copy(module, InferenceLinear if type(module) is nn.Linear else None)


class FusedAttention(nn.Module):
    """`Attention` with q, k and v as one product, and their norms and rotary positions in one launch."""

    def __init__(self, module: Attention) -> None:
        super().__init__()
        self.layer, self.head_dim = module.layer, module.head_dim
        self.mask_options = module.mask_options
        self.qkv_proj = merge_linears(module.q_proj, module.k_proj, module.v_proj)
        self.o_proj = _projection(module.o_proj)
        self.q_norm, self.k_norm = frozen_copy(module.q_norm), frozen_copy(module.k_norm)

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], -1, self.head_dim)  # half of unflatten's time

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: KVCache | None) -> Tensor:
        q, k, v = (self._heads(y) for y in self.qkv_proj(x))
        options = self.mask_options
        if cache is None:
            q, k = norm_and_rotate_heads(q, k, self.q_norm, self.k_norm, cos, sin)
            return self.o_proj(attend(self.layer, q, k, v.transpose(1, 2), None, options))
        q = rotate_and_append(q, k, v, self.q_norm, self.k_norm, cos, sin, self.layer, cache)
        out = cache.attend(self.layer, q, **options.keywords())
        return self.o_proj(out.transpose(1, 2).flatten(2))

    # The layers of the plain form, over their rows of the merged weight: what `parallelize` slices.
    @property
    def q_proj(self) -> nn.Linear:
        return self.qkv_proj.linears()[0]

    @property
    def k_proj(self) -> nn.Linear:
        return self.qkv_proj.linears()[1]

    @property
    def v_proj(self) -> nn.Linear:
        return self.qkv_proj.linears()[2]


class FusedMLP(nn.Module):
    """`MLP` with gate and up as one product, and SwiGLU in it or in one launch behind it; GeGLU behind it."""

    def __init__(self, module: MLP) -> None:
        super().__init__()
        self.activation = module.activation
        self.gate_up_proj = merge_linears(module.gate_proj, module.up_proj)
        self.down_proj = _projection(module.down_proj)

    def forward(self, x: Tensor) -> Tensor:
        merged = self.gate_up_proj
        return self.down_proj(glu_linear(x, merged.weight, merged.bias, self.activation))

    # As `FusedAttention`'s.
    @property
    def gate_proj(self) -> nn.Linear:
        return self.gate_up_proj.linears()[0]

    @property
    def up_proj(self) -> nn.Linear:
        return self.gate_up_proj.linears()[1]


def fused(module: nn.Module) -> nn.Module:
    """The inference form of a block's attention or MLP; the module itself where it has none."""
    if type(module) is Attention and can_merge((module.q_proj, module.k_proj, module.v_proj)):
        return FusedAttention(module)
    if type(module) is MLP and can_merge((module.gate_proj, module.up_proj), equal_sizes=True):
        return FusedMLP(module)
    if isinstance(module, (TPAttention, TPMLP)):
        return module.for_inference()
    return module


class FusedBlock(nn.Module):
    """`Block` that adds and norms in one launch: each norm behind the addition before it, the next block's first one
    too."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.input_layernorm = frozen_copy(block.input_layernorm)
        self.self_attn = fused(block.self_attn)
        self.post_attention_layernorm = frozen_copy(block.post_attention_layernorm)
        self.mlp = fused(block.mlp)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, cache: KVCache | None, normed: Tensor | None = None,
        next_norm: nn.Module | None = None,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """(the block's result (B, T, C), its `next_norm`, or None without one).

        normed: x's `input_layernorm`, where the block before has computed it.
        """
        normed = self.input_layernorm(x) if normed is None else normed
        x, normed = _add_norm(
            self.self_attn, (normed, cos, sin, cache), x, self.post_attention_layernorm
        )
        if next_norm is None:
            return x + self.mlp(normed), None
        return _add_norm(self.mlp, (normed,), x, next_norm)


class FusedGemmaBlock(GemmaBlock):
    """`GemmaBlock` with fused attention and MLP; its norms, by 1 + weight in fp32, are launches of their own."""

    def __init__(self, block: GemmaBlock) -> None:
        nn.Module.__init__(self)
        self.self_attn, self.mlp = fused(block.self_attn), fused(block.mlp)
        for name, module in block.named_children():
            if name not in ("self_attn", "mlp"):
                self.add_module(name, frozen_copy(module))


def fused_block(block: nn.Module) -> nn.Module:
    """The inference form of a block; the block itself where it has none."""
    forms = {Block: FusedBlock, GemmaBlock: FusedGemmaBlock}
    return forms[type(block)](block) if type(block) in forms else block


def _add_norm(
    module: nn.Module, inputs: tuple, residual: Tensor, norm: nn.Module
) -> tuple[Tensor, Tensor]:
    """(residual + module(*inputs), the norm of that)."""
    if isinstance(module, FusedTPLayer):
        return module.add_norm(*inputs, residual=residual, norm=norm)
    return add_norm(module(*inputs), residual, norm)


class InferenceTransformer(nn.Module):
    """A `Transformer` in merged and fused layers; `Transformer.for_inference` makes it, and says what it does not do.

    forward(tokens, cache=None, last_only=False) as `Transformer`'s. Blocks, attention and MLPs of types that are not known
    are those of the plain model.

    Raises:
        RuntimeError: from a call with gradients enabled, if a parameter requires them: one of a module that is the plain
            model's, or one that was made to.

    Examples:
        >>> config = torch_fdattn.models.ModelConfig("llama", 64, 32, 48, 1, 2, 2, 16, 128)
        >>> model = torch_fdattn.models.Transformer(config)
        >>> fused, tokens = model.for_inference(), torch.tensor([[1, 2, 3]])
        >>> with torch.no_grad():
        ...     torch.allclose(fused(tokens), model(tokens), atol=1e-5)
        True
    """

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.config = model.config
        self.embed_tokens = frozen_copy(model.embed_tokens)
        self.layers = nn.ModuleList()
        for block in model.layers:
            self.layers.append(fused_block(block))
            if self.embed_tokens.weight.is_cuda:
                torch.cuda.empty_cache()  # of parts, which are too small for the next merged weight
        self.norm, self.rotary = frozen_copy(model.norm), frozen_copy(model.rotary)
        self.rope_indices = model.rope_indices
        if not self.config.tie_embeddings:
            self.lm_head = frozen_copy(model.lm_head)
        #: How a tensor-parallel step spreads its tokens over the ranks; `parallelize` sets it.
        self.sharded_tokens: ShardedTokens | None = getattr(model, "sharded_tokens", None)
        self.eval()

    def forward(
        self, tokens: Tensor, cache: KVCache | None = None, last_only: bool = False
    ) -> Tensor:
        x = self.hidden(tokens, cache)
        return self.logits(x[:, -1:] if last_only else x)

    def hidden(self, tokens: Tensor, cache: KVCache | None = None) -> Tensor:
        """As `Transformer.hidden`."""
        refuse_gradients(self)
        angles = self.angles(tokens, cache)
        x, normed = self.embed_tokens(tokens), None
        if self.sharded_tokens is not None:
            x = self.sharded_tokens.take_rows(x)
        next_norms = self._next_norms()
        for i, block in enumerate(self.layers):
            turns = angles[self.rope_indices[i]]
            if isinstance(block, FusedBlock):
                x, normed = block(x, *turns, cache, normed, next_norms[i])
            else:
                x = block(x, *turns, cache)
        if self.sharded_tokens is not None:
            x = self.sharded_tokens.join_rows(x)
        if cache is not None:
            cache.advance(tokens.shape[1])
        return x

    angles, logits = Transformer.angles, Transformer.logits  # of the same attributes

    def _next_norms(self) -> list[nn.Module | None]:
        """For each block the norm that it computes for the next one; None: the block is not fused, or the next."""
        pairs = zip(self.layers, self.layers[1:], strict=False)
        between = [
            after.input_layernorm
            if isinstance(block, FusedBlock) and isinstance(after, FusedBlock)
            else None
            for block, after in pairs
        ]
        return [*between, None]
