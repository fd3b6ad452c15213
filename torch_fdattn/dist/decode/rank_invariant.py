"""Decode over shards with the same bits on any number of ranks: states of aligned blocks, merged in one tree of positions.

Each rank decodes the blocks that it holds (`batch_invariant`: their bits follow from nothing else), merges those that are
halves of one node (`ops/merge_states/tree.py`), and sends the nodes that are left: one where its shard is an aligned subtree.
All ranks merge the rest, in the order of positions.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from torch_fdattn.dist.collectives import all_gather
from torch_fdattn.dist.decode import block_bounds as _block_bounds  # noqa: F401
from torch_fdattn.dist.decode.inputs import CacheShard, ExtraOptions, runs_decode
from torch_fdattn.dist.decode.partial_states import MergeGroup, pack
from torch_fdattn.dist.state_tree import expect_block, in_one_layout
from torch_fdattn.ops import library
from torch_fdattn.ops.attention.inputs import lse_dtype
from torch_fdattn.ops.launch import power_of_two
from torch_fdattn.ops.positions import FAR, Mask

#: What `strategy` may be: how the nodes travel, which changes no bit.
STRATEGIES = ("auto", "all_gather", "symm_all_gather", "fused")
#: Rows (B · H · T) up to which `auto` takes `fused`.
_FUSED_ROWS = 512

#: (q, shard, mask, extras) → (out, lse) in the dtype of partial states.
Attend = Callable[[Tensor, CacheShard, Mask, ExtraOptions], tuple[Tensor, Tensor]]


def check(
    block: int, shard: CacheShard, kv_block: int | None, mask: Mask, strategy: str, trained: bool
) -> None:
    """That no block of keys is on two ranks, and what else cannot be."""
    expect_block(block)
    check_strategy(strategy)
    if strategy == "fused" and not is_one_node(shard, kv_block, block):
        raise NotImplementedError(
            "strategy must not be 'fused' where a rank's blocks are several nodes: take contiguous shards of a power of two "
            f"of blocks, got {shard.capacity} keys in blocks of {block}, kv_block={kv_block}"
        )
    if trained:
        raise NotImplementedError(
            "dist.decode has no gradient with invariant_block: call it under torch.no_grad()"
        )
    if mask.kv_start is not None:
        raise NotImplementedError(
            "kv_start must be None with invariant_block, for the host does not know where shards begin: use kv_block"
        )
    for name, run in (("kv_block", kv_block), ("k_shard's capacity", shard.capacity)):
        if run is not None and run % block:
            raise ValueError(f"{name} must be a multiple of invariant_block={block}, got {run}")
    if shard.page_table is not None:
        check_pages(block, shard.k.shape[2])


def is_one_node(shard: CacheShard, kv_block: int | None, block: int) -> bool:
    """Whether the blocks of each rank are one node of the tree, by which every rank's are where capacities are equal."""
    count = shard.capacity // block
    each = count if kv_block is None else kv_block // block
    return 0 < count <= each & -each


def choose(q: Tensor, shard: CacheShard, kv_block: int | None, block: int) -> str:
    """What `auto` takes where ranks share symmetric memory."""
    few = q.shape[0] * q.shape[1] * q.shape[2] <= _FUSED_ROWS and q.dtype != torch.float64
    return "fused" if few and is_one_node(shard, kv_block, block) else "symm_all_gather"


def check_strategy(strategy: str, round_robin: bool = False) -> None:
    """round_robin: of shards whose blocks go round the ranks, which are several nodes each."""
    allowed = tuple(x for x in STRATEGIES if not (round_robin and x == "fused"))
    if strategy not in allowed:
        others = "need one node a rank, or merge by ranks" if round_robin else "merge by ranks"
        raise NotImplementedError(
            f"strategy must be one of {allowed} with invariant_block: others {others}, got {strategy!r}"
        )


def check_pages(block: int, page_size: int) -> None:
    if block % page_size:
        raise ValueError(f"invariant_block must be whole pages of {page_size} tokens, got {block}")


