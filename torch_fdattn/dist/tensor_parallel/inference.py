"""The fused inference forms of tensor-parallel attention and MLP; `for_inference` of `TPAttention` and `TPMLP` makes them.

They compute what the layers that they are made of compute, over the same memory, in fewer launches:

- q, k and v are one product, and so are gate and up (`ops/merged_linear.py`);
- norms and rotary positions of q and k are one launch (`ops/rotary.py`), which stores k and v in the engine's pages;
- SwiGLU is part of gate's and up's product where that is faster (`fused_inference.swiglu_linear`); GeGLU is not;
- `add_norm` also adds the residual and computes the norm behind it: with replicated activations and one of our own
  all-reduces, in the launch of the all-reduce.

They have no gradients, and refuse inputs and weights that require them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from torch_fdattn.dist.tensor_parallel.attention import TPAttention, TransformersTPAttention
from torch_fdattn.dist.tensor_parallel.functional import matmul_all_reduce_rms_norm
from torch_fdattn.dist.tensor_parallel.fused_inference import (
    add_norm,
    glu_linear,
    norm_and_rotate_heads,
    rotate_and_append,
)
from torch_fdattn.dist.tensor_parallel.layers import TPMLP, TPLayer
from torch_fdattn.ops.glu import glu
from torch_fdattn.ops.merged_linear import can_merge, frozen_copy, merge_linears, refuse_gradients


class FusedTPLayer(TPLayer):
    """What fused tensor-parallel layers share."""

    def __init__(self, layer: TPLayer) -> None:
        """With the group and the options of the layer that this one is made of."""
        TPLayer.__init__(
            self, layer.group_name, layer.strategy, layer.allreduce_method, layer.tokens,
            layer.linear_strategy,
        )  # fmt: skip
        self._largest = layer._largest

    def _row_add_norm(
        self, x: Tensor, linear: nn.Linear, residual: Tensor, norm: nn.Module
    ) -> tuple[Tensor, Tensor]:
        """(added, normed) of `_row`'s result, the residual and the norm behind their sum."""
        if not _in_all_reduce(self.form, x, residual, norm):
            return add_norm(self._row(x, linear), residual, norm)
        normed, added = matmul_all_reduce_rms_norm(
            x.flatten(0, -2), linear.weight, self.group_name, residual.flatten(0, -2), norm.weight, norm.eps, linear.bias,
            **self._all_reduce_how(),
        )  # fmt: skip
        return added.view_as(residual), normed.view_as(residual)


def _in_all_reduce(form: str, x: Tensor, residual: Tensor, norm: nn.Module) -> bool:
    plain = type(norm) is nn.RMSNorm and norm.eps is not None and norm.weight is not None
    if form != "all_reduce" or torch.compiler.is_compiling() or not plain:
        return False
    return x.dtype == residual.dtype == norm.weight.dtype


class FusedTPMLP(FusedTPLayer):
    """`TPMLP` for inference: forward(x) as there.

    Example, on every rank::

        layer = TPMLP.from_module(mlp, group_name, "all_reduce").for_inference()
        with torch.inference_mode():
            y = layer(x)                               # (…, C)
            added, normed = layer.add_norm(x, residual=residual, norm=norm)
    """

    def __init__(self, layer: TPMLP) -> None:
        super().__init__(layer)
        self.activation = layer.activation
        self.gate_up_proj = merge_linears(layer.gate_proj, layer.up_proj)
        self.down_proj = frozen_copy(layer.down_proj)

    def forward(self, x: Tensor) -> Tensor:
        return self._row(self._inner(x), self.down_proj)

    def add_norm(self, x: Tensor, *, residual: Tensor, norm: nn.Module) -> tuple[Tensor, Tensor]:
        """(added, normed): ``added = residual + self(x)``, ``normed = norm(added)``, both as `residual`, in the form of
        the step's activations."""
        return self._row_add_norm(self._inner(x), self.down_proj, residual, norm)

    def _inner(self, x: Tensor) -> Tensor:
        """activation(gate(x)) * up(x) of all tokens."""
        refuse_gradients(self, x)
        weight, bias = self.gate_up_proj.weight, self.gate_up_proj.bias
        if self.form != "ag_rs":
            return glu_linear(x, weight, bias, self.activation)
        if self.activation != "silu":
            (both,) = self._gathered(x, [weight], [bias])
            return glu(*both.chunk(2, -1), self.activation)
        (inner,) = self._gathered(x, [weight], [bias], "swiglu")
        return inner


class FusedTPAttention(FusedTPLayer, TPAttention):
    """`TPAttention` for inference: forward(x, cos, sin, cache=None) as there."""

    def __init__(self, layer: TPAttention) -> None:
        super().__init__(layer)
        self.layer, self.head_dim, self.scale = layer.layer, layer.head_dim, layer.scale
        self.mask_options = layer.mask_options
        self.heads, self.kv_heads = layer.heads, layer.kv_heads
        self.qkv_proj = merge_linears(layer.q_proj, layer.k_proj, layer.v_proj)
        self.o_proj = frozen_copy(layer.o_proj)
        self.q_norm, self.k_norm = frozen_copy(layer.q_norm), frozen_copy(layer.k_norm)

    def for_inference(self) -> FusedTPAttention:
        return self

    def add_norm(
        self, x: Tensor, cos: Tensor, sin: Tensor, cache=None, *, residual: Tensor, norm: nn.Module
    ) -> tuple[Tensor, Tensor]:
        """(added, normed): ``added = residual + self(x, …)``, ``normed = norm(added)``, both as `residual`, in the form
        of the step's activations."""
        out = self._flat(self._attended(x, cos, sin, cache))
        return self._row_add_norm(out, self.o_proj, residual, norm)

    def _attended(self, x: Tensor, cos: Tensor, sin: Tensor, cache) -> Tensor:
        if cache is None:
            return super()._attended(x, cos, sin, None)
        projected = self._projected(x, cos)
        q = rotate_and_append(*projected, self.q_norm, self.k_norm, cos, sin, self.layer, cache)
        return cache.attend(self.layer, q, **self.mask_options.keywords())

    def _qkv(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self._projected(x, cos)
        q, k = norm_and_rotate_heads(q, k, self.q_norm, self.k_norm, cos, sin)
        return q, k, v.transpose(1, 2)

    def _projected(self, x: Tensor, cos: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q (B, T, H, D), k and v (B, T, K, D) of all tokens, before norms and rotation."""
        refuse_gradients(self, x)
        (heads,) = self._heads(x, cos, (self.qkv_proj,))
        return heads.split_with_sizes([self.heads, self.kv_heads, self.kv_heads], 2)


class FusedTransformersTPAttention(FusedTPAttention, TransformersTPAttention):
    """`FusedTPAttention` with the forward of transformers' attention layers."""


def fused_mlp(layer: TPMLP) -> TPLayer:
    """`TPMLP.for_inference`."""
    mergeable = can_merge((layer.gate_proj, layer.up_proj), equal_sizes=True)
    return FusedTPMLP(layer) if mergeable else layer


def fused_attention(layer: TPAttention) -> TPLayer:
    """`TPAttention.for_inference`."""
    if not can_merge((layer.q_proj, layer.k_proj, layer.v_proj)):
        return layer
    is_transformers = isinstance(layer, TransformersTPAttention)
    return (FusedTransformersTPAttention if is_transformers else FusedTPAttention)(layer)
