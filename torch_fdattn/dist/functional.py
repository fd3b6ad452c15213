"""The Python entries of the distributed ops."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_fdattn import checks
from torch_fdattn.dist.consensus import (
    check_equal_on_all_ranks,
    empty_of_group,
    refusing_on_all_ranks,
)
from torch_fdattn.dist.decode.inputs import expect_lengths
from torch_fdattn.dist.decode.op import tell_other_ranks
from torch_fdattn.dist.groups import Group, name_of, pair_of_names, rank_and_size
from torch_fdattn.dist.ring_attention.sequence_shards import (
    SequenceShards,
    documents_of,
    expect_chunk,
    expect_window_within,
    flat_ints,
    named_shards,
    prefixes_of,
)
from torch_fdattn.dist.state_tree import expect_block
from torch_fdattn.functional import window_bounds


def decode(
    q: Tensor, k_shard: Tensor, v_shard: Tensor, kv_lens: Tensor, group: Group, *,
    page_table: Tensor | None = None, q_start: Tensor | None = None, kv_start: Tensor | None = None,
    kv_block: int | None = None, causal: bool = True, window: tuple[int, int] | None = None,
    scale: float | None = None, k_scale: Tensor | None = None, v_scale: Tensor | None = None,
    softcap: float = 0, alibi_slopes: Tensor | None = None, sinks: Tensor | None = None,
    batch_invariant: bool = False, strategy: str = "auto", head_sharded: bool = False,
    hierarchy: tuple[Group, Group] | None = None, invariant_block: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention over a KV cache whose positions are sharded over the ranks of a process group.

    Args:
        q: queries (B, H, T, D), the same on every rank: the last T tokens of each sequence. Up to 16
            run the decode kernel, more (chunked prefill) the attention kernel, which knows contiguous,
            unquantised shards and none of decode's scores.
        k_shard, v_shard: this rank's part of the cache (B, H_kv, local capacity, D or DV); it may be empty.
        kv_lens: int32 (B,), **global** lengths, the new tokens included; the same on every rank; at most
            2**29, which all ranks' shards together may hold.
        group: the process group: itself, its name, a DeviceMesh of one dimension, or None for the default one.
        page_table: int32 (B, pages a sequence), of this rank alone: k_shard and v_shard are then its pages
            (P, H_kv, page, D or DV), and token j of those that it holds is where `torch_fdattn.paged_decode`
            looks for token j.
        kv_block: rank r of W holds the positions ``p`` with ``(p // kv_block) % W == r``, in order
            (round-robin in blocks). None: block sharding, kv_block is the local capacity, which must
            then be equal on all ranks.
        kv_start: instead of kv_block, int32 (B,): this rank holds the contiguous run of positions from
            kv_start on, as long as its capacity (of pages: whole pages). The runs of all ranks must be disjoint
            and cover the sequence; uneven is fine.
        q_start: int32 (B,), position of the first query. Default: kv_lens - T.
        causal, window, scale: as `torch_fdattn.attention`.
        k_scale, v_scale: of this rank's shard; see `torch_fdattn.decode`.
        softcap, alibi_slopes, sinks, batch_invariant: as `torch_fdattn.decode`, the same on every rank.
        strategy: how partial results travel: "all_gather", "star", "ring", "hierarchical" on the group's
            collectives; "symm_all_gather", "push", "push_tiled", "two_shot", "fused" through memory that ranks
            map (one host, CUDA); "auto" takes one of them (`torch_fdattn.dist.chosen_strategy`), and "all_gather"
            where gradients are wanted or torch.compile traces. One rank alone exchanges nothing.
        head_sharded: each rank gets its H / W heads alone, in the order of ranks.
        hierarchy: for "hierarchical", the groups (inner, outer): of the ranks of this rank's node,
            and of those of its place in every node. Rank = node · (ranks a node) + place.
        invariant_block: out and lse have the same bits on any number of ranks, for any batch, and with any `kv_block` and
            capacity (equal on all ranks) that are multiples of it, of pages whole ones: states of aligned blocks of so many
            keys are merged in one tree of positions: take 1024, say. Strategies "auto", "all_gather", "symm_all_gather"
            and, with contiguous shards of a power of two of blocks, "fused" alone; no kv_start, no gradients.

    Returns:
        out (B, H, T, DV), contiguous, and lse (B, H, T) float32 (float64 for float64 inputs), the same bits on
        every rank; with head_sharded (B, H / W, T, DV) and (B, H / W, T). Differentiable where attention is
        (contiguous unquantised shards, no scales, softcap, alibi_slopes or sinks, all heads), by any strategy: the
        gradients of k_shard and v_shard are local, that of q is summed over the ranks, under the
        convention that every rank computes the same loss from the replicated out and lse.

    Raises:
        ValueError, TypeError, NotImplementedError: naming the argument, what was expected and what came.
        RuntimeError: torch.distributed is not initialised, or the collective failed.
        PeerTimeout: one-sided strategies, here, at a later call or at `torch_fdattn.dist.check`: a rank did not
            come; out and lse of such a call are NaN.

    Examples:
        >>> world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
        >>> shards = torch_fdattn.dist.ShardMap(rank, world, 16)  # blocks of 16 positions go round the ranks
        >>> k_shard, v_shard = torch.randn(2, 1, 2, shards.local_capacity(1024), 64)
        >>> lens = torch.tensor([1000], dtype=torch.int32)  # of the whole sequence
        >>> q = torch.randn(1, 8, 1, 64)  # the same on all ranks
        >>> out, lse = torch_fdattn.dist.decode(q, k_shard, v_shard, lens, None, kv_block=16)
        >>> out.shape
        torch.Size([1, 8, 1, 64])
    """
    checks.expect_tensor("q", q)
    group_name = name_of(group)
    rank, world_size = rank_and_size(group_name)
    named = dict(
        page_table=page_table, k_scale=k_scale, v_scale=v_scale, alibi_slopes=alibi_slopes, sinks=sinks
    )  # fmt: skip
    positions = q_start, kv_start
    try:
        scale = checks.number("scale", scale)
        left, right = window_bounds(window)
        checks.expect_bool(
            causal=causal, batch_invariant=batch_invariant, head_sharded=head_sharded
        )
        checks.expect_str(strategy=strategy)
        expect_block(invariant_block)
        inner, outer = pair_of_names(hierarchy) or (None, None)
        given = (pair for pair in named.items() if pair[1] is not None)
        tensors = ("k_shard", k_shard), ("v_shard", v_shard)
        checks.expect_types((*tensors, *given), (kv_lens, *positions), scale, softcap)
        expect_lengths(kv_lens)
    except (TypeError, ValueError, NotImplementedError) as error:
        tell_other_ranks(group_name, q, strategy, error, invariant_block is not None)
        raise
    options = dict(
        kv_block=kv_block, causal=causal, window_left=left, window_right=right, scale=scale, softcap=softcap,
        batch_invariant=batch_invariant, strategy=strategy, head_sharded=head_sharded, inner_group=inner,
        outer_group=outer, invariant_block=invariant_block, **named,
    )  # fmt: skip
    return torch.ops.fdattn.dist_decode(
        q,
        k_shard,
        v_shard,
        kv_lens,
        group_name,
        *positions,
        rank=rank,
        world_size=world_size,
        **options,
    )


