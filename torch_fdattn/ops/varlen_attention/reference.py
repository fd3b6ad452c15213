"""Attention over packed sequences in torch: attention's formulas, one sequence after the other.

Tokens that belong to no sequence have out 0, lse -inf and no gradient.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from torch_fdattn.ops.attention.dropout import NO_DROPOUT, Dropout
from torch_fdattn.ops.attention.reference import (
    accumulated,
    attention_backward_reference,
    attention_reference,
    attention_tangent_reference,
)
from torch_fdattn.ops.decode.reference import gathered, longest_of
from torch_fdattn.ops.packed import Packed
from torch_fdattn.ops.positions import FAR, Mask
from torch_fdattn.ops.scores import Scores


def varlen_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, packed: Packed, mask: Mask, scale: float, options: Scores,
    dropout: Dropout = NO_DROPOUT, attend: Callable = attention_reference, written: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out (T, H, DV), lse (H, T)) in the accumulation dtype.

    attend: what computes attention over a sequence, in place of the reference; written: what to write into.
    """
    if written is None:
        like = accumulated(q)
        written = like.new_empty(*q.shape[:2], v.shape[-1]), like.new_empty(q.shape[1::-1])
    out, lse = written[0].zero_(), written[1].fill_(float("-inf"))
    queries, outs = by_heads(q), by_heads(out)
    if packed.page_table is None:
        all_k, all_v = by_heads(k), by_heads(v)
    for b, rows, keys, own_mask, own_options in _sequences(q, k, packed, mask, options):
        keys_in = None
        if packed.page_table is None:
            own_k, own_v = all_k[:, :, keys], all_v[:, :, keys]
        else:
            table = packed.page_table[b : b + 1]
            longest = longest_of(own_mask, table.shape[1] * k.shape[2])
            own_k, own_v, keys_in = gathered(q, k, v, table, longest)
            entries = _with_columns(own_options.attn_mask, own_k.shape[2])
            own_options = own_options._replace(attn_mask=entries)
        own = attend(
            queries[:, :, rows], own_k, own_v, own_mask, scale, own_options, keys_in, dropout, b
        )
        outs[:, :, rows], lse[:, rows] = own[0], own[1][0]
    return out, lse


def varlen_attention_backward_reference(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, packed: Packed,
    mask: Mask, scale: float, options: Scores, dropout: Dropout = NO_DROPOUT,
    differentiate: Callable = attention_backward_reference,
) -> tuple[Tensor, Tensor, Tensor, Scores]:  # fmt: skip
    """(dq, dk, dv, gradients of the options' tensors) in the accumulation dtype.

    differentiate: what computes a sequence's gradients, in place of the reference; of the options it may give fewer.
    """
    dq, dk, dv = (torch.zeros_like(accumulated(x)) for x in (q, k, v))
    slopes, sinks, entries = (
        None if x is None else torch.zeros_like(x, dtype=dq.dtype) for x in options[1:]
    )
    for b, rows, keys, own_mask, own_options in _sequences(q, k, packed, mask, options):
        *own, of_options = differentiate(
            by_heads(dout[rows]), None if dlse is None else dlse[None, :, rows],
            *(by_heads(x) for x in (q[rows], k[keys], v[keys], out[rows])), lse[None, :, rows],
            own_mask, scale, own_options, dropout, b,
        )  # fmt: skip
        for whole, where, part in zip((dq, dk, dv), (rows, keys, keys), own, strict=True):
            whole[where] += part[0].transpose(0, 1)
        if of_options.alibi_slopes is not None:
            (slopes if slopes.dim() == 1 else slopes[b]).add_(of_options.alibi_slopes.squeeze(0))
        if of_options.sinks is not None:
            sinks += of_options.sinks
        if of_options.attn_mask is not None:
            own = _own_entries(entries, b, rows, keys)
            own += (
                of_options.attn_mask.narrow(-1, 0, own.shape[-1])
                if own.dim()
                else of_options.attn_mask
            )
    return dq, dk, dv, Scores(0.0, slopes, sinks, entries)


