"""The faults, as data: what is planted where, and which tests must notice.

Each is one that a hurried edit could make. `old` must occur exactly once in the file, so that a fault cannot
silently stop being planted when the code changes.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tests:
    """One run of pytest: in the interpreter, on CPU tensors, or under torchrun (`interpret` there: of all tests)."""

    __test__ = False  # pytest need not look for tests in it

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
ROWS = Tests("rows of masks", (f"{_OPS}/attention/test_row_ranges.py",), interpret=True)
EDGES = Tests("edges", (f"{_OPS}/test_edges.py",), interpret=True)
ORDER = Tests("order of programs", (f"{_OPS}/attention/test_order.py",), interpret=True)
PREPARED = Tests("prepared calls", ("tests/compile_only/test_prepared.py",))
DECODE = Tests("decode kernel", (f"{_OPS}/decode",), interpret=True)
VARLEN = Tests(
    "packed sequences", (f"{_OPS}/varlen_attention/test_varlen_edges.py",), interpret=True
)
VARLEN_MASKS = Tests(
    "packed sequences' masks", (f"{_OPS}/varlen_attention/test_varlen_masks.py",), interpret=True
)
MERGE = Tests("merge kernels", (f"{_OPS}/merge_states",), interpret=True)
APPEND = Tests("append kernel", (f"{_OPS}/append_kv",), interpret=True)
WRITES = Tests("writes", (f"{_OPS}/append_kv/test_append_framework.py",))
REFERENCE = Tests(
    "references", (f"{_OPS}/attention", f"{_OPS}/merge_states", f"{_OPS}/test_edges.py")
)
CPU = Tests("CPU tensors", (f"{_OPS}/attention/test_cpu.py",))
FRAMEWORK = Tests(
    "framework",
    (
        f"{_OPS}/test_opcheck.py",
        f"{_OPS}/test_autograd.py",
        f"{_OPS}/test_autocast.py",
        f"{_OPS}/test_flops.py",
    ),
)
ONE_SIDED = Tests(
    "one-sided exchanges",
    ("tests/dist/test_signals.py", "tests/dist/test_one_sided.py"),
    interpret=True,
    ranks=2,
)
FUSED_PARTS = Tests(
    "parts merged by the exchange", ("tests/dist/test_fused_parts.py",), interpret=True, ranks=2
)
DECODE_TWO_SHOT = Tests(
    "sharded decode in two shots",
    ("tests/dist/test_decode_two_shot.py",),
    interpret=True,
    ranks=3,
)
SURVIVORS = Tests("lost ranks", ("tests/test_faults.py",))
MATMULS = Tests(
    "tensor-parallel matmuls", ("tests/dist/test_tp_one_sided.py",), interpret=True, ranks=2
)
INFERENCE = Tests("inference form", ("tests/models/test_inference.py",), interpret=True)
TP_INFERENCE = Tests(
    "tensor-parallel inference form", ("tests/dist/test_tp_inference.py",), ranks=2
)
SWIGLU = Tests(
    "gathered rows' SwiGLU", ("tests/dist/test_gathered_swiglu.py",), interpret=True, ranks=2
)
DIST = Tests("distributed", ("tests/dist/test_decode.py", "tests/dist/test_kv_cache.py"), ranks=2)

_KERNELS = "torch_fdattn/ops"
WRITTEN_FORMS = Tests(
    "forms as models write them, and their twins",
    (
        "tests/compile_backend/test_written_forms.py",
        "tests/compile_backend/test_written_form_twins.py",
    ),
)

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
        "beside = tl.minimum(beside, tl.num_programs(0) // blocks - first)", "beside = beside + 0 * first", ORDER,
    ),
    Fault(
        "a prepared call's launches given all tensors in order", "torch_fdattn/launch/prepared.py",
        "[addresses[i] + offset for i, offset in places]", "addresses[: len(places)]", PREPARED,
    ),
    Fault(
        "a view by the beginning of what it lies in", "torch_fdattn/launch/prepared.py",
        "[addresses[i] + offset for i, offset in places]", "[addresses[i] for i, offset in places]", PREPARED,
    ),
    Fault(
        "a prepared call by other tiles", f"{_KERNELS}/attention/op.py",
        "if not q.is_cuda or tuning.state.active or q.dtype", "if not q.is_cuda or q.dtype", PREPARED,
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
        "a padding mask of the first sequence", f"{_KERNELS}/decode/kernel.py",
        "mask_head_ptr = mask_ptr + b64 * mask_stride(mask_strides, 0)", "mask_head_ptr = mask_ptr + 0 * b64", DECODE,
    ),
    Fault(
        "decode's mask of the first head", f"{_KERNELS}/decode/kernel.py",
        "head.to(tl.int64) * mask_stride(mask_strides, 1)", "0 * head.to(tl.int64)", DECODE,
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
        "w3 = _words(head, q_pos, (first >> 5) * 4 +", "w3 = _words(head, q_pos, 0 * first +", ATTENTION,
    ),
    Fault(
        "lanes of words swapped", f"{_KERNELS}/attention/dropout_tiles.py",
        "below = tl.where((position & 8) == 0, w0, w1)", "below = tl.where((position & 8) == 0, w0, w2)", ATTENTION,
    ),
    Fault(
        "dropped weights count in dS", f"{_KERNELS}/attention/backward_keys.py",
        "dpt = tl.where(kept, dpt, 0.0) * options[9]", "dpt = dpt * options[9]", ATTENTION,
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
        "another item's parts", f"{_KERNELS}/decode/merge.py",
        "first += item * splits", "first += tl.maximum(item - 1, 0) * splits", DECODE,
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
        "CPU: a band without its first key", f"{_KERNELS}/attention/cpu_parts.py",
        "low = max(0, offset + start - left)", "low = max(0, offset + start - left + 1)", CPU,
    ),
    Fault(
        "CPU: causal from the first key wherever queries stand", f"{_KERNELS}/attention/cpu_parts.py",
        "and run.offset + rows.start + right == 0", "and run.offset + rows.start + right >= 0", CPU,
    ),
    Fault(
        "CPU: lengths of the first sequence alone", f"{_KERNELS}/attention/cpu_parts.py",
        "itertools.groupby(numbered)", "itertools.groupby(numbered, key=lambda _: 0)", CPU,
    ),
    Fault(
        "CPU: an lse of zero is of no keys", f"{_KERNELS}/attention/cpu.py",
        "lse.masked_fill(suspect & hidden,", "lse.masked_fill(suspect,", CPU,
    ),
    Fault(
        "CPU: the kernel is given an lse of -inf", f"{_KERNELS}/attention/cpu.py",
        'lse == float("-inf"), 0.0', "lse != lse, 0.0", CPU,
    ),
    Fault(
        "CPU: strided last dims", f"{_KERNELS}/attention/cpu.py",
        "made.append(x if apart else x.contiguous())", "made.append(x)", CPU,
    ),
    Fault(
        "reference: dS without delta", f"{_KERNELS}/attention/reference.py",
        "ds = p * (dp - delta_rows[..., None])", "ds = p * dp",
        REFERENCE,
    ),
    Fault(
        "raw ops differentiate silently", f"{_KERNELS}/library.py",
        "if torch.is_grad_enabled() and any(requires_grad(arg) for arg in given):", "if False:", FRAMEWORK,
    ),
    Fault(
        "fake outputs contiguous", f"{_KERNELS}/attention/op.py",
        "options)\n    return empty_state(q, v, options.dtype)",
        "options)\n    return empty_state(q.contiguous(), v, options.dtype)", FRAMEWORK,
    ),
    Fault(
        "a late rank's tiles taken before they came", "torch_fdattn/dist/tensor_parallel/fused_scatter.py",
        "came &= await_flag(mine, source, epoch, state_ptr, fault_ptr, limit_ns)",
        "came &= True", MATMULS,
    ),
    Fault(
        "a late rank's rows taken before they came", "torch_fdattn/dist/tensor_parallel/fused_gather.py",
        "            await_flag(arrived + source, source, epoch, state_ptr, fault_ptr, limit_ns)\n",
        "", MATMULS,
    ),
    Fault(
        "the last tile's flag forgotten", "torch_fdattn/dist/tensor_parallel/fused_scatter.py",
        "    if waiting >= 0:\n        _raise(",
        "    if waiting >= tiles:\n        _raise(", MATMULS,
    ),
    Fault(
        "SwiGLU by a kernel where it is differentiated", f"{_KERNELS}/swiglu.py",
        "is_compiling() or not can_call_kernel(gate, up) or not _fits", "is_compiling() or not _fits", INFERENCE,
    ),
    Fault(
        "a norm of another tensor", "torch_fdattn/dist/tensor_parallel/fused_inference.py",
        "return added, normed", "return normed, added", INFERENCE,
    ),
    Fault(
        "merged weights that the model does not share", f"{_KERNELS}/merged_linear.py",
        "            parameter.data = part\n", "            part.data_ptr()\n", INFERENCE,
    ),
    Fault(
        "merged again at another place", f"{_KERNELS}/merged_linear.py",
        "    if adjacent is not None:\n", "    if False:\n", INFERENCE,
    ),
    Fault(
        "memory of processes merged", f"{_KERNELS}/merged_linear.py",
        'if any(x.device.type == "cpu" and x.is_shared() for x in parameters):', "if False:", INFERENCE,
    ),
    Fault(
        "gradients of a parallel inference form", f"{_KERNELS}/merged_linear.py",
        "    if any(x.requires_grad for x in inputs) or any(", "    if any(", TP_INFERENCE,
    ),
    Fault(
        "gate and up in each other's place", "torch_fdattn/ops/gemm/persistent_swiglu_gemm.py",
        "rounded_swiglu(gate, up, DTYPE)", "rounded_swiglu(up, gate, DTYPE)", SWIGLU,
    ),
    Fault(
        "SwiGLU before a bias is added", "torch_fdattn/dist/tensor_parallel/one_sided.py",
        'if strategy != "copy_engine" or any(bias is not None for bias in biases):', 'if strategy != "copy_engine":', SWIGLU,
    ),
    Fault(
        "what the last call brought is left in memory", "torch_fdattn/dist/tensor_parallel/gemm_all_reduce.py",
        "    clear(addresses_ptr, rank, turn, before, each, buffer_bytes, SLOTS, SOURCES, _CLEARED)\n", "", MATMULS,
    ),
    Fault(
        "the first tensor's map for all tensors", "torch_fdattn/launch/driver_launch.py",
        "if self._mapped[i] != addresses[index]:", "if not self._mapped[i]:", PREPARED,
    ),
    Fault(
        "an uneven rank's rows by those of the ranks behind it", "torch_fdattn/dist/tensor_parallel/low_latency.py",
        "first = sum(rows[:rank])", "first = sum(rows[rank + 1 :])", MATMULS,
    ),
    Fault(
        "strided lengths given for their copies", f"{_KERNELS}/attention/op.py",
        "if call is None or not all(x is None or x.is_contiguous() for x in tensors[:3]):", "if call is None:", PREPARED,
    ),
    Fault(
        "ranks deal blocks to a neighbour", "torch_fdattn/dist/kv_cache/shard_map.py",
        "mine = block % self.world_size == self.rank", "mine = (block + 1) % self.world_size == self.rank", DIST,
    ),
    Fault(
        "global lengths taken for local ones", "torch_fdattn/dist/decode/local_mask.py",
        "kv_lens=shards.local_lengths(lengths).clamp(max=capacity),", "kv_lens=lengths.clamp(max=capacity),", DIST,
    ),
    Fault(
        "dQ not summed over ranks", "torch_fdattn/dist/decode/op.py",
        'dq = torch.ops._c10d_functional.all_reduce(dq, "sum", ctx.group.group_name)', "dq = dq.clone()", DIST,
    ),
    Fault(
        "one half for all epochs", "torch_fdattn/dist/symm/signals.py",
        "tl.load(addresses_ptr + rank) + (epoch & 1) * half_bytes", "tl.load(addresses_ptr + rank)", ONE_SIDED,
    ),
    Fault(
        "words of any epoch accepted", "torch_fdattn/dist/symm/signals.py",
        "(inside & (((words >> 32) & 0xFFFFFFFF) != epoch))", "(inside & (((words >> 32) & 0xFFFFFFFF) == 0))", ONE_SIDED,
    ),
    Fault(
        "flags of any epoch accepted", "torch_fdattn/dist/symm/signals.py",
        "    flags = tl.load(flags_ptr, mask=inside, other=0, volatile=True)\n    missing = (inside & (flags != raised))",
        "    flags = tl.load(flags_ptr, mask=inside, other=0, volatile=True)\n    missing = (inside & (flags == 0))",
        ONE_SIDED,
    ),
    Fault(
        "flags that data looks like", "torch_fdattn/dist/symm/signals.py",
        "return epoch * -7046029254386353131", "return epoch", ONE_SIDED,
    ),
    Fault(
        "flags before data", "torch_fdattn/dist/decode/push.py",
        "    for i in tl.static_range(1, WORLD):\n        peer = (rank + i) % WORLD\n        if (OWNERS == 1) | (peer == owner):\n"
        "            address = at_rank(addresses_ptr, peer, epoch, half_bytes)\n            push_rows(",
        "    early = tl.arange(0, SOURCES)\n    rest = (early < WORLD) & (early != rank)\n"
        "    raise_flags(flags_at(addresses_ptr, early, rest, epoch, half_bytes) + rank, rest & sends, epoch)\n"
        "    for i in tl.static_range(1, WORLD):\n        peer = (rank + i) % WORLD\n        if (OWNERS == 1) | (peer == owner):\n"
        "            address = at_rank(addresses_ptr, peer, epoch, half_bytes)\n            push_rows(",
        ONE_SIDED,
    ),
    Fault(
        "a rank that gave up goes on sending", "torch_fdattn/dist/symm/signals.py",
        "return (broken == 0) | (broken == epoch)", "return (broken == 0) | (broken != 0)", ONE_SIDED,
    ),
    Fault(
        "epochs pass through zero", "torch_fdattn/dist/symm/signals.py",
        "tl.where(epoch == 0xFFFFFFFF, 2, epoch + 1)", "(epoch + 1) & 0xFFFFFFFF", ONE_SIDED,
    ),
    Fault(
        "another KV head's parts", "torch_fdattn/dist/decode/fused_parts.py",
        "packed // BLOCK_M * kv_heads + h // group", "packed // BLOCK_M * kv_heads + h % kv_heads", FUSED_PARTS,
    ),
    Fault(
        "parts that nobody wrote", "torch_fdattn/dist/decode/fused_parts.py",
        "if splits == 1:", "if splits == 0:", FUSED_PARTS,
    ),
    Fault(
        "lse sent in 16 bits", "torch_fdattn/dist/decode/fused.py",
        "tl.store(lse_ptr, ll_packet(lses, epoch), mask=row_in)",
        "tl.store(lse_ptr, ll_packet(lses.to(tl.float16).to(tl.float32), epoch), mask=row_in)", ONE_SIDED,
    ),
    Fault(
        "a rank's own part forgotten", "torch_fdattn/dist/decode/rows.py",
        "lses = tl.where(mine[:, None], own_lses[None, :], lses)",
        "lses = tl.where(mine[:, None], float(\"-inf\"), lses)", ONE_SIDED,
    ),
    Fault(
        "what did not come is not NaN", "torch_fdattn/dist/decode/rows.py",
        "values = tl.where(came, values, float(\"nan\"))", "values = tl.where(came, values, 0.0)", SURVIVORS,
    ),
    Fault(
        "an owner blamed for whom it waits for", "torch_fdattn/dist/decode/two_shot.py",
        "tl.where(other, absent - 1, owner)", "owner", SURVIVORS,
    ),
    Fault(
        "an earlier call's words are left in memory", "torch_fdattn/dist/decode/two_shot.py",
        "    clear_all(addresses_ptr, rank, turn, tl.where(whole, before, 0), buffer_bytes, _CLEARED)\n", "", DECODE_TWO_SHOT,
    ),
    Fault(
        "a broken channel takes an earlier call's words", "torch_fdattn/dist/decode/two_shot.py",
        "    travels = row_in & whole\n", "    travels, whole = row_in & whole, row_in.shape[0] > 0\n", DECODE_TWO_SHOT,
    ),
    Fault(
        "an lse of zero looks as if it had not come", "torch_fdattn/dist/decode/two_shot.py",
        "nonzero_words(lse_bits, tl.float32)", "lse_bits", DECODE_TWO_SHOT,
    ),
    Fault(
        "an owner's tiles beyond its rows", "torch_fdattn/dist/decode/rows.py",
        "limit = share if INTERPRET else in_a_warp", "limit = 1 << 62 if INTERPRET else in_a_warp", SURVIVORS,
    ),
    Fault(
        "faults outlive their group", "torch_fdattn/dist/symm/faults.py",
        "(word for word in _words if not word.is_left())", "_words", SURVIVORS,
    ),
    Fault(
        "scores are written to whose older view is read later", "torch_fdattn/compile_backend/graph/functional.py",
        "        position[user] >= position[node]\n", "        position[user] < 0\n", WRITTEN_FORMS,
    ),
    Fault(
        "a write under no_grad has a gradient", "torch_fdattn/compile_backend/graph/functional.py",
        "if any(_sets_grad_mode(x) for x in _between(before[0], node)):", "if False:", WRITTEN_FORMS,
    ),
    Fault(
        "a temperature of each key is multiplied into q", "torch_fdattn/compile_backend/match/scores.py",
        "if self.frame.is_over_keys((label,), 0)", "if False", WRITTEN_FORMS,
    ),
    Fault(
        "keys of a head that all groups share are a group's", "torch_fdattn/compile_backend/match/roles.py",
        "((groups, inner), (groups, 1), (1, 1))", "((groups, inner), (groups, 1), (1, 1), (1, inner))", WRITTEN_FORMS,
    ),
    Fault(
        "ties of a maximum have a whole gradient", "torch_fdattn/compile_backend/masks/floors.py",
        "if not alone or floor.halves_ties:", "if not alone:", WRITTEN_FORMS,
    ),
)  # fmt: skip
