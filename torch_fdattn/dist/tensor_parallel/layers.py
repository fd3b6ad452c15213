"""Tensor-parallel layers: what they share, the MLP and the LM head; attention is in `attention.py`.

They replace the layers of a dense decoder, ours or transformers'. Two forms of activations, the strategies:

- ``all_reduce``: activations are replicated, (B, T, C) on every rank; one all-reduce after each layer.
  For few tokens (decode).
- ``ag_rs``: activations are sharded along tokens: a rank holds its rows (m_r, C) of the flattened
  (B · T, C), as even as possible, the remainder on the first ranks. All-gather before a layer,
  reduce-scatter after it; norms and residuals see the rank's rows alone. For many tokens (prefill,
  training).

With ``auto`` a layer takes what it is given: sharded rows where `TokenRows` says how they are spread, replicated ones
where it says nothing. `models.parallelize` says so in each step, by what was measured for so many tokens. Training
replicates: sharded rows would want other gradient hooks.

Parameters keep the names of the layer that is replaced (``q_proj.weight``, …) and hold the rank's slice
alone. After a backward pass each gradient is the same slice of the single-process gradient: where ranks
share a parameter, a hook sums what each of them saw (`weights.py`). Hooks sit on the parameter
objects: `copy.deepcopy` and a meta model's `to_empty` lose them, so copy and materialise first.
Hooks on the projections themselves do not run: the layers use their weights only.

These layers train. `for_inference` makes of each its fused form (`inference.py`).

B batch, T new tokens, C hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torch_fdattn.dist.collectives import replicate_rows, split_evenly, spread
from torch_fdattn.dist.groups import Group, name_of, rank_and_size
from torch_fdattn.dist.tensor_parallel.functional import (
    all_gather_matmul,
    matmul_all_reduce,
    matmul_reduce_scatter,
)
from torch_fdattn.dist.tensor_parallel.op import check_linear_strategy, check_method
from torch_fdattn.dist.tensor_parallel.weights import expect_linear, sliced_linear, sum_gradient
from torch_fdattn.ops.glu import ACTIVATIONS, glu

STRATEGIES = ("ag_rs", "all_reduce")
AUTO = "auto"


class TokenRows:
    """How many rows of the current step's tokens each rank holds under ``ag_rs``.

    One object is shared by all layers of a model, and the model's entry sets it in every step: a
    rank's rows alone do not tell how many the others have. None: as many on every rank, and, to layers of strategy
    ``auto``, that activations are replicated.
    """

    rows: Sequence[int] | None = None


def check_strategy(strategy: str, allreduce_method: str, linear_strategy: str) -> None:
    check_linear_strategy("linear_strategy", linear_strategy)
    if strategy not in (AUTO, *STRATEGIES):
        raise ValueError(f"strategy must be one of {(AUTO, *STRATEGIES)}, got {strategy!r}")
    check_method("allreduce_method", allreduce_method)


def check_mlp(module: nn.Module) -> None:
    """Refuses an MLP that is not ``down(activation(gate(x)) * up(x))``; transformers' must be of SiLU."""
    expect_linear(module, "gate_proj", "up_proj", "down_proj")
    activation = type(getattr(module, "act_fn", nn.SiLU())).__name__
    if activation not in ("SiLU", "SiLUActivation"):
        raise ValueError(f"module's activation must be SiLU, got {activation}")
    if (ours := getattr(module, "activation", "silu")) not in ACTIVATIONS:
        raise ValueError(
            f"module's activation must be one of {', '.join(ACTIVATIONS)}, got {ours!r}"
        )


