"""The op `fdattn::dist_decode`: attention over a KV cache whose positions are sharded over ranks.

A composite of raw ops and functional collectives, so that torch.compile sees each of them. Rank and world
size are arguments: torch keys its compile caches by the graph that Dynamo saw, which ranks share, and a
rank read inside the op would hand one rank's compiled graph to the others. The
gradient needs no collective merge: with the global (out, lse) saved, `attention_backward` over the
local shard gives this shard's exact dK and dV, and a part of dQ that is summed over the ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_fdattn import checks
from torch_fdattn.dist.decode.all_gather import gather_and_merge
from torch_fdattn.dist.groups import agree, given_rank_and_size, wants_gradients
from torch_fdattn.dist.sharding import ShardMap
from torch_fdattn.ops import library
from torch_fdattn.ops.attention.op import check_inputs, default_scale, options_to_mask
from torch_fdattn.ops.decode.inputs import MAX_QUERY_TOKENS
from torch_fdattn.ops.positions import FAR, Mask

STRATEGIES = ("all_gather",)


def _check(q, k_shard, v_shard, kv_lens, q_start, kv_start, strategy) -> None:
    checks.check_qkv(q, k_shard, v_shard, ("q", "k_shard", "v_shard"))
    if kv_lens is None:
        raise TypeError("kv_lens must be an int32 tensor of global lengths (batch,), got None")
    # The bound is the same on all ranks, so that under TORCH_FDATTN_CHECK all of them raise or none.
    checks.check_lengths("kv_lens", kv_lens, q, bound=FAR)
    checks.check_lengths("q_start", q_start, q)
    checks.check_lengths("kv_start", kv_start, q)
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy must be one of {STRATEGIES}, got {strategy!r}")


def local_mask(
    q: Tensor, k_shard: Tensor, mask: Mask, kv_block: int | None, rank: int, world_size: int
) -> Mask:
    """The rank's own mask from the global one: local lengths, and positions of queries and keys."""
    capacity = k_shard.shape[2]
    # With block sharding the whole capacity is known; otherwise lengths are trusted up to FAR.
    explicit = kv_block is not None or mask.kv_start is not None
    lengths = mask.kv_lens.clamp(0, FAR if explicit else world_size * capacity).int()
    q_start = lengths - q.shape[2] if mask.q_start is None else mask.q_start
    if mask.kv_start is not None:
        # An explicit contiguous shard: this rank's keys stand at kv_start, kv_start + 1, …
        local = (lengths - mask.kv_start.clamp(-FAR, FAR).int()).clamp(0, capacity)
        return mask._replace(kv_lens=local, q_start=q_start, kv_block=0, kv_stride=0)
    shards = ShardMap(rank, world_size, kv_block or max(capacity, 1))
    return mask._replace(
        kv_lens=shards.local_lengths(lengths).clamp(max=capacity),
        q_start=q_start,
        kv_start=torch.full_like(lengths, shards.kv_start),
        kv_block=shards.kv_block,
        kv_stride=shards.kv_stride,
    )


def _forward(q, k_shard, v_shard, mask, scale, group_name, world_size):
    """Global (out, lse), the same bits on every rank."""
    raw = torch.ops.fdattn.decode_forward
    if not 1 <= q.shape[2] <= MAX_QUERY_TOKENS:
        raw = torch.ops.fdattn.attention_forward
    partial_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    out, lse = raw(q, k_shard, v_shard, *mask, scale, partial_dtype)
    return gather_and_merge(out, lse, q.dtype, group_name, world_size)


class _DistDecode(torch.autograd.Function):
    """q and the outputs are replicated: every rank computes the same loss from them."""

    @staticmethod
    def forward(ctx, q, k_shard, v_shard, group_name, world_size, *mask_and_scale):
        mask, scale = Mask(*mask_and_scale[:-1]), mask_and_scale[-1]
        out, lse = _forward(q, k_shard, v_shard, mask, scale, group_name, world_size)
        ctx.save_for_backward(q, k_shard, v_shard, out, lse, *mask[:3])
        ctx.options = mask_and_scale[3:]
        ctx.group_name = group_name
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        library.refuse_double_backward("dist_decode")
        no_gradients = (None,) * (5 + len(ctx.options))
        if dout is None and dlse is None:
            return None, None, None, *no_gradients
        q, k_shard, v_shard, out, lse, *pointers = ctx.saved_tensors
        if dout is None:
            dout = torch.zeros_like(out)
        partial_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        dq, dk, dv = torch.ops.fdattn.attention_backward(
            dout, dlse, q, k_shard, v_shard, out, lse, *pointers, *ctx.options, partial_dtype
        )
        dq = torch.ops._c10d_functional.all_reduce(dq, "sum", ctx.group_name)
        dq = torch.ops._c10d_functional.wait_tensor(dq)
        return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype), *no_gradients


def _dist_decode(
    q, k_shard, v_shard, kv_lens, group_name, q_start=None, kv_start=None, *, rank=None,
    world_size=None, kv_block=None, causal=True, window_left=-1, window_right=-1, scale=None, strategy="all_gather",
):  # fmt: skip
    _check(q, k_shard, v_shard, kv_lens, q_start, kv_start, strategy)
    rank, world_size = given_rank_and_size(group_name, rank, world_size)
    if kv_block is not None and kv_block < 1:
        raise ValueError(f"kv_block must be at least 1, got {kv_block}")
    # Positions are int32 in the kernels. The condition is the same on all ranks: all raise, or none.
    block, name = (
        (k_shard.shape[2], "k_shard's capacity") if kv_block is None else (kv_block, "kv_block")
    )
    if kv_start is None and block * world_size > FAR:
        raise ValueError(f"{name} must be at most 2**29 // {world_size} ranks, got {block}")
    if kv_block is not None and kv_start is not None:
        raise ValueError(
            "kv_block and kv_start exclude each other: round-robin or explicit shards, got both"
        )
    mask = options_to_mask(kv_lens, q_start, kv_start, causal, window_left, window_right, 0, 0)
    mask = local_mask(q, k_shard, mask, kv_block, rank, world_size)
    scale = default_scale(q, scale)
    check_inputs(q, k_shard, v_shard, mask, scale, ("q", "k_shard", "v_shard"))
    gradients = wants_gradients(q, k_shard, v_shard)
    agree(
        group_name,
        q,
        {
            "q's shape": tuple(q.shape),
            "k_shard's heads": k_shard.shape[1],
            **({"k_shard's capacity": k_shard.shape[2]} if kv_block is None and kv_start is None else {}),
            "whether q_start and kv_start are given": (q_start is not None, kv_start is not None),
            "strategy": strategy,
            "the dtype": q.dtype,
            "kv_block": kv_block,
            "causal and window": (mask.window_left, mask.window_right),
            "scale": scale,
            **gradients,
        },
    )
    if any(gradients.values()):
        return _DistDecode.apply(q, k_shard, v_shard, group_name, world_size, *mask, scale)
    return _forward(q, k_shard, v_shard, mask, scale, group_name, world_size)


library.define_composite(
    "dist_decode(Tensor q, Tensor k_shard, Tensor v_shard, Tensor kv_lens, str group_name, "
    "Tensor? q_start=None, Tensor? kv_start=None, *, int? rank=None, int? world_size=None, "
    "SymInt? kv_block=None, bool causal=True, "
    "int window_left=-1, int window_right=-1, float? scale=None, str strategy='all_gather') "
    "-> (Tensor out, Tensor lse)",
    _dist_decode,
    autocast_args=3,
)
