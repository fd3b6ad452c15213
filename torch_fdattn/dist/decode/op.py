"""The op `fdattn::dist_decode`: attention over a KV cache whose positions are sharded over ranks.

A composite of raw ops and collectives, functional ones in graphs, so that torch.compile sees each of them. Rank and world
size are arguments: torch keys its compile caches by the graph that Dynamo saw, which ranks share, and a
rank read inside the op would hand one rank's compiled graph to the others. The
gradient needs no collective merge: with the global (out, lse) saved, `attention_backward` over the
local shard gives this shard's exact dK and dV, and a part of dQ that is summed over the ranks.

A strategy is a module with `merge(out, lse, dtype, group)`, or the name of a one-sided exchange, which
`one_sided.py` knows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_fdattn.dist.consensus import (
    check_equal_on_all_ranks,
    equality_is_assumed,
    tell_refusal,
    wants_gradients,
)
from torch_fdattn.dist.decode import (
    all_gather,
    hierarchical,
    one_sided,
    rank_invariant,
    ring,
    star,
)
from torch_fdattn.dist.decode.auto import choose_for
from torch_fdattn.dist.decode.inputs import (
    CacheShard,
    ExtraOptions,
    check_local_call,
    check_positions,
    check_tensors,
    refuse_gradients,
    runs_decode,
)
from torch_fdattn.dist.decode.local_mask import kernel_mask, local_mask
from torch_fdattn.dist.decode.partial_states import MergeGroup
from torch_fdattn.dist.groups import given_rank_and_size, is_traced
from torch_fdattn.dist.state_tree import with_sinks
from torch_fdattn.dist.symm.availability import expect_mapped
from torch_fdattn.ops import library
from torch_fdattn.ops.attention.op import default_scale, options_to_mask
from torch_fdattn.ops.decode.op import decode_eagerly
from torch_fdattn.ops.positions import Mask

#: On the group's own collectives.
PORTABLE = {
    "all_gather": all_gather,
    "star": star,
    "ring": ring,
    "hierarchical": hierarchical,
}
#: Those of them that never wait for a peer in a kernel.
COLLECTIVES_ALONE = ("all_gather", "star", "ring")
#: Through symmetric memory.
ONE_SIDED = one_sided.ONE_SIDED
STRATEGIES = ("auto", *PORTABLE, *ONE_SIDED)


def check_strategy(strategy: str, hierarchy: tuple[str | None, str | None] | None) -> None:
    """The name, and `hierarchy` where it is needed and nowhere else."""
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy must be one of {STRATEGIES}, got {strategy!r}")
    given = hierarchy is not None and None not in hierarchy
    if given != (strategy == "hierarchical"):
        expected = "None" if given else "the names of an inner and an outer group"
        raise ValueError(
            f"hierarchy must be {expected} with strategy={strategy!r}, got {hierarchy!r}"
        )


def tell_other_ranks(
    group_name: str, q: Tensor, strategy: str, error: Exception, invariant: bool = False
) -> None:
    """They raise too what this rank refuses, if they compare this call before they exchange anything; invariant: as calls with
    an invariant_block do, even before they choose a strategy.
    """
    on_cpu = q.device.type == "cpu"
    if strategy == "auto" and on_cpu and library.INTERPRET and not invariant:
        return  # they may be about to ask each other what memory they can map
    once = not invariant and (not on_cpu or strategy in ONE_SIDED or equality_is_assumed())
    tell_refusal(group_name, q, error, once)


def _check_merge(q: Tensor, group: MergeGroup, strategy: str) -> None:
    if group.head_sharded and q.shape[1] % group.world_size:
        raise ValueError(
            "head_sharded must be False where the group's size does not divide q's heads, got True with "
            f"{q.shape[1]} heads on {group.world_size} ranks"
        )
    if strategy in ONE_SIDED and q.dtype == torch.float64:
        raise TypeError(f"q must not be float64 with strategy={strategy!r}, got {q.dtype}")


def _wide(q: Tensor) -> torch.dtype:
    """The dtype of partial results."""
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _partial_dtype(q: Tensor, strategy: str) -> torch.dtype:
    return q.dtype if strategy == "none" else _wide(q)


def _attend(q, shard, mask, scale, extras, dtype) -> tuple[Tensor, Tensor]:
    """(out, lse) over the rank's shard, by its own mask."""
    if not runs_decode(q):
        return torch.ops.fdattn.attention_forward(q, shard.k, shard.v, *mask, scale, dtype)
    if shard.page_table is None:
        return torch.ops.fdattn.decode_forward(q, shard.k, shard.v, *mask, scale, dtype, *extras)
    return torch.ops.fdattn.paged_decode_forward(
        q, shard.k, shard.v, shard.page_table, *mask, scale, dtype, *extras
    )


def _heads_of(x: Tensor, group: MergeGroup) -> Tensor:
    """With head_sharded this rank's heads."""
    own = x.chunk(group.world_size, 1)[group.rank] if group.head_sharded else x
    return own.contiguous()


