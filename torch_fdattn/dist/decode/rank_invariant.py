"""Decode over shards with the same bits on any number of ranks: states of aligned blocks, merged in one tree of positions.

Each rank decodes the blocks that it holds (`batch_invariant`: their bits follow from nothing else), merges those that are
halves of one node (`state_tree.py`), and sends what is left: one state where its shard is an aligned subtree. All ranks merge
the rest, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from torch_fdattn.dist.decode.inputs import CacheShard
from torch_fdattn.dist.decode.partial_states import MergeGroup, pack, unpack
from torch_fdattn.dist.state_tree import Node, StateTree, expect_block, in_one_layout, roots
from torch_fdattn.ops.positions import FAR, Mask

#: (q, part of the shard, its mask, its keys) → (out, lse) in the dtype of partial states.
Attend = Callable[[Tensor, CacheShard, Mask, slice], tuple[Tensor, Tensor]]


def check(
    block: int, shard: CacheShard, kv_block: int | None, mask: Mask, strategy: str, trained: bool
) -> None:
    """That no block of keys is on two ranks, and what else cannot be."""
    expect_block(block)
    if strategy not in ("auto", "all_gather"):
        raise NotImplementedError(
            f"strategy must be 'auto' or 'all_gather' with invariant_block: others merge by ranks, got {strategy!r}"
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
    if shard.page_table is not None and block % shard.k.shape[2]:
        raise ValueError(
            f"invariant_block must be whole pages of {shard.k.shape[2]} tokens, got {block}"
        )


def blocks_of(rank: int, world_size: int, capacity: int, kv_block: int | None, block: int) -> list[int]:  # fmt: skip
    """Which blocks of the whole sequence a rank's shard holds, in its order."""
    held = range(capacity // block)
    if kv_block is None:
        return [rank * len(held) + i for i in held]
    each = kv_block // block
    return [(i // each * world_size + rank) * each + i % each for i in held]


def decode(
    q: Tensor, shard: CacheShard, mask: Mask, attend: Attend, group: MergeGroup, kv_block: int | None, block: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out, lse) of all heads, in the dtype of partial states, without sinks; mask: global."""
    held = [
        blocks_of(rank, group.world_size, shard.capacity, kv_block, block)
        for rank in range(group.world_size)
    ]
    out = q.new_zeros((*q.shape[:3], shard.v.shape[3]), dtype=dtype)
    tree, empty = StateTree(), (out, out.new_full(q.shape[:3], float("-inf")))
    # As `local_mask`: lengths are trusted where the whole capacity is not known.
    most = FAR if kv_block is not None else group.world_size * shard.capacity
    lengths = mask.kv_lens.clamp(0, most).int()
    q_start = lengths - q.shape[2] if mask.q_start is None else mask.q_start
    mask, q = mask._replace(q_start=q_start, kv_block=0, kv_stride=0), in_one_layout(q)
    for i, index in enumerate(held[group.rank]):
        keys, start = slice(i * block, (i + 1) * block), index * block
        own = mask._replace(
            kv_lens=(lengths - start).clamp(0, block), kv_start=torch.full_like(lengths, start)
        )
        tree.add((0, index), *attend(q, _part_of(shard, keys), own, keys))
    if group.world_size > 1:
        tree = _gathered(tree, [roots(blocks) for blocks in held], pack(*empty), group)
    return tree.root() or empty


def _part_of(shard: CacheShard, keys: slice) -> CacheShard:
    if shard.page_table is None:
        return CacheShard(*(in_one_layout(x[:, :, keys]) for x in shard[:2]), None)
    page = shard.k.shape[2]
    pages = slice(keys.start // page, keys.stop // page)
    return shard._replace(page_table=shard.page_table[:, pages].contiguous())


def _gathered(
    tree: StateTree, of_ranks: list[list[Node]], row: Tensor, group: MergeGroup
) -> StateTree:
    """The tree of all ranks' roots, by one all-gather of as many states, like `row`, as the rank with the most has."""
    rows = row.new_zeros((max(map(len, of_ranks)), *row.shape))
    for i, node in enumerate(of_ranks[group.rank]):
        rows[i] = pack(*tree.nodes[node])
    received = torch.ops._c10d_functional.all_gather_into_tensor(
        rows, group.world_size, group.group_name
    )
    received = torch.ops._c10d_functional.wait_tensor(received).view(group.world_size, *rows.shape)
    found = StateTree()
    for states, nodes in zip(received, of_ranks, strict=True):
        for state, node in zip(states, nodes, strict=False):
            found.add(node, *unpack(state, state.dtype))
    return found
