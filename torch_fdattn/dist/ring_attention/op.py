"""The op `fdattn::ring_attention`: attention over a sequence sharded over the ranks of a process group.

A composite of raw attention ops and collectives, forward and backward, with the strategies as modules:
each has `forward(q, k, v, problem) -> out, lse, saved` and `backward(dout, dlse, saved, problem) -> dq,
dk, dv`. Rank, world size and shards are arguments, because torch keys its compile caches by the graph.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from torch_fdattn import checks
from torch_fdattn.dist.consensus import (
    check_equal_on_all_ranks,
    refusing_on_all_ranks,
    wants_gradients,
)
from torch_fdattn.dist.groups import given_rank_and_size, is_traced
from torch_fdattn.dist.ring_attention import all_gather, query_split, ring, star, ulysses
from torch_fdattn.dist.ring_attention.local import Problem, Saved
from torch_fdattn.dist.ring_attention.sequence_shards import SequenceShards, check_documents
from torch_fdattn.ops import library
from torch_fdattn.ops.attention.op import default_scale, options_to_mask
from torch_fdattn.ops.scores import Scores, sink_gradient

STRATEGIES = {
    "ring": ring,
    "all_gather": all_gather,
    "ulysses": ulysses,
    "query_split": query_split,
    "star": star,
}


@functools.lru_cache(maxsize=1024)
def partition(numbers: tuple[int, ...]) -> SequenceShards:
    """The shards of `SequenceShards.flat`, checked once to be a partition."""
    shards = SequenceShards.from_flat(numbers)
    runs = sorted(run for runs in shards.ranks for run in runs)
    end = 0
    for run in runs:
        if run.start != end or run.length < 1:
            raise ValueError(
                "shards must hold each position from 0 on exactly once, got a run of "
                f"{run.length} positions from {run.start} where {end} should come"
            )
        end = run.end
    return shards


def _check(q: Tensor, k: Tensor, v: Tensor, problem: Problem, strategy: str) -> None:
    checks.check_qkv(q, k, v)
    checks.expect_shape("v", v, k.shape, "k")
    checks.check_scale(problem.scale)
    checks.check_scores(*problem.scores[:3], q)
    checks.check_lengths("kv_lens", problem.kv_lens, q, bound=problem.shards.total)
    for name in ("alibi_slopes", "attn_mask"):
        x = getattr(problem.scores, name)
        if x is not None and x.requires_grad and torch.is_grad_enabled():
            raise NotImplementedError(
                f"{name} of ring_attention has no gradient: give {name}.detach()"
            )
    own = problem.shards.lengths[problem.rank]
    if q.shape[2] != own:
        raise ValueError(
            f"q must have {own} tokens on rank {problem.rank} as its shards say, got {q.shape[2]}"
        )
    keys = problem.shards.total if strategy == "query_split" else own
    if k.shape[2] != keys:
        raise ValueError(
            f"k must have {keys} tokens on rank {problem.rank} with strategy={strategy!r}, "
            f"got {k.shape[2]}"
        )
    if strategy == "ulysses":
        ulysses.check_heads(q.shape[1], k.shape[1], problem.world_size)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, slopes, sinks, attn_mask, kv_lens, problem, strategy):
        scores = Scores(problem.scores.softcap, slopes, sinks, attn_mask)
        given = problem._replace(scores=scores, kv_lens=kv_lens)
        out, lse, saved = STRATEGIES[strategy].forward(q, k, v, given)
        # The first is like nothing that attention of one rank saves: a checkpoint whose backward stands outside of
        # `context_parallel`, and so makes such attention of this, sees other tensors than it had, and raises.
        of_sinks = () if sinks is None else (out, lse)
        ctx.save_for_backward(
            q.new_empty(0, 0, 0), *saved, kv_lens, slopes, sinks, attn_mask, *of_sinks
        )
        ctx.problem, ctx.strategy, ctx.shape, ctx.lse_dtype = problem, strategy, q.shape, lse.dtype
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        library.refuse_double_backward("ring_attention")
        _, *tensors = ctx.saved_tensors
        saved, (kv_lens, slopes, sinks, attn_mask, *results) = Saved(*tensors[:5]), tensors[5:]
        scores = Scores(ctx.problem.scores.softcap, slopes, sinks, attn_mask)
        dtype = saved.q.dtype
        # Ranks may use different outputs, and one that used none must still take part in the collectives:
        # all of them travel, as zeros where they were not used.
        if dout is None:
            dout = saved.q.new_zeros(ctx.shape)
        if dlse is None:
            dlse = saved.q.new_zeros(ctx.shape[:-1], dtype=ctx.lse_dtype)
        problem = ctx.problem._replace(scores=scores, kv_lens=kv_lens)
        gradients = STRATEGIES[ctx.strategy].backward(dout, dlse, saved, problem)
        dsinks = _sink_gradient(dout, dlse, *results, sinks) if ctx.needs_input_grad[4] else None
        return *(x.to(dtype) for x in gradients), None, dsinks, None, None, None, None


def _sink_gradient(dout: Tensor, dlse: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """(H,), of this rank's queries; out, lse: its results."""
    delta = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1) - dlse
    delta = delta.masked_fill(lse == float("-inf"), 0.0)
    return sink_gradient(sinks, lse, delta).to(sinks.dtype)


