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
from torch_fdattn.dist.decode.hierarchical import check_hierarchy, sizes
from torch_fdattn.dist.decode.partial_states import MergeGroup
from torch_fdattn.dist.groups import given_rank_and_size, is_traced
from torch_fdattn.dist.point_to_point import all_to_all, with_dependency
from torch_fdattn.dist.ring_attention import (
    all_gather,
    one_sided,
    query_split,
    ring,
    star,
    ulysses,
    ulysses_ring,
)
from torch_fdattn.dist.ring_attention.auto import AUTO, choose
from torch_fdattn.dist.ring_attention.heads import check_heads
from torch_fdattn.dist.ring_attention.local import Problem, Saved, state_dtype
from torch_fdattn.dist.ring_attention.rank_invariant import check_block
from torch_fdattn.dist.ring_attention.sequence_shards import (
    SequenceShards,
    check_documents,
    check_prefixes,
    chunked,
    expect_chunk,
)
from torch_fdattn.dist.symm.availability import expect_mapped
from torch_fdattn.ops import library
from torch_fdattn.ops.attention.dropout import Dropout
from torch_fdattn.ops.attention.op import default_scale, options_to_mask, seeded_dropout
from torch_fdattn.ops.scores import Scores, sink_gradient

STRATEGIES = {
    "ring": ring,
    "all_gather": all_gather,
    "one_sided": one_sided,
    "ulysses": ulysses,
    "query_split": query_split,
    "star": star,
    "ulysses_ring": ulysses_ring,
}
#: Ranks share heads.
BY_HEADS = ("ulysses", "ulysses_ring")


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
    checks.check_dropout(*problem.dropout, q)
    checks.check_lengths("kv_lens", problem.kv_lens, q, bound=problem.shards.total)
    _check_lengths_on_host(problem.kv_lens, problem.shards.total)
    if strategy in (*BY_HEADS, "star") and _is_trained(problem.scores.attn_mask):
        raise NotImplementedError(
            f"attn_mask of ring_attention has no gradient with strategy={strategy!r}: use another strategy, or give "
            "attn_mask.detach()"
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
    if strategy == "one_sided":
        if is_traced(q):
            # Of a NotImplementedError Dynamo makes a graph break, and traces what then runs eagerly, waits and all.
            raise ValueError(
                "strategy must not be 'one_sided' under torch.compile, which does not see its copies: use 'ring' or 'all_gather'"
            )
        if q.dtype == torch.float64:
            raise TypeError(
                "q must not be float64 with strategy='one_sided', which sums in float32: use 'all_gather'"
            )
    if strategy in BY_HEADS:
        ranks = ulysses_ring.ranks_of_node(problem) if problem.hierarchy else problem.world_size
        check_heads(q.shape[1], k.shape[1], ranks, strategy)


def expect_hierarchy(strategy: str, hierarchy: tuple | None) -> None:
    """Where it is needed, and nowhere else."""
    if (hierarchy is not None) != (strategy == "ulysses_ring"):
        expected = "a pair of groups (inner, outer)" if strategy == "ulysses_ring" else "None"
        raise ValueError(f"hierarchy must be {expected} with strategy={strategy!r}, got {hierarchy}")  # fmt: skip


def _check_lengths_on_host(kv_lens: Tensor | None, total: int) -> None:
    """As with TORCH_FDATTN_CHECK=1, where reading them waits for no device."""
    if kv_lens is None or not kv_lens.is_cpu or is_traced(kv_lens) or not kv_lens.numel():
        return
    low, high = (int(x) for x in torch.aminmax(kv_lens))
    if low < 0 or high > total:
        raise ValueError(f"kv_lens must lie in [0, {total}], got values from {low} to {high}")


def _check_prefix(prefix_lens: tuple[int, ...], window: tuple[int, int], chunk: int) -> None:
    if prefix_lens and window != (-1, 0):
        raise NotImplementedError(
            "prefix_lens needs causal=True and no window: a prefix is what a causal mask does not hide, got the window "
            f"{window}, of which (-1, 0) is causal"
        )
    if prefix_lens and chunk:
        raise NotImplementedError(
            f"prefix_lens goes with no attention_chunk, got {chunk}: give the chunks as cu_seqlens, and a prefix for each"
        )


def _is_trained(x: Tensor | None) -> bool:
    return x is not None and x.requires_grad and torch.is_grad_enabled()


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, slopes, sinks, attn_mask, kv_lens, seed, problem, strategy):
        scores = Scores(problem.scores.softcap, slopes, sinks, attn_mask)
        dropout = Dropout(problem.dropout.p, seed)
        given = problem._replace(scores=scores, kv_lens=kv_lens, dropout=dropout)
        out, lse, saved = STRATEGIES[strategy].forward(q, k, v, given)
        # The first is like nothing that attention of one rank saves: a checkpoint whose backward stands outside of
        # `context_parallel`, and so makes such attention of this, sees other tensors than it had, and raises.
        of_sinks = () if sinks is None else (out, lse)
        ctx.save_for_backward(
            q.new_empty(0, 0, 0), *saved, seed, kv_lens, slopes, sinks, attn_mask, *of_sinks
        )
        ctx.problem, ctx.strategy, ctx.shape, ctx.lse_dtype = problem, strategy, q.shape, lse.dtype
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        library.refuse_double_backward("ring_attention")
        _, *tensors = ctx.saved_tensors
        saved, (seed, kv_lens, slopes, sinks, attn_mask, *results) = (
            Saved(*tensors[:5]),
            tensors[5:],
        )
        scores = Scores(ctx.problem.scores.softcap, slopes, sinks, attn_mask)
        dtype = saved.q.dtype
        # Ranks may use different outputs, and one that used none must still take part in the collectives:
        # all of them travel, as zeros where they were not used.
        if dout is None:
            dout = saved.q.new_zeros(ctx.shape)
        if dlse is None:
            dlse = saved.q.new_zeros(ctx.shape[:-1], dtype=ctx.lse_dtype)
        dropout = Dropout(ctx.problem.dropout.p, seed)
        _, _, _, of_slopes, of_sinks, of_mask, *_ = ctx.needs_input_grad
        sums = Scores(
            alibi_slopes=_zeros_like(slopes, saved.q) if of_slopes else None,
            attn_mask=_zeros_like(attn_mask, saved.q) if of_mask else None,
        )
        # Each call's gradient has the dtype of what it is of: in half precision sums of calls would be rounded.
        scores = scores._replace(
            alibi_slopes=_single(slopes) if of_slopes else slopes,
            attn_mask=_single(attn_mask) if of_mask else attn_mask,
        )
        problem = ctx.problem._replace(
            scores=scores, kv_lens=kv_lens, dropout=dropout, score_grads=sums, invariant_block=None
        )
        gradients = STRATEGIES[ctx.strategy].backward(dout, dlse, saved, problem)
        dsinks = _sink_gradient(dout, dlse, *results, sinks) if of_sinks else None
        dslopes, dmask = (
            None if total is None else with_dependency(total, *gradients).to(x.dtype)
            for total, x in ((sums.alibi_slopes, slopes), (sums.attn_mask, attn_mask))
        )
        return *(x.to(dtype) for x in gradients), dslopes, dsinks, dmask, None, None, None, None


