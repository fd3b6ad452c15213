"""Attention of packed chunks of prompts over pages whose positions a group shares, the queries split over its ranks.

Queries travel, keys stay: each rank holds its share of the chunks' tokens, and the keys of its own positions.

    all-gather of the queries → every rank: all queries over its own keys → all-to-all of the partial states, each to the
    rank that has the query → merge in the order of the ranks

This is ring attention's "pass-Q" form (arXiv:2411.01783) in two collectives. What is stored may be far longer than the chunk, and does not
move. A causal mask leaves every rank as much to do as the others, since positions go round the ranks in small blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_fdattn.dist.collectives import collective
from torch_fdattn.dist.decode.partial_states import pack
from torch_fdattn.dist.kv_cache.shard_map import ShardMap
from torch_fdattn.ops.merge_states.op import merge_rows
from torch_fdattn.ops.options import AttentionOptions
from torch_fdattn.ops.packed import Packed
from torch_fdattn.ops.positions import Mask


def gather_shares(x: Tensor, shards: ShardMap, group_name: str) -> Tensor:
    """(W · n, …) in the order of ranks from every rank's x (n, …), of one shape on all ranks, which is not compared."""
    world_size = shards.world_size
    rows = [x.shape[0]] * world_size
    return collective("gather_rows", x, group_name, rows, shards.rank, world_size)


def chunk_mask(cu_seqlens: Tensor, kv_lens: Tensor, shards: ShardMap) -> Mask:
    """The causal mask over this rank's keys of chunks that are the last of kv_lens (P,) tokens of each sequence.

    cu_seqlens: int32 (P + 1,), where each chunk begins among the packed queries.
    """
    return Mask(
        kv_lens=shards.local_lengths(kv_lens),
        q_start=kv_lens - cu_seqlens.diff(),
        kv_start=torch.full_like(kv_lens, shards.kv_start),
        window_right=0,
        kv_block=shards.kv_block,
        kv_stride=shards.kv_stride,
    )


def attend_chunks(
    q: Tensor, k: Tensor, v: Tensor, packed: Packed, options: AttentionOptions, shards: ShardMap, group_name: str
) -> Tensor:  # fmt: skip
    """out (n, H, DV) in q's dtype, of this rank's share of the queries.

    Args:
        q: (n, H, D), rows rank · n to (rank + 1) · n of the packed queries; n is the same on all ranks, and what lies behind
            the last chunk belongs to no sequence.
        k, v: this rank's pages (pages, H_kv, page, D or DV).
        packed: the chunks among all W · n queries, and this rank's page table.
        options: with the mask of `chunk_mask`, and a window on its left. Their dtype counts for nothing.
        shards: the positions that this rank holds.
    """
    queries = gather_shares(q, shards, group_name)
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    out, lse = torch.ops.fdattn.varlen_attention_forward(
        queries, k, v, *packed, *options._replace(dtype=wide).to_raw()
    )
    rows = pack(out, lse.T)
    share = [rows.numel() // shards.world_size] * shards.world_size
    received = torch.ops._c10d_functional.all_to_all_single(
        rows.flatten(), share, share, group_name
    )
    received = torch.ops._c10d_functional.wait_tensor(received)
    received = received.view(shards.world_size, 1, q.shape[0], *rows.shape[1:])
    return merge_rows(received, q.dtype)[0][0]
