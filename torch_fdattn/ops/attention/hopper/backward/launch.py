"""The launches of Hopper's backward: terms of rows, the sweep over keys, and dQ of its sums; or gradients by themselves."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from torch_fdattn.launch.device import num_sms
from torch_fdattn.launch.launches import Launch
from torch_fdattn.ops.attention.backward import copy_sink_gradient, copy_slope_gradient
from torch_fdattn.ops.attention.backward_rows import PADDING
from torch_fdattn.ops.attention.hopper.backward.kernel import attention_backward_kernel
from torch_fdattn.ops.attention.hopper.backward.one_gradient_launch import gradient_launch
from torch_fdattn.ops.attention.hopper.backward.sums import LINE, WARPS, scaled_sums_kernel
from torch_fdattn.ops.attention.hopper.backward.terms import described_terms, terms_launch
from torch_fdattn.ops.attention.hopper.backward.tiles import GROUPS, QUERIES
from torch_fdattn.ops.attention.hopper.launch import (
    described,
    section,
    strides_of,
)
from torch_fdattn.ops.attention.hopper.launch import takes as forward_takes
from torch_fdattn.ops.attention.hopper.rows import ROWS
from torch_fdattn.ops.launch import cdiv
from torch_fdattn.ops.options import AttentionOptions
from torch_fdattn.ops.packed import Packed, kernel_arguments
from torch_fdattn.ops.positions import Mask
from torch_fdattn.ops.scores import NO_SCORES, Scores

#: That the sweep over keys computes with; what is between is filled up with zeros by the copies that load it.
HEAD_DIMS = (64, 128)
#: That each gradient by itself is computed with, above these.
WIDE_HEAD_DIM = 256


def takes(
    q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, packed: Packed | None = None
) -> bool:
    """Whether the kernel can read tensors that lie like these, and has what the options ask for."""
    return (
        options.scores.attn_mask is None
        and options.dropout.p == 0
        and (packed is None or _takes_packed(q, packed))
        and forward_takes(q, k, v, options, packed)
    )


def gives(score_grads: Scores, q: Tensor, options: AttentionOptions, packed: Packed | None) -> bool:
    """Whether these gradients of what modifies scores come with those of q, k and v, of a call that `takes` takes.

    Sinks' are sums over rows. Slopes' are of dS as it is before the cap's derivative, which no registers are left for.
    """
    if score_grads.alibi_slopes is None:
        return True
    return options.scores.softcap == 0.0 and packed is None


def _takes_packed(q: Tensor, packed: Packed) -> bool:
    """Up to head dim 128, and where the padding of each sequence's sums of dQ is no memory to speak of; the ordered form,
    which has none, takes the same calls.
    """
    padding = (packed.sequences + 2) * PADDING.value
    is_small = padding <= max(2 * q.shape[2], 4096)
    return packed.page_table is None and q.shape[3] <= HEAD_DIMS[-1] and is_small


def zero_sums(q: Tensor, padded_len: int) -> Tensor | None:
    """(B, H, padded_len, D'), float32, of the head dim that the kernel computes with; None where no sums are needed."""
    batch, heads, _, head_dim = q.shape
    if head_dim > HEAD_DIMS[-1]:
        return None
    return q.new_zeros((batch, heads, padded_len, _dim(head_dim)), dtype=torch.float32)


def _dim(head_dim: int) -> int:
    return next(x for x in (*HEAD_DIMS, WIDE_HEAD_DIM) if head_dim <= x)


def subs_of(head_dim: int, mask: Mask) -> int:
    """Blocks of 64 keys of a warp group: of head dim 128 one fills the registers.

    With a window of few keys smaller tiles have fewer hidden pairs. One H200, head dim 64, 32 heads, 16k: 0.84, 0.95, 1.08
    and 1.15 of the time with windows of 512, 1024, 2048 and 4096.
    """
    left, right = mask.window_left, mask.window_right
    is_narrow = min(left, right) >= 0 and left + right < 1024
    return 1 if head_dim > 64 or is_narrow else 2


def hopper_backward_launches(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    options: AttentionOptions, dq: Tensor, dk: Tensor, dv: Tensor, rows: tuple[Tensor, Tensor],
    sums: Tensor | None, counter: Tensor, packed: Packed | None = None, score_grads: Scores = NO_SCORES,
) -> Iterator[Launch]:  # fmt: skip
    """What writes the gradients into dq (like q), dk and dv (like k and v); lse and dlse fp32, contiguous.

    Of packed sequences all are by `packed.by_heads`, and lse and dlse (H, T).

    rows: `empty_rows`.
    sums: `zero_sums`, to which tiles of keys add in any order; None: dQ has a launch of its own, and the same bits on every run.
    counter: int32 (1,), 0, of no other launch that may run at the same time; it is 0 again afterwards.
    score_grads: as in `backward_launches`, of those that `gives` knows; torch sums them behind the launches.
    """
    dim, given = _dim(q.shape[3]), (dout, q, k, v, options)
    yield terms_launch(dout, dlse, out, lse, rows, dim, kernel_arguments(packed, k))
    if q.shape[3] <= HEAD_DIMS[-1]:
        yield from _sweep(*given, dq, dk, dv, rows, sums, counter, packed, score_grads.alibi_slopes)
    else:
        yield gradient_launch("dv", *given, dv, rows, counter, dim)
        yield gradient_launch("dk", *given, dk, rows, counter, dim)
    if sums is None:
        dslopes = score_grads.alibi_slopes if dim == WIDE_HEAD_DIM else None  # or of the sweep
        slope_sums = (
            None if dslopes is None else _slope_sums(q, q.shape[2], GROUPS.value * ROWS.value)
        )
        yield gradient_launch("dq", *given, dq, rows, counter, dim, packed, slope_sums)
        if dslopes is not None:
            copy_slope_gradient(dslopes, slope_sums)
    if score_grads.sinks is not None:
        copy_sink_gradient(score_grads.sinks, options.scores.sinks, lse, rows, packed)


def _sweep(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, dq: Tensor, dk: Tensor, dv: Tensor,
    rows: tuple[Tensor, Tensor], sums: Tensor | None, counter: Tensor, packed: Packed | None, dslopes: Tensor | None,
) -> Iterator[Launch]:  # fmt: skip
    """Up to head dim 128: dK and dV, and dQ where there are sums for it."""
    batch, heads, q_len, head_dim = q.shape
    kv_heads, capacity = k.shape[1:3]
    mask, scale, scores = options[:3]
    dim = _dim(head_dim)
    padded_len = rows[0].shape[2]
    subs = subs_of(head_dim, mask)
    keys = GROUPS.value * subs * ROWS.value
    blocks, sequences, begins = cdiv(capacity, keys) * batch, batch, (None, None)
    if packed is not None:
        blocks, sequences = packed.blocks(capacity, keys), packed.sequences
        begins = packed.cu_seqlens_q.contiguous(), packed.begins_of_keys.contiguous()
    slope_sums = None if dslopes is None else _slope_sums(q, capacity, keys)
    block = [1, 1, ROWS.value, dim]
    # Of a head's section: Q, dO and the sums of dQ.
    read = heads // kv_heads * q_len * head_dim * (2 * q.element_size() + 4)
    yield Launch(
        attention_backward_kernel, min(blocks * kv_heads, num_sms(q.device)),
        *(described(x, block) for x in (q, k, v, dout)), *map(described_terms, rows),
        None if sums is None else _lines(sums),
        described(dk, block), described(dv, block), dk, dv, counter, *mask[:3], *begins, q_len, capacity, sequences, kv_heads,
        heads // kv_heads, section(batch * kv_heads, 1, read), mask.window_left, mask.window_right,
        scale, scores.softcap or None, scores.alibi_slopes, *strides_of(scores.alibi_slopes, sequences), slope_sums,
        SUBS=subs, HAS_LEFT=mask.window_left >= 0, HAS_RIGHT=mask.window_right >= 0,
        RAGGED=packed is not None or mask.kv_lens is not None or capacity % keys != 0, num_warps=4,
    )  # fmt: skip
    if sums is not None:
        yield Launch(
            scaled_sums_kernel, padded_len // QUERIES.value * heads * batch,
            sums, dq, dq.stride(), heads, q_len, padded_len, scale, sequences, begins[0],
            HEAD_DIM=head_dim, ROWS=QUERIES.value, COLUMNS=dim, GROUPS=GROUPS.value,
        )  # fmt: skip
    if dslopes is not None:
        copy_slope_gradient(dslopes, slope_sums)


def _slope_sums(q: Tensor, length: int, tile: int) -> Tensor:
    """(B, H, parts): of each warp of each tile of so many rows of `length`."""
    parts = cdiv(length, tile) * GROUPS.value * WARPS.value
    return q.new_empty((*q.shape[:2], parts), dtype=torch.float32)


def _lines(sums: Tensor) -> TensorDescriptor:
    """Blocks of a warp group's columns of 64 rows."""
    lines, columns = QUERIES.value * sums.shape[3] // LINE.value // GROUPS.value, LINE.value
    layout = gl.NVMMASharedLayout(0, 32, 2)
    return TensorDescriptor(sums, [sums.numel() // columns, columns], [columns, 1], [lines, columns], layout)  # fmt: skip
