"""Tensor-parallel layers alone: MLP and attention.

`eager` is PyTorch with NCCL in the common all-reduce form on replicated activations (peers/eager_parallel.py), `torch_symm` the same
layer by torch's fused symmetric-memory ops, `local` the layer without its communication. `--check` compares with one
process that holds all weights.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from torch_fdattn.dist import TPMLP, ShardedKVCache, TPAttention
from torch_fdattn.dist.tensor_parallel.head_sharding import shard_heads
from torch_fdattn.dist.tensor_parallel.layers import TPLayer
from torch_fdattn.models.rope import Rotary
from torch_fdattn.models.transformer import MLP, Attention

from ..peers import eager_parallel as peers
from ..ranks import Ranks
from ..report import parallel
from ..report.parallel import TORCH
from ..results import Recorder
from ..shapes import LOCAL
from .layer_run import Calls, LayerRun
from .models import attention_weights, kv_bytes, mlp_weights, random_weights
from .parallel_options import file_name as file_name

table = parallel.table


def _ours(
    run: LayerRun, layer: TPMLP | TPAttention, call: Callable[[TPLayer], Tensor]
) -> dict[str, Calls]:
    """The layer's inference form, over the same weights, by each of the variants."""
    found: dict[str, Calls] = {}
    fused = layer.for_inference()
    for name, how in run.variants.items():
        one = copy.copy(fused)
        one.linear_strategy = how.get("strategy", "auto")
        one.allreduce_method = how.get("method", "auto")
        found[name] = [lambda one=one: call(one)]
    return found


def _fused(run: LayerRun, tokens: int, call: Callable[[peers.Linears], Tensor]) -> dict[str, Calls]:
    """torch's fused ops, where they have a form for these tokens."""
    replicated = run.strategy == "all_reduce"
    found = peers.fused(run.ranks, tokens, run.config.hidden_size, run.dtype, replicated)
    return {name: [lambda by=by: call(by)] for name, by in found.items()}


def tp_mlp(options: argparse.Namespace, ranks: Ranks, recorder: Recorder) -> bool:
    run = LayerRun(options, ranks, recorder)
    hidden, inner = run.config.hidden_size, run.config.intermediate_size
    run.require(2 * mlp_weights(run.config) + options.M * (2 * hidden + 4 * inner))
    with torch.device("meta"):
        whole = MLP(run.config)
    random_weights(whole, ranks.device, run.dtype, seed=0)
    tokens = run.tokens(options.M)
    layer = TPMLP.from_module(whole, ranks.group_name, run.strategy, tokens=tokens)
    if not options.check:
        whole = None
    x = run.random(options.M, run.config.hidden_size)
    own = run.own(x)
    return run.finish(
        run.case(f"M{options.M}"),
        _ours(run, layer, lambda one: one(own)),
        {
            TORCH: [lambda: peers.mlp(layer, x)],
            **_fused(run, options.M, lambda by: peers.mlp(layer, own, by)),
            LOCAL: [lambda: peers.mlp(layer, x, peers.Alone())],
        },
        lambda: run.own(whole(x)),
    )


def tp_attn(options: argparse.Namespace, ranks: Ranks, recorder: Recorder) -> bool:
    """One attention layer: prefill of a whole prompt, or one token after `seq_len` stored ones."""
    run = LayerRun(options, ranks, recorder)
    config, decode = run.config, options.mode == "decode"
    heads, width = (
        config.num_heads + config.num_kv_heads,
        options.bsz * (1 if decode else options.seq_len),
    )
    of_rank, of_all = (
        kv_bytes(replace(config, num_layers=1), run.dtype, size, options.bsz, options.seq_len + 1)
        for size in (ranks.size, 1)
    )
    run.require(
        2 * attention_weights(config)
        + width * (2 * config.hidden_size + 3 * heads * config.head_dim),
        2 * of_rank + 2 * of_all * options.check,
    )
    with torch.device("meta"):
        whole = Attention(config, 0)
    random_weights(whole, ranks.device, run.dtype, seed=0)
    new, held = (1, options.seq_len) if decode else (options.seq_len, 0)
    tokens = run.tokens(options.bsz * new)
    layer = TPAttention.from_module(whole, ranks.group_name, run.strategy, tokens=tokens)

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

    def theirs(x: Tensor, *by: peers.Linears) -> Callable[[], Tensor]:
        return lambda: peers.attention(layer, x, cos, sin, torch_cache, held, *by)

    return run.finish(
        run.case(f"bsz{options.bsz}", f"N{options.seq_len}", options.mode),
        _ours(run, layer, lambda one: one(own, cos, sin, ours_cache)),
        {
            TORCH: [theirs(x)],
            **_fused(run, options.bsz * new, lambda by: theirs(own, by)()),
            LOCAL: [theirs(x, peers.Alone())],
        },
        lambda: run.own(whole(x, cos, sin, whole_cache)),
    )


def _copy_heads(whole_cache, ours_cache, torch_cache, layer, config, ranks: Ranks) -> None:
    shard = shard_heads(config.num_heads, config.num_kv_heads, ranks.rank, ranks.size)
    for whole, own, theirs in zip(
        whole_cache.layer(0), ours_cache.layer(0), torch_cache, strict=True
    ):
        heads = whole[:, shard.kv_start : shard.kv_start + layer.kv_heads]
        own.copy_(heads)
        theirs.copy_(heads)