class TPLayer(nn.Module):
    """Column-parallel layers in, a row-parallel layer out, by one of the strategies."""

    def __init__(
        self, group: Group, strategy: str, allreduce_method: str, tokens: TokenRows | None,
        linear_strategy: str,
    ) -> None:  # fmt: skip
        check_strategy(strategy, allreduce_method, linear_strategy)
        super().__init__()
        self.group_name, self.strategy = name_of(group), strategy
        self.allreduce_method, self.linear_strategy = allreduce_method, linear_strategy
        self.tokens = tokens or TokenRows()
        # Known once: looking the group up costs 10 µs a call, and an eager step makes hundreds.
        rank, world_size = rank_and_size(self.group_name)
        self._ranks = dict(rank=rank, world_size=world_size)
        #: (columns of `_columns`, features of `_row`) of the rank that has the most: the same on all ranks. Or None.
        self._largest: tuple[int, int] | None = None

    @property
    def form(self) -> str:
        """Of the step's activations: "ag_rs" or "all_reduce"."""
        if self.strategy != AUTO:
            return self.strategy
        return "all_reduce" if self.tokens.rows is None else "ag_rs"

    def _all_tokens(self, x: Tensor) -> int:
        """How many tokens all ranks have together."""
        if self.form == "all_reduce":
            return x.shape[:-1].numel()
        if self.tokens.rows is None:
            return x.shape[0] * self._ranks["world_size"]
        return sum(self.tokens.rows)

    def _columns(self, x: Tensor, linears: Sequence[nn.Module]) -> list[Tensor]:
        """Every linear layer of all tokens: (m_r, C) -> (B · T, N_i), or (…, C) -> (…, N_i)."""
        if self.form == "ag_rs":
            if self.strategy == AUTO and torch.is_grad_enabled():
                raise NotImplementedError(
                    "strategy 'auto' has gradients for replicated activations alone, got sharded rows where gradients "
                    "are wanted: make the layer with strategy 'ag_rs'"
                )
            weights, biases = zip(*[(x.weight, x.bias) for x in linears], strict=True)
            return self._gathered(x, list(weights), list(biases))
        if torch.is_grad_enabled() and x.requires_grad:
            x = torch.ops.fdattn.spread(x, self.group_name, **self._ranks)
        return [F.linear(x, linear.weight, linear.bias) for linear in linears]

    def _gathered(
        self, x: Tensor, weights: list[Tensor], biases: list[Tensor | None], activation: str | None = None
    ) -> list[Tensor]:  # fmt: skip
        return all_gather_matmul(
            x, weights, self.group_name, biases, rows=self.tokens.rows, strategy=self.linear_strategy,
            largest=self._largest and self._largest[0], activation=activation,
        )  # fmt: skip

    def _row(self, x: Tensor, linear: nn.Linear) -> Tensor:
        """The sum over the ranks, of this rank's rows or of all: the inverse of `_columns` in shape."""
        if self.form == "ag_rs":
            return matmul_reduce_scatter(
                x, linear.weight, self.group_name, linear.bias, rows=self.tokens.rows, strategy=self.linear_strategy,
                largest=self._largest and self._largest[1],
            )  # fmt: skip
        flat = x if x.dim() == 2 else x.flatten(0, -2)
        how = self._all_reduce_how()
        y = matmul_all_reduce(flat, linear.weight, self.group_name, linear.bias, **how)
        return y if flat is x else y.view(*x.shape[:-1], y.shape[-1])

    def _all_reduce_how(self) -> dict[str, object]:
        strategy = self.linear_strategy
        if self.strategy == AUTO and strategy == "copy_engine":  # which is for the other form
            strategy = AUTO
        largest = self._largest and self._largest[1]
        return dict(method=self.allreduce_method, strategy=strategy, largest=largest)

    def extra_repr(self) -> str:
        return f"group_name={self.group_name!r}, strategy={self.strategy!r}"


