"""Strategy `all_gather`: every rank gathers all of K and V, in the order of positions, and attends once.

One collective each way, no merge, any mask in one kernel call a run of queries: the simplest plan for the
compiler, and the fastest where communication cannot hide (short shards). Memory: K and V of the whole
sequence on every rank, and in the backward their fp32 gradients (Llama 3, arXiv:2407.21783, section 3.3.2).
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_fdattn.dist.point_to_point import with_dependency
from torch_fdattn.dist.ring_attention.layout import gather, scatter_sum
from torch_fdattn.dist.ring_attention.local import Problem, Saved
from torch_fdattn.dist.ring_attention.unsharded import attend_unsharded, unsharded_gradients


def forward(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> tuple[Tensor, Tensor, Saved]:
    gathered = _gathered(k, v, problem)
    out, lse = attend_unsharded(q, *gathered, problem)
    out = with_dependency(out, *gathered)  # a rank without tokens reads none
    return out, lse, Saved(q, k, v, out, lse)


def backward(
    dout: Tensor, dlse: Tensor | None, saved: Saved, problem: Problem
) -> tuple[Tensor, Tensor, Tensor]:
    # Gathered again: kept from the forward, K and V of the whole sequence would stay for every layer.
    k, v = _gathered(saved.k, saved.v, problem)
    dq, dkv = unsharded_gradients(dout, dlse, saved._replace(k=k, v=v), problem)
    given = dout, dlse, *saved, k, v
    parts = [with_dependency(dkv.of(runs), *given) for runs in problem.shards.ranks]
    return with_dependency(dq, *given), *scatter_sum(parts, problem).unbind()


def _gathered(k: Tensor, v: Tensor, problem: Problem) -> tuple[Tensor, Tensor]:
    return gather(torch.stack([k, v]), problem).unbind()
