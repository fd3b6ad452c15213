"""Packed sequences and pages in Triton: whose tokens a program's block holds, and where keys lie on pages.

`packed.py` says how blocks are numbered. Nothing here trusts the device's numbers with an address: whatever
cu_seqlens hold, first tokens and lengths stay within the tensors, and page numbers outside the cache are masked.
"""

from __future__ import annotations

import triton
import triton.language as tl

#: Beginnings of sequences that one step of the search compares.
_STEP = tl.constexpr(128)


@triton.jit
def packed_block(number, own_ptr, other_ptr, sequences, tokens, other_tokens, BLOCK: tl.constexpr):
    """Block `number`: (sequence, block of it, its first token, length, the same two of its other tokens).

    own_ptr are the beginnings of what is cut into blocks (queries, say), other_ptr those of the others (keys);
    None where each sequence has `other_tokens` of its own, as on pages.
    """
    begun = 0
    for first in tl.range(0, sequences + 1, _STEP):
        entry = first + tl.arange(0, _STEP)
        inside = entry <= sequences
        begins = _clamped(tl.load(own_ptr + entry, mask=inside, other=0), tokens)
        begun += tl.sum((inside & (begins // BLOCK + entry < number)).to(tl.int32), 0)
    sequence = begun - 1
    first_token, length = packed_span(own_ptr, sequence, sequences, tokens)
    block = number - (first_token // BLOCK + begun)
    # Lengths that do not grow have blocks before their first: none of theirs, then.
    block = tl.where(block < 0, tokens // BLOCK + 1, block)
    other_first = 0
    other_length = other_tokens
    if other_ptr is not None:
        other_first, other_length = packed_span(other_ptr, sequence, sequences, other_tokens)
    owned = (sequence >= 0) & (sequence < sequences)
    return sequence, block, first_token, length, other_first, tl.where(owned, other_length, 0)


@triton.jit
def packed_span(cu_seqlens_ptr, sequence, sequences, tokens):
    """(first token, length) of a sequence; of those before the first and behind the last: -1 and `sequences`."""
    first, end = sequence, sequence + 1
    begin = tl.load(cu_seqlens_ptr + first, mask=first >= 0, other=0)
    stop = tl.load(cu_seqlens_ptr + end, mask=end <= sequences, other=tokens)
    begin, stop = _clamped(begin, tokens), _clamped(stop, tokens)
    return begin, tl.maximum(stop - begin, 0)


@triton.jit
def _clamped(token, tokens):
    return tl.minimum(tl.maximum(token, 0), tokens).to(tl.int32)


@triton.jit
def listed(sequence, sequences):
    """A sequence whose entries in per-sequence tensors may be read, also for tokens that belong to none."""
    return tl.minimum(tl.maximum(sequence, 0), sequences - 1)


@triton.jit
def padded_row(first_token, sequence, PADDING: tl.constexpr):
    """Where a sequence's rows begin in a buffer of whole blocks of PADDING rows."""
    return ((first_token // PADDING + sequence + 1) * PADDING).to(tl.int64)


@triton.jit
def page_rows(index, kv_len, pages, PAGE: tl.constexpr):
    """Of keys (N,) behind a page table: (whether each is to be read, its page, its slot there).

    pages = (the sequence's row of the table, step between its entries, pages of the cache, the oldest key that
    counts). Keys that a window has left behind are not read, since their pages may have been freed.
    """
    table_ptr, step, page_count, oldest = pages
    inside = (index < kv_len) & (index >= oldest)
    page = tl.load(table_ptr + (index // PAGE).to(tl.int64) * step, mask=inside, other=-1)
    # Unsigned, a negative page is beyond the last one; so is the -1 of keys that do not count.
    held = page.to(tl.uint32, bitcast=True) < page_count.to(tl.uint32)
    return held, page.to(tl.int64), (index % PAGE).to(tl.int64)