class TPMLP(TPLayer):
    """``down(activation(gate(x)) * up(x))``: x and the result (m_r, C) with ag_rs, (…, C) with all_reduce, and with auto
    either, as `tokens` has it.

    Args:
        gate_proj, up_proj, down_proj: this rank's slices, of the inner features.
        group: the tensor-parallel process group: itself, its name, a DeviceMesh of one dimension, or None for
            the default one.
        strategy, allreduce_method: see the module's and `matmul_all_reduce`'s documentation.
        tokens: how the rows are spread under ag_rs; None: as many on every rank.
        linear_strategy: how matmuls and communication are combined, of `all_gather_matmul` and its variants.
        activation: "silu" or "gelu_tanh".

    Examples:
        >>> config = torch_fdattn.models.ModelConfig("llama", 64, 32, 48, 1, 2, 2, 16, 128)
        >>> mlp = torch_fdattn.models.Transformer(config).layers[0].mlp
        >>> parallel = torch_fdattn.dist.TPMLP.from_module(mlp, None, "all_reduce")
        >>> x = torch.randn(2, 5, 32)
        >>> torch.allclose(parallel(x), mlp(x), atol=1e-5)
        True
    """

    def __init__(
        self, gate_proj: nn.Linear, up_proj: nn.Linear, down_proj: nn.Linear, group: Group,
        strategy: str, allreduce_method: str = "auto", tokens: TokenRows | None = None,
        linear_strategy: str = "auto", activation: str = "silu",
    ) -> None:  # fmt: skip
        super().__init__(group, strategy, allreduce_method, tokens, linear_strategy)
        self.activation = activation
        self.gate_proj, self.up_proj, self.down_proj = gate_proj, up_proj, down_proj
        if strategy == "ag_rs":
            sum_gradient(down_proj.bias, self.group_name)

    @classmethod
    def from_module(
        cls, module: nn.Module, group: Group, strategy: str, allreduce_method: str = "auto",
        tokens: TokenRows | None = None, linear_strategy: str = "auto",
    ) -> TPMLP:  # fmt: skip
        """This rank's part of an MLP with gate_proj, up_proj, down_proj: ours, or transformers'
        LlamaMLP and Qwen3MLP, with SiLU. The inner features are split as evenly as possible.

        Raises:
            ValueError, TypeError: another activation or layer, or an unknown strategy or method.
        """
        check_mlp(module)
        group_name = name_of(group)
        rank, world_size = rank_and_size(group_name)
        shares = split_evenly(module.gate_proj.out_features, world_size)
        start = sum(shares[:rank])
        inner = slice(start, start + shares[rank])
        gate, up = (sliced_linear(x, rows=inner) for x in (module.gate_proj, module.up_proj))
        layer = cls(
            gate,
            up,
            sliced_linear(module.down_proj, columns=inner),
            group_name,
            strategy,
            allreduce_method,
            tokens,
            linear_strategy,
            getattr(module, "activation", "silu"),
        )
        layer._largest = 2 * shares[0], shares[0]
        return layer

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self._columns(x, (self.gate_proj, self.up_proj))
        return self._row(glu(gate, up, self.activation), self.down_proj)

    def for_inference(self) -> TPLayer:
        """A `FusedTPMLP` over this layer's weights; the layer itself where they cannot be merged (DTensors)."""
        from torch_fdattn.dist.tensor_parallel.inference import fused_mlp

        return fused_mlp(self)


class TPHead(nn.Module):
    """An LM head whose vocabulary is split: replicated x (…, C) -> replicated logits (…, vocab).

    Each rank holds its rows of the weight, as even as possible, and the logits are gathered.
    """

    def __init__(self, head: nn.Linear, group_name: str) -> None:
        super().__init__()
        rank, world_size = rank_and_size(group_name)
        self.group_name = group_name
        self.shares = split_evenly(head.out_features, world_size)
        start = sum(self.shares[:rank])
        local = sliced_linear(head, rows=slice(start, start + self.shares[rank]))
        self.weight, self.bias = local.weight, local.bias

    def forward(self, x: Tensor) -> Tensor:
        x = spread(x, self.group_name)
        local = F.linear(x.flatten(0, -2), self.weight, self.bias)
        logits = replicate_rows(local.t(), self.group_name, self.shares).t()
        return logits.reshape(*x.shape[:-1], logits.shape[-1])
