"""What the sweeps of the backward read and write by rows: their terms, whole tiles, sums over a sequence."""

from __future__ import annotations

import triton
import triton.language as tl

from torch_fdattn.ops.attend import block_ptrs
from torch_fdattn.ops.online_softmax import LOG2E
from torch_fdattn.ops.packed_tiles import packed_block, packed_span, padded_row
from torch_fdattn.ops.tiles import program_coordinates

#: Rows of lse and delta are padded to multiples of it; every tile side divides it.
PADDING = tl.constexpr(128)
#: Arguments of the sweeps that a kernel is not compiled anew for.
LENGTHS = [
    "swizzle",
    "padded_len",
    "q_len",
    "kv_capacity",
    "window_left",
    "window_right",
    "kv_block",
    "kv_stride",
    "heads",
    "group",
    "sequences",
]


@triton.jit(do_not_specialize=["q_len", "padded_len", "heads", "sequences"])
def _row_terms_kernel(
    out_ptr, dout_ptr, lse_ptr, dlse_ptr, lse2_ptr, delta_ptr, out_strides, dout_strides,
    q_len, padded_len, heads, v_dim: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_DV: tl.constexpr,
    sequences=None, cu_seqlens_q_ptr=None, cu_seqlens_k_ptr=None,
):  # fmt: skip
    PACKED: tl.constexpr = cu_seqlens_q_ptr is not None
    block, head, batch = program_coordinates(padded_len // BLOCK_M, heads)
    batch64 = batch.to(tl.int64)
    first = block * BLOCK_M
    if PACKED:
        # Rows of blocks that no sequence fills are written, too: whoever sums over all rows adds zeros.
        tokens, place = q_len, first
        _, whole, first_token, q_len, _, _ = packed_block(
            place // PADDING, cu_seqlens_q_ptr, None, sequences, tokens, 0, PADDING
        )
        first = whole * PADDING + place % PADDING
        out_ptr += first_token.to(tl.int64) * out_strides[2]
        dout_ptr += first_token.to(tl.int64) * dout_strides[2]
    rows = first + tl.arange(0, BLOCK_M)
    rows_in = rows < q_len
    inside = rows_in[:, None] & (tl.arange(0, BLOCK_DV)[None, :] < v_dim)
    out_ptr += batch64 * out_strides[0] + head.to(tl.int64) * out_strides[1]
    dout_ptr += batch64 * dout_strides[0] + head.to(tl.int64) * dout_strides[1]
    out_ptrs = block_ptrs(out_ptr, first, (out_strides[2], out_strides[3]), True, BLOCK_M, BLOCK_DV)
    dout_ptrs = block_ptrs(
        dout_ptr, first, (dout_strides[2], dout_strides[3]), True, BLOCK_M, BLOCK_DV
    )
    out = tl.load(out_ptrs, mask=inside, other=0.0).to(tl.float32)
    dout = tl.load(dout_ptrs, mask=inside, other=0.0).to(tl.float32)
    # The selection rounds the products. Without it, where a thread holds one element of a row, its own product goes
    # unrounded into the sum's first addition (FMA), and the threads of a row differ in the sum's last bit.
    delta = tl.sum(tl.where(inside, out * dout, 0.0), 1)
    row_offset = (batch64 * heads + head) * q_len
    if PACKED:
        row_offset = head.to(tl.int64) * tokens + first_token
    lse = tl.load(lse_ptr + row_offset + rows, mask=rows_in, other=float("-inf"))
    if dlse_ptr is not None:
        delta -= tl.load(dlse_ptr + row_offset + rows, mask=rows_in, other=0.0)
    # Rows outside and rows that saw no key get a lse beyond all scores, so that their probabilities are zero and
    # the sweeps need no mask for them; a loss's gradient at lse = -inf may be NaN, and 0 · NaN is NaN. It is finite:
    # rows outside read the last row's mask, whose +inf less +inf is NaN (less this, they weigh what is zero).
    unseen = lse == float("-inf")
    delta = tl.where(unseen, 0.0, delta)
    lse = tl.where(unseen, 2e38, lse)
    padded_offset = (batch64 * heads + head) * padded_len
    if PACKED:
        padded_offset += place - first
    tl.store(lse2_ptr + padded_offset + rows, lse * LOG2E)
    tl.store(delta_ptr + padded_offset + rows, delta)


@triton.jit
def store_rows(ptr, strides, first, length, dim, tile, WIDE: tl.constexpr):
    """A tile's rows from `first` on, of a head's `length` at ptr."""
    ROWS: tl.constexpr = tile.shape[0]
    COLUMNS: tl.constexpr = tile.shape[1]
    ptrs = block_ptrs(ptr, first, (strides[2], strides[3]), WIDE, ROWS, COLUMNS)
    inside = (first + tl.arange(0, ROWS) < length)[:, None] & (tl.arange(0, COLUMNS) < dim)[None, :]
    tl.store(ptrs, tile.to(ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["sequences", "tokens", "padded_len", "heads"])
def _sum_by_sequence_kernel(
    rows_ptr, sums_ptr, cu_seqlens_ptr, sequences, tokens, padded_len, heads, BLOCK: tl.constexpr
):  # fmt: skip
    """sums (B, H) of each sequence's rows in (H, padded_len), in one order."""
    head, sequence, _ = program_coordinates(heads, sequences)
    first_token, length = packed_span(cu_seqlens_ptr, sequence, sequences, tokens)
    rows_ptr += head.to(tl.int64) * padded_len + padded_row(first_token, sequence, PADDING)
    total = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, length, BLOCK):
        row = start + tl.arange(0, BLOCK)
        total += tl.load(rows_ptr + row, mask=row < length, other=0.0)
    tl.store(sums_ptr + sequence.to(tl.int64) * heads + head, tl.sum(total, 0))
