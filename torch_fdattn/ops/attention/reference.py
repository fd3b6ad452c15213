"""Attention by explicit formulas in torch: the definition, and what `cpu.py` falls back to.

    S = scale · Q Kᵀ,  lse = log Σ_j exp(S_ij) over visible keys,  P = exp(S - lse),  O = P V

(with what `ops/scores.py` does to S, and `dropout.py` to P in P V and to dO Vᵀ) and, with D = rowsum(dO ∘ O) - dlse,

    dV = Pᵀ dO,  dS = P ∘ (dO Vᵀ - D),  dQ = scale · dS K,  dK = scale · dSᵀ Q

where S in dQ and dK is that before the cap, whose slope multiplies dS; -Σ dS ∘ distance for a slope of ALiBi.

(FlashAttention-2, arXiv:2307.08691, section 3.1; the term dlse is d lse / d S = P). The backward takes
P from the saved lse, so a partial key set with a global (out, lse) yields that part's exact gradients.

Forward mode, with primes for tangents:

    S' = scale · (Q' Kᵀ + Q K'ᵀ),  lse' = rowsum(P ∘ S'),  O' = (P ∘ (S' - lse')) V + P V'

Computes in fp32, or fp64 for fp64 inputs. Limit: materialises the scores of QUERY_BLOCK rows at a time.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from torch_fdattn.ops.attention.dropout import NO_DROPOUT, Dropout, kept_weights
from torch_fdattn.ops.positions import Mask, query_key_positions, sees, sees_any, visible
from torch_fdattn.ops.scores import (
    NO_SCORES,
    Scores,
    add_sinks,
    cap_slope,
    modify_scores,
    sink_gradient,
    sink_weights,
    sum_to,
)

QUERY_BLOCK = 512
#: Scores that the tangents hold at a time, where 16 rows have no more: they run on GPUs too.
TANGENT_SCORES = 1 << 24


def attention_reference(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float, options: Scores | None = None,
    keys_in: Tensor | None = None, dropout: Dropout = NO_DROPOUT, first_sequence: int = 0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out (B, H, S, DV), lse (B, H, S)) in the accumulation dtype.

    keys_in (B, N), boolean, takes further keys out. Dropout counts sequences from first_sequence on.
    """
    options = options or NO_SCORES
    kv_heads, q_len, kv_len = k.shape[1], q.shape[2], k.shape[2]
    q, k, v = grouped(q, kv_heads), accumulated(_valid(k, mask)), accumulated(_valid(v, mask))
    seen = visible(mask, q_len, kv_len, q.device)
    if keys_in is not None:
        seen = seen & keys_in[:, None, :]
    if mask.window_left >= 0:  # keys that every query has left behind may hold anything
        v = v.masked_fill(~seen.any(1)[:, None, :, None], 0.0)
    q_pos, k_pos, _ = query_key_positions(mask, q_len, kv_len, q.device)
    distance = k_pos[:, None, :] - q_pos[:, :, None]
    outs, lses = [], []
    positions = q_pos.split(QUERY_BLOCK, 1)
    for rows, seen_rows, distance_rows, options_rows, pos in zip(
        *(x.split(QUERY_BLOCK, dim) for x, dim in ((q, 3), (seen, 1), (distance, 1))),
        _by_rows(options, q_len), positions, strict=True,
    ):  # fmt: skip
        scores = scale * _by_group(rows, k.mT)
        if not options.is_plain:
            flat = modify_scores(scores.flatten(1, 2), distance_rows, options_rows)
            scores = flat.view(scores.shape)
        scores = scores.masked_fill(~seen_rows[:, None, None], float("-inf"))
        lse = torch.logsumexp(scores, -1)
        # Not exp(scores - lse): lse is rounded, and softmax's own normaliser is not. A row that sees no
        # key has no softmax; its probabilities are zero.
        p = torch.softmax(scores, -1).masked_fill((lse == float("-inf"))[..., None], 0.0)
        outs.append(_by_group(_kept(p, dropout, pos, k_pos, first_sequence), v))
        lses.append(lse)
    out, lse = torch.cat(outs, 3).flatten(1, 2), torch.cat(lses, 3).flatten(1, 2)
    return add_sinks(out, lse, options.sinks)