def one_sided_all_gather(x: Tensor, group: Group) -> Tensor:
    """Every rank's x, stacked in the order of ranks, through symmetric memory, in one kernel.

    Args:
        x: contiguous, any dtype, of a multiple of 4 bytes; the same shape on every rank. On GPUs of one host, or
            CPU tensors with TRITON_INTERPRET=1.
        group: the process group: itself, its name, a DeviceMesh of one dimension, or None for the default one.

    Returns:
        (W, *x.shape), the same on all ranks. Every bit is set (NaN in floating point) where a rank's part did
        not come within `set_timeout`.

    Raises:
        TypeError, ValueError: x is no contiguous tensor, or has no multiple of 4 bytes.
        NotImplementedError: the ranks cannot share symmetric memory, or x requires gradients.
        PeerTimeout: an earlier call on the group did not get a rank's part.

    Examples:
        >>> x = torch.arange(4.0)  # with TRITON_INTERPRET=1, or on a GPU
        >>> torch_fdattn.dist.one_sided_all_gather(x, None)[torch.distributed.get_rank()]
        tensor([0., 1., 2., 3.])
    """
    from torch_fdattn.dist.symm.availability import expect_mapped
    from torch_fdattn.dist.symm.one_sided_gather import all_gather

    checks.expect_types((("x", x),))
    if x.requires_grad and torch.is_grad_enabled():
        raise NotImplementedError("one_sided_all_gather has no gradient: call it under no_grad")
    group_name = name_of(group)
    rank_and_size(group_name)
    values = {"x's shape": tuple(x.shape), "x's dtype": x.dtype}
    check_equal_on_all_ranks(group_name, x, values, once=True)
    expect_mapped("one_sided_all_gather", group_name, x.device)
    return all_gather(x, group_name)


