"""Strategy `ulysses_ring`: `ulysses` over the ranks of a node, `ring` over the nodes (USP, arXiv:2405.07719).

The ranks are a mesh (nodes, ranks of a node), as of `dist.decode`'s "hierarchical". Inside a node all-to-alls give each rank all
of the node's tokens for its part of the heads; keys and values of these heads then go round the nodes. So more ranks than
heads can share a sequence, and what goes between nodes is one node's keys, in parts by heads.
"""

from __future__ import annotations

from torch import Tensor
from torch.distributed import get_process_group_ranks
from torch.distributed.distributed_c10d import _resolve_process_group

from torch_fdattn.dist.ring_attention import ring
from torch_fdattn.dist.ring_attention.heads import (
    keys_to_heads,
    keys_to_tokens,
    of_own_heads,
    to_heads,
    to_tokens,
)
from torch_fdattn.dist.ring_attention.layout import in_order_of
from torch_fdattn.dist.ring_attention.local import Problem, Saved
from torch_fdattn.dist.ring_attention.sequence_shards import Run, SequenceShards


def ranks_of_node(problem: Problem) -> int:
    return len(get_process_group_ranks(_resolve_process_group(problem.hierarchy[0])))


def forward(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> tuple[Tensor, Tensor, Saved]:
    own_q, (node, nodes) = q, _parts(problem, q)
    q, k, v = to_heads(q, node), *(keys_to_heads(x, node) for x in (k, v))
    out, lse, saved = ring.forward(q, k, v, nodes)
    own_out = in_order_of(own_q, to_tokens(out, node))
    return own_out, to_tokens(lse.unsqueeze(-1), node).squeeze(-1), saved


def backward(
    dout: Tensor, dlse: Tensor | None, saved: Saved, problem: Problem
) -> tuple[Tensor, Tensor, Tensor]:
    node, nodes = _parts(problem, dout)
    dout = to_heads(dout, node)
    if dlse is not None:
        dlse = to_heads(dlse.unsqueeze(-1), node).squeeze(-1)
    dq, *dkv = ring.backward(dout, dlse, saved, nodes)
    dtype = saved.q.dtype
    of_keys = (keys_to_tokens(x, node, dtype) for x in dkv)
    return to_tokens(dq.to(dtype), node), *of_keys


def _parts(problem: Problem, q: Tensor) -> tuple[Problem, Problem]:
    """(what the ranks of this node exchange, the ring over nodes of this rank's heads); q: like this rank's queries."""
    inner, outer = problem.hierarchy
    size = ranks_of_node(problem)
    of_nodes = [
        problem.shards.ranks[begin : begin + size]
        for begin in range(0, problem.world_size, size)
    ]  # fmt: skip
    index, place = divmod(problem.rank, size)
    lengths = problem.shards.lengths[index * size : (index + 1) * size]
    # A node's tokens lie in the order of its ranks, whatever their positions.
    held, begin = [], 0
    for length in lengths:
        held.append((Run(begin, length),) if length else ())
        begin += length
    node = problem._replace(group_name=inner, rank=place, shards=SequenceShards(tuple(held)))
    shards = SequenceShards(tuple(sum(ranks, ()) for ranks in of_nodes))
    nodes = problem._replace(group_name=outer, rank=index, shards=shards, **of_own_heads(node, q))
    return node, nodes