def attention_backward_reference(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    mask: Mask, scale: float, options: Scores | None = None, dropout: Dropout = NO_DROPOUT,
    first_sequence: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Scores]:  # fmt: skip
    """(dq, dk, dv, gradients of the options' tensors) in the accumulation dtype."""
    options = options or NO_SCORES
    delta = (accumulated(dout) * accumulated(out)).sum(-1)
    if dlse is not None:
        # A row that sees no key has gradient 0, though a loss's gradient at lse = -inf may be NaN.
        delta = delta - dlse.masked_fill(lse == float("-inf"), 0.0)
    dsinks = None if options.sinks is None else sink_gradient(options.sinks, lse, delta)
    kv_heads = k.shape[1]
    q, dout = grouped(q, kv_heads), grouped(dout, kv_heads)
    lse, delta = lse.unflatten(1, (kv_heads, -1)), delta.unflatten(1, (kv_heads, -1))
    k, v = accumulated(_valid(k, mask)), accumulated(_valid(v, mask))
    seen = visible(mask, q.shape[3], k.shape[2], q.device)[:, None, None]
    q_pos, k_pos, _ = query_key_positions(mask, q.shape[3], k.shape[2], q.device)
    distance = (k_pos[:, None, :] - q_pos[:, :, None])[:, None, None]
    dq, dk, dv, dslopes, dmask = [], torch.zeros_like(k), torch.zeros_like(v), 0.0, []
    blocks = (tensor.split(QUERY_BLOCK, 3) for tensor in (q, dout, lse, delta, seen, distance))
    positions = q_pos.split(QUERY_BLOCK, 1)
    for q_rows, dout_rows, lse_rows, delta_rows, seen_rows, away, rows, pos in zip(
        *blocks, _by_rows(options, q.shape[3]), positions, strict=True
    ):
        products = scale * _by_group(q_rows, k.mT)
        scores = products
        if not options.is_plain:
            flat = modify_scores(products.flatten(1, 2), away[:, 0, 0], rows)
            scores = flat.view(scores.shape)
        p = _probabilities(scores.masked_fill(~seen_rows, float("-inf")), lse_rows)
        dp = _kept(_by_group(dout_rows, v.mT), dropout, pos, k_pos, first_sequence)
        ds = p * (dp - delta_rows[..., None])
        if options.alibi_slopes is not None:
            sums, weights = (ds * away.abs()).sum(4), p.sum(4)
            if options.sinks is not None:
                sinks = accumulated(options.sinks).unflatten(0, (kv_heads, -1))[None, :, :, None]
                weights = weights + torch.exp(sinks - lse_rows)
            sums = _without_rounding_of_lse(sums, weights, lse_rows)
            dslopes = dslopes - sums.sum(3).flatten(1, 2)
        if rows.attn_mask is not None:
            dmask.append(sum_to(ds.flatten(1, 2), rows.attn_mask.shape))
        ds = ds * cap_slope(products, options)
        dq.append(scale * _by_group(ds, k))
        dk += scale * (ds.flatten(2, 3).mT @ q_rows.flatten(2, 3))
        p = _kept(p, dropout, pos, k_pos, first_sequence)
        dv += p.flatten(2, 3).mT @ dout_rows.flatten(2, 3)
    if options.alibi_slopes is None:
        dslopes = None
    elif options.alibi_slopes.dim() == 1:
        dslopes = dslopes.sum(0)
    if dmask:
        by_row = options.attn_mask.dim() > 1 and options.attn_mask.shape[-2] > 1
        dmask = torch.cat(dmask, -2) if by_row else sum(dmask)
        dmask = dmask.reshape(options.attn_mask.shape)
    gradients = Scores(0.0, dslopes, dsinks, None if options.attn_mask is None else dmask)
    return torch.cat(dq, 3).flatten(1, 2), dk, dv, gradients


def _without_rounding_of_lse(sums: Tensor, weights: Tensor, lse: Tensor) -> Tensor:
    """As in `backward_queries.py`: sums of rows that are linear in their weights, for weights that add up to one."""
    if (
        lse.dtype == torch.float64
    ):  # nothing is rounded by as much, and what looks like it is another part of the keys
        return sums
    explained = (lse.abs() * 3.5e-7 + 1e-6).clamp(max=1e-4)
    return sums / torch.where((weights - 1.0).abs() <= explained, weights, 1.0)


