"""Activation checkpoints in a graph over one rank's tokens: what the backward runs again must be alike on all ranks."""

from __future__ import annotations

from torch.fx import GraphModule

from torch_fdattn.compile_backend.context_parallel.options import OPTION, ContextParallel
from torch_fdattn.compile_backend.report import UnsupportedAttention
from torch_fdattn.dist.ring_attention.sequence_shards import SequenceShards

#: Whose backward runs what the forward ran, also on a rank without tokens.
_TAKES_EMPTY_SHARDS = "all_gather"


def refuse_empty_shards(gm: GraphModule, context: ContextParallel) -> None:
    """A rank without tokens keeps its empty results, and would run less of the forward again than the others."""
    shards = context.shards
    if not isinstance(shards, SequenceShards) or 0 not in shards.lengths:
        return
    if context.strategy != _TAKES_EMPTY_SHARDS and _has_checkpoints(gm):
        raise UnsupportedAttention(
            f"{OPTION} with activation checkpoints must have tokens on every rank, got shards of {shards.lengths} tokens with "
            f'strategy={context.strategy!r}: give "strategy": "{_TAKES_EMPTY_SHARDS}", or shards without empty ones'
        )


def _has_checkpoints(gm: GraphModule) -> bool:
    modules = (x for x in gm.modules() if isinstance(x, GraphModule))
    return any("checkpoint" in str(node.target) for x in modules for node in x.graph.nodes)
