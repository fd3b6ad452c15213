"""Sharded batches, the context manager, and a small GPT trained with its sequence split over the ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import torch_fdattn
from torch_fdattn.dist import SequenceShards, context_parallel, shard_batch, unshard_batch

TEXT = Path(__file__).parents[2] / "LICENSE"


def zigzag(total: int) -> SequenceShards:
    return SequenceShards.zigzag(total, dist.get_world_size())


def test_shard_and_unshard(group, rank_device) -> None:
    shards = zigzag(21)
    tokens = torch.arange(2 * 21, device=rank_device).view(2, 21)
    positions = torch.arange(21, device=rank_device)
    (own,) = shard_batch(group, shards, tokens)
    assert torch.equal(own, tokens[:, shards.positions(dist.get_rank(), rank_device)])
    (mine,) = shard_batch(group, shards, positions, dim=0)
    assert torch.equal(mine, shards.positions(dist.get_rank(), rank_device))
    again = unshard_batch(group, shards, own, own.float() * 2)
    assert torch.equal(again[0], tokens)
    assert torch.equal(again[1], tokens.float() * 2)
    with pytest.raises(TypeError, match="shards must be a SequenceShards, got str"):
        shard_batch(group, "zigzag", torch.zeros(1, 21))
    with pytest.raises(ValueError, match="x must have 21 positions in dim 1, got 20"):
        shard_batch(group, shards, tokens[:, 1:])
    with pytest.raises(ValueError, match="parts must have"):
        unshard_batch(group, shards, own[:, 1:])


def test_attention_calls_inside_are_ring_attention(group, rank_device) -> None:
    shards, rank = zigzag(20), dist.get_rank()
    q, k, v = (torch.randn(2, n, 20, 16, device=rank_device) for n in (4, 2, 2))
    part = [shards.shard(x, rank, 2) for x in (q, k, v)]
    with context_parallel(group, shards=shards):
        sdpa = F.scaled_dot_product_attention(*part, is_causal=True, enable_gqa=True)
        out, lse = torch_fdattn.attention(*part, causal=True, window=(5, 0))
        same, _ = torch.ops.fdattn.attention(*part, causal=True, window_left=5)
    exact = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(sdpa, shards.shard(exact, rank, 2))
    exact, exact_lse = torch_fdattn.attention(q, k, v, causal=True, window=(5, 0))
    torch.testing.assert_close(out, shards.shard(exact, rank, 2))
    torch.testing.assert_close(lse, shards.shard(exact_lse, rank, 2))
    assert torch.equal(same, out)


def test_a_scale_that_is_a_tensor(group, rank_device) -> None:
    """Is the number that it holds, in all ways to attend over the ranks."""
    shards = zigzag(20)
    part = [
        shards.shard(torch.randn(2, 2, 20, 16, device=rank_device), dist.get_rank(), 2)
        for _ in range(3)
    ]
    cache = [torch.randn(2, 2, 8, 16, device=rank_device) for _ in range(2)]
    q, lens = torch.randn(2, 2, 1, 16, device=rank_device), torch.tensor([8, 5], dtype=torch.int32)
    results = []
    for scale in (torch.tensor(0.3, device=rank_device), float(torch.tensor(0.3))):
        with context_parallel(group, shards=shards):
            inside = torch_fdattn.attention(*part, causal=True, scale=scale)
        ring = torch_fdattn.dist.ring_attention(
            *part, group, shards=shards, causal=True, scale=scale
        )
        decoded = torch_fdattn.dist.decode(q, *cache, lens.to(rank_device), group, scale=scale)
        results.append((*inside, *ring, *decoded))
    assert all(map(torch.equal, *results))


def test_what_it_cannot_do_is_refused(group, rank_device) -> None:
    x = torch.randn(1, 1, 8, 16, device=rank_device)
    shards = zigzag(8 * dist.get_world_size())
    with context_parallel(group, shards=shards):
        with pytest.raises(NotImplementedError, match="got attn_mask"):
            F.scaled_dot_product_attention(x, x, x, torch.ones(8, 7, device=rank_device))
        lens = torch.tensor([3], device=rank_device, dtype=torch.int32)
        with pytest.raises(NotImplementedError, match="got kv_lens"):
            torch_fdattn.attention(x, x, x, lens, causal=True)
        layer = nn.MultiheadAttention(16, 1, device=rank_device)
        with pytest.raises(NotImplementedError, match="this rank's tokens only"):
            layer(x[0], x[0], x[0])
        with pytest.raises(NotImplementedError, match="this rank's tokens only"):
            torch_fdattn.decode(x, x, x)
        with pytest.raises(NotImplementedError, match="this rank's tokens only"):
            torch_fdattn.decode(x, x, x, out=(torch.empty_like(x), x.new_empty(1, 1, 8)))
        with pytest.raises(ValueError, match="cu_seqlens must begin with 0, end with the"):
            torch_fdattn.varlen_attention(*[x[0].transpose(0, 1)] * 3, lens)
        with pytest.raises(NotImplementedError, match="got kv_lens"):
            torch_fdattn.varlen_attention(*[x[0].transpose(0, 1)] * 3, lens, kv_lens=lens)
        table, lens = torch.zeros(2, 1, 1, device=rank_device, dtype=torch.int32).unbind()
        with pytest.raises(NotImplementedError, match="this rank's tokens only"):
            torch_fdattn.paged_decode(x, x, x, table, lens[0])
        with pytest.raises(NotImplementedError, match="this rank's tokens only"):
            torch.ops.aten.scaled_dot_product_attention(x, x, x)
    for wrong in (
        dict(strategy="pigeon"),
        dict(shards=SequenceShards.zigzag(8, dist.get_world_size() + 1)),
    ):
        with (
            pytest.raises(ValueError, match="must"),
            context_parallel(**{**dict(group=group, shards=shards), **wrong}),
        ):
            pass
    with (
        pytest.raises(ValueError, match="where keys are sharded too"),
        context_parallel(group, shards=shards, strategy="query_split"),
    ):
        pass
    with (
        pytest.raises(ValueError, match="seq_dims must have one dim for each buffer"),
        context_parallel(group, shards=shards, buffers=[x]),
    ):
        pass


def test_buffers_are_shards_inside_and_whole_again_after_an_error(group, rank_device) -> None:
    shards = zigzag(13)
    tokens = torch.arange(13, device=rank_device)
    own = shards.positions(dist.get_rank(), rank_device)
    inside = []

    def fails() -> None:
        with context_parallel(group, shards=shards, buffers=[tokens], seq_dims=[0]):
            inside.append(tokens.clone())
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert torch.equal(inside[0], own)
    assert torch.equal(tokens, torch.arange(13, device=rank_device))


class GPT(nn.Module):
    """Bytes to bytes: two pre-norm blocks with learned positions, attention by torch's own function."""

    def __init__(self, length: int, width: int = 32, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.tokens, self.places = nn.Embedding(256, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                dict(
                    norm1=nn.LayerNorm(width), qkv=nn.Linear(width, 3 * width), out=nn.Linear(width, width),
                    norm2=nn.LayerNorm(width), up=nn.Linear(width, 4 * width), down=nn.Linear(4 * width, width),
                )
            )
            for _ in range(2)
        )  # fmt: skip
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.places(positions)
        for block in self.blocks:
            heads = block.qkv(block.norm1(x)).unflatten(-1, (3, self.heads, -1))
            q, k, v = heads.permute(2, 0, 3, 1, 4)
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + block.out(out.transpose(1, 2).flatten(2))
            x = x + block.down(F.gelu(block.up(block.norm2(x))))
        return self.head(self.norm(x))


