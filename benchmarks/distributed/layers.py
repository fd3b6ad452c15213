"""Tensor-parallel layers alone: MLP, all-gather GEMM, GEMM reduce-scatter, attention.

`torch` is eager PyTorch with NCCL: for the MLP and attention the common all-reduce form on replicated
activations (peers.py), for the two GEMMs the same collective and matmul one after the other. `--check`
compares with one process that holds all weights.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from torch_fdattn.dist import (
    TPMLP,
    ShardedKVCache,
    TPAttention,
    all_gather_matmul,
    matmul_all_reduce,
    matmul_reduce_scatter,
)
from torch_fdattn.dist.collectives import split_evenly
from torch_fdattn.dist.head_sharding import shard_heads
from torch_fdattn.dist.tp_layers import TokenRows
from torch_fdattn.models.rope import Rotary
from torch_fdattn.models.transformer import MLP, Attention

from ..results import Recorder
from ..runner import DTYPES, generator
from . import peers
from .clock import compare
from .models import (
    attention_weights,
    config_named,
    kv_bytes,
    mlp_weights,
    random_weights,
    require_memory,
)
from .processes import Ranks, largest
from .report import TORCH


class _Layer:
    """What the four runs share: shapes, rows, tolerance."""

    def __init__(self, options: argparse.Namespace, ranks: Ranks, recorder: Recorder) -> None:
        self.options, self.ranks, self.recorder = options, ranks, recorder
        self.config, self.dtype = config_named(options.model), DTYPES[options.dtype]
        self.strategy = "all_reduce" if options.use_allreduce else "ag_rs"
        self.method = options.allreduce_method
        self._made = generator(ranks.device, 1)  # advances: no two tensors are alike

    def require(self, held: int, passing: int, outputs: int, cache_bytes: int = 0) -> None:
        """Refuses what does not fit, before the first tensor is made.

        Values on this rank: `held` by weights and inputs, `passing` in activations and the result, whose
        number is `outputs`: a check holds the exact ones in fp64, then ours and the difference too.
        """
        held, passing = (self.dtype.itemsize * values for values in (held, passing))
        if self.options.check:
            exact = torch.float64.itemsize * outputs
            passing = max(passing + exact, 3 * exact)
        what = f"{self.options.name} of {self.options.model}"
        needed = held + passing + cache_bytes
        require_memory(what, needed, self.ranks.device, self.ranks.size)

    def share(self, count: int) -> int:
        """The first rank's part of `count`, which is the largest."""
        return split_evenly(count, self.ranks.size)[0]

    def copied(self, count: int) -> int:
        """The same, where it is a copy: one rank's is the whole itself."""
        return self.share(count) if self.ranks.size > 1 else 0

    def own_rows(self, count: int) -> int:
        """How many of `count` rows a rank's result has at most."""
        return count if self.strategy == "all_reduce" else self.share(count)

    @property
    def ours(self) -> str:
        if self.strategy == "ag_rs":
            return "fdattn/ag_rs"
        return "fdattn/all_reduce" + ("" if self.method == "nccl" else f"-{self.method}")

    def case(self, *parameters: object) -> str:
        words = (*parameters, self.options.model, self.options.dtype, f"x{self.ranks.size}")
        return " ".join(map(str, (self.options.name, *words)))

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._made, device=self.ranks.device, dtype=self.dtype)

    def own(self, x: Tensor) -> Tensor:
        """This rank's rows of the flattened tokens, or all of x, as the strategy wants it."""
        if self.strategy == "all_reduce":
            return x
        flat = x.flatten(0, -2)
        return flat.split(split_evenly(len(flat), self.ranks.size))[self.ranks.rank]

    def tokens(self, count: int) -> TokenRows:
        tokens = TokenRows()
        tokens.rows = split_evenly(count, self.ranks.size)
        return tokens

    @torch.inference_mode()
    def finish(
        self, case: str, ours: Callable[[], Tensor], torch_: Callable[[], Tensor],
        right: Callable[[], Tensor],
    ) -> bool:  # fmt: skip
        """Checks if asked, then times both; whether the check holds."""
        holds = True
        if self.options.check:
            exact = right().double()
            error = largest((ours().double() - exact).abs())
            # Relative to the typical value: a few large ones must not excuse errors everywhere else.
            bound = (2e-5 if self.dtype == torch.float32 else 0.1) * _rms(exact)
            holds = error <= bound < math.inf
            self.recorder.add(case, self.ours, "max_abs_err", error)
            if self.ranks.rank == 0:
                verdict = "ok" if holds else "WRONG"
                print(f"check: largest error {error:.2e}, bound {bound:.2e}: {verdict}")
        compare(
            self.ranks, self.recorder, case, {TORCH: torch_, self.ours: ours},
            repeats=self.options.repeats,
        )  # fmt: skip
        return holds


