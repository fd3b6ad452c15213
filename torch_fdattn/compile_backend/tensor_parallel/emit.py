"""Puts one op in the place of a collective and its matmuls."""

from __future__ import annotations

import operator

import torch
from torch.fx import Node

from torch_fdattn.compile_backend.report import Unsupported
from torch_fdattn.compile_backend.tensor_parallel.match import SIZE, Gather, Reduction
from torch_fdattn.compile_backend.tensor_parallel.rows import Builder, erase, replay, value
from torch_fdattn.dist.tensor_parallel import compiled

_ATEN, _C10D = torch.ops.aten, torch.ops._c10d_functional


def emit_gather(gather: Gather, strategy: str) -> None:
    """The op stands where the first matmul did, or, where others use the gathered rows as well, where those came.

    Raises:
        Unsupported: the weights are not known there; nothing was changed.
    """
    at = gather.wait if gather.keep else gather.matmuls[0].node
    _move_before(at, [matmul.weight for matmul in gather.matmuls])
    build = Builder(at, gather.matmuls[0].node)
    weights = [build.transposed(matmul.weight) for matmul in gather.matmuls]
    how = gather.group_name, gather.world_size, strategy, gather.keep
    results = build(compiled.GATHER, build.rows(gather.x), weights, *how)
    parts = [build(operator.getitem, results, i) for i in range(len(weights) + gather.keep)]
    gathered = gather.wait
    if gather.keep:
        gathered = _like(gather.x, parts[-1], build)
        gather.wait.replace_all_uses_with(gathered)
    for matmul, part in zip(gather.matmuls, parts, strict=False):
        here = Builder(matmul.node, matmul.node)
        # The product's rows as the gathered ones were arranged for it.
        y = _like(gather.x, part, here)
        y = replay(matmul.x, {gather.wait: y, gathered: y}, here)
        if matmul.bias is not None:
            y = here(_ATEN.add.Tensor, y, matmul.bias)
        matmul.node.replace_all_uses_with(y)
        here.clear()
    build.clear()
    for size in _sizes(gather.collective):
        here, dim = Builder(size, size), size.args[1] % value(gather.collective).dim()
        new = here.size(gather.x, dim)
        size.replace_all_uses_with(here(operator.mul, new, gather.world_size) if dim == 0 else new)
        erase([size])
    erase(matmul.node for matmul in gather.matmuls)
    erase([*sorted(gather.arranged, reverse=True), gather.collective])


def emit_reduction(reduction: Reduction, strategy: str) -> None:
    product = reduction.collective.args[0]
    build = Builder(reduction.collective, reduction.matmuls[0].node)
    # The matmuls' rows as their products were arranged for the collective.
    xs = [replay(product, {matmul.node: matmul.x}, build) for matmul in reduction.matmuls]
    weights = [build.transposed(matmul.weight) for matmul in reduction.matmuls]
    rows = [build.rows(x) for x in xs]
    several = len(rows) > 1  # a sum of products is the product of all their features
    x = build(_ATEN.cat.default, rows, 1) if several else rows[0]
    weight = build(_ATEN.cat.default, weights, 1) if several else weights[0]
    bias = reduction.biases[0] if reduction.biases else None
    for other in reduction.biases[1:]:
        bias = build(_ATEN.add.Tensor, bias, other)
    all_reduce = reduction.collective.target is _C10D.all_reduce.default
    op = compiled.ALL_REDUCE if all_reduce else compiled.SCATTER
    y = build(op, x, weight, bias, reduction.group_name, reduction.world_size, strategy)
    y = _like(xs[0], y, build)
    reduction.wait.replace_all_uses_with(y)
    for size in _sizes(reduction.collective):
        size.replace_all_uses_with(build(SIZE, y, size.args[1]))
        erase([size])
    build.clear()
    erase([reduction.wait, reduction.collective, *sorted(reduction.chain, reverse=True)])
    erase(matmul.node for matmul in reduction.matmuls)


def _sizes(collective: Node) -> list[Node]:
    """Where a dynamic graph asks for the result's."""
    return [user for user in collective.users if user.target is SIZE]


def _like(x: Node, y: Node, build: Builder) -> Node:
    """y (rows, width) with x's dimensions between its first and its last; x may have another number of rows."""
    between = [build.size(x, dim) for dim in range(1, value(x).dim() - 1)]
    return build.reshape(y, [-1, *between, build.size(y, -1)])


def _move_before(at: Node, nodes: list[Node]) -> None:
    """What the nodes are made of, so that it stands before `at`, on which none of it depends."""
    later: dict[Node, None] = {}
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if at < node and node not in later:
            if node.is_impure() or "_c10d_functional" in str(node.target):
                raise Unsupported("weight-later", f"{node} is not moved before {at}")
            later[node] = None
            waiting.extend(node.all_input_nodes)
    for node in sorted(later):
        at.prepend(node)
