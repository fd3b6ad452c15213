"""Decode of CPU tensors: the filled part of the cache, dense or gathered from pages, by `attention/cpu.py`."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from torch_fdattn.ops import library
from torch_fdattn.ops.attention.cpu import LARGE, attention_on_cpu, of_sequence
from torch_fdattn.ops.attention.cpu_parts import FEW_KEYS, FEW_SEQUENCES
from torch_fdattn.ops.attention.inputs import copy_state, empty_state
from torch_fdattn.ops.decode.inputs import Cache
from torch_fdattn.ops.decode.reference import decode_reference, gathered, paged_decode_reference
from torch_fdattn.ops.options import DecodeOptions
from torch_fdattn.ops.positions import Mask
from torch_fdattn.ops.scores import Scores


class DecodeOnCpu:
    """A decode of CPU tensors that has passed its checks, called as `PreparedDecode` is."""

    floats = 0  #: of a workspace

    def __init__(self, options: DecodeOptions) -> None:
        # Without the first call's tensors, which a remembered call would keep alive.
        mask, scores = Mask(None, None, None, *options.mask[3:]), Scores(options.scores.softcap)
        self._options = options._replace(mask=mask, scores=scores, k_scale=None, v_scale=None)

    def run(self, q, k, v, others, written=None, leave_parts=False):
        library.launches["decode_forward/cpu"] += 1
        options = self._options
        kv_lens, q_start, kv_start, page_table, k_scale, v_scale, slopes, attn_mask, sinks = others
        mask = Mask(kv_lens, q_start, kv_start, *options.mask[3:])
        scores = Scores(options.scores.softcap, slopes, sinks, attn_mask)
        scales = (x if x is None else x.expand(k.shape[:3]) for x in (k_scale, v_scale))
        cache = Cache(k, v, page_table, *scales)
        out, lse = empty_state(q, v, options.dtype) if written is None else written[:2]
        state = decode_on_cpu(q, cache, mask, options.scale, scores, options.batch_invariant)
        copy_state(out, lse, state)
        return (out, lse, None) if leave_parts else (out, lse)


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
