"""Drawn calls of attention, and of decode with gradients, with all that modifies scores crossed."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from torch_fdattn.ops.attention.dropout import Dropout, kept_weights
from torch_fdattn.ops.positions import Mask, query_key_positions
from torch_fdattn.testing.cases import AttentionCase, draw_attention, draw_decode


def score_parameters(case, device: torch.device | str) -> dict[str, Tensor]:
    """The slopes and sinks that a drawn case asks for: keywords that are tensors and have gradients."""
    generator = torch.Generator().manual_seed(case.seed + 4)
    found = {}
    if case.alibi:
        shape = (case.heads,) if case.alibi == "head" else (case.batch, case.heads)
        found["alibi_slopes"] = torch.rand(shape, generator=generator) * 0.1
    if case.sinks:
        found["sinks"] = torch.randn(case.heads, generator=generator)
    wide = torch.float64 if case.dtype == torch.float64 else torch.float32
    return {name: x.to(device, wide) for name, x in found.items()}


def drawn_mask(case, beyond: int | None, device: torch.device | str) -> Tensor:
    """Hides a fifth of all pairs and everything from some rows; where it can be, NaN from key `beyond` on."""
    shape, generator = case.mask_shape, torch.Generator().manual_seed(case.seed + 5)
    hidden = torch.rand(shape, generator=generator) < 0.2
    if len(shape) > 1 and shape[-2] > 1:
        hidden[..., ::7, :] = True
    if case.mask == "bool":
        found = ~hidden.to(device)
    else:
        bias = torch.randn(shape, generator=generator)
        if case.mask == "bias with -inf":
            bias = bias.masked_fill(hidden, float("-inf"))
        if beyond is not None and shape[-1] > 1:
            bias[..., beyond:] = float("nan")
        found = bias.to(device, case.dtype)
    return found.mT.contiguous().mT if case.mask_transposed and found.dim() > 1 else found


MASK_KINDS = ("bool", "bias", "bias with -inf")


@dataclass(frozen=True)
class FeatureCase(AttentionCase):
    """A call whose parameters (slopes, sinks) have gradients too."""

    v_dim: int = 0  # 0: head_dim
    softcap: float = 0.0
    alibi: str = ""  # "", "head" or "sequence"
    sinks: bool = False
    mask: str = ""  # "", "bool", "bias", or "bias with -inf"
    mask_shape: tuple[int, ...] = ()
    mask_transposed: bool = False
    dropout_p: float = 0.0

    @property
    def value_dim(self) -> int:
        return self.v_dim or self.head_dim

    @property
    def error_factor(self) -> float:
        """Of the error rule: softcap's tanh multiplies errors."""
        return 3.0 if self.softcap else 2.0

    def oracle_options(self) -> dict:
        options = super().oracle_options() | dict(softcap=self.softcap)
        if self.dropout_p:
            dropout = Dropout(self.dropout_p, self._seed())
            options["kept"] = dropout.factor * self.kept(dropout).double()
        return options

    def options(self, device: torch.device | str) -> dict:
        options = super().options(device)
        if options.pop("kept", None) is not None:
            options |= dict(dropout_p=self.dropout_p, dropout_seed=self._seed().to(device))
        return options

    def _seed(self) -> Tensor:
        return torch.tensor([self.seed * 2**40 - 1, self.seed])

    def kept(self, dropout: Dropout) -> Tensor:
        """Which weights dropout keeps, (B, H, S, S_kv), by its reference."""
        bounds = (
            None if x is None else torch.tensor(x)
            for x in (self.kv_lens, self.q_start, self.kv_start)
        )  # fmt: skip
        mask = Mask(*bounds, kv_block=self.kv_block, kv_stride=self.kv_stride)
        q_pos, k_pos, _ = query_key_positions(mask, self.q_len, self.kv_len, torch.device("cpu"))
        return kept_weights(dropout, q_pos, k_pos, self.batch, self.heads)

    def parameters(self, device: torch.device | str) -> dict[str, Tensor]:
        found = score_parameters(self, device)
        if not self.mask:
            return found
        beyond = max(0, *self.kv_lens) if self.kv_lens else None
        return found | {"attn_mask": drawn_mask(self, beyond, device)}

    def features(self) -> list[str]:
        tests = {
            "other value dim": self.value_dim != self.head_dim,
            "softcap": self.softcap > 0,
            "ALiBi": bool(self.alibi),
            "sinks": self.sinks,
            "dropout": self.dropout_p > 0,
            "boolean mask": self.mask == "bool",
            "additive mask": self.mask.startswith("bias"),
            "mask broadcast over batch or heads": bool(self.mask)
            and self.mask_shape != (self.batch, self.heads, self.q_len, self.kv_len),
            "mask broadcast over queries or keys": bool(self.mask)
            and self.mask_shape[-2:] != (self.q_len, self.kv_len),
        }
        return super().features() + [name for name, holds in tests.items() if holds]


def draw_features(
    seed: int, device: torch.device | str = "cpu", *, decode: bool = False
) -> FeatureCase:
    """A drawn case of attention or decode with any of the features."""
    rng = random.Random(f"features {seed}")
    plain = (draw_decode if decode else draw_attention)(seed, device)
    case = FeatureCase(
        **{name: getattr(plain, name) for name in plain.__dataclass_fields__},
        v_dim=rng.choice((16, 24, 48, 64)) if rng.random() < 0.3 else 0,
        softcap=rng.choice((1.0, 5.0, 30.0)) if rng.random() < 0.4 else 0.0,
        alibi=rng.choice(("head", "sequence")) if rng.random() < 0.4 else "",
        sinks=rng.random() < 0.4,
    )
    if not decode and rng.random() < 0.3:
        case = replace(case, dropout_p=rng.choice((0.1, 0.5)))
    if rng.random() < 0.6:
        full = (case.batch, case.heads, case.q_len, case.kv_len)
        shape = tuple(x if rng.random() < 0.7 else 1 for x in full)[rng.choice((0, 0, 1, 2, 3)) :]
        kind = rng.choice(MASK_KINDS)
        case = replace(case, mask=kind, mask_shape=shape, mask_transposed=rng.random() < 0.3)
    if case.dtype == torch.float32 and case.mask in ("bool", "bias with -inf"):
        case = replace(case, dtype=torch.float16)  # rows may keep a single key: `cases.py`
    if case.kv_block and case.q_start is None:  # positions would not follow from the length
        case = replace(case, alibi="")
    return case
