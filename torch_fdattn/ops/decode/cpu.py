"""Decode of CPU tensors: the filled part of the cache, dense or gathered from pages, by `attention/cpu.py`."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from torch_fdattn.ops import library
from torch_fdattn.ops.attention.cpu import (
    FORWARD,
    LARGE,
    REFERENCE_ALONE,
    TAKES_GROUPS,
    attention_on_cpu,
    of_sequence,
)
from torch_fdattn.ops.attention.cpu_parts import FEW_KEYS, FEW_SEQUENCES
from torch_fdattn.ops.attention.inputs import copy_state, empty_state
from torch_fdattn.ops.decode.inputs import Cache, DecodeCall
from torch_fdattn.ops.decode.reference import decode_reference, gathered, paged_decode_reference
from torch_fdattn.ops.positions import Mask
from torch_fdattn.ops.scores import Scores


class DecodeOnCpu:
    """A decode of CPU tensors that has passed its checks, called as `PreparedDecode` is."""

    floats = 0  #: of a workspace
    reads_pairs = False

    def __init__(self, call: DecodeCall) -> None:
        options = call.options
        self._is_one_row = _is_one_row(call)
        # Without the first call's tensors, which a remembered call would keep alive.
        mask, scores = Mask(None, None, None, *options.mask[3:]), Scores(options.scores.softcap)
        self._options = options._replace(mask=mask, scores=scores, k_scale=None, v_scale=None)

    def run(self, q, k, v, others, written=None, leave_parts=False):
        library.launches["decode_forward/cpu"] += 1
        options = self._options
        kv_lens, q_start, kv_start, page_table, k_scale, v_scale, slopes, attn_mask, sinks = others
        state = None
        if self._is_one_row:
            state = _one_row(q, k, v, kv_lens, page_table, options.scale)
        # In q's order of memory: the dims beside heads and elements are of size 1.
        if state is not None and written is None and state[0].stride(1) == q.stride(1):
            return (*state, None) if leave_parts else state
        out, lse = empty_state(q, v, options.dtype) if written is None else written[:2]
        if state is None:
            mask = Mask(kv_lens, q_start, kv_start, *options.mask[3:])
            scores = Scores(options.scores.softcap, slopes, sinks, attn_mask)
            scales = (x if x is None else x.expand(k.shape[:3]) for x in (k_scale, v_scale))
            cache = Cache(k, v, page_table, *scales)
            state = decode_on_cpu(q, cache, mask, options.scale, scores, options.batch_invariant)
        copy_state(out, lse, state)
        return (out, lse, None) if leave_parts else (out, lse)


def _is_one_row(call: DecodeCall) -> bool:
    """Whether each head has one query, over keys that torch's kernel takes as they are: a step of one sequence in float32."""
    q, (k, v, _table, *scales), options, global_lens = call
    mask, scores = options.mask, options.scores
    absent = *mask[1:3], *scales, *scores[1:], options.dtype, global_lens
    return (
        TAKES_GROUPS
        and not REFERENCE_ALONE
        and (q.shape[0], q.shape[2]) == (1, 1)
        and all(x is None for x in absent)
        and all(x.dtype == torch.float32 and x.stride(3) == 1 for x in (q, k, v))
        and q.shape[3] == v.shape[3] <= min(k.stride(2), v.stride(2))
        and (mask.window_left, mask.kv_block, scores.softcap) == (-1, 0, 0.0)
    )


def _one_row(
    q: Tensor, k: Tensor, v: Tensor, kv_lens: Tensor | None, page_table: Tensor | None, scale: float
) -> tuple[Tensor, Tensor] | None:
    """(out, lse) by one call of the kernel, without the Python in front of it; None: it may have lost a NaN, or all is hidden."""
    capacity = k.shape[2] * (1 if page_table is None else page_table.shape[1])
    keys = capacity if kv_lens is None else min(int(kv_lens), capacity)
    if keys < 1 or torch.is_autocast_enabled("cpu"):
        return None
    if page_table is not None:
        ids = page_table[0, : -(-keys // k.shape[2])].tolist()
        if not 0 <= min(ids) <= max(ids) < k.shape[0]:
            return None
        k, v = (_keys_of_pages(x, ids) for x in (k, v))
    state = FORWARD(q, k[:, :, :keys], v[:, :, :keys], 0.0, False, scale=scale)
    # As in `attention_on_cpu`: the kernel's lse of a row without a finite score is 0.
    return state if int(state[1].count_nonzero()) == q.shape[1] else None


def _keys_of_pages(pages: Tensor, ids: list[int]) -> Tensor:
    """(1, H_kv, ids · page, D) of pages (P, H_kv, page, D): of pages in a row, as the first sequence of a pool has them, a view."""
    if ids == list(range(ids[0], ids[0] + len(ids))):
        found = pages[ids[0] : ids[0] + len(ids)]
    else:
        found = pages[ids]
    return found.transpose(1, 2).flatten(0, 1).transpose(0, 1)[None]


@library.without_autocast  # a plan may be called within it
def decode_on_cpu(
    q: Tensor, cache: Cache, mask: Mask, scale: float, scores: Scores, alone: bool = False
) -> tuple[Tensor, Tensor]:
    """(out (B, H, T, DV), lse (B, H, T)); alone: as in `attention_on_cpu`."""
    attend = functools.partial(attention_on_cpu, alone=alone)
    k, v, page_table, *scales = cache
    if page_table is None:
        return decode_reference(q, k, v, mask, scale, *scales, scores, attend)
    if not _is_by_sequence(q, cache):
        return paged_decode_reference(q, k, v, page_table, mask, scale, *scales, scores, attend)
    counts = [cache.capacity] * q.shape[0]
    if mask.kv_lens is not None:
        counts = [min(max(count, 0), cache.capacity) for count in mask.kv_lens.tolist()]
        mask = mask._replace(kv_lens=None)
    states = []
    for b, count in enumerate(counts):
        own, (own_mask, own_scores) = slice(b, b + 1), of_sequence(mask, scores, b)
        own_k, own_v, keys_in = gathered(q, k, v, page_table[own], count, *scales)
        states.append(attend(q[own], own_k, own_v, own_mask, scale, own_scores, keys_in))
    return tuple(torch.cat(x) for x in zip(*states, strict=True))


def _is_by_sequence(q: Tensor, cache: Cache) -> bool:
    """Whether each sequence's pages are gathered alone: its keys only, which then are in the processor's caches."""
    batch, keys = q.shape[0], cache.capacity * cache.k.shape[1] * cache.k.shape[3]
    return batch * keys > FEW_KEYS and (batch <= FEW_SEQUENCES or keys >= LARGE)
