"""Faults of what ranks do together: shards, exchanges, tensor parallelism, lost ranks."""

from __future__ import annotations

from tests.mutants.faults.fault import Fault
from tests.mutants.faults.runs import (
    COMPILED_POSITIONS,
    DECODE_TWO_SHOT,
    DIST,
    FUSED_PARTS,
    FUSED_TREE,
    MATMULS,
    ONE_SIDED,
    PACKED_MODELS,
    RANK_INVARIANT,
    RING_MASKS,
    RING_ONE_SIDED,
    RING_PLANS,
    SHARDED_PAGES,
    SURVIVORS,
    SWIGLU,
    TP_INFERENCE,
    ULYSSES_RING,
)

_KERNELS = "torch_fdattn/ops"
_RING = "torch_fdattn/dist/ring_attention"
_CHUNKS = "torch_fdattn/dist/kv_cache/chunk_attention.py"
_PAGES = "torch_fdattn/engine/sharded_pages.py"
_OVER_RANKS = "torch_fdattn/compile_backend/context_parallel"
FAULTS = (
    Fault(
        "documents that see each other over ranks", f"{_RING}/plan.py",
        "document = bisect.bisect_right(documents, start)", "document = len(documents)", RING_MASKS,
    ),
    Fault(
        "global lengths for each block of keys", f"{_RING}/local.py",
        "(lens.clamp(min=0) - call.kv_start).clamp(", "lens.clamp(", RING_MASKS,
    ),
    Fault(
        "a sink for each block of keys", f"{_RING}/local.py",
        "return Scores(softcap, slopes, sinks, None if", "return Scores(softcap, slopes, self.scores.sinks, None if", RING_MASKS,
    ),
    Fault(
        "dropout by places in a block of keys", f"{_RING}/local.py",
        "            self.dropout.p > 0\n            or self.inv", "            self.inv", RING_MASKS,
    ),
    Fault(
        "one copy's gradient of a KV head", f"{_RING}/heads.py",
        "unflatten(1, (problem.kv_heads, -1)).sum(2)", "unflatten(1, (problem.kv_heads, -1))[:, :, 0]", ULYSSES_RING,
    ),
    Fault(
        "nodes in the order of their ranks' places", f"{_RING}/ulysses_ring.py",
        "problem.shards.ranks[begin : begin + size]", "problem.shards.ranks[begin // size :: problem.world_size // size]",
        ULYSSES_RING,
    ),
    Fault(
        "a run copied to where the shard has it", f"{_RING}/one_sided.py",
        "run.start * row)", "(run.start - runs[0].start) * row)", RING_ONE_SIDED,
    ),
    Fault(
        "each run of a shard placed as its first one", f"{_RING}/placing.py",
        "(begin + tokens) * strides[2]", "tokens * strides[2]", RING_ONE_SIDED,
    ),
    Fault(
        "a group's keys in the memory of the one before", f"{_RING}/one_sided.py",
        "_copies(group.of_keys(k), problem, i % 2)", "_copies(group.of_keys(k), problem, 0)", RING_ONE_SIDED,
    ),
    Fault(
        "the first heads' scores for each group", f"{_RING}/head_groups.py",
        "return problem._replace(**of_heads(problem, first, count,", "return problem._replace(**of_heads(problem, 0, count,", RING_ONE_SIDED,
    ),
    Fault(
        "keys awaited up to the first run that a call sees", f"{_RING}/one_sided.py",
        "seen[-1] < _ahead(runs)", "seen[0] < _ahead(runs)", RING_ONE_SIDED,
    ),
    Fault(
        "a second call left alone counted as the first", "torch_fdattn/dist/consensus.py",
        "_left[group] = None, count", "_left[group] = None, 0", RING_ONE_SIDED,
    ),
    Fault(
        "the last call's gradients of tokens alone", f"{_RING}/unsharded.py",
        "there.add_(part) if is_written else there.copy_(part)", "there.copy_(part)", RING_PLANS,
    ),
    Fault(
        "a call without the last key that it sees", f"{_RING}/plan.py",
        "last + right + 1 - self.kv_start", "last + right - self.kv_start", RING_PLANS,
    ),
    Fault(
        "dropout without the positions that it counts", f"{_RING}/local.py",
        "problem.kv_lens is None and problem.dropout.p == 0:", "problem.kv_lens is None:", RING_PLANS,
    ),
    Fault(
        "no positions where the first ones are the same", f"{_RING}/plan.py",
        "return self.q_start + rows == self.kv_start + keys", "return self.q_start == self.kv_start", RING_PLANS,
    ),
    Fault(
        "gradients of other ranks' keys left out", f"{_RING}/one_sided.py",
        "copies.send(parts[owner], owner,", "copies.send(torch.zeros_like(parts[owner]), owner,", RING_ONE_SIDED,
    ),
    Fault(
        "a node of the tree that begins anywhere", "torch_fdattn/dist/state_tree.py",
        "level, index = level + 1, index >> 1\n        self.nodes[level, index]", "level, index = level + 1, index & ~1\n        self.nodes[level, index]",
        RANK_INVARIANT,
    ),
    Fault(
        "empty halves that change bits", "torch_fdattn/ops/merge_states/tree.py",
        "found = torch.where(other_empty[..., None], out, found)", "found = found + 0 * out.isnan()", RANK_INVARIANT,
    ),
    Fault(
        "blocks in the order of ranks", "torch_fdattn/dist/decode/rank_invariant.py",
        "unflatten(1, (-1, each)).transpose(0, 1)", "unflatten(1, (-1, each))", RANK_INVARIANT,
    ),
    Fault(
        "blocks merged that are no halves of one node", "torch_fdattn/dist/decode/rank_invariant.py",
        "together = each & -each", "together = 1 << (each.bit_length() - 1)", RANK_INVARIANT,
    ),
    Fault(
        "blocks cut where a rank's shard begins", f"{_RING}/plan.py",
        "for start in range(run.start - run.start % block, run.end, block):", "for start in range(run.start, run.end, 2 * block):",
        RANK_INVARIANT,
    ),
    Fault(
        "each rank's sinks", "torch_fdattn/dist/decode/rank_invariant.py",
        "._replace(sinks=None, batch_invariant=True)", "._replace(batch_invariant=True)", RANK_INVARIANT,
    ),
    Fault(
        "each rank's own seed of dropout", f"{_RING}/op.py",
        "all_to_all([dropout.seed] * world_size, [[2]] * world_size, group_name)[0]", "dropout.seed", RING_MASKS,
    ),
    Fault(
        "dropout of each rank's heads as of the first ones", f"{_RING}/heads.py",
        "dropout=problem.dropout.from_head(first)", "dropout=problem.dropout", RING_MASKS,
    ),
    Fault(
        "a prefix's queries under the causal mask", f"{_RING}/plan.py",
        "if x.run.start < end], (-1, -1)", "if x.run.start < end], (left, right)", RING_MASKS,
    ),
    Fault(
        "chunks counted from the first of all tokens", f"{_RING}/sequence_shards.py",
        "for begin, end in begins for x in range(begin, end, chunk)", "for begin, end in begins for x in (begin, *range(begin - begin % chunk + chunk, end, chunk))", RING_MASKS,
    ),
    Fault(
        "slopes' gradient of the last block of keys", f"{_RING}/local.py",
        "slopes += found[3]", "slopes.copy_(found[3])", RING_MASKS,
    ),
    Fault(
        "an explicit mask's columns by places in a shard", f"{_RING}/local.py",
        "slice(call.kv_start, call.kv_start + call.kv_end - call.kv_begin)", "slice(call.kv_begin, call.kv_end)",
        RING_MASKS,
    ),
    Fault(
        "distances between runs that are no neighbours", f"{_RING}/plan.py",
        "        if by_position:\n", "        if False:\n", RING_MASKS,
    ),
    Fault(
        "a sink's gradient without that of lse", f"{_RING}/op.py",
        "out.to(lse.dtype)).sum(-1) - dlse", "out.to(lse.dtype)).sum(-1)", RING_MASKS,
    ),
    Fault(
        "any steps between positions taken for documents", f"{_OVER_RANKS}/local_masks.py",
        "or steps.args[1:] != (1,):", "or False:", COMPILED_POSITIONS,
    ),
    Fault(
        "keys before a query alone, without a bound", f"{_OVER_RANKS}/local_masks.py",
        "        elif limit < 0:\n            return None\n", "", COMPILED_POSITIONS,
    ),
    Fault(
        "chunks counted from anywhere", f"{_OVER_RANKS}/local_masks.py",
        "condition.of.without(first, second).terms or not bare", "condition.of.without(first, second).terms", COMPILED_POSITIONS,
    ),
    Fault(
        "a prefix beside another bound", f"{_OVER_RANKS}/local_masks.py",
        "order[1:] != (\"right\", 0)", "order[1] != \"right\"", COMPILED_POSITIONS,
    ),
    Fault(
        "factors counted by local tokens", f"{_OVER_RANKS}/local_counts.py",
        "if statically_true(value(node).shape[0] == length):", "if False:", COMPILED_POSITIONS,
    ),
    Fault(
        "what a mask adds to scores that are seen, lost", "torch_fdattn/compile_backend/masks/recovery.py",
        "if any(read.bias is None or read.bias.terms for read in reads):", "if False:", COMPILED_POSITIONS,
    ),
    Fault(
        "positions that the graph writes to", f"{_OVER_RANKS}/local_masks.py",
        "while not flow.is_written(positions, until):", "while True:", COMPILED_POSITIONS,
    ),
    Fault(
        "any positions taken for the shard's", f"{_OVER_RANKS}/positions.py",
        "            _check(given[i], context, in_documents)\n", "            pass\n", COMPILED_POSITIONS,
    ),
    Fault(
        "documents of a model's calls forgotten", f"{_RING}/context_parallel.py",
        "cu_seqlens=documents or None)", "cu_seqlens=None)", PACKED_MODELS,
    ),
    Fault(
        "documents forgotten in a graph", f"{_OVER_RANKS}/options.py",
        "        if self.documents:\n", "        if False:\n", PACKED_MODELS,
    ),
    Fault(
        "chunks and prefixes of positions that go on through documents", f"{_OVER_RANKS}/positions.py",
        "accepted._replace(in_sequence=accepted.in_documents)", "accepted", PACKED_MODELS,
    ),
    Fault(
        "one prefix for all documents, however short", f"{_OVER_RANKS}/ring.py",
        "min(call.structure.prefix, length) for length in lengths", "min(call.structure.prefix, documents[1]) for length in lengths", PACKED_MODELS,
    ),
    Fault(
        "ranks given positions of two kinds", f"{_RING}/transformers_layers.py",
        "elif not (is_wrong or all(refused)):", "elif not (is_wrong or (fault and other)):", PACKED_MODELS,
    ),
    Fault(
        "documents of one rank", f"{_RING}/transformers_layers.py",
        "    if largest != -negated:\n", "    if False:\n", PACKED_MODELS,
    ),
    Fault(
        "cu_seq_lens that changed in place", f"{_RING}/transformers_layers.py",
        "ref() is x and seen == version", "ref() is x", PACKED_MODELS,
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
        "an uneven rank's rows by those of the ranks behind it", "torch_fdattn/dist/tensor_parallel/low_latency.py",
        "first = sum(rows[:rank])", "first = sum(rows[rank + 1 :])", MATMULS,
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
        "packets of any epoch accepted", "torch_fdattn/dist/symm/signals.py",
        "(inside & (((packets >> 32) & 0xFFFFFFFF) != epoch))", "(inside & (((packets >> 32) & 0xFFFFFFFF) == 0))", ONE_SIDED,
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
        "nodes of ranks that are not there", "torch_fdattn/dist/decode/fused_tree.py",
        'return values, tl.where(source < WORLD, lses, float("-inf")), came', "return values, lses, came", FUSED_TREE,
    ),
    Fault(
        "nodes of ranks merged in another order", "torch_fdattn/dist/decode/fused_tree.py",
        "own, row, first + half, *where", "own, row, (first + half) ^ 1, *where", FUSED_TREE,
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
        "an earlier call's packets are left in memory", "torch_fdattn/dist/decode/two_shot.py",
        "    clear_all(addresses_ptr, rank, turn, tl.where(whole, before, 0), buffer_bytes, _CLEARED)\n", "", DECODE_TWO_SHOT,
    ),
    Fault(
        "a broken channel takes an earlier call's packets", "torch_fdattn/dist/decode/two_shot.py",
        "    travels = row_in & whole\n", "    travels, whole = row_in & whole, row_in.shape[0] > 0\n", DECODE_TWO_SHOT,
    ),
    Fault(
        "an lse of zero looks as if it had not come", "torch_fdattn/dist/decode/two_shot.py",
        "nonzero_packets(lse_bits, tl.float32)", "lse_bits", DECODE_TWO_SHOT,
    ),
    Fault(
        "an owner's tiles beyond its rows", "torch_fdattn/dist/decode/rows.py",
        "limit = share if INTERPRET else in_a_warp", "limit = 1 << 62 if INTERPRET else in_a_warp", SURVIVORS,
    ),
    Fault(
        "faults outlive their group", "torch_fdattn/dist/symm/faults.py",
        "(word for word in _registry if not word.is_left())", "_registry", SURVIVORS,
    ),
    Fault(
        "every rank's keys begin at the first position", _CHUNKS,
        "torch.full_like(kv_lens, shards.kv_start)", "torch.zeros_like(kv_lens)", SHARDED_PAGES,
    ),
    Fault(
        "chunks that begin with their sequence", _CHUNKS,
        "q_start=kv_lens - cu_seqlens.diff()", "q_start=kv_lens - kv_lens", SHARDED_PAGES,
    ),
    Fault(
        "states of rank 0's queries on every rank", _CHUNKS,
        "rows.flatten(), share, share, group_name", "rows[: q.shape[0]].repeat(shards.world_size, 1, 1).flatten(), share, share, group_name",
        SHARDED_PAGES,
    ),
    Fault(
        "chunks rounded before they are merged", _CHUNKS,
        "options._replace(dtype=wide)", "options._replace(dtype=torch.float32)", SHARDED_PAGES,
    ),
    Fault(
        "every rank stores all positions", _PAGES,
        "pages.masked_fill(~is_own, NO_PAGE)", "pages", SHARDED_PAGES,
    ),
    Fault(
        "a rank's share is the first one's", _PAGES,
        "rest.narrow(0, shards.rank * self._share, self._share)", "rest.narrow(0, 0, self._share)", SHARDED_PAGES,
    ),
    Fault(
        "of chunks rank 0's keys and values alone", _PAGES,
        "k, v = self._all_rows(torch.stack([k, v], 1)).unbind(1)", "k, v = self._all_rows(torch.stack([k, v], 1) * (self._kv.shards.rank == 0)).unbind(1)",
        SHARDED_PAGES,
    ),
    Fault(
        "bits that follow from a rank's share of a chunk", _PAGES,
        "invariant_block=page_size if rank_invariant else None", "invariant_block=None", SHARDED_PAGES,
    ),
    Fault(
        "chunks that follow from the number of ranks", "torch_fdattn/engine/llm.py",
        "unit = page_size if rank_invariant else self.page_size", "unit = self.page_size", SHARDED_PAGES,
    ),
)  # fmt: skip
