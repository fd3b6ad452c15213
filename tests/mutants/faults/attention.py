"""Faults of attention's kernels: masks, tiles, scores, packed sequences, dropout, gradients."""

from __future__ import annotations

from tests.mutants.faults.fault import Fault
from tests.mutants.faults.runs import (
    ATTENTION,
    EDGES,
    ORDER,
    ROWS,
    VARLEN,
    VARLEN_MASKS,
)

_KERNELS = "torch_fdattn/ops"
FAULTS = (
    Fault(
        "causal mask off by one", f"{_KERNELS}/tiles.py",
        "seen & (position <= q_pos + window_right)", "seen & (position <= q_pos + window_right + 1)", ATTENTION,
    ),
    Fault(
        "left window dropped", f"{_KERNELS}/tiles.py",
        "seen = seen & (position >= q_pos - window_left)", "seen = seen & (position >= position)", ATTENTION,
    ),
    Fault(
        "interior reaches into the border", f"{_KERNELS}/tiles.py",
        "full_end = tl.maximum(full_end // BLOCK_N * BLOCK_N, full_begin)",
        "full_end = tl.maximum(tl.cdiv(full_end, BLOCK_N) * BLOCK_N, full_begin)", ATTENTION,
    ),
    Fault(
        "the last heads' programs counted as if they were as many as the others'", f"{_KERNELS}/tiles.py",
        "swizzle = tl.minimum(swizzle, tl.num_programs(0) // blocks - first)", "swizzle = swizzle + 0 * first", ORDER,
    ),
    Fault(
        "striped positions without the rest", f"{_KERNELS}/tiles.py",
        "kv_start + index // kv_block * kv_stride + index % kv_block", "kv_start + index // kv_block * kv_stride",
        ATTENTION,
    ),
    Fault(
        "strided lengths read as contiguous", f"{_KERNELS}/launch.py",
        "if all(x is None or x.is_contiguous() for x in mask[:3]):", "if True:", EDGES,
    ),
    Fault(
        "lengths not clamped", f"{_KERNELS}/tiles.py",
        "tl.minimum(tl.maximum(given, 0), kv_capacity).to(tl.int32)", "given.to(tl.int32)", ATTENTION,
    ),
    Fault(
        "accumulator not rescaled", f"{_KERNELS}/attend.py",
        "add_dot(acc * alpha[:, None], p.to(v.dtype), v, PRECISION)",
        "add_dot(acc, p.to(v.dtype), v, PRECISION)", ATTENTION,
    ),
    Fault(
        "lse in log2 units", f"{_KERNELS}/online_softmax.py",
        "float(\"-inf\"), row_max * LN2 + tl.log(", "float(\"-inf\"), row_max + tl.log(", ATTENTION,
    ),
    Fault(
        "K's sequence stride taken for V", f"{_KERNELS}/attend.py",
        "v_ptr + start.to(tl.int64) * v_strides[0]", "v_ptr + start.to(tl.int64) * k_strides[0]", ATTENTION,
    ),
    Fault(
        "a block of two sequences", f"{_KERNELS}/packed_tiles.py",
        "begins // BLOCK + entry < number", "begins // BLOCK + entry <= number", VARLEN,
    ),
    Fault(
        "a sequence's keys taken from the first token", f"{_KERNELS}/attention/forward.py",
        "v_ptr += first_key.to(tl.int64) * v_strides[2]", "v_ptr += first_key.to(tl.int64) * 0", VARLEN,
    ),
    Fault(
        "sinks for tokens of no sequence", f"{_KERNELS}/attention/forward.py",
        "sink = tl.where(owned, sink, float(\"-inf\"))", "sink = tl.where(owned, sink, sink)", VARLEN,
    ),
    Fault(
        "pages outside the cache followed", f"{_KERNELS}/packed_tiles.py",
        "held = page.to(tl.uint32, bitcast=True) < page_count.to(tl.uint32)", "held = inside & (page >= 0)", VARLEN,
    ),
    Fault(
        "dK unscaled", f"{_KERNELS}/attention/backward_keys.py",
        "head_dim, dk * scale, WIDE", "head_dim, dk, WIDE", ATTENTION,
    ),
    Fault(
        "gradient of lse forgotten", f"{_KERNELS}/attention/backward_rows.py",
        "delta -= tl.load(dlse_ptr", "delta -= 0 * tl.load(dlse_ptr", ATTENTION,
    ),
    Fault(
        "only the group's first head in dK and dV", f"{_KERNELS}/attention/backward_keys.py",
        "head64 = first_head64 + member", "head64 = first_head64", ATTENTION,
    ),
    Fault(
        "the cap's slope forgotten", f"{_KERNELS}/score_tiles.py",
        "cap_slope = 1.0 - capped * capped", "cap_slope = 1.0", ATTENTION,
    ),
    Fault(
        "slopes' gradient with signed distances", f"{_KERNELS}/attention/backward_queries.py",
        "distance = tl.abs(key_distance(q_pos[:, None], index[None, :], keys, BLOCK_CYCLIC))",
        "distance = key_distance(q_pos[:, None], index[None, :], keys, BLOCK_CYCLIC)", ATTENTION,
    ),
    Fault(
        "half a sink's gradient", f"{_KERNELS}/scores.py",
        "* delta).sum((0, 2))", "* delta).sum((0, 2)) * 0.5", ATTENTION,
    ),
    Fault(
        "an explicit mask's rows from the first on", f"{_KERNELS}/score_tiles.py",
        "mask_ptr += first_row.to(tl.int64) * of_rows", "mask_ptr += 0 * first_row.to(tl.int64) * of_rows",
        ATTENTION,
    ),
    Fault(
        "a mask's gradient from one head", f"{_KERNELS}/attention/backward_mask.py",
        "head_count = heads // mask_heads", "head_count = 1", ATTENTION,
    ),
    Fault(
        "padding's first whole tile is its first", f"{_KERNELS}/tiles.py",
        "tl.cdiv(first, BLOCK_N) * BLOCK_N), last)", "first // BLOCK_N * BLOCK_N), last)", ROWS,
    ),
    Fault(
        "padding's last key is left out", f"{_KERNELS}/row_ranges_kernel.py",
        "tl.where(seen, index + 1, 0)", "tl.where(seen, index, 0)", ROWS,
    ),
    Fault(
        "rows with holes are not read within", f"{_KERNELS}/row_ranges_kernel.py",
        "(last - begin == tl.sum(count, 0)).to(tl.int32)", "(last >= begin).to(tl.int32)", ROWS,
    ),
    Fault(
        "a shard's weights are taken for all", f"{_KERNELS}/attention/backward_queries.py",
        "tl.where(tl.abs(weights - 1.0) <= explained, weights, 1.0)", "weights", ATTENTION,
    ),
    Fault(
        "a mask's gradient of packed sequences from the first alone", f"{_KERNELS}/attention/backward_mask.py",
        "batch = own_batch + i", "batch = own_batch + 0 * i", VARLEN_MASKS,
    ),
    Fault(
        "a packed sequence's mask of the first", f"{_KERNELS}/score_tiles.py",
        "mask_ptr = options[5] + batch64 * mask_stride(options[6], 0)", "mask_ptr = options[5] + 0 * batch64", VARLEN_MASKS,
    ),
    Fault(
        "dropout by tile", f"{_KERNELS}/attention/dropout_tiles.py",
        "w3 = _random_bits(head, q_pos, (first >> 5) * 4 +", "w3 = _random_bits(head, q_pos, 0 * first +", ATTENTION,
    ),
    Fault(
        "dropout of a part's heads as of the first ones", f"{_KERNELS}/score_tiles.py",
        "counted += tl.load(options[7] + 2).to(tl.int32)", "counted += 0", ATTENTION,
    ),
    Fault(
        "lanes of words swapped", f"{_KERNELS}/attention/dropout_tiles.py",
        "below = tl.where((position & 8) == 0, w0, w1)", "below = tl.where((position & 8) == 0, w0, w2)", ATTENTION,
    ),
    Fault(
        "dropped weights count in dS", f"{_KERNELS}/attention/backward_keys.py",
        "dpt = tl.where(kept, dpt, 0.0) * options[9]", "dpt = dpt * options[9]", ATTENTION,
    ),
)  # fmt: skip