def _single(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _zeros_like(x: Tensor, q: Tensor) -> Tensor:
    """Of x's entries, for sums."""
    return q.new_zeros(x.shape, dtype=state_dtype(q))


def _sink_gradient(dout: Tensor, dlse: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """(H,), of this rank's queries; out, lse: its results."""
    delta = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1) - dlse
    delta = delta.masked_fill(lse == float("-inf"), 0.0)
    return sink_gradient(sinks, lse, delta).to(sinks.dtype)


def _ring_attention(
    q, k, v, group_name, shards, *, rank=None, world_size=None, causal=False, window_left=-1,
    window_right=-1, scale=None, strategy="ring", softcap=0.0, alibi_slopes=None, sinks=None, documents=(), kv_lens=None,
    attn_mask=None, dropout_p=0.0, dropout_seed=None, invariant_block=None, inner_group=None, outer_group=None,
    attention_chunk=0, prefix_lens=(),
):  # fmt: skip
    rank, world_size = given_rank_and_size(group_name, rank, world_size)
    with refusing_on_all_ranks(group_name, q):
        checks.expect_tensor("q", q)
        if strategy not in (AUTO, *STRATEGIES):
            raise ValueError(f"strategy must be one of {(AUTO, *STRATEGIES)}, got {strategy!r}")
        hierarchy = (
            None if inner_group is None and outer_group is None else (inner_group, outer_group)
        )
        mesh = MergeGroup(group_name, rank, world_size, False, inner_group, outer_group)
        expect_hierarchy(strategy, hierarchy)
        if hierarchy is not None:
            check_hierarchy(mesh)
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
        documents, prefix_lens = (
            tuple(int(x) for x in numbers) for numbers in (documents, prefix_lens)
        )
        window = mask.window_left, mask.window_right
        dropout = seeded_dropout(q, dropout_p, dropout_seed)
        problem = Problem(
            group_name, rank, shards, *window, scale, scores, kv_lens=kv_lens, dropout=dropout, invariant_block=invariant_block,
            kv_heads=k.shape[1] if k.dim() == 4 else 0, hierarchy=hierarchy,
        )  # fmt: skip
        _check(q, k, v, problem, strategy)
        expect_chunk(attention_chunk)
        _check_prefix(prefix_lens, window, attention_chunk)
        check_block(problem, strategy)
    gradients = wants_gradients(q, k, v)
    for name, x in (("alibi_slopes", alibi_slopes), ("sinks", sinks), ("attn_mask", attn_mask)):
        if x is not None:
            gradients[f"whether {name} need a gradient"] = _is_trained(x)
    check_equal_on_all_ranks(
        group_name,
        q,
        {
            "q's batch, heads and head dim": (*q.shape[:2], q.shape[3]),
            "k's heads": k.shape[1],
            "the dtype": q.dtype,
            "shards": shards,
            "cu_seqlens": documents,
            "attention_chunk": attention_chunk,
            "prefix_lens": prefix_lens,
            "causal and window": window,
            "scale": scale,
            "softcap": softcap,
            "dropout_p": dropout_p,
            "attn_mask's dtype and shape beside its rows": (
                None
                if attn_mask is None
                else (attn_mask.dtype, *attn_mask.shape[:2], attn_mask.shape[3])
            ),
            "which of alibi_slopes, sinks, kv_lens, attn_mask and dropout_seed are given": tuple(
                x is not None for x in (alibi_slopes, sinks, kv_lens, attn_mask, dropout_seed)
            ),
            "strategy": strategy,
            "the sizes of hierarchy's groups": sizes(mesh),
            "invariant_block": invariant_block,
            **gradients,
        },
        contents={
            "kv_lens": kv_lens,
            "dropout_seed": dropout_seed,
            "alibi_slopes": alibi_slopes,
            "sinks": sinks,
            "attn_mask of one row": _shared_row(attn_mask, shards),
        },
    )
    check_documents(documents, shards.total)  # the same on all ranks, so that none waits
    check_prefixes(prefix_lens, documents, shards.total)
    documents = chunked(documents, shards.total, attention_chunk)
    problem = problem._replace(documents=documents, prefix_lens=prefix_lens)
    if strategy == AUTO:  # on all ranks, which have the same call by now
        strategy = choose(q, group_name, world_size, shards.total)
    elif strategy == "one_sided" and world_size > 1:
        expect_mapped("strategy 'one_sided'", group_name, q.device)
    if dropout_p > 0 and dropout_seed is None:
        # Ranks' generators may have come to different places.
        seed = all_to_all([dropout.seed] * world_size, [[2]] * world_size, group_name)[0]
        problem = problem._replace(dropout=Dropout(dropout_p, seed))
    if any(gradients.values()):
        plain = problem._replace(scores=Scores(softcap), kv_lens=None, dropout=Dropout(dropout_p))
        tensors = alibi_slopes, sinks, attn_mask, kv_lens, problem.dropout.seed
        return _RingAttention.apply(q, k, v, *tensors, plain, strategy)
    return STRATEGIES[strategy].forward(q, k, v, problem)[:2]


def _shared_row(attn_mask: Tensor | None, shards: SequenceShards) -> Tensor | None:
    """A mask of one row for all queries, which is the same on all ranks; not where a rank's only query has such a row."""
    shared = attn_mask is not None and attn_mask.shape[2] == 1 and 1 not in shards.lengths
    return attn_mask if shared else None


library.define_composite(
    "ring_attention(Tensor q, Tensor k, Tensor v, str group_name, SymInt[] shards, *, int? rank=None, "
    "int? world_size=None, bool causal=False, int window_left=-1, int window_right=-1, "
    "float? scale=None, str strategy='ring', float softcap=0.0, Tensor? alibi_slopes=None, Tensor? sinks=None, "
    "SymInt[] documents=[], Tensor? kv_lens=None, Tensor? attn_mask=None, "
    "float dropout_p=0.0, Tensor? dropout_seed=None, int? invariant_block=None, "
    "str? inner_group=None, str? outer_group=None, int attention_chunk=0, SymInt[] prefix_lens=[]) "
    "-> (Tensor out, Tensor lse)",
    _ring_attention,
    autocast_args=3,
)