def attention_tangent_reference(
    q: Tensor, k: Tensor, v: Tensor, lse: Tensor, dq: Tensor | None, dk: Tensor | None, dv: Tensor | None,
    doptions: Scores, mask: Mask, scale: float, options: Scores | None = None, dropout: Dropout = NO_DROPOUT,
    first_sequence: int = 0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Tangents of (out, lse) in the accumulation dtype, from those of the inputs, None where there is none.

    Of `doptions` the tensors are tangents. Without dropout nothing here waits for a GPU.
    """
    options = options or NO_SCORES
    kv_heads, q_len, kv_len = k.shape[1], q.shape[2], k.shape[2]
    q_pos, k_pos, lens = query_key_positions(mask, q_len, kv_len, q.device)
    if q_len:
        # Keys that no query sees may hold anything, and so may their tangents: 0 · NaN is NaN.
        unseen = ~sees_any(mask, q_pos, k_pos, lens)[:, None, :, None]
        k, v, dk, dv = (None if x is None else x.masked_fill(unseen, 0.0) for x in (k, v, dk, dv))
    k, v, dk, dv = (None if x is None else accumulated(x) for x in (k, v, dk, dv))
    q, dq = (None if x is None else grouped(x, kv_heads) for x in (q, dq))
    block = min(max(TANGENT_SCORES // max(q.shape[0] * lse.shape[1] * kv_len, 1), 16), QUERY_BLOCK)
    outs, lses = [], []
    for start in range(0, max(q_len, 1), block):
        rows = slice(start, start + block)
        q_rows, lse_rows, pos = q[:, :, :, rows], lse[:, :, rows], q_pos[:, rows]
        away = k_pos[:, None, :] - pos[:, :, None]
        entries = _rows_of(options.attn_mask, rows)
        products = scale * _by_group(q_rows, k.mT)
        changed = modify_scores(products.flatten(1, 2), away, options._replace(attn_mask=entries))
        hidden = ~sees(mask, pos, k_pos, lens)[:, None]
        p = _probabilities(changed.masked_fill(hidden, float("-inf")), lse_rows)
        ds = torch.zeros_like(products)
        if dq is not None:
            ds = ds + scale * _by_group(dq[:, :, :, rows], k.mT)
        if dk is not None:
            ds = ds + scale * _by_group(q_rows, dk.mT)
        ds = (ds * cap_slope(products, options)).flatten(1, 2)
        doptions_rows = doptions._replace(softcap=0.0, attn_mask=_rows_of(doptions.attn_mask, rows))
        ds = _add_tangents(ds, away, doptions_rows).masked_fill(p == 0, 0.0)
        dlse = (p * ds).sum(-1)
        if doptions.sinks is not None:
            dlse = (
                dlse + sink_weights(options.sinks, lse_rows) * accumulated(doptions.sinks)[:, None]
            )
        grid = products.shape
        changing = (p * (ds - dlse[..., None])).view(grid)
        out = _by_group(_kept(changing, dropout, pos, k_pos, first_sequence), v)
        if dv is not None:
            out = out + _by_group(_kept(p.view(grid), dropout, pos, k_pos, first_sequence), dv)
        outs.append(out)
        lses.append(dlse)
    return torch.cat(outs, 3).flatten(1, 2), torch.cat(lses, 2)


def _add_tangents(ds: Tensor, distance: Tensor, doptions: Scores) -> Tensor:
    """ds (B, H, M, N) with the tangents of slopes and of an additive mask."""
    if doptions.alibi_slopes is not None:
        slopes = doptions.alibi_slopes.to(ds.dtype)
        slopes = slopes[None] if slopes.dim() == 1 else slopes
        ds = ds - slopes[:, :, None, None] * distance.abs()[:, None]
    if doptions.attn_mask is not None:
        ds = ds + doptions.attn_mask.to(ds.dtype)
    return ds


def _kept(x: Tensor, dropout: Dropout, q_pos: Tensor, k_pos: Tensor, first: int) -> Tensor:
    """x (B, H_kv, G, M, N) with zeros where weights are dropped, the others times 1 / (1 - p)."""
    if not dropout.threshold:
        return x
    kept = kept_weights(dropout, q_pos, k_pos, x.shape[0], x.shape[1] * x.shape[2], first)
    return (x * dropout.factor).masked_fill(~kept.view(x.shape), 0.0)


def _by_rows(options: Scores, q_len: int) -> Iterator[Scores]:
    """The options of each block of queries: with the mask's own rows, (…, M or 1, N or 1)."""
    entries = options.attn_mask
    for start in range(0, max(q_len, 1), QUERY_BLOCK):
        rows = slice(start, start + QUERY_BLOCK)
        yield options._replace(attn_mask=_rows_of(entries, rows))


def _rows_of(entries: Tensor | None, rows: slice) -> Tensor | None:
    """A mask's entries for some queries."""
    if entries is not None and entries.dim() > 1 and entries.shape[-2] > 1:
        return entries[..., rows, :]
    return entries


def _valid(x: Tensor, mask: Mask) -> Tensor:
    """Keys or values with zeros beyond kv_lens: caches hold anything there, and 0 · NaN is NaN."""
    if mask.kv_lens is None or not x.numel() or int(mask.kv_lens.min()) >= x.shape[2]:
        return x
    beyond = torch.arange(x.shape[2], device=x.device) >= mask.kv_lens[:, None]
    return x.masked_fill(beyond[:, None, :, None], 0.0)


def accumulated(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def grouped(x: Tensor, kv_heads: int) -> Tensor:
    """(B, H, S, D) to (B, H_kv, H / H_kv, S, D) in the accumulation dtype."""
    return accumulated(x).unflatten(1, (kv_heads, -1))


def _by_group(x: Tensor, y: Tensor) -> Tensor:
    """x (B, H_kv, G, M, C) @ y (B, H_kv, C, N), the group folded into the rows.

    Broadcasting y over the group would copy it G times: 17 times slower for one token at 4096 keys.
    """
    return (x.flatten(2, 3) @ y).unflatten(2, x.shape[2:4])


def _probabilities(scores: Tensor, lse: Tensor) -> Tensor:
    # A row that sees no key has lse = -inf; its probabilities are zero, not exp(-inf + inf).
    return torch.exp(scores - lse.masked_fill(lse == float("-inf"), 0.0)[..., None])
