"""Strategy `query_split`: queries are sharded, K and V are replicated; no communication.

K and V (B, K, total, D) are in the order of positions. Their gradients are summed over the ranks, so that
every rank holds the whole gradient of its copy: the backward's only collective.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_fdattn.dist.ring_attention.local import Problem, Saved
from torch_fdattn.dist.ring_attention.sequence_shards import Run
from torch_fdattn.dist.ring_attention.unsharded import attend_unsharded, unsharded_gradients


def forward(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> tuple[Tensor, Tensor, Saved]:
    out, lse = attend_unsharded(q, k, v, problem)
    return out, lse, Saved(q, k, v, out, lse)


def backward(
    dout: Tensor, dlse: Tensor | None, saved: Saved, problem: Problem
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dkv = unsharded_gradients(dout, dlse, saved, problem)
    everything = dkv.of([Run(0, problem.shards.total)])
    dkv = torch.ops._c10d_functional.all_reduce(everything, "sum", problem.group_name)
    dk, dv = torch.ops._c10d_functional.wait_tensor(dkv).unbind()
    return dq, dk, dv
