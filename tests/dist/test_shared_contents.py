"""What one rank alone gets wrong, in contents that ranks share or in arguments, is named on every rank, by one type."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import torch_fdattn
from torch_fdattn import checks
from torch_fdattn.dist import (
    SequenceShards,
    consensus,
    context_parallel,
    decode,
    ring_attention,
    unshard_batch,
)

pytestmark = pytest.mark.usefixtures("compared_in_every_call")


def odd() -> bool:
    return dist.get_rank() == 1


def own_tokens(device) -> torch.Tensor:
    return torch.randn(1, 2, 8, 16, device=device)


@pytest.mark.parametrize(
    "name", ["sinks", "alibi_slopes", "attn_mask of one row", "kv_lens", "dropout_seed"]
)
@pytest.mark.parametrize("strategy", ["ring", "all_gather"])
def test_contents(group, rank_device, name, strategy) -> None:
    """After calls with equal ones, which have the same shapes."""
    x, total = own_tokens(rank_device), 8 * dist.get_world_size()

    def given(number: float) -> dict:
        numbers = torch.tensor([1, number], device=rank_device)
        if name == "attn_mask of one row":
            return {"attn_mask": torch.arange(total, device=rank_device)[None].float() * number}
        if name == "kv_lens":
            return {name: numbers[1:].int()}
        if name == "dropout_seed":
            return {name: numbers.long(), "dropout_p": 0.5}
        return {name: numbers.float()}

    for number in (3, 4):
        ring_attention(x, x, x, group, strategy=strategy, **given(number))
    with pytest.raises(ValueError, match=f"{name} must be the same on all ranks, got .* on rank 1"):
        ring_attention(x, x, x, group, strategy=strategy, **given(4 if odd() else 3))
    ring_attention(x, x, x, group, strategy=strategy, **given(3))


def test_contents_of_attention_in_context_parallel(group, rank_device) -> None:
    x, world = own_tokens(rank_device), dist.get_world_size()
    sinks = torch.full((2,), float(dist.get_rank()), device=rank_device)
    with (
        context_parallel(group, shards=SequenceShards.zigzag(8 * world, world)),
        pytest.raises(ValueError, match=r"sinks must be the same .* on rank 0, \[1.0, 1.0\] on"),
    ):
        torch_fdattn.attention(x, x, x, causal=True, sinks=sinks)


def test_rows_of_ranks_with_one_token(group, rank_device) -> None:
    """Their mask's one row is their own, and none of all ranks."""
    world, rank = dist.get_world_size(), dist.get_rank()
    x = torch.randn(1, 2, 1, 16, device=rank_device)
    row = torch.zeros(1, world, device=rank_device)
    row[0, rank] = -torch.inf
    out, _ = ring_attention(x, x, x, group, attn_mask=row)
    assert out.isfinite().all()


def test_many_numbers_are_compared_by_their_digest() -> None:
    x = torch.arange(100.0)
    changed = x.clone()
    changed[77] += 1e-3
    assert consensus.numbers_of(x) == consensus.numbers_of(x.clone())
    assert consensus.numbers_of(x) != consensus.numbers_of(changed)
    assert "digest" in consensus.numbers_of(x.bfloat16())
    assert consensus.numbers_of(None) is None


def test_contents_are_read_where_a_call_is_compared(group, rank_device, monkeypatch) -> None:
    """On GPUs that is the first call of its kind, so that none waits for the device later."""
    monkeypatch.setattr(checks, "CHECK_VALUES", False)
    x, read = own_tokens(rank_device), []
    monkeypatch.setattr(consensus, "numbers_of", lambda x: read.append(x))
    for _ in range(3):
        ring_attention(
            x, x, x, group, sinks=torch.ones(2, device=rank_device), scale=0.2171
        )  # of this test
    contents = 5
    assert len(read) == (3 if rank_device.type == "cpu" else 1) * contents


def test_parts_of_another_length(group, rank_device) -> None:
    world = dist.get_world_size()
    part = torch.ones(1, 7 if odd() else 8, device=rank_device)
    with pytest.raises(ValueError, match="parts must have 8 tokens in dim 1 on rank 1, got 7"):
        unshard_batch(group, SequenceShards.zigzag(8 * world, world), part)


@pytest.mark.parametrize(
    ("given", "kind", "text"),
    [
        (dict(strategy="pigeon"), ValueError, "strategy must be one of"),
        (dict(shards="zigzag"), TypeError, "shards must be a SequenceShards, got str"),
        (dict(prefix_lens="a"), TypeError, "prefix_lens must"),
        (dict(seq_dims=[0]), ValueError, "seq_dims must have one dim for each buffer"),
        (dict(strategy="all_gather"), ValueError, "strategy must be the same on all ranks, got ring on rank 0"),
        (dict(invariant_block=4), ValueError, "invariant_block must be the same on all ranks"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)  # fmt: skip
def test_arguments_of_context_parallel(group, rank_device, given, kind, text) -> None:
    world = dist.get_world_size()
    right = dict(shards=SequenceShards.zigzag(8 * world, world))
    with (
        pytest.raises(kind, match=text),
        context_parallel(group, **(right | given if odd() else right)),
    ):
        raise AssertionError


@pytest.mark.parametrize(
    ("given", "kind", "text"),
    [
        (dict(window=3), TypeError, "window must be two ints"),
        (dict(kv_lens=None), TypeError, "kv_lens must be an int32 .* got None"),
        (dict(window=(-3, 0)), ValueError, "window must"),
        (dict(softcap="a"), TypeError, "softcap must"),
        (dict(kv_block=-1), ValueError, "kv_block must"),
    ],
)  # fmt: skip
def test_arguments_of_decode(group, rank_device, given, kind, text) -> None:
    if rank_device.type == "cuda":
        pytest.skip("on GPUs the others are told of a group's first call alone")
    q = torch.randn(1, 2, 1, 16, device=rank_device)
    right = dict(kv_lens=torch.tensor([2], dtype=torch.int32), strategy="all_gather")
    with pytest.raises(kind, match=text):
        decode(q, q, q, group=group, **(right | given if odd() else right))


def test_windows_beyond_the_sequence(group, rank_device) -> None:
    """Are refused by name, on all ranks; in `context_parallel`, where models bring theirs, they are none."""
    x, world = own_tokens(rank_device), dist.get_world_size()
    total = 8 * world
    with pytest.raises(ValueError, match=f"window must lie within the {total} tokens of all ranks"):
        ring_attention(x, x, x, group, causal=True, window=(1000 if odd() else 3, 0))
    ring_attention(x, x, x, group, causal=True, window=(total, 0))
    shards = SequenceShards.contiguous(total, world)
    exact, _ = ring_attention(x, x, x, group, shards=shards, causal=True)
    with context_parallel(group, shards=shards):
        found, _ = torch_fdattn.attention(x, x, x, causal=True, window=(4096, 0))
    assert torch.equal(found, exact)


def test_lengths_beyond_the_sequence(group, rank_device) -> None:
    x, total = own_tokens(rank_device), 8 * dist.get_world_size()
    lens = torch.tensor([400], dtype=torch.int32, device=rank_device)
    with pytest.raises(ValueError, match=rf"kv_lens must lie in \[0, {total}\]"):
        ring_attention(x, x, x, group, kv_lens=lens if odd() else lens.clamp(max=3))
