"""Tensor parallelism from outside the model: `parallelize(model, mesh)`.

The attention and the MLP of every layer are replaced by their tensor-parallel forms
(`torch_fdattn.dist.TPAttention`, `TPMLP`), which keep this rank's slices of the weights. An
`InferenceTransformer` gets the fused forms of these, and so does any model with ``fused=True``. With ``ag_rs``
two hooks (in an `InferenceTransformer` its forward) carry the tokens in and out: before the first layer each rank takes its rows of the
replicated hidden states, after the last they are gathered. With ``auto`` they do so in steps of as many
tokens as it was measured to be faster for. An untied LM head is split over the
vocabulary and its logits are gathered; embedding, final norm and a tied head stay replicated. Inputs,
logits and loss are the same on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from torch_fdattn.dist import TPMLP, TPAttention
from torch_fdattn.dist.collectives import own_rows, replicate_rows, split_evenly
from torch_fdattn.dist.groups import Group, name_of, rank_and_size
from torch_fdattn.dist.tensor_parallel import auto
from torch_fdattn.dist.tensor_parallel.attention import check_attention
from torch_fdattn.dist.tensor_parallel.layers import (
    AUTO,
    TokenRows,
    TPHead,
    check_mlp,
    check_strategy,
)
from torch_fdattn.dist.tensor_parallel.weights import expect_linear, sum_gradient
from torch_fdattn.models.inference import InferenceTransformer


def parallelize(
    model: nn.Module, mesh: Group, strategy: str = "auto", allreduce_method: str = "auto",
    linear_strategy: str = "auto", fused: bool = False,
) -> nn.Module:  # fmt: skip
    """Splits a dense model over a tensor-parallel group, in place.

    Every rank calls it with the same full model, already on its device and in its dtype; nothing is
    communicated. Afterwards the model is called as before, with the same input on every rank; a KV
    cache holds `local_kv_heads(model)` heads, and may itself be sharded over another dimension of the mesh.

    Args:
        model: ours (`Transformer`, or the `InferenceTransformer` that its `for_inference` gives) or transformers'
            LlamaForCausalLM and Qwen3ForCausalLM (their attention implementations "sdpa" and "eager").
        mesh: a DeviceMesh of one dimension (``mesh["tp"]`` of a larger one), a process group, its name, or None
            for the default group.
        strategy: "all_reduce" (activations replicated), "ag_rs" (activations sharded along tokens; see
            `torch_fdattn.dist.tensor_parallel.layers`), or "auto": in each forward the one that was measured to be faster for so
            many tokens, layers of this size, ranks and GPU; "all_reduce" where nothing was, where gradients
            are enabled, and in torch.compile.
        allreduce_method: of `torch_fdattn.dist.matmul_all_reduce`.
        linear_strategy: the `strategy` of `torch_fdattn.dist.all_gather_matmul` and the other tensor-parallel products; with "auto" forms
            "copy_engine" is that of sharded activations alone.
        fused: for inference: the layers' fused forms, with merged weights and without gradients (`TPMLP.for_inference`).
            Always those for an `InferenceTransformer`. A parallel `Transformer` may also be asked for its inference form
            afterwards (`for_inference`), whose blocks are fused too.

    Returns:
        The model.

    Raises:
        ValueError, TypeError, NotImplementedError: naming what is wrong; the model is then unchanged.

    Examples:
        >>> config = torch_fdattn.models.ModelConfig("qwen3", 64, 32, 48, 1, 4, 2, 16, 128)
        >>> model = torch_fdattn.models.Transformer(config)
        >>> mesh = torch.distributed.init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        >>> parallel = torch_fdattn.models.parallelize(model, mesh)
        >>> parallel(torch.ones(1, 4, dtype=torch.long)).shape  # the same on all ranks
        torch.Size([1, 4, 64])
    """
    return replace_layers(model, mesh, strategy, allreduce_method, linear_strategy, fused)


def replace_layers(
    model: nn.Module, mesh: Group, strategy: str, allreduce_method: str, linear_strategy: str, fused: bool,
    before: Callable[[nn.Module, str], None] = lambda module, name: None,
) -> nn.Module:  # fmt: skip
    """`parallelize`; before(module, name) is called with each layer, and a head, before it is sliced."""
    group_name, fused = name_of(mesh, "mesh"), fused or isinstance(model, InferenceTransformer)
    _, world_size = rank_and_size(group_name, "mesh")
    check_strategy(strategy, allreduce_method, linear_strategy)
    layers = _layers(model)
    if any(isinstance(layer.self_attn, TPAttention) for layer in layers):
        raise ValueError(
            f"model must not be parallelised already, got a parallel {type(model).__name__}"
        )
    for layer in layers:
        check_attention(layer.self_attn, world_size)
        check_mlp(layer.mlp)
    untied = getattr(model, "lm_head", None) is not None and not _is_tied(model)
    if untied:
        expect_linear(model, "lm_head")

    inner = split_evenly(layers[0].mlp.gate_proj.out_features, world_size)[0]
    tokens = ShardedTokens(group_name, world_size, strategy, inner)
    options = (group_name, strategy, allreduce_method, tokens, linear_strategy)
    for i, layer in enumerate(layers):
        before(layer, f"layers.{i}")
        layer.self_attn = TPAttention.from_module(layer.self_attn, *options)
        layer.mlp = TPMLP.from_module(layer.mlp, *options)
        if fused:
            layer.self_attn = layer.self_attn.for_inference()
            layer.mlp = layer.mlp.for_inference()
    if untied:
        before(model.lm_head, "lm_head")
        model.lm_head = TPHead(model.lm_head, group_name)
    if strategy == "ag_rs" and not fused:
        for layer in layers:  # their norms see this rank's rows alone
            for name, norm in layer.named_children():
                if name not in ("self_attn", "mlp"):
                    for parameter in norm.parameters():
                        sum_gradient(parameter, group_name)
    if strategy != "all_reduce":
        if not isinstance(model, InferenceTransformer):
            layers[0].register_forward_pre_hook(tokens.before_first)
            layers[-1].register_forward_hook(tokens.behind_last)
        model.sharded_tokens = tokens
    return model


def local_kv_heads(model: nn.Module) -> int:
    """How many KV heads of every layer this rank holds: what its KV cache is made for.

    Examples:
        >>> config = torch_fdattn.models.ModelConfig("qwen3", 64, 32, 48, 1, 4, 2, 16, 128)
        >>> model = torch_fdattn.models.Transformer(config)
        >>> torch_fdattn.models.local_kv_heads(model)  # after parallelize: those of this rank
        2
    """
    attention = _layers(model)[0].self_attn
    if isinstance(attention, TPAttention):
        return attention.kv_heads
    return attention.k_proj.out_features // attention.head_dim


class ShardedTokens(TokenRows):
    """Takes the rank's rows of (B, T, C) before the first layer, and puts all together after the last.

    Holds the shape of the forward that runs: layers that are recomputed (activation checkpointing) must
    be so before another forward of another shape. inner: the most inner features of an MLP that a rank has.
    """

    def __init__(self, group_name: str, world_size: int, strategy: str, inner: int) -> None:
        self.group_name, self.world_size = group_name, world_size
        self.strategy, self._inner = strategy, inner

    def take_rows(self, x: Tensor) -> Tensor:
        """x (B, T, C), the same on all ranks -> this rank's rows (m_r, C); x itself, if the step replicates."""
        self.shape, self.rows = x.shape, None
        if self._form(x) == "all_reduce":
            return x
        if not x.shape[1]:
            raise ValueError(
                f"tokens must have at least one position, got shape {tuple(x.shape[:2])}"
            )
        self.rows = split_evenly(x.shape[0] * x.shape[1], self.world_size)
        return own_rows(x.flatten(0, 1), self.group_name, self.rows)

    def join_rows(self, x: Tensor) -> Tensor:
        """The inverse of `take_rows`, of the last layer's result."""
        if self.rows is None:
            return x
        return replicate_rows(x, self.group_name, self.rows).view(self.shape)

    def before_first(self, layer: nn.Module, args: tuple) -> tuple:
        return self.take_rows(args[0]), *args[1:]

    def behind_last(self, layer: nn.Module, args: tuple, x: Tensor) -> Tensor:
        return self.join_rows(x)

    def _form(self, x: Tensor) -> str:
        """Of this forward; by sizes that are the same on all ranks."""
        if self.strategy != AUTO:
            return self.strategy
        # In reentrant checkpoints gradients are off, but asked for all the same.
        if torch.is_grad_enabled() or x.requires_grad or torch.compiler.is_compiling():
            return "all_reduce"
        sizes = auto.LinearSizes(x.shape[:-1].numel(), x.shape[-1], self._inner, self.world_size)
        return auto.choose(auto.LAYER, self.group_name, x, sizes, "all_reduce", equal_sizes=True)


def _is_tied(model: nn.Module) -> bool:
    embedding = getattr(model, "model", model).embed_tokens
    return model.lm_head.weight is embedding.weight


def _layers(model: nn.Module) -> Sequence[nn.Module]:
    """The decoder layers of our model, or of transformers'."""
    layers = getattr(getattr(model, "model", model), "layers", None)
    parts = ("self_attn", "mlp", "input_layernorm", "post_attention_layernorm")
    if not layers or not all(hasattr(layer, part) for layer in layers for part in parts):
        raise TypeError(
            "model must be a torch_fdattn Transformer or a transformers LlamaForCausalLM or "
            f"Qwen3ForCausalLM, got {type(model).__name__}"
        )
    return layers