def _runs_kernels(q: Tensor, shard: CacheShard, mask: Mask, extras: ExtraOptions) -> bool:
    """Whether the decode kernels are to be called as they are, global lengths and all."""
    if not runs_decode(q) or is_traced(q) or not library.use_triton(q):
        return False
    others = (shard.page_table, *mask[:3], *extras)
    return library.can_call_kernel(q, shard.k, shard.v) and library.lie_in_memory(*others)


def _merge(out, lse, dtype, group: MergeGroup, strategy: str) -> tuple[Tensor, Tensor]:
    """Global (out, lse), the same bits on every rank (with head_sharded, those of its heads)."""
    library.launches[f"dist_decode/{strategy}"] += 1
    out = out.contiguous()
    if strategy == "none":
        return out, lse
    if strategy in PORTABLE:
        return PORTABLE[strategy].merge(out, lse, dtype, group)
    return one_sided.merge(out, lse, dtype, group.group_name, strategy, group.head_sharded)


class _DistDecode(torch.autograd.Function):
    """q and the outputs are replicated: every rank computes the same loss from them."""

    @staticmethod
    def forward(ctx, q, k_shard, v_shard, batch_invariant, group, strategy, *mask_and_scale):
        mask, scale = Mask(*mask_and_scale[:-1]), mask_and_scale[-1]
        shard, extras = (
            CacheShard(k_shard, v_shard, None),
            ExtraOptions(batch_invariant=batch_invariant),
        )
        dtype = _partial_dtype(q, strategy)
        out, lse = _attend(q, shard, mask, scale, extras, dtype)
        out, lse = _merge(out, lse, q.dtype, group, strategy)
        ctx.save_for_backward(q, k_shard, v_shard, out, lse, *mask[:3])
        ctx.options = mask_and_scale[3:]
        ctx.group = group
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        library.refuse_double_backward("dist_decode")
        no_gradients = (None,) * (6 + len(ctx.options))
        if dout is None and dlse is None:
            return None, None, None, *no_gradients
        q, k_shard, v_shard, out, lse, *pointers = ctx.saved_tensors
        if dout is None:
            dout = torch.zeros_like(out)
        dq, dk, dv = torch.ops.fdattn.attention_backward(
            dout, dlse, q, k_shard, v_shard, out, lse, *pointers, *ctx.options, _wide(q)
        )
        if ctx.group.world_size > 1:
            dq = torch.ops._c10d_functional.all_reduce(dq, "sum", ctx.group.group_name)
            dq = torch.ops._c10d_functional.wait_tensor(dq)
        return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype), *no_gradients


def _run_kernels(
    group: MergeGroup, strategy: str, scale: float, q, shard, local, global_lens, extras
) -> tuple[Tensor, Tensor]:
    """An eager call by the decode kernels. Exchanges through symmetric memory are called without their op."""
    leaves_parts = strategy == "fused" and one_sided.MERGES_PARTS
    out, lse, *unmerged = decode_eagerly(
        q, *shard, _own(extras, group.rank).options(local, scale, _partial_dtype(q, strategy)),
        global_lens=global_lens, leave_parts=leaves_parts,
    )  # fmt: skip
    if strategy not in ONE_SIDED or not out.numel():
        return _merge(out, lse, q.dtype, group, strategy)
    library.launches[f"dist_decode/{strategy}"] += 1
    expect_mapped(f"strategy {strategy!r}", group.group_name, out.device)
    options = q.dtype, group.group_name, group.head_sharded
    if leaves_parts and unmerged[0] is not None:
        return one_sided.strategy("fused_parts").merge(out, lse, unmerged[0], *options)
    return one_sided.strategy(strategy).merge(out.contiguous(), lse, *options)


def _own(extras: ExtraOptions, rank: int) -> ExtraOptions:
    """A sink is a key whose value is 0: one rank adds it, and the merge needs to know nothing of it."""
    return extras if rank == 0 else extras._replace(sinks=None)