def losses(device, steps: int, length: int, group: str | None = None, strategy: str = "ring"):
    """The loss of each step of training on LICENSE; with a group, its ranks share each sequence."""
    torch.manual_seed(7)
    text = torch.frombuffer(bytearray(TEXT.read_bytes()), dtype=torch.uint8).long().to(device)
    model = GPT(length).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    shards = zigzag(length) if group else SequenceShards.contiguous(length, 1)
    rank = dist.get_rank() if group else 0
    positions = shards.positions(rank, device)
    curve = []
    for step in range(steps):
        begins = [(step * 2 + b) * length % (len(text) - length - 1) for b in range(2)]
        tokens = torch.stack([text[b : b + length] for b in begins])
        labels = torch.stack([text[b + 1 : b + length + 1] for b in begins])
        if group:
            tokens, labels = shard_batch(group, shards, tokens, labels)
            with context_parallel(group, shards=shards, strategy=strategy):
                logits = model(tokens, positions)
        else:
            logits = model(tokens, positions)
        # Every rank's share of the mean over all tokens: the shares, and so the gradients, add up.
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / (
            2 * length
        )
        optimizer.zero_grad()
        loss.backward()
        if group:
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            loss = loss.detach()
            dist.all_reduce(loss)
        optimizer.step()
        curve.append(loss.item())
    return curve


@pytest.mark.parametrize(
    "strategy", ["ring", *(pytest.param(x, marks=pytest.mark.slow) for x in ("all_gather", "star"))]
)
def test_gpt_follows_the_single_process_loss_curve(group, rank_device, strategy) -> None:
    alone = losses(rank_device, steps=25, length=67)
    together = losses(rank_device, 25, 67, group, strategy)
    assert alone[-1] < 0.75 * alone[0]
    for step, (a, b) in enumerate(zip(alone, together, strict=True)):
        assert abs(a - b) <= 2e-4 * a, (
            f"step {step}: {a} alone, {b} on {dist.get_world_size()} ranks"
        )