def decode(
    q: Tensor, shard: CacheShard, mask: Mask, attend: Attend, extras: ExtraOptions, group: MergeGroup,
    kv_block: int | None, block: int, *, strategy: str, dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out in `dtype`, lse) of all heads, without sinks; mask: global; strategy: one of STRATEGIES, or "none" of one rank."""
    count = shard.capacity // block
    if not count or not q.shape[0]:
        out = q.new_zeros((*q.shape[:3], shard.v.shape[3]), dtype=dtype)
        return out, q.new_full(q.shape[:3], float("-inf"), dtype=lse_dtype(q))
    each = count if kv_block is None else kv_block // block
    # As `local_mask`: lengths are trusted where the whole capacity is not known.
    length_limit = FAR if kv_block is not None else group.world_size * shard.capacity
    bounds = torch.ops.fdattn.block_bounds(
        mask.kv_lens, mask.q_start, q.shape[2], block, count, each, group.rank, group.world_size, length_limit,
        _pages_apart(shard, block),
    )  # fmt: skip
    mask = _simplified(mask, q, extras)._replace(kv_block=0, kv_stride=0)
    if shard.page_table is None:
        shape = shard.k.shape[:3]
        extras = _with_scales(extras, lambda scale: scale.expand(shape))
    extras = extras._replace(sinks=None, batch_invariant=True)
    states = _in_one_call if runs_decode(q) and library.use_triton(q) else _one_by_one
    outs, lses = states(q, shard, mask, attend, extras, bounds)
    if strategy == "fused":
        from torch_fdattn.dist.decode.fused_tree import merge

        return merge(outs, lses, dtype, group.group_name)
    if group.world_size > 1:
        outs, lses = _of_all_ranks(outs, lses, each, group, strategy == "symm_all_gather")
    out, lse = torch.ops.fdattn.merge_tree(outs, lses, power_of_two(outs.shape[0]), dtype)
    return out[0], lse[0]


def _simplified(mask: Mask, q: Tensor, extras: ExtraOptions) -> Mask:
    """Without positions where one query, the last key, sees all keys wherever they stand."""
    positions = mask.q_start is not None or mask.window_left >= 0 or extras.alibi_slopes is not None
    return mask if positions or q.shape[2] > 1 else mask._replace(window_right=-1)


def _of_bounds(mask: Mask, bounds: Tensor, extras: ExtraOptions) -> Mask:
    """The mask of blocks as sequences; bounds (4, blocks)."""
    filled, q_start, kv_start, _ = bounds.unbind()
    if mask.window_left < 0 and mask.window_right < 0 and extras.alibi_slopes is None:
        q_start = kv_start = None
    return mask._replace(kv_lens=filled, q_start=q_start, kv_start=kv_start)


def _one_by_one(q, shard, mask, attend, extras, bounds) -> tuple[Tensor, Tensor]:
    """States (blocks, B, H, M, D), a call each. What CPUs make of a block may follow from the call's other sequences."""
    count, states = bounds.shape[2], []
    block = shard.capacity // count
    # The decode kernel's may not; longer queries are computed together.
    alone = q.is_cpu and not runs_decode(q)
    q = in_one_layout(q)
    for i in range(count):
        part, of_block = _part_of(shard, extras, slice(i * block, (i + 1) * block))
        if not alone:
            own = _of_bounds(mask, bounds[:, :, i].contiguous(), extras)
            states.append(attend(q, part, own, of_block))
            continue
        by_sequence = []
        for b in range(q.shape[0]):
            of_one = _sequence(part, of_block, b)
            own = _of_bounds(mask, bounds[:, b : b + 1, i].contiguous(), extras)
            by_sequence.append(attend(q[b : b + 1], of_one[0], own, of_one[1]))
        states.append(tuple(map(torch.cat, zip(*by_sequence, strict=True))))
    return tuple(torch.stack(x) for x in zip(*states, strict=True))


