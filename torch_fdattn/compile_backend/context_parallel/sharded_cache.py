"""`options={"context_parallel": {"group": …, "cache": …}}`: steps over a KV cache that the ranks share, as `dist.decode`.

What "cache" says of a graph, and nothing in the graph could: where few queries attend to more keys, or in
`torch_fdattn.decode` and `paged_decode`, K and V are this rank's shard of a cache, q is unsharded and equal on every
rank, and `kv_lens` and `q_start` are those of full sequences. "contiguous": each rank holds one run of positions, as
long as its capacity, which is the same on all; a number: positions go round the ranks in blocks of as many.

Lengths and positions must be said by our own ops. In SDPA and attention written out they would be in a mask, made for
local slots by a model that knows of no shards; only with no mask at all, where all slots of all ranks hold keys, is it
clear what is meant. How a rank writes its shard is the model's matter (`dist.ShardMap` says which tokens are its own).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch_fdattn.compile_backend.choose import OpCall
from torch_fdattn.compile_backend.graph.nodes import statically_true, tensor
from torch_fdattn.compile_backend.masks.expressions import number
from torch_fdattn.compile_backend.masks.structure import Structure
from torch_fdattn.compile_backend.match.attention import MatchedAttention
from torch_fdattn.compile_backend.match.operands import S
from torch_fdattn.compile_backend.report import Unsupported
from torch_fdattn.ops.decode.inputs import MAX_QUERY_TOKENS

if TYPE_CHECKING:
    from torch_fdattn.compile_backend.context_parallel.options import ContextParallel

#: Of decode's arguments, where a local call stands in its shard; `dist_decode` finds that by itself.
_LOCAL = ("kv_start", "kv_block", "kv_stride", "attn_mask")


def is_step(queries: Any, keys: Any) -> bool:
    """Whether there may be as few queries as decode takes. As many keys could be a short prompt: it is refused."""
    return not (statically_true(queries > MAX_QUERY_TOKENS) or statically_true(keys < queries))


def over_shards(attention: MatchedAttention, call: OpCall, context: ContextParallel) -> OpCall:
    """A step that sees all of the cache; raises `Unsupported` for others."""
    # A guard, where it is symbolic: what all ranks hold follows from it.
    capacity = int(attention.k.size(S))
    if call.op != "decode" or capacity <= int(attention.q.size(S)):
        raise Unsupported(
            "context-parallel",
            "few queries that want gradients, or over as many keys: with a cache over the ranks it is not clear "
            "whether these are tokens or a step (torch_fdattn.attention and decode say it)",
        )
    if attention.masked or call.structure != Structure():
        raise Unsupported(
            "context-parallel",
            "a mask or is_causal over a cache's local slots: say lengths to torch_fdattn.decode",
        )
    return replace(
        call, op="dist_decode", structure=Structure(lengths=number(capacity * context.world_size)),
        operands=(context.group_name,), options=_rank(context), contiguous=True,
    )  # fmt: skip


def of_decode(given: dict, defaults: dict, context: ContextParallel) -> tuple[str, tuple, dict]:
    """(op, arguments, keywords) in place of `decode` or `paged_decode`."""
    given = dict(given)
    local = [name for name in _LOCAL if name in given and given.pop(name) != defaults[name]]
    q, k, v, lengths, start = (
        given.pop(x) for x in ("q", "k_cache", "v_cache", "kv_lens", "q_start")
    )
    if local or lengths is None:
        raise Unsupported(
            "context-parallel",
            f"decode over a sharded cache with {', '.join(local) or 'no kv_lens'}: it takes the lengths of whole "
            "sequences, and none of kv_start, kv_block, kv_stride and attn_mask",
        )
    tensor(q)
    given |= _rank(context)
    if context.cache != "contiguous":
        given["kv_block"] = context.cache
    return "dist_decode", (q, k, v, lengths, context.group_name, start), given


def _rank(context: ContextParallel) -> dict[str, int]:
    return dict(rank=context.rank, world_size=context.world_size)
