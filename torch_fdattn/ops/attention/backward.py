"""Attention backward in portable Triton: streaming from the saved lse, deterministic by construction.

Three launches (FlashAttention-2, arXiv:2307.08691, algorithm 2, split in two sweeps), or four:
- `backward_rows.py`, per row: delta = rowsum(dO ∘ O) - dlse, and the lse in log2 units, both padded to whole tiles;
- `backward_keys.py`, one program per block of keys: dK and dV, over the queries of all heads of its group, in order;
- `backward_queries.py`, one program per block of queries: dQ, over the keys, and each row's part of the slopes'
  gradient. An additive mask's gradient is dS: written here where the mask is broadcast to nothing;
- `backward_mask.py`: else one program per tile of the mask sums it, in fixed order.
Seven matmuls instead of the five of a single sweep, but no atomics: the same bits on every run. One sweep with
dQ added up in fp32 was written and measured: no faster on the whole (docs/notes/attention.md).

Shapes: q, dq (B, H, M, D); out, dout (B, H, M, DV); k, dk (B, H_kv, N, D); v, dv (B, H_kv, N, DV); lse, dlse
(B, H, M). Packed sequences: the same programs on blocks that they look up, as in `forward.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from math import prod

import torch
from torch import Tensor

from torch_fdattn.launch.launches import Launch, run
from torch_fdattn.launch.pdl import supports_pdl
from torch_fdattn.ops.attention import tuning
from torch_fdattn.ops.attention.backward_keys import _dkdv_kernel
from torch_fdattn.ops.attention.backward_mask import _dmask_kernel
from torch_fdattn.ops.attention.backward_queries import _dq_kernel
from torch_fdattn.ops.attention.backward_rows import (
    PADDING,
    _row_terms_kernel,
    _sum_by_sequence_kernel,
)
from torch_fdattn.ops.attention.configs import (
    TILE_MULTIPLE,
    BackwardConfig,
    backward_config,
    device_capability,
    dot_precision,
    heads_per_swizzle,
    is_short_window,
    mask_gradient_config,
)
from torch_fdattn.ops.attention.tuned_tiles import with_tuned_tiles
from torch_fdattn.ops.launch import (
    broadcast_mask,
    cdiv,
    contiguous_mask,
    kernel_options,
    mask_flags,
    mask_numbers,
    tile_dims,
    wide_rows,
)
from torch_fdattn.ops.library import launches
from torch_fdattn.ops.mask_strides import mask_strides, of_vectors, opaque
from torch_fdattn.ops.online_softmax import LN2
from torch_fdattn.ops.options import AttentionOptions
from torch_fdattn.ops.packed import Packed, kernel_arguments
from torch_fdattn.ops.row_ranges_kernel import ranges_launch
from torch_fdattn.ops.scores import NO_SCORES, Scores, sink_gradient


def launch_backward(*args, **kwargs) -> None:
    """Makes `backward_launches`."""
    run(backward_launches(*args, **kwargs))


def backward_launches(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    options: AttentionOptions, dq: Tensor, dk: Tensor, dv: Tensor, score_grads: Scores = NO_SCORES,
    config: BackwardConfig | None = None, packed: Packed | None = None,
    rows: tuple[Tensor, Tensor] | None = None, ranges: Tensor | None = None,
) -> Iterator[Launch]:  # fmt: skip
    """What writes the gradients into dq (like q), dk and dv (like k and v); lse and dlse fp32, contiguous.

    score_grads: tensors for the gradients of the scores' options, None for those that nobody asks for; torch adds some
    of them up between and behind the launches.

    Of packed sequences all are by `packed.by_heads`, and lse and dlse (H, T). Scratch memory: rows (`empty_rows`) and
    ranges (`empty_ranges`).
    """
    batch, heads, q_len, head_dim = q.shape
    kv_heads, kv_capacity = k.shape[1:3]
    v_dim = v.shape[3]
    mask, scale, scores, dropout, _ = options
    if config is None:
        config = backward_config(
            max(head_dim, v_dim), q.dtype, device_capability(q.device), scores, dropout,
            is_short_window(mask, kv_capacity),
        )  # fmt: skip
        config = with_tuned_tiles("backward", config, q, v, options, kv_capacity, packed is not None)  # fmt: skip
        if tuning.state.active:
            case = tuning.TuningCase(q, k, v, options, packed)
            trial = partial(
                launch_backward, dout, dlse, q, k, v, out, lse, options, dq, dk, dv, score_grads, packed=packed,
                ranges=ranges,
            )  # fmt: skip
            config = tuning.chosen("backward", config, case, (dq, dk, dv), trial)
    mask = contiguous_mask(mask)
    op, row_blocks = "attention_backward", partial(cdiv, q_len)
    kv_blocks = partial(cdiv, kv_capacity)
    if packed is not None:
        op, row_blocks = "varlen_attention_backward", partial(packed.blocks, q_len)
        kv_blocks = partial(packed.blocks, kv_capacity)
    launches[f"{op}/triton"] += 1
    lse2, delta = rows or empty_rows(q, packed)
    padded_len = lse2.shape[2]
    slope_rows = None if score_grads.alibi_slopes is None else torch.empty_like(lse2)
    sizes = (
        q_len,
        kv_capacity,
        *mask_numbers(mask),
        scale,
        padded_len,
        heads,
        heads // kv_heads,
        head_dim,
        v_dim,
    )
    switches = {**mask_flags(mask), "PRECISION": dot_precision(q.dtype)}
    block_d, block_dv = tile_dims(k, v)
    switches |= {"BLOCK_D": block_d, "BLOCK_DV": block_dv}
    score_options = kernel_options(scores, q, k, dropout, packed)
    dmask, masks = score_grads.attn_mask, broadcast_mask(scores, q, k, packed)
    if dmask is not None:
        masks += broadcast_mask(score_grads, q, k, packed)
    # Where dQ's sweep itself writes the mask's gradient.
    in_dq = masks[1] if dmask is not None and dmask.numel() == masks[1].numel() else None
    # No kernels of their own for whole tiles where a mask's entries cost more than those would save.
    ragged = packed is not None or not of_vectors(score_options[6])
    ragged_q = ragged or q_len % TILE_MULTIPLE != 0
    ragged_kv = ragged or mask.kv_lens is not None or kv_capacity % TILE_MULTIPLE != 0
    borders = not mask.hides_nothing or ragged_q or ragged_kv
    ragged_kv |= in_dq is not None
    switches["WIDE"] = wide_rows(q, k, v, dout, dq, dk, dv, *masks)
    pdl = k.numel() > 0 and supports_pdl(device_capability(q.device))  # of dQ, behind dK and dV
    row_bytes = (head_dim + v_dim) * q.element_size()
    found_in = in_sweeps = kernel_arguments(packed, k)
    if ranges is not None:
        yield ranges_launch(ranges, scores, q, k)
        in_sweeps, borders = {"ranges_ptr": ranges}, True
    # Before the sweeps: dQ waits for nothing, and may start early of the kernel just before it alone.
    filled = in_dq is not None and packed is None  # whose sequences do not fill it
    if dmask is not None and not filled:
        dmask.zero_()
    if q.numel():
        block_m = 64 if v_dim <= 256 else 16
        yield Launch(
            _row_terms_kernel, padded_len // block_m * heads * batch,
            out, dout, lse, dlse, lse2, delta, out.stride(), dout.stride(), q_len, padded_len, heads, v_dim, BLOCK_M=block_m, BLOCK_DV=block_dv, also=found_in,
        )  # fmt: skip
    if k.numel():
        tile = config.dkdv
        yield Launch(
            _dkdv_kernel, kv_blocks(tile.block_n) * kv_heads * batch,
            q, k, v, dout, lse2, delta, dk, dv, *mask[:3],
            q.stride(), k.stride(), v.stride(), dout.stride(), dk.stride(), dv.stride(), score_options,
            heads_per_swizzle(mask, kv_heads * batch, q_len * row_bytes * (heads // kv_heads), packed is not None),
            *sizes, **switches, BORDERS=borders, RAGGED=ragged_q, GROUPED=heads != kv_heads, PDL=pdl,
            BLOCK_M=tile.block_m, BLOCK_N=tile.block_n,
            num_warps=tile.num_warps, num_stages=tile.num_stages, also=in_sweeps,
        )  # fmt: skip
    if q.numel():
        tile = config.dq
        yield Launch(
            _dq_kernel, row_blocks(tile.block_m) * heads * batch,
            q, k, v, dout, lse2, delta, dq, slope_rows, in_dq, *mask[:3],
            q.stride(), k.stride(), v.stride(), dout.stride(), dq.stride(),
            None if in_dq is None else mask_strides(in_dq), score_options,
            heads_per_swizzle(mask, heads * batch, kv_capacity * row_bytes // (heads // kv_heads), packed is not None),
            *sizes, **switches, BORDERS=borders, RAGGED=ragged_kv, PDL=pdl, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n,
            num_warps=tile.num_warps, num_stages=tile.num_stages, **({"launch_pdl": True} if pdl else {}), also=in_sweeps,
        )  # fmt: skip
    if dmask is not None and in_dq is None:
        tile = mask_gradient_config(max(head_dim, v_dim), q.dtype, device_capability(q.device))
        tile = tuning.forced("dmask", tile)
        sizes_of = (1,) * (4 - dmask.dim()) + tuple(dmask.shape)
        # One row of one query is its own, and one column of one key, to have fewer kernels.
        by_row, by_key = (
            own > 1 or (packed is None and own == whole)
            for own, whole in zip(sizes_of[2:], masks[1].shape[2:], strict=True)
        )
        mask_sizes = (
            *sizes_of[:2], cdiv(sizes_of[2], tile.block_m), cdiv(sizes_of[3], tile.block_n)
        )  # fmt: skip
        if q.numel() and k.numel():
            yield Launch(
                _dmask_kernel, prod(mask_sizes),
                q, k, v, dout, lse2, delta, dmask, *mask[:3],
                q.stride(), k.stride(), v.stride(), dout.stride(),
                tuple(map(opaque, masks[1].stride())), score_options, *sizes, batch if packed is None else packed.sequences,
                tuple(map(opaque, mask_sizes)), **switches, BY_ROW=by_row, BY_KEY=by_key,
                BLOCK_M=tile.block_m, BLOCK_N=tile.block_n,
                num_warps=tile.num_warps, num_stages=tile.num_stages, also=found_in,
            )  # fmt: skip
    if score_grads.alibi_slopes is not None:
        parts = slope_rows[:, :, :q_len]
        if packed is not None:
            parts = slope_rows.new_empty(packed.sequences, heads, 1)
            yield _sum_by_sequence(slope_rows, parts, packed, q_len)
        copy_slope_gradient(score_grads.alibi_slopes, parts)
    if score_grads.sinks is not None:
        copy_sink_gradient(score_grads.sinks, scores.sinks, lse, (lse2, delta), packed)


def copy_slope_gradient(gradient: Tensor, parts: Tensor) -> None:
    """gradient (H,) or (B, H) of parts (B, H, any number), which are summed in float64: they cancel."""
    over = (0, 2) if gradient.dim() == 1 else 2
    gradient.copy_(parts.sum(over, dtype=torch.float64))


def copy_sink_gradient(
    gradient: Tensor, sinks: Tensor, lse: Tensor, rows: tuple[Tensor, Tensor], packed: Packed | None
) -> None:
    """gradient (H,) of lse and of rows, (lse2, delta), which a launch has written."""
    lse2, delta = rows
    q_len = lse.shape[-1]
    if packed is not None and q_len:  # in padded rows, as delta is; nobody's are 2e38
        lse, q_len = lse2 * LN2.value, lse2.shape[2]
    gradient.copy_(sink_gradient(sinks, lse, delta[:, :, :q_len]))


def empty_rows(q: Tensor, packed: Packed | None = None) -> tuple[Tensor, Tensor]:
    """(lse2, delta), which the sweeps read, by heads and in whole tiles; unwritten."""
    batch, heads, q_len = q.shape[:3]
    blocks = cdiv(q_len, PADDING.value) if packed is None else packed.blocks(q_len, PADDING.value)
    shape = batch, heads, blocks * PADDING.value
    lse2 = torch.empty(shape, dtype=torch.float32, device=q.device)
    return lse2, torch.empty_like(lse2)


def _sum_by_sequence(rows: Tensor, sums: Tensor, packed: Packed, tokens: int) -> Launch:
    """What writes sums (B, H, 1) of rows (1, H, padded_len)."""
    heads, padded_len = rows.shape[1:]
    return Launch(
        _sum_by_sequence_kernel, packed.sequences * heads,
        rows, sums, packed.cu_seqlens_q.contiguous(), packed.sequences, tokens, padded_len, heads,
        BLOCK=PADDING.value,
    )  # fmt: skip