def _ring_attention(
    q, k, v, group_name, shards, *, rank=None, world_size=None, causal=False, window_left=-1,
    window_right=-1, scale=None, strategy="ring", softcap=0.0, alibi_slopes=None, sinks=None, documents=(), kv_lens=None,
    attn_mask=None,
):  # fmt: skip
    checks.expect_tensor("q", q)
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy must be one of {tuple(STRATEGIES)}, got {strategy!r}")
    rank, world_size = given_rank_and_size(group_name, rank, world_size)
    with refusing_on_all_ranks(group_name, q):
        shards = partition(tuple(int(number) for number in shards))
        if shards.world_size != world_size:
            raise ValueError(
                f"shards must be for the group's {world_size} ranks, got {shards.world_size}"
            )
        mask = options_to_mask(None, None, None, causal, window_left, window_right, 0, 0)
        scale = default_scale(q, scale)
        if attn_mask is not None:
            rows = q.shape[2] if q.dim() == 4 else None
            checks.check_attn_mask(attn_mask, q, (*q.shape[:2], rows, shards.total))
            attn_mask = attn_mask[(None,) * (4 - attn_mask.dim())]
        scores = Scores(softcap, alibi_slopes, sinks, attn_mask)
        documents = tuple(int(x) for x in documents)
        window = mask.window_left, mask.window_right
        problem = Problem(group_name, rank, shards, *window, scale, scores, documents, kv_lens)
        _check(q, k, v, problem, strategy)
    gradients = wants_gradients(q, k, v)
    if sinks is not None:
        gradients["whether sinks need a gradient"] = sinks.requires_grad and torch.is_grad_enabled()
    check_equal_on_all_ranks(
        group_name,
        q,
        {
            "q's batch, heads and head dim": (*q.shape[:2], q.shape[3]),
            "k's heads": k.shape[1],
            "the dtype": q.dtype,
            "shards": shards,
            "cu_seqlens": documents,
            "causal and window": window,
            "scale": scale,
            "softcap": softcap,
            "kv_lens": _compared(kv_lens),
            "attn_mask's dtype and shape beside its rows": (
                None
                if attn_mask is None
                else (attn_mask.dtype, *attn_mask.shape[:2], attn_mask.shape[3])
            ),
            "which of alibi_slopes, sinks, kv_lens and attn_mask are given": tuple(
                x is not None for x in (alibi_slopes, sinks, kv_lens, attn_mask)
            ),
            "strategy": strategy,
            **gradients,
        },
    )
    check_documents(documents, shards.total)  # the same on all ranks, so that none waits
    if any(gradients.values()):
        plain = problem._replace(scores=Scores(softcap), kv_lens=None)
        tensors = alibi_slopes, sinks, attn_mask, kv_lens
        return _RingAttention.apply(q, k, v, *tensors, plain, strategy)
    return STRATEGIES[strategy].forward(q, k, v, problem)[:2]


def _compared(kv_lens: Tensor | None) -> tuple[int, ...] | None:
    """What ranks compare of it: on GPUs nothing, which would wait for the device in each call."""
    if kv_lens is None or is_traced(kv_lens) or not (kv_lens.is_cpu or checks.CHECK_VALUES):
        return None
    return tuple(kv_lens.tolist())


library.define_composite(
    "ring_attention(Tensor q, Tensor k, Tensor v, str group_name, SymInt[] shards, *, int? rank=None, "
    "int? world_size=None, bool causal=False, int window_left=-1, int window_right=-1, "
    "float? scale=None, str strategy='ring', float softcap=0.0, Tensor? alibi_slopes=None, Tensor? sinks=None, "
    "SymInt[] documents=[], Tensor? kv_lens=None, Tensor? attn_mask=None) "
    "-> (Tensor out, Tensor lse)",
    _ring_attention,
    autocast_args=3,
)