def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, group: Group, *,
    shards: SequenceShards | str = "contiguous", causal: bool = False,
    window: tuple[int, int] | None = None, scale: float | None = None, softcap: float = 0,
    alibi_slopes: Tensor | None = None, sinks: Tensor | None = None,
    cu_seqlens: Tensor | Sequence[int] | None = None, kv_lens: Tensor | None = None,
    attn_mask: Tensor | None = None, dropout_p: float = 0, dropout_seed: Tensor | None = None,
    strategy: str = "ring", invariant_block: int | None = None, hierarchy: tuple[Group, Group] | None = None,
    attention_chunk: int | None = None, prefix_lens: int | Tensor | Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention over a sequence whose tokens are sharded over the ranks of a process group.

    Args:
        q: this rank's queries (B, H, S_r, D); S_r may differ between ranks, and be 0.
        k, v: this rank's keys and values (B, H_kv, S_r, D); with "query_split" those of the whole sequence,
            (B, H_kv, total, D) in order of positions, on every rank.
        group: the process group: itself, its name, a DeviceMesh of one dimension, or None for the default one.
        shards: which positions each rank holds: a `SequenceShards`, the same on all ranks, or a name for
            shards of equal length, "contiguous" or "zigzag" (balanced under a causal mask).
        causal, window, scale: as `torch_fdattn.attention`, in positions of the whole sequence, beyond which no window goes.
        softcap, alibi_slopes, sinks: as `torch_fdattn.attention`, of all heads, the same on every rank.
        cu_seqlens: packed documents: where each begins in the whole sequence, and where the last one ends (0, …, total),
            whatever the shards; the same for all B, and on every rank. Documents do not see each other. Its numbers are
            needed on the host: a tensor of a GPU is waited for.
        kv_lens: int32 (B,), the same on every rank: positions of the whole sequence from there on are padding, which no query
            sees. Queries keep their positions (`torch_fdattn.attention` with q_start = 0). Beyond the sequence they are
            refused on the CPU, or with TORCH_FDATTN_CHECK=1.
        attn_mask: boolean or additive, broadcastable to (B, H, S_r, total): the rows of this rank's queries, whose columns
            are all keys in order of positions. On every rank or on none. With a gradient, but not of "ulysses",
            "ulysses_ring" and "star".
        dropout_p, dropout_seed: as `torch_fdattn.attention`, the same on every rank: with one
            seed the same weights are dropped on any number of ranks, in positions of the whole sequence. Without a seed
            rank 0's generator draws it.
        strategy: "ring" (K and V go round; least memory), "all_gather" (of K and V), "one_sided" (copy engines bring K and V
            through symmetric memory; GPUs of one host, not under torch.compile), "ulysses" (all-to-all over heads), "query_split" (K and V replicated), "star" (a root merges), "ulysses_ring" (all-to-all
            over heads inside nodes, K and V round the nodes), or "auto": of "ring", "all_gather" and "one_sided" the fastest that
            `fdattn tune` has measured for about as many tokens on as many ranks, "ring" where it has not, and under torch.compile.
        invariant_block: out and lse have the same bits on any number of ranks and with any shards that begin and end at
            multiples of it, by any strategy but "star": states of aligned blocks of so many keys are merged in one tree of
            positions. Each pair of blocks is a call of its own: take as large a block as the shards allow. Of the forward alone.
        hierarchy: for "ulysses_ring", the groups (inner, outer): of the ranks of this rank's node, and of those of its place
            in every node. Rank = node · (ranks a node) + place.
        attention_chunk: chunked attention (Llama 4): queries see the keys of their own chunk of so many positions, counted
            from the first of their document, as far as causal and window let them.
        prefix_lens: prefix-LM: a causal query sees the first so many positions too, those of its document; of each document, or
            one number for all. Needs causal=True; not with window and attention_chunk. As cu_seqlens, on the host, the same
            for all B and on every rank.

    Returns:
        out (B, H, S_r, D) and lse (B, H, S_r) of this rank's queries, float32 (float64 of float64); the same bits on every run.
        Differentiable in q, k, v, attn_mask, alibi_slopes and sinks, for losses that are summed over the ranks: each
        rank's gradients are of the sum of all ranks' losses, but those of slopes, sinks and a mask of one row for all
        queries, which are a part of it: like the gradients of other parameters that ranks share they are to be summed
        over them. The backward is a collective: the loss must depend on an output (out or lse, not always the same) on
        every rank. (With "query_split", K and V's gradients are whole on every rank.)

    Raises:
        ValueError, TypeError: naming the argument, what was expected and what came; also on all ranks where
            they disagree, before any data moves. Compared are options, shapes and dtypes, and the contents of kv_lens,
            dropout_seed, alibi_slopes, sinks and a mask of one row: on CPUs in every call; on GPUs in the first call
            with such options and shapes, or with TORCH_FDATTN_CHECK=1 in every call.
        RuntimeError: torch.distributed is not initialised, or the collective failed or timed out.

    Examples:
        >>> world = torch.distributed.get_world_size()
        >>> q, k, v = torch.randn(3, 1, 4, 32, 16, requires_grad=True)  # of this rank's tokens
        >>> shards = torch_fdattn.dist.SequenceShards.zigzag(32 * world, world)
        >>> out, lse = torch_fdattn.dist.ring_attention(q, k, v, None, shards=shards, causal=True)
        >>> out.sum().backward()  # losses of ranks add up
    """
    group_name = name_of(group)
    rank, world_size = rank_and_size(group_name)
    with refusing_on_all_ranks(
        group_name, q if isinstance(q, Tensor) else empty_of_group(group_name)
    ):
        checks.expect_tensor("q", q)
        scale, softcap = checks.number("scale", scale), checks.number("softcap", softcap)
        left, right = window_bounds(window)
        checks.expect_types(
            (("k", k), ("v", v)), (kv_lens,), scale, softcap, dropout_p, alibi_slopes=alibi_slopes, sinks=sinks,
            attn_mask=attn_mask, dropout_seed=dropout_seed,
        )  # fmt: skip
        checks.expect_bool(causal=causal)
        checks.expect_str(strategy=strategy)
        expect_block(invariant_block)
        inner, outer = pair_of_names(hierarchy) or (None, None)
        chunk = 0 if attention_chunk is None else attention_chunk
        expect_chunk(chunk)
        documents, prefixes = documents_of(cu_seqlens), prefixes_of(prefix_lens)
        if not isinstance(shards, SequenceShards):
            shards = named_shards(shards, q.shape[2] if q.dim() == 4 else 0, world_size)
        if max(left, right) > 0:
            expect_window_within(window, shards.total)
        runs = flat_ints(shards)
    return torch.ops.fdattn.ring_attention(
        q, k, v, group_name, runs, rank=rank, world_size=world_size, causal=causal,
        window_left=left, window_right=right, scale=scale, strategy=strategy, softcap=softcap,
        alibi_slopes=alibi_slopes, sinks=sinks, documents=documents, kv_lens=kv_lens, attn_mask=attn_mask,
        dropout_p=dropout_p, dropout_seed=dropout_seed, invariant_block=invariant_block, inner_group=inner,
        outer_group=outer, attention_chunk=chunk, prefix_lens=prefixes,
    )  # fmt: skip