def varlen_attention_tangent_reference(
    q: Tensor, k: Tensor, v: Tensor, lse: Tensor, packed: Packed, dq: Tensor | None, dk: Tensor | None,
    dv: Tensor | None, doptions: Scores, mask: Mask, scale: float, options: Scores, dropout: Dropout = NO_DROPOUT,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Tangents of (out, lse) in the accumulation dtype; reads the lengths on the host."""
    out = accumulated(q).new_zeros(*q.shape[:2], v.shape[-1])
    dlse = out.new_zeros(q.shape[1], q.shape[0])
    of_sequences = _sequences(q, k, packed, mask, doptions)
    for (b, rows, keys, own_mask, own), (*_, own_tangents) in zip(
        _sequences(q, k, packed, mask, options), of_sequences, strict=True
    ):
        parts = ((q, rows), (k, keys), (v, keys)), ((dq, rows), (dk, keys), (dv, keys))
        inputs, tangents = (
            [None if x is None else by_heads(x[at]) for x, at in part] for part in parts
        )
        found = attention_tangent_reference(
            *inputs, lse[None, :, rows], *tangents, own_tangents, own_mask, scale, own, dropout, b
        )  # fmt: skip
        out[rows], dlse[:, rows] = found[0][0].transpose(0, 1), found[1][0]
    return out, dlse


def by_heads(x: Tensor) -> Tensor:
    """(T, H, D) to (1, H, T, D)."""
    return x.transpose(0, 1)[None]


class _Sequence(NamedTuple):
    """Of one sequence: its number, its rows of q and of k, its mask and its options."""

    number: int
    rows: slice
    keys: slice
    mask: Mask
    options: Scores


def _sequences(
    q: Tensor, k: Tensor, packed: Packed, mask: Mask, options: Scores
) -> Iterator[_Sequence]:
    for b, (rows, keys) in enumerate(zip(*spans_of(q, k, packed), strict=True)):
        own_mask, own_options = mask, options
        if any(x is not None for x in mask[:3]):
            own_mask = Mask(*(None if x is None else x[b : b + 1] for x in mask[:3]), *mask[3:])
        if options.alibi_slopes is not None and options.alibi_slopes.dim() == 2:
            own_options = options._replace(alibi_slopes=options.alibi_slopes[b : b + 1])
        if options.attn_mask is not None:
            columns = keys if packed.page_table is None else slice(0, FAR)
            own = _own_entries(options.attn_mask, b, rows, columns)
            if packed.page_table is None:
                own = _with_columns(own, keys.stop - keys.start)
            own_options = own_options._replace(attn_mask=own)
        if rows.stop > rows.start:
            yield _Sequence(b, rows, keys, own_mask, own_options)


def _own_entries(entries: Tensor, b: int, rows: slice, keys: slice) -> Tensor:
    """A view of an explicit mask's entries of sequence b, with those columns of its keys that it has."""
    if entries.dim() == 4 and entries.shape[0] > 1:
        entries = entries[b : b + 1]
    for dim, tokens in ((-2, rows), (-1, keys)):
        if entries.dim() >= -dim and entries.shape[dim] > 1:
            count = min(tokens.stop - tokens.start, entries.shape[dim])
            entries = entries.narrow(dim, 0, count)
    return entries


def _with_columns(entries: Tensor | None, count: int) -> Tensor | None:
    """With as many columns; those that a mask has not belong to keys that do not count."""
    if entries is None or not entries.dim() or entries.shape[-1] in (1, count):
        return entries
    return torch.nn.functional.pad(entries, (0, count - entries.shape[-1]))


def spans_of(q: Tensor, k: Tensor, packed: Packed) -> tuple[list[slice], list[slice]]:
    """Of each sequence, its queries and its keys."""
    rows = _slices(packed.cu_seqlens_q, q.shape[0])
    if packed.cu_seqlens_k is None and k.shape[0] == q.shape[0]:
        return rows, rows
    return rows, _slices(packed.begins_of_keys, k.shape[0])


def _slices(cu_seqlens: Tensor, tokens: int) -> list[slice]:
    """Of each sequence, within the tokens that there are."""
    bounds = cu_seqlens.clamp(0, tokens).tolist()
    return [slice(a, max(a, b)) for a, b in itertools.pairwise(bounds)]
