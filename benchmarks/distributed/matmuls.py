"""The three matmuls with a collective, alone: inputs, and the calls of everybody who computes them.

For few rows the weights rotate through copies of several times the L2, as a model's layers do.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from torch_fdattn.dist import all_gather_matmul, matmul_all_reduce, matmul_reduce_scatter
from torch_fdattn.dist.collectives import split_evenly
from torch_fdattn.dist.tensor_parallel.auto import ALL_REDUCE, GATHER, SCATTER

from ..peers import eager_parallel as peers
from ..peers import torch_symm
from ..ranks import Ranks, all_gather
from ..report import parallel
from ..report.parallel import TORCH
from ..results import Recorder
from ..shapes import GEMM_ALONE
from ..timing import copies_needed
from .layer_run import Calls, LayerRun
from .parallel_options import file_name as file_name

table = parallel.table
_ROTATED_ROWS = 1024  # up to which what a call reads is its weight


class Matmul:
    """One op at one size on this rank.

    Args:
        op: of `tensor_parallel/auto.py`.
        x: what this rank gives to it: its rows (m_r, K) of M to a gather, all (M, K) to the others.
        weight: (N, K).
    """

    def __init__(self, op: str, x: Tensor, weight: Tensor, rows: Sequence[int], ranks: Ranks) -> None:  # fmt: skip
        self.op, self.x, self.rows, self.ranks = op, x, list(rows), ranks
        copies = 1
        if x.is_cuda and sum(rows) <= _ROTATED_ROWS:
            l2 = torch.cuda.get_device_properties(x.device).L2_cache_size
            copies = copies_needed(weight.nbytes, l2)
        self.weights = [weight, *(weight.clone() for _ in range(copies - 1))]

    def _each(self, function) -> Calls:
        return [functools.partial(function, weight) for weight in self.weights]

    def ours(self, variant: str) -> Calls:
        """By a strategy, or a method of all-reduce."""
        x, group = self.x, self.ranks.group_name
        if self.op == GATHER:
            return self._each(
                lambda w: all_gather_matmul(x, [w], group, rows=self.rows, strategy=variant)[0]
            )
        if self.op == SCATTER:
            return self._each(
                lambda w: matmul_reduce_scatter(x, w, group, rows=self.rows, strategy=variant)
            )
        return self._each(lambda w: matmul_all_reduce(x, w, group, method=variant))

    def others(self) -> dict[str, Calls]:
        """Eager torch, torch's fused ops where there are GPUs, and the product alone."""
        found = {TORCH: self._each(getattr(self, f"_{self.op}"))}
        x, group, even = self.x, self.ranks.group_name, len(set(self.rows)) == 1
        if not x.is_cuda or self.ranks.size == 1:
            pass
        elif self.op == ALL_REDUCE:
            reduce = torch_symm.AllReduce(len(x), len(self.weights[0]), x.dtype, x.device, group)
            for method in torch_symm.METHODS:
                by = functools.partial(reduce, x, method=method)
                found[f"{torch_symm.NAME}/{method}"] = self._each(by)
        elif even and self.op == GATHER:
            found[torch_symm.NAME] = self._each(lambda w: torch_symm.gather(x, [w], group)[0])
        elif even:
            found[torch_symm.NAME] = self._each(lambda w: torch_symm.scatter(x, w, group))
        whole = self.x
        if self.op == GATHER:
            whole = self.x.new_zeros(sum(self.rows), self.x.shape[1]).normal_()
        found[GEMM_ALONE] = self._each(lambda w: F.linear(whole, w))
        return found

    def _all_gather_matmul(self, weight: Tensor) -> Tensor:
        if len(set(self.rows)) > 1:
            return F.linear(peers.gather(self.x, self.rows, 0), weight)
        whole = self.x.new_empty(sum(self.rows), self.x.shape[1])
        all_gather(whole.view(self.ranks.size, *self.x.shape), self.x, self.ranks)
        return F.linear(whole, weight)

    def _matmul_reduce_scatter(self, weight: Tensor) -> Tensor:
        partial, rank = F.linear(self.x, weight), self.ranks.rank
        if partial.device.type == "cpu" or len(set(self.rows)) > 1:  # gloo, or uneven rows
            dist.all_reduce(partial)
            return partial.split(self.rows)[rank]
        out = partial.new_empty(self.rows[rank], partial.shape[1])
        dist.reduce_scatter_tensor(out, partial)
        return out

    def _matmul_all_reduce(self, weight: Tensor) -> Tensor:
        partial = F.linear(self.x, weight)
        dist.all_reduce(partial)
        return partial


def ag_gemm(options: argparse.Namespace, ranks: Ranks, recorder: Recorder) -> bool:
    """The all-gather and the gate-and-up matmul of an MLP; with all-reduce the matmul of replicated x."""
    run = LayerRun(options, ranks, recorder)
    hidden, features = run.config.hidden_size, 2 * run.config.intermediate_size
    shares = split_evenly(features, ranks.size)
    run.require(2 * features * hidden + options.M * (2 * hidden + features))
    weight = run.random(features, hidden).mul_(0.02)
    own_weight = weight.split(shares)[ranks.rank].contiguous()
    x = run.random(options.M, hidden)
    rows = split_evenly(options.M, ranks.size)
    case = run.case(f"M{options.M}")

    def right() -> Tensor:
        return F.linear(x, own_weight)

    if run.strategy == "all_reduce":  # nothing to gather: the same call on both sides
        return run.finish(case, {next(iter(run.variants)): [right]}, {TORCH: [right]}, right)
    own = x.split(rows)[ranks.rank].contiguous()
    made = Matmul(GATHER, own, own_weight, rows, ranks)
    ours = {name: made.ours(how["strategy"]) for name, how in run.variants.items()}
    return run.finish(case, ours, made.others(), right)


def gemm_rs(options: argparse.Namespace, ranks: Ranks, recorder: Recorder) -> bool:
    """The down matmul of an MLP and its reduce-scatter, or its all-reduce."""
    run = LayerRun(options, ranks, recorder)
    hidden, inner = run.config.hidden_size, run.config.intermediate_size
    shares = split_evenly(inner, ranks.size)
    run.require(2 * inner * hidden + options.M * 2 * (inner + hidden))
    weight = run.random(hidden, inner).mul_(0.02)
    x = run.random(options.M, inner)
    own_weight, own = (y.split(shares, 1)[ranks.rank].contiguous() for y in (weight, x))
    rows = split_evenly(options.M, ranks.size)
    op = ALL_REDUCE if run.strategy == "all_reduce" else SCATTER
    made = Matmul(op, own, own_weight, rows, ranks)
    ours = {name: made.ours(*how.values()) for name, how in run.variants.items()}
    case = run.case(f"M{options.M}")
    return run.finish(case, ours, made.others(), lambda: run.own(F.linear(x, weight)))