def _rms(x: Tensor) -> float:
    """Of all ranks' values; with few tokens a rank may have none."""
    sums = torch.stack([x.square().sum(), x.new_tensor(x.numel())])
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).sqrt().item()


def tp_mlp(options: argparse.Namespace, ranks: Ranks, recorder: Recorder) -> bool:
    run = _Layer(options, ranks, recorder)
    hidden, inner = run.config.hidden_size, run.config.intermediate_size
    weights = mlp_weights(run.config)
    # Gate, up, silu(gate) and their product, of all features where one process checks; the result.
    passing = options.M * (4 * (inner if options.check else run.share(inner)) + hidden)
    held = weights + weights // ranks.size + options.M * hidden
    run.require(held, passing, run.own_rows(options.M) * hidden)
    with torch.device("meta"):
        whole = MLP(run.config)
    random_weights(whole, ranks.device, run.dtype, seed=0)
    layer = TPMLP.from_module(
        whole, ranks.group_name, run.strategy, run.method, run.tokens(options.M)
    )
    if not options.check:
        whole = None
    x = run.random(options.M, run.config.hidden_size)
    own = run.own(x)
    return run.finish(
        run.case(f"M{options.M}"),
        lambda: layer(own),
        lambda: peers.mlp(layer, x),
        lambda: run.own(whole(x)),
    )


def ag_gemm(options: argparse.Namespace, ranks: Ranks, recorder: Recorder) -> bool:
    """The all-gather and the gate-and-up matmul of an MLP; with all-reduce the matmul of replicated x."""
    run = _Layer(options, ranks, recorder)
    hidden, features = run.config.hidden_size, 2 * run.config.intermediate_size
    shares = split_evenly(features, ranks.size)
    outputs = options.M * shares[0]
    # The weight, x and this rank's part of both; what is gathered, and the result.
    held = (features + run.copied(features) + options.M + run.copied(options.M)) * hidden
    run.require(held, run.copied(options.M) * ranks.size * hidden + outputs, outputs)
    weight = run.random(features, hidden).mul_(0.02)
    own_weight = weight.split(shares)[ranks.rank].contiguous()
    x = run.random(options.M, hidden)
    rows = split_evenly(options.M, ranks.size)
    own = x.split(rows)[ranks.rank].contiguous()

    if run.strategy == "all_reduce":  # nothing to gather: the same call on both sides
        calls = 3 * [lambda: F.linear(x, own_weight)]
        return run.finish(run.case(f"M{options.M}"), *calls)

    def torch_() -> Tensor:
        if len(set(rows)) == 1:
            whole = x.new_empty(x.shape)
            dist.all_gather_into_tensor(whole, own)
        else:
            whole = peers.gather(own, rows, 0)
        return F.linear(whole, own_weight)

    return run.finish(
        run.case(f"M{options.M}"),
        lambda: all_gather_matmul(own, [own_weight], ranks.group_name, rows=rows)[0],
        torch_,
        lambda: F.linear(x, own_weight),
    )


def gemm_rs(options: argparse.Namespace, ranks: Ranks, recorder: Recorder) -> bool:
    """The down matmul of an MLP and its reduce-scatter, or its all-reduce."""
    run = _Layer(options, ranks, recorder)
    hidden, inner = run.config.hidden_size, run.config.intermediate_size
    shares = split_evenly(inner, ranks.size)
    # The weight, x and this rank's part of both; the partial sums, and the result.
    held = (inner + run.copied(inner)) * (hidden + options.M)
    outputs = run.own_rows(options.M) * hidden
    run.require(held, options.M * hidden + outputs, outputs)
    weight = run.random(hidden, inner).mul_(0.02)
    x = run.random(options.M, inner)
    own_weight, own = (y.split(shares, 1)[ranks.rank].contiguous() for y in (weight, x))
    rows = split_evenly(options.M, ranks.size)

    def reduced() -> Tensor:
        partial = F.linear(own, own_weight)
        dist.all_reduce(partial)
        return partial

    if run.strategy == "all_reduce":
        return run.finish(
            run.case(f"M{options.M}"),
            lambda: matmul_all_reduce(own, own_weight, ranks.group_name, method=run.method),
            reduced,
            lambda: F.linear(x, weight),
        )

    def torch_() -> Tensor:
        partial = F.linear(own, own_weight)
        if ranks.device.type == "cpu" or len(set(rows)) > 1:  # gloo, or uneven rows
            dist.all_reduce(partial)
            return partial.split(rows)[ranks.rank]
        out = partial.new_empty(rows[ranks.rank], partial.shape[1])
        dist.reduce_scatter_tensor(out, partial)
        return out

    return run.finish(
        run.case(f"M{options.M}"),
        lambda: matmul_reduce_scatter(own, own_weight, ranks.group_name, rows=rows),
        torch_,
        lambda: F.linear(x, weight).split(rows)[ranks.rank],
    )


