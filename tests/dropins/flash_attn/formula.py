"""What FlashAttention's documentation says of one sequence, written out in float64 and differentiable; and drawn options."""

from __future__ import annotations

import math
import random

import torch
from torch import Tensor

DTYPE = torch.float64
#: Everything runs in float64: what is compared is what arguments mean, not how kernels round.
CLOSE = {"rtol": 1e-9, "atol": 1e-9}


def attend(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, causal: bool = False, window=(-1, -1),
    softcap: float = 0.0, slopes: Tensor | None = None, sinks: Tensor | None = None, first_key: int = 0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """q (S, H, D), k (N, H_k, D), v (N, H_k, D_v) -> out (S, H, D_v), lse (H, S), -inf where nothing is seen.

    first_key hides the keys before it.
    """
    queries, heads, dim = q.shape
    keys, kv_heads, _ = k.shape
    k, v = (x.repeat_interleave(heads // kv_heads, 1) for x in (k, v))
    scores = torch.einsum("shd,nhd->hsn", q, k) * (dim**-0.5 if scale is None else scale)
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    i, j = torch.arange(queries)[:, None], torch.arange(keys)
    distance = j - (i + keys - queries)
    if slopes is not None:
        scores = scores - slopes.double()[:, None, None] * distance.abs()
    left, right = window
    seen = j >= first_key
    seen = seen & (distance <= 0) if causal else seen.expand(queries, keys)
    if left >= 0:
        seen = seen & (distance >= -left)
    if right >= 0:
        seen = seen & (distance <= right)
    weights = torch.where(seen, torch.exp(scores), 0.0)
    total = weights.sum(-1)
    if sinks is not None:
        total = total + torch.exp(sinks.double())[:, None]
    divisor = torch.where(total > 0, total, 1.0)
    out = torch.einsum("hsn,nhd->shd", weights / divisor[..., None], v)
    return out, torch.where(total > 0, torch.log(divisor), -math.inf)


def attend_batch(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor | None = None, **options):
    """The same of (B, S, H, D): out (B, S, H, D_v), lse (B, H, S)."""
    rows = []
    for b in range(len(q)):
        own = slopes if slopes is None or slopes.dim() == 1 else slopes[b]
        rows.append(attend(q[b], k[b], v[b], slopes=own, **options))
    return torch.stack([x[0] for x in rows]), torch.stack([x[1] for x in rows])


def drawn_options(rng: random.Random, heads: int, batch: int) -> tuple[dict, dict]:
    """(what `attend_batch` takes, what the functions of flash_attn take) of one drawn call."""
    options = {
        "scale": rng.choice((None, None, 0.3)),
        "causal": rng.random() < 0.5,
        "window": rng.choice(((-1, -1), (-1, -1), (3, 0), (2, 5), (-1, 1), (4, -1))),
        "softcap": rng.choice((0.0, 0.0, 1.5)),
        "slopes": rng.choice((None, torch.rand(heads), torch.rand(batch, heads))),
    }
    given = {
        "softmax_scale": options["scale"], "causal": options["causal"], "window_size": options["window"],
        "softcap": options["softcap"], "alibi_slopes": options["slopes"],
    }  # fmt: skip
    return options, given


def drawn_sizes(rng: random.Random) -> tuple[int, int, int]:
    """Heads, key heads and a head dim, some of which the functions pad."""
    return *rng.choice(((4, 4), (4, 2), (6, 1))), rng.choice((8, 16, 24, 37, 64))


def made(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=DTYPE)


def equal_with_gradients(result: Tensor, expected: Tensor, inputs: list[Tensor]) -> None:
    """The same values, and the same gradients of all inputs."""
    torch.testing.assert_close(result, expected, **CLOSE)
    direction = torch.randn_like(expected)
    ours = torch.autograd.grad(result, inputs, direction)
    theirs = torch.autograd.grad(expected, inputs, direction)
    for own, other, x in zip(ours, theirs, inputs, strict=True):
        assert own.shape == x.shape
        torch.testing.assert_close(own, other, **CLOSE)
