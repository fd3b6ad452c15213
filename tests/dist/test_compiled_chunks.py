"""Chunks and prefixes that a graph makes of its input's positions, compiled over the ranks; and factors counted by indices."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import torch_fdattn
from torch_fdattn.compile_backend import fdattn
from torch_fdattn.compile_backend.report import UnsupportedAttention
from torch_fdattn.dist import SequenceShards, shard_batch

from .test_compiled_positions import (
    attended,
    causal,
    check_shards,
    compared,
    eager,
    given,
    masked_by,
    window,
    with_sinks,
)


def chunks(positions, _):
    """Seen to both sides."""
    q, k = compared(positions // 6)
    return q == k


def causal_chunks(positions, _):
    """Llama 4's, with a window."""
    return window(positions, _) & chunks(positions, _)


def prefix(positions, _):
    q, k = compared(positions)
    return (q >= k) | (k < 11)


def long_prefix(positions, _):
    q, k = compared(positions)
    return (k <= 999) | (k <= q)


def chunks_from_elsewhere(positions, _):
    q, k = compared((positions + 3) // 6)
    return q == k


def chunks_of_others(positions, others):
    q, k = compared(positions // 6, others // 6)
    return (q == k) & causal(positions, None)


def chunks_of_two_sizes(positions, _):
    q, k = compared(positions // 9)
    return chunks(positions, _) & (q == k)


def prefix_beside_a_window(positions, _):
    return window(positions, _) | (compared(positions)[1] < 11)


def prefix_and_the_next_key(positions, _):
    q, k = compared(positions)
    return (q + 1 >= k) | (k < 11)


def prefix_in_chunks(positions, _):
    return prefix(positions, _) & chunks(positions, _)


def first_queries(positions, _):
    q, k = compared(positions)
    return (q >= k) | (q < 11)


def prefix_of_others(positions, others):
    return causal(positions, None) | (others[:, None, None, :] < 11)


def prefix_ends_by_data(positions, others):
    q, k = compared(positions)
    return (q >= k) | (k < others[:, :1, None, None])


def sdpa(q, k, v, mask):
    return F.scaled_dot_product_attention(q, k, v, mask)


@pytest.mark.parametrize(
    ("form", "make"),
    [
        (sdpa, chunks), (sdpa, long_prefix), (eager, prefix), (with_sinks, causal_chunks),
        *(pytest.param(sdpa, x, marks=pytest.mark.slow) for x in (causal_chunks, prefix)),
    ],
    ids=lambda x: x.__name__,
)  # fmt: skip
def test_understood(group, rank_device, form, make) -> None:
    """Gradients too."""
    check_shards(given(group, rank_device), masked_by(make, form), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "make",
    [
        chunks_from_elsewhere, chunks_of_others, chunks_of_two_sizes, prefix_beside_a_window, prefix_in_chunks, first_queries,
        prefix_and_the_next_key, prefix_of_others, prefix_ends_by_data,
    ],
    ids=lambda x: x.__name__,
)  # fmt: skip
def test_not_understood(group, rank_device, make) -> None:
    """Whatever the numbers hold, it could be another mask."""
    _, _, own, compiled = given(group, rank_device)
    with pytest.raises(Exception, match="a mask of local tokens that is no window") as raised:
        compiled(attended(make))(*own)
    assert isinstance(raised.value.inner_exception, UnsupportedAttention)


def by_an_index(x):
    """Llama 4's temperature: of a token's index among those that the model is given."""
    index = torch.arange(x.shape[2], device=x.device) + 0
    return x * (torch.log1p(torch.floor((index + 1.0) / 4)) * 0.1 + 1.0)[:, None].to(x.dtype)


@pytest.mark.parametrize(
    "attend",
    [
        lambda q, k, v: F.scaled_dot_product_attention(by_an_index(q), k, v, is_causal=True),
        lambda q, k, v: F.scaled_dot_product_attention(q, by_an_index(k), v, is_causal=True),
        lambda q, k, v: torch.softmax(by_an_index(q @ k.mT), -1) @ v,
        lambda q, k, v: torch_fdattn.attention(by_an_index(q), k, v, causal=True)[0],
    ],
    ids=["q", "k", "scores", "ours"],
)
def test_factors_counted_by_local_tokens_are_refused(group, rank_device, attend) -> None:
    _, _, own, compiled = given(group, rank_device)
    with pytest.raises(Exception, match="depends on indices of this rank's tokens") as raised:
        compiled(attend)(*own[:3])
    assert isinstance(raised.value.inner_exception, UnsupportedAttention)


def test_angles_are_a_models_own_matter(group, rank_device) -> None:
    """Counted from where a rank's tokens begin."""
    zigzag, whole, _, _ = given(group, rank_device)
    shards = SequenceShards.contiguous(zigzag.total, zigzag.world_size)
    first, rank = shards.ranks[dist.get_rank()][0].start, dist.get_rank()

    def run(q, k, v, first=first):
        angles = (torch.arange(q.shape[2], device=q.device) + first)[:, None] * 0.3
        return F.scaled_dot_product_attention(q * angles.cos(), k, v, is_causal=True)

    options = {"context_parallel": {"group": group, "shards": shards}, "lower": "aot_eager"}
    own = shard_batch(group, shards, *whole[:3], dim=2)
    found = torch.compile(run, backend=fdattn, fullgraph=True, options=options)(*own)
    torch.testing.assert_close(found, shards.shard(run(*whole[:3], first=0), rank, 2))