def tp_attn(options: argparse.Namespace, ranks: Ranks, recorder: Recorder) -> bool:
    """One attention layer: prefill of a whole prompt, or one token after `seq_len` stored ones."""
    run = _Layer(options, ranks, recorder)
    config, decode = run.config, options.mode == "decode"
    _require_attention(run, decode)
    with torch.device("meta"):
        whole = Attention(config, 0)
    random_weights(whole, ranks.device, run.dtype, seed=0)
    new, held = (1, options.seq_len) if decode else (options.seq_len, 0)
    layer = TPAttention.from_module(
        whole, ranks.group_name, run.strategy, run.method, run.tokens(options.bsz * new)
    )

    def cache(heads: int) -> ShardedKVCache:
        """Holds `held` random tokens."""
        made = ShardedKVCache(
            1, options.bsz, heads, options.seq_len + 1, config.head_dim, dtype=run.dtype,
            device=ranks.device,
        )  # fmt: skip
        if held:
            made.append(
                0, *(run.random(options.bsz, heads, held, config.head_dim) for _ in range(2))
            )
            made.advance(held)
        return made

    ours_cache, whole_cache = cache(layer.kv_heads), None
    torch_cache = tuple(x.clone() for x in ours_cache.layer(0))
    if options.check:
        whole_cache = cache(config.num_kv_heads)
        if held:  # the whole cache's heads of this rank
            _copy_heads(whole_cache, ours_cache, torch_cache, layer, config, ranks)
    else:
        whole = None
    x = run.random(options.bsz, new, config.hidden_size)
    own = run.own(x)
    rotary = Rotary(config).to(ranks.device)
    cos, sin = rotary(torch.arange(held, held + new, device=ranks.device)[None])
    return run.finish(
        run.case(f"bsz{options.bsz}", f"N{options.seq_len}", options.mode),
        lambda: layer(own, cos, sin, ours_cache),
        lambda: peers.attention(layer, x, cos, sin, torch_cache, held),
        lambda: run.own(whole(x, cos, sin, whole_cache)),
    )


def _require_attention(run: _Layer, decode: bool) -> None:
    options, ranks, config = run.options, run.ranks, run.config
    shard = shard_heads(config.num_heads, config.num_kv_heads, ranks.rank, ranks.size)
    heads = shard.q_heads + shard.kv_heads
    if options.check:
        heads = config.num_heads + config.num_kv_heads
    tokens = options.bsz * (1 if decode else options.seq_len)
    weights = attention_weights(config)
    held = weights + weights // ranks.size + tokens * config.hidden_size
    # q, k, v, the rotated q and k and their attention; the result.
    passing = tokens * (3 * heads * config.head_dim + config.hidden_size)

    def cache(size: int) -> int:
        one = replace(config, num_layers=1)
        return kv_bytes(one, run.dtype, size, options.bsz, options.seq_len + 2)

    caches = 2 * cache(ranks.size)  # ours and torch's
    if options.check:
        caches += (2 if decode else 1) * cache(1)  # and the random tokens that fill it
    outputs = run.own_rows(tokens) * config.hidden_size
    run.require(held, passing, outputs, caches)


def _copy_heads(whole_cache, ours_cache, torch_cache, layer, config, ranks: Ranks) -> None:
    shard = shard_heads(config.num_heads, config.num_kv_heads, ranks.rank, ranks.size)
    for whole, own, theirs in zip(
        whole_cache.layer(0), ours_cache.layer(0), torch_cache, strict=True
    ):
        heads = whole[:, shard.kv_start : shard.kv_start + layer.kv_heads]
        own.copy_(heads)
        theirs.copy_(heads)
