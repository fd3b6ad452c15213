"""The faults, as data: what is planted where, and which tests must notice.

Each is one that a hurried edit could make. `old` must occur exactly once in the file, so that a fault cannot
silently stop being planted when the code changes.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tests:
    """One run of pytest: in the interpreter, on CPU tensors, or under torchrun."""

    name: str
    paths: tuple[str, ...]
    interpret: bool = False
    ranks: int = 0


@dataclass(frozen=True)
class Fault:
    name: str
    file: str
    old: str
    new: str
    tests: Tests


_OPS = "tests/ops"
ATTENTION = Tests(
    "attention kernels", (f"{_OPS}/attention", f"{_OPS}/test_edges.py"), interpret=True
)
EDGES = Tests("edges", (f"{_OPS}/test_edges.py",), interpret=True)
DECODE = Tests("decode kernel", (f"{_OPS}/decode",), interpret=True)
MERGE = Tests("merge kernels", (f"{_OPS}/merge_states",), interpret=True)
APPEND = Tests("append kernel", (f"{_OPS}/append_kv",), interpret=True)
WRITES = Tests("writes", (f"{_OPS}/append_kv/test_append_framework.py",))
REFERENCE = Tests(
    "references", (f"{_OPS}/attention", f"{_OPS}/merge_states", f"{_OPS}/test_edges.py")
)
FRAMEWORK = Tests(
    "framework",
    (
        f"{_OPS}/test_opcheck.py",
        f"{_OPS}/test_autograd.py",
        f"{_OPS}/test_autocast.py",
        f"{_OPS}/test_flops.py",
    ),
)
DIST = Tests("distributed", ("tests/dist/test_decode.py", "tests/dist/test_kv_cache.py"), ranks=2)

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
        "tl.minimum(tl.maximum(tl.load(kv_lens_ptr + batch), 0), kv_capacity).to(tl.int32)",
        "tl.load(kv_lens_ptr + batch).to(tl.int32)", ATTENTION,
    ),
    Fault(
        "accumulator not rescaled", f"{_KERNELS}/attend.py",
        "tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)",
        "tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)", ATTENTION,
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
        "dK unscaled", f"{_KERNELS}/attention/backward.py",
        "(dk * scale).to(dk_ptr.dtype.element_ty)", "dk.to(dk_ptr.dtype.element_ty)", ATTENTION,
    ),
    Fault(
        "gradient of lse forgotten", f"{_KERNELS}/attention/backward.py",
        "delta -= tl.load(dlse_ptr", "delta -= 0 * tl.load(dlse_ptr", ATTENTION,
    ),
    Fault(
        "only the group's first head in dK and dV", f"{_KERNELS}/attention/backward.py",
        "for member in tl.range(0, group, num_stages=1):", "for member in tl.range(0, 1, num_stages=1):", ATTENTION,
    ),
    Fault(
        "a piece skips a tile in each round", f"{_KERNELS}/decode/kernel.py",
        "step = pieces * BLOCK_N", "step = (pieces + (pieces > 1)) * BLOCK_N", DECODE,
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
        "inside = (part < pieces)[:, None]", "inside = (part < tl.maximum(pieces - 1, 2))[:, None]", DECODE,
    ),
    Fault(
        "another item's parts", f"{_KERNELS}/decode/merge.py",
        "first += item * pieces", "first += tl.maximum(item - 1, 0) * pieces", DECODE,
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
        "a sink in every part", f"{_KERNELS}/score_tiles.py",
        "return out * weight[:, None], tl.where(", "return out, tl.where(", DECODE,
    ),
    Fault(
        "the bias before the cap", f"{_KERNELS}/score_tiles.py",
        "scores = softcap * tanh(scores / softcap)", "scores = softcap * tanh(scores / softcap * 1.01)", DECODE,
    ),
    Fault(
        "batch invariance forgotten", f"{_KERNELS}/decode/op.py",
        "self.batch_invariant, self.whole = batch_invariant, whole", "self.batch_invariant, self.whole = False, whole", DECODE,
    ),
    Fault(
        "a plan for every scale", f"{_KERNELS}/decode/op.py",
        "window_left, window_right, kv_block, kv_stride, scale, out_dtype,",
        "window_left, window_right, kv_block, kv_stride, out_dtype,", DECODE,
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
        "b = batch.to(tl.int64)", "b = batch", APPEND,
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
    Fault(
        "reference: right window ignored", f"{_KERNELS}/positions.py",
        "seen = seen & (k_pos <= q_pos + mask.window_right)", "seen = seen & (k_pos <= k_pos)", REFERENCE,
    ),
    Fault(
        "reference: dS without delta", f"{_KERNELS}/attention/reference.py",
        "ds = p * (_by_group(dout_rows, v.mT) - delta_rows[..., None])", "ds = p * _by_group(dout_rows, v.mT)",
        REFERENCE,
    ),
    Fault(
        "raw ops differentiate silently", f"{_KERNELS}/library.py",
        "if torch.is_grad_enabled() and any(requires_grad(arg) for arg in given):", "if False:", FRAMEWORK,
    ),
    Fault(
        "fake outputs contiguous", f"{_KERNELS}/attention/op.py",
        "    check_inputs(q, k, v, Mask(*mask), scale, (\"q\", \"k\", \"v\"))\n    return empty_state(q, out_dtype)",
        "    check_inputs(q, k, v, Mask(*mask), scale, (\"q\", \"k\", \"v\"))\n"
        "    return empty_state(q.contiguous(), out_dtype)", FRAMEWORK,
    ),
    Fault(
        "ranks deal blocks to a neighbour", "torch_fdattn/dist/sharding.py",
        "mine = block % self.world_size == self.rank", "mine = (block + 1) % self.world_size == self.rank", DIST,
    ),
    Fault(
        "global lengths taken for local ones", "torch_fdattn/dist/decode/op.py",
        "kv_lens=shards.local_lengths(lengths).clamp(max=capacity),", "kv_lens=lengths.clamp(max=capacity),", DIST,
    ),
    Fault(
        "dQ not summed over ranks", "torch_fdattn/dist/decode/op.py",
        'dq = torch.ops._c10d_functional.all_reduce(dq, "sum", ctx.group_name)', "dq = dq.clone()", DIST,
    ),
)  # fmt: skip