def _dist_decode(
    q, k_shard, v_shard, kv_lens, group_name, q_start=None, kv_start=None, *, page_table=None, rank=None,
    world_size=None, kv_block=None, causal=True, window_left=-1, window_right=-1, scale=None,
    k_scale=None, v_scale=None, softcap=0.0, alibi_slopes=None, sinks=None, batch_invariant=False,
    strategy="auto", head_sharded=False, inner_group=None, outer_group=None, invariant_block=None,
):  # fmt: skip
    shard = CacheShard(k_shard, v_shard, page_table)
    hierarchy = None if inner_group is None and outer_group is None else (inner_group, outer_group)
    rank, world_size = given_rank_and_size(group_name, rank, world_size)
    group = MergeGroup(group_name, rank, world_size, head_sharded, inner_group, outer_group)
    try:
        check_tensors(q, shard, kv_lens, q_start, kv_start)
        check_strategy(strategy, hierarchy)
        _check_merge(q, group, strategy)
        if hierarchy is not None:
            hierarchical.check_hierarchy(group)
        check_positions(shard, kv_block, kv_start, world_size)
        mask = options_to_mask(kv_lens, q_start, kv_start, causal, window_left, window_right, 0, 0)
        scale = default_scale(q, scale)
        extras = ExtraOptions(k_scale, v_scale, softcap, alibi_slopes, sinks, batch_invariant)
        where = shard.capacity, mask, kv_block, rank, world_size
        runs_kernels = _runs_kernels(q, shard, mask, extras)
        if runs_kernels:
            local, global_lens = kernel_mask(q, *where, alibi_slopes is not None)
            check_local_call(q, shard, local, scale, extras, global_lens)
        else:
            local = local_mask(q, *where)
            check_local_call(q, shard, local, scale, extras)
        inputs = [x for x in (q, k_shard, v_shard, *extras) if isinstance(x, Tensor)]
        gradients = wants_gradients(*inputs)
        if invariant_block is not None:
            trained = any(gradients.values())
            rank_invariant.check(invariant_block, shard, kv_block, mask, strategy, trained)
    except (TypeError, ValueError, NotImplementedError) as error:
        tell_other_ranks(group_name, q, strategy, error, invariant_block is not None)
        raise
    if world_size == 1:
        strategy = "none"
    elif strategy == "auto":
        # Asked on every rank, even if some want gradients: a group's first answer is a collective.
        strategy = "all_gather" if is_traced(q) else choose_for(q, group, batch_invariant)
        if any(gradients.values()):
            strategy = "all_gather"
        elif invariant_block is not None and strategy in ONE_SIDED:
            strategy = rank_invariant.choose(q, shard, kv_block, invariant_block)
    if world_size > 1:
        # By which positions follow, or which states each rank has.
        equal_capacity = (kv_block is None and kv_start is None) or invariant_block is not None
        check_equal_on_all_ranks(
            group_name,
            q,
            {
                "q's shape": tuple(q.shape),
                **gradients,  # by which auto chooses
                "k_shard's heads": k_shard.shape[1],
                "v_shard's head dim": v_shard.shape[3],
                **({"k_shard's capacity": shard.capacity} if equal_capacity else {}),
                "whether q_start and kv_start are given": (
                    q_start is not None,
                    kv_start is not None,
                ),
                "whether page_table is given": page_table is not None,
                "which of decode's tensors are given": extras.given(),
                "kv_block": kv_block,
                "invariant_block": invariant_block,
                "strategy": strategy,  # behind what it may follow from
                "head_sharded": head_sharded,
                "the sizes of hierarchy's groups": hierarchical.sizes(group),
                "the dtype": q.dtype,
                "the cache's dtype": k_shard.dtype,
                "causal and window": (mask.window_left, mask.window_right),
                "scale": scale,
                "softcap": softcap,
                "batch_invariant": batch_invariant,
            },
            # A dead rank is to be found by the kernels, which name it and leave the group usable.
            once=strategy in ONE_SIDED,
        )
    if invariant_block is not None:

        def attend(q, shard, mask, extras):
            return _attend(q, shard, mask, scale, extras, _wide(q))

        out, lse = rank_invariant.decode(
            q, shard, mask, attend, extras, group, kv_block, invariant_block,
            strategy=strategy, dtype=q.dtype if sinks is None else _wide(q),
        )  # fmt: skip
        out, lse = with_sinks(out, lse, sinks)
        return _heads_of(out.to(q.dtype), group), _heads_of(lse, group)
    if any(gradients.values()):
        refuse_gradients(q, shard, extras, head_sharded)
        return _DistDecode.apply(
            q, k_shard, v_shard, batch_invariant, group, strategy, *local, scale
        )
    if runs_kernels:
        return _run_kernels(group, strategy, scale, q, shard, local, global_lens, extras)
    dtype = _partial_dtype(q, strategy)
    out, lse = _attend(q, shard, local, scale, _own(extras, rank), dtype)
    return _merge(out, lse, q.dtype, group, strategy)


library.define_composite(
    "dist_decode(Tensor q, Tensor k_shard, Tensor v_shard, Tensor kv_lens, str group_name, "
    "Tensor? q_start=None, Tensor? kv_start=None, *, Tensor? page_table=None, int? rank=None, "
    "int? world_size=None, SymInt? kv_block=None, bool causal=True, "
    "int window_left=-1, int window_right=-1, float? scale=None, "
    "Tensor? k_scale=None, Tensor? v_scale=None, float softcap=0.0, Tensor? alibi_slopes=None, "
    "Tensor? sinks=None, bool batch_invariant=False, str strategy='auto', bool head_sharded=False, "
    "str? inner_group=None, str? outer_group=None, int? invariant_block=None) "
    "-> (Tensor out, Tensor lse)",
    _dist_decode,
    autocast_args=3,
)
