"""What a rewritten graph takes for granted of its inputs, seen when it runs: positions are those of this rank's tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.fx import GraphModule

from torch_fdattn.compile_backend.context_parallel.options import OPTION, ContextParallel
from torch_fdattn.dist.ring_attention.sequence_shards import SequenceShards, named_shards
from torch_fdattn.dist.ring_attention.transformers_layers import (
    POSITIONS,
    AcceptedPositions,
    compare_positions,
)

if TYPE_CHECKING:
    from torch_fdattn.compile_backend.report import Report


def checking(
    compiled: Callable[..., Any], gm: GraphModule, report: Report, context: ContextParallel
) -> Callable[..., Any]:
    """The same function of the graph's inputs, which raises ValueError on all ranks where the inputs that the report names
    do not hold the positions of each rank's tokens, or where ranks have other documents; a small collective for each, and a
    wait for the device.
    """
    inputs = [node.name for node in gm.graph.nodes if node.op == "placeholder"]
    places = [
        (i, name in report.document_positions)
        for i, name in enumerate(inputs)
        if name in report.positions
    ]

    def run(*given: Any) -> Any:
        for i, in_documents in places:
            _check(given[i], context, in_documents)
        return compiled(*given)

    return run


def _check(positions: Tensor, context: ContextParallel, in_documents: bool) -> None:
    """in_documents: positions of the full sequence would give chunks or prefixes another meaning."""
    shards = context.shards
    if not isinstance(shards, SequenceShards):
        shards = named_shards(shards, positions.shape[-1], context.world_size)
    accepted = AcceptedPositions.of(shards, context.rank, context.documents)
    if in_documents:
        accepted = accepted._replace(in_sequence=accepted.in_documents)
    compare_positions(
        context.group_name, positions.device, positions, accepted, None, f"{OPTION}: {POSITIONS}"
    )
