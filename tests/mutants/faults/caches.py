"""Faults of what reads and writes KV caches: decode, its merges, writes."""

from __future__ import annotations

from tests.mutants.faults.fault import Fault
from tests.mutants.faults.runs import APPEND, DECODE, DECODE_ON_HOPPER, MERGE, WRITES

_KERNELS = "torch_fdattn/ops"
FAULTS = (
    Fault(
        "a padding mask of the first sequence", f"{_KERNELS}/decode/kernel.py",
        "mask_head_ptr = mask_ptr + b64 * mask_stride(mask_strides, 0)", "mask_head_ptr = mask_ptr + 0 * b64", DECODE,
    ),
    Fault(
        "decode's mask of the first head", f"{_KERNELS}/decode/kernel.py",
        "head.to(tl.int64) * mask_stride(mask_strides, 1)", "0 * head.to(tl.int64)", DECODE,
    ),
    Fault(
        "a piece skips a tile in each round", f"{_KERNELS}/decode/kernel.py",
        "step = splits * BLOCK_N", "step = (splits + (splits > 1)) * BLOCK_N", DECODE,
    ),
    Fault(
        "a ragged batch's pieces are never found", f"{_KERNELS}/decode/schedule.py",
        "here = (begins <= program) & (program < ends)", "here = (begins <= program) & (program < ends - 1)", DECODE,
    ),
    Fault(
        "the first pages of keys beyond the length", f"{_KERNELS}/decode/kernel.py",
        "next_page = tl.where(first_key + n < end, next_page, -1)", "next_page = tl.where(n >= 0, next_page, -1)", DECODE,
    ),
    Fault(
        "packed rows in the other order", f"{_KERNELS}/decode/kernel.py",
        "q_pos = q_start + row % q_len", "q_pos = q_start + row // group", DECODE,
    ),
    Fault(
        "one part is not merged", f"{_KERNELS}/decode/merge.py",
        "inside = (part < splits)[:, None]", "inside = (part < tl.maximum(splits - 1, 2))[:, None]", DECODE,
    ),
    Fault(
        "another work tile's parts", f"{_KERNELS}/decode/merge.py",
        "first += work_tile * splits", "first += tl.maximum(work_tile - 1, 0) * splits", DECODE,
    ),
    Fault(
        "pages that do not exist are read", f"{_KERNELS}/decode/kernel.py",
        "inside = page.to(tl.uint32, bitcast=True) < page_count.to(tl.uint32)",
        "page = tl.minimum(tl.maximum(page, 0), page_count - 1)", DECODE,
    ),
    Fault(
        "value scales forgotten in the sum's place", f"{_KERNELS}/decode/kernel.py",
        "p *= (value_scales * (weight / largest))[None, :]", "p *= weight / largest", DECODE,
    ),
    Fault(
        "pairs of bytes in the other order", f"{_KERNELS}/decode/one_byte.py",
        "first, second = (pairs & 0xFF).to(tl.uint8), (pairs >> 8).to(tl.uint8)",
        "second, first = (pairs & 0xFF).to(tl.uint8), (pairs >> 8).to(tl.uint8)", DECODE,
    ),
    Fault(
        "rows of odd strides read as pairs", f"{_KERNELS}/decode/configs.py",
        "even = all(stride % 2 == 0 for stride in cache.stride()[:3])", "even = True", DECODE,
    ),
    Fault(
        "pairs at odd addresses", f"{_KERNELS}/decode/launch.py",
        "return k.dtype.itemsize == 1 and bool((k.data_ptr() | v.data_ptr()) & 1)", "return False", DECODE_ON_HOPPER,
    ),
    Fault(
        "a sink in every part", f"{_KERNELS}/score_tiles.py",
        "return out * (own / some)[:, None], joined", "return out, joined", DECODE,
    ),
    Fault(
        "the bias before the cap", f"{_KERNELS}/score_tiles.py",
        "scores = softcap * tanh(scores / softcap)", "scores = softcap * tanh(scores / softcap * 1.01)", DECODE,
    ),
    Fault(
        "batch invariance forgotten", f"{_KERNELS}/decode/launch.py",
        "batch_invariant = options.batch_invariant", "batch_invariant = False", DECODE,
    ),
    Fault(
        "a plan for every scale", f"{_KERNELS}/decode/op.py",
        "v.device, mask[3:], scale, dtype,", "v.device, mask[3:], dtype,", DECODE,
    ),
    Fault(
        "merge without weights", f"{_KERNELS}/online_softmax.py",
        "acc = acc * alpha[:, None] + tl.sum(weights[:, :, None] * outs, 0)",
        "acc = acc * alpha[:, None] + tl.sum(outs, 0)", MERGE,
    ),
    Fault(
        "garbage of empty parts merged", f"{_KERNELS}/online_softmax.py",
        'outs = tl.where((lses == float("-inf"))[:, :, None], 0.0, outs)', "outs = outs + 0.0", MERGE,
    ),
    Fault(
        "merge's gradient without the merged output", f"{_KERNELS}/merge_states/kernel.py",
        "inner = tl.sum(dout * (part_out - out), 0)", "inner = tl.sum(dout * part_out, 0)", MERGE,
    ),
    Fault(
        "writes beyond the cache", f"{_KERNELS}/append_kv/kernel.py",
        "inside = real & (slot >= 0) & (slot < capacity)", "inside = real & (slot >= 0)", APPEND,
    ),
    Fault(
        "writes to pages that do not exist", f"{_KERNELS}/append_kv/kernel.py",
        "inside = inside & (base >= 0) & (base < page_count)", "inside = inside & (base >= 0)", APPEND,
    ),
    Fault(
        "padding stored", f"{_KERNELS}/append_kv/kernel.py",
        "real = real & (t < tl.load(new_lens_ptr + b * new_lens_strides[0]))", "real = real & (t < tokens)", APPEND,
    ),
    Fault(
        "32-bit offsets of caches", f"{_KERNELS}/append_kv/kernel.py",
        "b, t = batch.to(tl.int64), index", "b, t = batch, index", APPEND,
    ),
    Fault(
        "ties away from even", f"{_KERNELS}/append_kv/rounding.py",
        "normal = (magnitude + odd + ((1 << (drop - 1)) - 1)) >> drop",
        "normal = (magnitude + (1 << (drop - 1))) >> drop", APPEND,
    ),
    Fault(
        "K's scale taken for V", f"{_KERNELS}/append_kv/kernel.py",
        "values, v_cache_ptr, v_cache_strides, v_scale_ptr, v_scale_strides,",
        "values, v_cache_ptr, v_cache_strides, k_scale_ptr, k_scale_strides,", APPEND,
    ),
    Fault(
        "rope interleaved", f"{_KERNELS}/append_kv/kernel.py",
        "pair = (d % half).to(tl.int64)", "pair = (d // 2 % half).to(tl.int64)", APPEND,
    ),
    Fault(
        "writes that autograd does not see", f"{_KERNELS}/library.py",
        "torch.autograd.graph.increment_version([x for x in found if x is not None])", "list(found)", WRITES,
    ),
)  # fmt: skip
