"""Partial attention states merged in one binary tree: results that follow from the states and their places alone.

merge_tree(outs, lses, leaves, dtype=None)        -> (out, lse) of each node of so many states, a power of two
merge_tree_rows(outs, lses, leaves)               -> rows (…, D + 1) of the same: out, and then lse, in one row
merge_pair(out, lse, other_out, other_lse)        -> (out, lse) of two

A node is the merge of its two halves. What is missing at the end is empty, and an empty state changes no bit of the other:
so nodes of 2 leaves, merged by 16, have the same bits as nodes of 32. Not differentiable; not part of the public interface.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from torch_fdattn.ops import library
from torch_fdattn.ops.launch import cdiv


def _pair(out, lse, other_out, other_lse) -> tuple[Tensor, Tensor]:
    if not library.use_triton(out):
        return _merged(out, lse, other_out, other_lse)
    tensors = [x.contiguous() for x in (out, lse, other_out, other_lse)]
    merged, merged_lse = _pair_fake(*tensors)
    if lse.numel():
        from torch_fdattn.ops.merge_states.tree_kernel import launch_pair

        launch_pair(*tensors, merged, merged_lse)
    return merged, merged_lse


def _pair_fake(out, lse, other_out, other_lse) -> tuple[Tensor, Tensor]:
    new = torch.empty_like
    return tuple(new(x, memory_format=torch.contiguous_format) for x in (out, lse))


def _merged(out, lse, other_out, other_lse) -> tuple[Tensor, Tensor]:
    """By operations of torch that round once each: a compiler may contract a product and a sum, here in one kernel and there
    not, and so this is an op, into which none sees.
    """
    top = torch.maximum(lse, other_lse)
    weight, other_weight = torch.exp(lse - top), torch.exp(other_lse - top)
    total = weight + other_weight
    sums = out * weight[..., None] + other_out * other_weight[..., None]
    empty, other_empty = lse == float("-inf"), other_lse == float("-inf")
    found = torch.where(empty[..., None], other_out, sums / total[..., None])
    found = torch.where(other_empty[..., None], out, found)
    found_lse = torch.where(empty, other_lse, top + torch.log(total))
    found_lse = torch.where(other_empty, lse, found_lse)
    return found.masked_fill((empty & other_empty)[..., None], 0.0), found_lse


def _tree(outs, lses, leaves, dtype=None) -> tuple[Tensor, Tensor]:
    if not library.use_triton(outs):
        return _tree_reference(outs, lses, leaves, dtype)
    return _merge_into(*_tree_fake(outs, lses, leaves, dtype), outs, lses, leaves)


def _rows(outs, lses, leaves) -> Tensor:
    if not library.use_triton(outs):
        out, lse = _tree_reference(outs, lses, leaves, None)
        return torch.cat([out, lse[..., None]], -1)
    rows = _rows_fake(outs, lses, leaves)
    _merge_into(rows[..., :-1], rows[..., -1], outs, lses, leaves)
    return rows


def _merge_into(out, lse, outs, lses, leaves) -> tuple[Tensor, Tensor]:
    """By launches of MAX_LEAVES, of which the last one writes into out and lse."""
    from torch_fdattn.ops.merge_states.tree_kernel import MAX_LEAVES, launch_tree

    if lse.numel():
        while leaves > MAX_LEAVES:
            nodes = _tree_fake(outs, lses, MAX_LEAVES)
            launch_tree(outs, lses, *nodes, MAX_LEAVES)
            outs, lses, leaves = *nodes, leaves // MAX_LEAVES
        launch_tree(outs, lses, out, lse, leaves)
    return out, lse


def _tree_fake(outs, lses, leaves, dtype=None) -> tuple[Tensor, Tensor]:
    nodes = cdiv(outs.shape[0], leaves)
    out = outs.new_empty((nodes, *outs.shape[1:]), dtype=dtype or outs.dtype)
    return out, lses.new_empty((nodes, *lses.shape[1:]))


def _rows_fake(outs, lses, leaves) -> Tensor:
    return outs.new_empty((cdiv(outs.shape[0], leaves), *outs.shape[1:-1], outs.shape[-1] + 1))


def _tree_reference(outs, lses, leaves, dtype) -> tuple[Tensor, Tensor]:
    missing = -outs.shape[0] % leaves
    outs = pad(outs, (0,) * 8 + (0, missing))
    lses = pad(lses, (0,) * 6 + (0, missing), value=float("-inf"))
    while leaves > 1:
        halves = [x[i::2].contiguous() for i in (0, 1) for x in (outs, lses)]
        outs, lses = _merged(*halves)
        leaves //= 2
    outs = outs.masked_fill((lses == float("-inf"))[..., None], 0.0)
    return outs.to(dtype or outs.dtype), lses.contiguous()


library.define_raw(
    "merge_pair(Tensor out, Tensor lse, Tensor other_out, Tensor other_lse) -> (Tensor, Tensor)",
    _pair,
    _pair_fake,
)
library.define_raw(
    "merge_tree(Tensor outs, Tensor lses, int leaves, ScalarType? dtype=None) -> (Tensor, Tensor)",
    _tree,
    _tree_fake,
)
library.define_raw(
    "merge_tree_rows(Tensor outs, Tensor lses, int leaves) -> Tensor", _rows, _rows_fake
)
