"""The output of queries that see no key, where our ops give zeros and the original gave NaN or the mean of all values."""

from __future__ import annotations

import math
import operator

import torch
from torch.fx import Node

from torch_fdattn.compile_backend.emit.mask_arguments import MaskArguments
from torch_fdattn.compile_backend.graph.adder import Adder
from torch_fdattn.compile_backend.graph.nodes import statically_true, value
from torch_fdattn.compile_backend.match.attention import Attention
from torch_fdattn.compile_backend.match.operands import D, S
from torch_fdattn.compile_backend.report import Unsupported


def with_empty_rows(
    add: Adder, found: Attention, given: MaskArguments, pair: Node, out: Node,
    qkv: tuple[Node, Node, Node],
) -> Node:  # fmt: skip
    empty, wanted = found.mask.empty, value(found.result).requires_grad
    hidden = add.call(operator.eq, add.call(operator.getitem, pair, 1), -math.inf)
    hidden = add.call("unsqueeze", hidden, -1)
    if empty == "nan" and not wanted:
        return add.call("masked_fill", out, hidden, math.nan)
    mean = _mean_of_values(add, found, *qkv)
    if empty == "mean":
        return add.call(torch.where, hidden, mean, out)
    # NaN for the gradients too: of no row that sees a key, since 0 · mean has none.
    zeros = add.call(torch.zeros_like, add.call("detach", mean))
    factor = add.call(torch.where, hidden, math.nan, zeros)
    reached = [mean, *_reached_beside_fills(add, found, given, hidden, *qkv[:2])]
    reached += _reached_by_sums(add, found, given, hidden)
    for each in reached:
        out = add.call(operator.add, out, add.call(operator.mul, factor, each))
    return out


def _reached_beside_fills(
    add: Adder, found: Attention, given: MaskArguments, hidden: Node, q: Node, k: Node
) -> list[Node]:
    """Numbers through which NaN reaches q and k, but for pairs of them that are filled."""
    call, fills = add.call, found.mask.nans.fills
    if not fills:
        return []
    summed = call(torch.logical_not, given.filled(fills))
    rows = call(operator.and_, hidden, call("any", summed, -1, keepdim=True))
    keys = call("unsqueeze", call("any", call(operator.and_, hidden, summed), -2), -1)
    queries = call("sum", call(torch.where, rows, q, 0.0), -1, keepdim=True)
    heads, kv_heads = value(q).shape[1], value(k).shape[1]
    if statically_true(heads == kv_heads):
        used = call(torch.where, keys, k, 0.0)
    else:
        used = call(torch.where, keys, _repeated(add, k, heads), 0.0)
    # Zero where no row is hidden, so that 0 · it is no infinity's.
    return [queries, call("sum", used, (-1, -2), keepdim=True)]


def _reached_by_sums(
    add: Adder, found: Attention, given: MaskArguments, hidden: Node
) -> list[Node]:
    """Numbers through which NaN reaches what is learned and added, where no fill comes behind."""
    call, reached = add.call, []
    for kept, fills in found.mask.nans.learned:
        where = hidden
        if fills:
            summed = call(torch.logical_not, given.filled(fills))
            where = call(operator.and_, hidden, summed)
        used = call(torch.where, where, given.of(kept), 0.0)
        reached.append(call("sum", used, -1, keepdim=True))
    return reached


def _repeated(add: Adder, x: Node, heads: object) -> Node:
    """K, or what is made of K or V, with a head for each of q."""
    kv_heads = value(x).shape[1]
    if statically_true(kv_heads == 1) or statically_true(heads == kv_heads):
        return x
    if not isinstance(heads, int) or not isinstance(kv_heads, int):
        raise Unsupported("heads", f"a mean of {kv_heads} heads of v for {heads} of q")
    return add.call("repeat_interleave", x, heads // kv_heads, 1)


def _mean_of_values(add: Adder, found: Attention, q: Node, k: Node, v: Node) -> Node:
    """Of all keys; where gradients reach their scores, with those of equal weights, and no value, of q and k.

    With weights of 1 / N: out = mean + Σ (s - s₀) (v - mean) / N, which is mean + (q - q₀) · C, C = scale · kᵀ (v - mean) / N.
    """
    call, heads = add.call, value(q).shape[1]
    mean = call("mean", v, 2, keepdim=True)
    if not found.mask.flows:
        return _repeated(add, mean, heads)
    scale = found.scale if found.scale is not None else found.q.size(D) ** -0.5
    count = found.k.size(S)
    count = count if isinstance(count, int) else call("size", k, 2)
    centred = call(operator.sub, call("detach", v), call("detach", mean))
    centred = call(operator.mul, call(operator.truediv, centred, count), scale)
    moved = _repeated(add, call(torch.matmul, call("transpose", k, 2, 3), centred), heads)
    moved = call(torch.matmul, q, moved)
    return call(
        operator.add, _repeated(add, mean, heads), call(operator.sub, moved, call("detach", moved))
    )
