"""Partial states of aligned blocks of keys, merged in one binary tree over the blocks' positions.

A sum of floats depends on its order, and an order by ranks depends on how many there are. Here the order follows from positions
alone: block i holds the keys i · block to before (i + 1) · block, node (level, i) the blocks i · 2^level to before
(i + 1) · 2^level, and a node is the merge of its two halves. A node that is empty, or that nobody has, changes no bit of the other half.
So whoever has both halves of a node merges them, and the result has the same bits on any number of ranks, whatever rank holds
which blocks, and however long the cache is.
"""

from __future__ import annotations

import torch
from torch import Tensor

Node = tuple[int, int]  # (level, index)


def expect_block(block: object) -> None:
    """`invariant_block` of a call: the keys of a block, or None."""
    if block is None:
        return
    if isinstance(block, bool) or not isinstance(block, int):
        raise TypeError(f"invariant_block must be an int or None, got {type(block).__name__}")
    if block < 1:
        raise ValueError(f"invariant_block must be at least 1, got {block}")


class StateTree:
    """The states (out (…, D), lse (…)) so far; lse is -inf, and out ignored, where a row has seen no key."""

    def __init__(self) -> None:
        self.nodes: dict[Node, tuple[Tensor, Tensor]] = {}

    def add(self, node: Node, out: Tensor, lse: Tensor) -> None:
        """A node of which nothing was added before. Nodes whose halves are there are merged at once."""
        level, index = node
        while (sibling := self.nodes.pop((level, index ^ 1), None)) is not None:
            out, lse = merged(*sibling, out, lse)
            level, index = level + 1, index >> 1
        self.nodes[level, index] = out, lse

    def root(self) -> tuple[Tensor, Tensor] | None:
        """The merge of all nodes, where those that were not added are empty; None where there are none. Rows without keys: 0."""
        while len(self.nodes) > 1:
            level, index = min(self.nodes)
            state = self.nodes.pop((level, index))
            self.add((level + 1, index >> 1), *state)
        for out, lse in self.nodes.values():
            return out.masked_fill((lse == float("-inf"))[..., None], 0.0), lse
        return None


def merged(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """The state over the keys of both, whichever is named first; the same bits as one of them where the other one is empty, and
    zeros where both are.
    """
    return torch.ops.fdattn.merge_pair(out, lse, other_out, other_lse)


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """out (B, H, M, D) and lse (B, H, M) after each head's sink (H,), a key whose value is 0, joined: last, on any rank.

    Not `ops.scores.add_sinks`: what CPUs make of logaddexp and sigmoid depends on where a number lies.
    """
    if sinks is None:
        return out, lse
    sinks = sinks.to(lse.dtype)[None, :, None].expand_as(lse)
    return merged(out, lse, torch.zeros_like(out), sinks.contiguous())


def in_one_layout(x: Tensor) -> Tensor:
    """What products are computed of: on CPUs a copy, for their bits may follow from strides and from where a tensor begins."""
    return x.clone(memory_format=torch.contiguous_format) if x.is_cpu else x