def _part_of(
    shard: CacheShard, extras: ExtraOptions, keys: slice
) -> tuple[CacheShard, ExtraOptions]:
    if shard.page_table is None:
        shard = CacheShard(*(in_one_layout(x[:, :, keys]) for x in shard[:2]), None)
        return shard, _with_scales(extras, lambda scale: scale[..., keys])
    page = shard.k.shape[2]
    pages = slice(keys.start // page, keys.stop // page)
    return shard._replace(page_table=shard.page_table[:, pages].contiguous()), extras


def _with_scales(extras: ExtraOptions, part: Callable[[Tensor], Tensor]) -> ExtraOptions:
    return ExtraOptions(*(x if x is None else part(x) for x in extras[:2]), *extras[2:])


def _sequence(shard: CacheShard, extras: ExtraOptions, b: int) -> tuple[CacheShard, ExtraOptions]:
    """Those of one sequence."""
    one = slice(b, b + 1)
    if shard.page_table is None:
        shard = CacheShard(shard.k[one], shard.v[one], None)
        extras = _with_scales(extras, lambda scale: scale[one])
    else:
        shard = shard._replace(page_table=shard.page_table[one])
    if extras.alibi_slopes is not None and extras.alibi_slopes.dim() == 2:
        extras = extras._replace(alibi_slopes=extras.alibi_slopes[b])
    return shard, extras


def _in_one_call(q, shard, mask, attend, extras, bounds) -> tuple[Tensor, Tensor]:
    """As `_one_by_one`, all blocks in one call, each a sequence of its own."""
    batch, count = bounds.shape[1:]
    blocks = _blocks(shard, extras, bounds)
    if blocks is None:  # as their memory lies, of one sequence only
        states = []
        for b in range(batch):
            one, bound = slice(b, b + 1), bounds[:, b : b + 1]
            own, of_own = _sequence(shard, extras, b)
            states.append(_in_one_call(q[one], own, mask, attend, of_own, bound))
        return tuple(torch.cat(x, 1) for x in zip(*states, strict=True))
    queries = q[:, None].expand(-1, count, -1, -1, -1).flatten(0, 1)
    states = attend(queries, blocks[0], _of_bounds(mask, bounds.flatten(1), extras), blocks[1])
    return tuple(x.unflatten(0, (batch, count)).transpose(0, 1) for x in states)


def _blocks(
    shard: CacheShard, extras: ExtraOptions, bounds: Tensor
) -> tuple[CacheShard, ExtraOptions] | None:
    """Each block of each sequence as a sequence; None where they do not lie at equal distances."""
    batch, count = bounds.shape[1:]
    if extras.alibi_slopes is not None and extras.alibi_slopes.dim() == 2:
        slopes = extras.alibi_slopes.repeat_interleave(count, 0)
        extras = extras._replace(alibi_slopes=slopes)
    if shard.page_table is not None:
        return shard._replace(page_table=shard.page_table.reshape(batch * count, -1)), extras
    if batch == 1:
        cut = CacheShard(*(_cut(x, count) for x in shard[:2]), None)
        return cut, _with_scales(extras, lambda scale: _cut(scale, count))
    of_heads = all(x is None or x.stride(0) == x.stride(2) == 0 for x in extras[:2])
    if not of_heads or not _pages_apart(shard, shard.capacity // count):
        return None
    pages = (_pages(x, shard.capacity // count) for x in shard[:2])
    return CacheShard(*pages, bounds[3].reshape(-1, 1)), _with_scales(
        extras, lambda x: x[:1, :, :1]
    )


def _pages_apart(shard: CacheShard, block: int) -> int:
    """How many blocks, as pages, from one sequence to the next in memory; 0: they are no pages."""
    strides = {(x.stride(0), x.stride(2)) for x in shard[:2]}
    if shard.page_table is not None or any(row == 0 for _, row in strides):
        return 0  # rows of stride 0: a tensor expanded over its tokens
    apart = {divmod(between, block * row) for between, row in strides}
    count, rest = apart.pop()
    return 0 if rest or apart else count


def _pages(x: Tensor, block: int) -> Tensor:
    """(pages, H, block, D) of x (B, H, N, D): pages of two sequences overlap where these lie in one another, head by head."""
    batch, heads, length, dim = x.shape
    between, head, row, column = x.stride()
    pages = (batch - 1) * (between // (block * row)) + length // block
    shape, strides = (pages, heads, block, dim), (block * row, head, row, column)
    return x.as_strided(shape, strides, x.storage_offset())


def _cut(x: Tensor, count: int) -> Tensor:
    """(1, H, N, …) as (blocks, H, N / blocks, …)."""
    return x[0].unflatten(1, (count, -1)).transpose(0, 1)


def _of_all_ranks(outs: Tensor, lses: Tensor, each: int, group: MergeGroup, one_sided: bool):
    """Nodes of all ranks' blocks in the order of positions: each rank merges what is aligned wherever its runs begin."""
    together = each & -each
    if together > 1:
        # One node of more leaves than there are blocks has the same bits as the smallest that holds them.
        leaves = min(together, power_of_two(outs.shape[0]))
        rows = torch.ops.fdattn.merge_tree_rows(outs, lses, leaves)
    else:
        rows = pack(outs, lses)
    # Where a run is longer than the capacity, other ranks than the first have no keys: where they stand changes no bit.
    each = min(each // together, rows.shape[0])
    missing = -rows.shape[0] % each
    if missing:  # the last round is a part of one
        rows = torch.cat([rows, rows.new_full((missing, *rows.shape[1:]), float("-inf"))])
    if one_sided:
        from torch_fdattn.dist.symm import one_sided_gather

        rows = one_sided_gather.all_gather(rows, group.group_name)
    else:
        gathered = all_gather(rows, group.world_size, group.group_name)
        rows = gathered.view(group.world_size, *rows.shape)
    rows = rows.unflatten(1, (-1, each)).transpose(0, 1).flatten(0, 2)
    return rows[..., :-1], rows[..., -1]
