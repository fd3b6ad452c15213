"""What a rewritten graph takes for granted of its inputs, seen when it runs: positions are those of this rank's tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.fx import GraphModule

from torch_fdattn.compile_backend.context_parallel.options import OPTION, ContextParallel
from torch_fdattn.dist.consensus import raise_on_all_ranks
from torch_fdattn.dist.ring_attention.sequence_shards import SequenceShards, named_shards
from torch_fdattn.dist.ring_attention.transformers_layers import POSITIONS, difference


def checking(
    compiled: Callable[..., Any], gm: GraphModule, names: set[str], context: ContextParallel
) -> Callable[..., Any]:
    """The same function of the graph's inputs, which raises ValueError on all ranks where the inputs of these names do not
    hold the positions of each rank's tokens; a collective of one number, and a wait for the device.
    """
    inputs = [node for node in gm.graph.nodes if node.op == "placeholder"]
    places = [i for i, node in enumerate(inputs) if node.name in names]

    def run(*given: Any) -> Any:
        for i in places:
            _check(given[i], context)
        return compiled(*given)

    return run


def _check(positions: Tensor, context: ContextParallel) -> None:
    shards = context.shards
    if not isinstance(shards, SequenceShards):
        shards = named_shards(shards, positions.shape[-1], context.world_size)
    own = shards.positions(context.rank).to(positions.device)
    said = difference(positions, own)
    raise_on_all_ranks(
        context.group_name, positions.device, ValueError, said, f"{OPTION}: {POSITIONS}"
    )
