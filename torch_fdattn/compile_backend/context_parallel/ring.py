"""Attention over this rank's tokens as ring attention over the tokens of all ranks."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

from torch_fdattn.compile_backend.choose import OpCall
from torch_fdattn.compile_backend.context_parallel import sharded_cache
from torch_fdattn.compile_backend.context_parallel.local_counts import refuse_counts_of_local_tokens
from torch_fdattn.compile_backend.context_parallel.options import ContextParallel
from torch_fdattn.compile_backend.graph.nodes import is_tensor, statically_true, tensor
from torch_fdattn.compile_backend.masks.structure import Structure
from torch_fdattn.compile_backend.match.attention import MatchedAttention
from torch_fdattn.compile_backend.match.operands import D, S
from torch_fdattn.compile_backend.report import Unsupported

#: What ring attention takes of `torch_fdattn.attention`'s arguments.
_SUPPORTED = (
    "q", "k", "v", "causal", "window_left", "window_right", "scale", "softcap", "alibi_slopes", "sinks", "dropout_p",
    "dropout_seed",
)  # fmt: skip
_MASK = (
    "a mask of local tokens that is no window, chunks or prefix over the graph's input of their positions (give a transformers model "
    "position_ids, this rank's part of all positions, and no attention_mask, or where it makes masks of indices, as gpt-oss does, "
    "that of torch_fdattn.dropins.transformers.masks_of_positions; transformers 5.23 or newer)"
)


def over_ranks(attention: MatchedAttention, call: OpCall, context: ContextParallel) -> OpCall:
    """Ring attention or, over a cache, `dist_decode` in place of a call over local tokens; raises `Unsupported`."""
    q, k, v = attention.q, attention.k, attention.v
    if context.cache is not None and sharded_cache.is_step(q.size(S), k.size(S)):
        return sharded_cache.over_shards(attention, call, context)
    _refuse(
        **{_MASK: attention.masked}, **_misfits(q.size(S), k.size(S), k.size(D), v.size(D)),
    )  # fmt: skip
    factors = (x.node for x in attention.temperatures if is_tensor(x.node))
    refuse_counts_of_local_tokens(q.node, k.node, v.node, *factors, length=q.size(S))
    # Without a start: that of SDPA's is_causal is 0, for tokens that a shard may hold in any order.
    structure = Structure(left=call.structure.left, right=call.structure.right)
    operands, options = context.operands(q.size(S)), context.options
    if call.structure.chunk:
        options["attention_chunk"] = call.structure.chunk
    if call.structure.prefix:
        from torch_fdattn.dist.ring_attention.sequence_shards import SequenceShards

        documents = context.documents or (0, SequenceShards.from_flat(operands[1]).total)
        lengths = (end - begin for begin, end in itertools.pairwise(documents))
        options["prefix_lens"] = [min(call.structure.prefix, length) for length in lengths]
    return replace(
        call, op="ring_attention", structure=structure, operands=operands, options=options
    )


def of_attention(given: dict, defaults: dict, context: ContextParallel) -> tuple[str, tuple, dict]:
    """(op, arguments, keywords) in place of `torch_fdattn.attention`."""
    _refuse(**{x: given[x] != default for x, default in defaults.items() if x not in _SUPPORTED})
    q, k, v = (given[name] for name in "qkv")
    shapes = [tensor(x).shape for x in (q, k, v)]
    _refuse(**_misfits(shapes[0][2], shapes[1][2], shapes[1][3], shapes[2][3]))
    refuse_counts_of_local_tokens(q, k, v, length=shapes[0][2])
    options = {name: given[name] for name in _SUPPORTED[3:]} | context.options
    return "ring_attention", (q, k, v, *context.operands(shapes[0][2])), options


def _misfits(queries: Any, keys: Any, k_dim: Any, v_dim: Any) -> dict[str, bool]:
    return {
        "queries and keys of other tokens, or a cache": not statically_true(queries == keys),
        "values of another head dim": not statically_true(v_dim == k_dim),
    }


def _refuse(**given: object) -> None:
    named = [name for name, there in given.items() if there]
    if named:
        raise Unsupported(
            "context-parallel",
            f"only causal, windows, scale, softcap, ALiBi slopes, sinks and dropout of torch_fdattn.attention go over ranks, got {', '.join(named)}",
        )
