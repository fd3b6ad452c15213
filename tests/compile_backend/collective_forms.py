"""Functions that have matmuls beside functional collectives: those that become one op, and near-misses that must not.

Each takes (x, w, group, world): x (W·6, 8) or, where the name says so, (B, W·6, 8), w (10, 8); what it gathers it first
cuts to this rank's rows of what all ranks have alike, so that any rank's result is known.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor

from torch_fdattn.dist.collectives import gather_rows


def gather(x: Tensor, group, dim: int = 0) -> Tensor:
    # Dynamo of torch 2.11 traces the functional collectives along the first dimension alone.
    rows = funcol.all_gather_tensor(x, 0, group)
    return torch.cat(rows.chunk(dist.get_world_size()), dim) if dim else rows


def scatter(y: Tensor, group, dim: int = 0, op: str = "sum") -> Tensor:
    rows = torch.cat(y.chunk(dist.get_world_size(), dim)) if dim else y
    return funcol.reduce_scatter_tensor(rows, op, 0, group)


def reduce(y: Tensor, group, op: str = "sum") -> Tensor:
    return funcol.all_reduce(y, op, group)


def batched(x: Tensor) -> Tensor:
    return torch.stack([x, x.flip(0)])


def _gathered_twice(x, w, g, n):
    rows = gather(x, g)
    first = rows @ w.t()
    return rows @ (first.sum() * w.t())  # whose weight is made of the first


def _used_before(x, w, g, n):
    rows = gather(x, g)
    return rows.relu() @ w.t(), rows @ w.t()


#: Name: (function, what it becomes: how many of each op).
G, S, A = "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"
FORMS: dict[str, tuple[Callable, list[str]]] = {
    "gather": (lambda x, w, g, n: gather(x, g) @ w.t(), [G]),
    "gather, weight as it lies": (lambda x, w, g, n: gather(x, g) @ w.t().contiguous(), [G]),
    "gather, bias": (lambda x, w, g, n: F.linear(gather(x, g), w, w[:, 0]), [G]),
    "gather, bias of rows": (lambda x, w, g, n: torch.addmm(gather(x, g)[:, :1], gather(x, g), w.t()), [G]),
    "gather of one sequence": (lambda x, w, g, n: F.linear(gather(x[None], g, 1), w), [G]),
    "gather of two sequences": (lambda x, w, g, n: F.linear(gather(batched(x), g, 1), w, w[:, 1]), [G]),
    "gather, sequences last but one": (
        lambda x, w, g, n: F.linear(gather(batched(x).transpose(0, 1).contiguous(), g).transpose(0, 1).contiguous(), w), [G],
    ),
    "gather, rows dropped": (lambda x, w, g, n: gather(x, g)[:-2] @ w.t(), [G]),
    "gather, two weights": (lambda x, w, g, n: (F.linear(r := gather(x, g), w), F.linear(r, w.flip(0) * 2)), [G]),
    "gather, rows used elsewhere": (lambda x, w, g, n: ((r := gather(x, g)) @ w.t(), r.sum(0)), [G]),
    "gather, rows used before": (_used_before, [G]),
    "gather, second weight of the first": (_gathered_twice, [G]),
    "gather_rows": (lambda x, w, g, n: F.linear(gather_rows(x, g), w), [G]),
    "scatter": (lambda x, w, g, n: scatter(x @ w.t(), g), [S]),
    "scatter, bias": (lambda x, w, g, n: scatter(F.linear(x, w, w[:, 0]), g), [S]),
    "scatter of one sequence": (lambda x, w, g, n: scatter(F.linear(x[None], w), g, 1), [S]),
    "scatter of two sequences": (lambda x, w, g, n: scatter(F.linear(batched(x), w, w[:, 0]), g, 1), [S]),
    "scatter, sequences last but one": (
        lambda x, w, g, n: scatter(F.linear(batched(x), w).transpose(0, 1).contiguous(), g), [S],
    ),
    "scatter of a sum": (lambda x, w, g, n: scatter(x @ w.t() + (x * 2)[:, :4] @ w[:, :4].t(), g), [S]),
    "scatter of a sum, biases": (
        lambda x, w, g, n: scatter(F.linear(batched(x), w, w[:, 0]) + F.linear(batched(x) * 2, w, w[:, 1]), g, 1), [S],
    ),
    "reduce": (lambda x, w, g, n: reduce(x @ w.t(), g), [A]),
    "reduce, bias": (lambda x, w, g, n: reduce(F.linear(x, w, w[:, 0]), g), [A]),
    "reduce of sequences": (lambda x, w, g, n: reduce(F.linear(batched(x), w), g), [A]),
    "reduce of a sum": (lambda x, w, g, n: reduce(x @ w.t() + x @ w.flip(0).t(), g), [A]),
    "gather and scatter": (lambda x, w, g, n: scatter(F.linear(gather(x, g), w).relu() @ w, g), [G, S]),
}  # fmt: skip

#: Name: (function, reason codes of what is reported).
NEAR_MISSES: dict[str, tuple[Callable, list[str]]] = {
    "features gathered": (lambda x, w, g, n: gather(x, g, 1) @ torch.cat([w.t()] * n), []),
    "weights gathered": (lambda x, w, g, n: x @ gather(w, g).t(), []),
    "gathered by itself": (lambda x, w, g, n: (r := gather(x, g)) @ r.t(), []),
    "gathered rows as features": (lambda x, w, g, n: gather(x, g).t() @ torch.cat([x[:, :3]] * n), []),
    "something between gather and matmul": (lambda x, w, g, n: gather(x, g).relu() @ w.t(), []),
    "gather, scaled": (lambda x, w, g, n: (gather(x, g) * 2) @ w.t(), []),
    "gather, cast": (lambda x, w, g, n: gather(x.half(), g).float() @ w.t(), []),
    "gather of float64": (lambda x, w, g, n: gather(x.double(), g) @ w.double().t(), ["dtype"]),
    "gather, another width": (lambda x, w, g, n: gather(x, g).view(-1, 4) @ w[:, :4].t(), []),
    "gather, rows summed": (lambda x, w, g, n: gather(x, g).sum(0, keepdim=True) @ w.t(), []),
    "gather, a product for each rank": (
        lambda x, w, g, n: torch.bmm(gather(x, g).view(n, -1, 8), w.t().expand(n, 8, 10)), ["batched"],
    ),
    "gather, product scaled": (
        lambda x, w, g, n: torch.addmm(w[:, 0], gather(x, g), w.t(), alpha=2), ["scaled"],
    ),
    "something between matmul and scatter": (lambda x, w, g, n: scatter((x @ w.t()).relu(), g), []),
    "scatter of a mean": (lambda x, w, g, n: scatter(x @ w.t(), g, op="avg"), ["reduce-op"]),
    "scatter of the largest": (lambda x, w, g, n: scatter(x @ w.t(), g, op="max"), ["reduce-op"]),
    "scatter, product used": (lambda x, w, g, n: (scatter(y := x @ w.t(), g), y.sum()), ["product-used"]),
    "scatter, a part of the product used": (
        lambda x, w, g, n: (scatter((y := F.linear(batched(x), w)), g, 1), y[:, :2].sum()), ["product-used"],
    ),
    "scatter, a residual added": (lambda x, w, g, n: scatter(x @ w.t() + x[:, :1].expand(-1, 10), g), []),
    "scatter of halves": (lambda x, w, g, n: scatter((x @ w.t()) * 0.5, g), []),
    "features scattered": (lambda x, w, g, n: scatter(x @ torch.cat([w.t()] * n, 1), g, 1), []),
    "scatter, cast": (lambda x, w, g, n: scatter((x.half() @ w.half().t()).float(), g), []),
    "scatter of what is flat": (lambda x, w, g, n: scatter((x @ w.t()).flatten(), g), []),
    "scatter of a product twice": (lambda x, w, g, n: scatter((y := x @ w.t()) + y, g), []),
    "scatter of two products, joined": (lambda x, w, g, n: scatter(torch.cat([x @ w.t(), x @ w.flip(0).t()]), g), []),
    "scatter of a sum, one side broadcast": (lambda x, w, g, n: scatter(x @ w.t() + x[:1] @ w.t(), g), []),
    "scatter of a sum, one side scaled": (
        lambda x, w, g, n: scatter(torch.add(x @ w.t(), x @ w.flip(0).t(), alpha=2), g), [],
    ),
    "scatter, bias of rows": (lambda x, w, g, n: scatter(torch.addmm(x[:, :1], x, w.t()), g), ["bias"]),
    "scatter, bias scaled": (lambda x, w, g, n: scatter(torch.addmm(w[:, 0], x, w.t(), beta=2), g), ["scaled"]),
    "the largest of all": (lambda x, w, g, n: reduce(x @ w.t(), g, "max"), ["reduce-op"]),
    "reduce, product used": (lambda x, w, g, n: (reduce(y := x @ w.t(), g), y.sum()), ["product-used"]),
    "reduce, something between": (lambda x, w, g, n: reduce(torch.sigmoid(x @ w.t()), g), []),
    "reduce of products of matrices": (
        lambda x, w, g, n: reduce(torch.bmm(batched(x), w.t().expand(2, 8, 10)), g), ["batched"],
    ),
    "reduce of float64": (lambda x, w, g, n: reduce(x.double() @ w.double().t(), g), ["dtype"]),
    "reduce of a column": (lambda x, w, g, n: reduce((x @ w.t()).sum(1), g), []),
}  # fmt: skip
