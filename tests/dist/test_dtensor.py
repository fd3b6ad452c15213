"""A training step on DTensors, eager and compiled: batch- and head-sharded, out only, lse only, both."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import torch_fdattn


def loss_of(which: str, out: Tensor, lse: Tensor) -> Tensor:
    if which == "out":
        return out.sin().sum()
    if which == "lse":
        return lse.cos().sum()
    return out.sin().sum() + lse.cos().sum()


def full(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "inductor"])
@pytest.mark.parametrize("which", ["out", "lse", "both"])
@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(1)], ids=str)
def test_attention_step(mesh, rank_device, placement, which: str, compiled: bool) -> None:
    torch._dynamo.reset()
    world = dist.get_world_size()
    shapes = [(2 * world, heads * world, 12, 16) for heads in (4, 2, 2)]
    plain = [torch.randn(shape, device=rank_device).requires_grad_() for shape in shapes]
    loss_of(which, *torch_fdattn.attention(*plain, causal=True)).backward()
    parts = [
        distribute_tensor(x.detach().clone(), mesh, [placement]).requires_grad_() for x in plain
    ]

    def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return loss_of(which, *torch_fdattn.attention(q, k, v, causal=True))

    full((torch.compile(step, fullgraph=True) if compiled else step)(*parts)).backward()
    for part, expected in zip(parts, plain, strict=True):
        assert part.grad.placements == (placement,)
        torch.testing.assert_close(part.grad.full_tensor(), expected.grad, atol=1e-5, rtol=1e-4)


def test_groups_that_a_mesh_would_tear_are_replicated(mesh, rank_device) -> None:
    """9 query heads over 3 KV heads on 2 ranks: sharding heads would tear a group."""
    world = dist.get_world_size()
    kv_heads = world + 1
    q, k, v = (
        torch.randn(2, h, 5, 16, device=rank_device) for h in (3 * kv_heads, kv_heads, kv_heads)
    )
    parts = [distribute_tensor(x, mesh, [Shard(1)]) for x in (q, k, v)]
    out, lse = torch_fdattn.attention(*parts)
    expected, expected_lse = torch_fdattn.attention(q, k, v)
    torch.testing.assert_close(out.full_tensor(), expected)
    torch.testing.assert_close(lse.full_tensor(), expected_lse)


@pytest.mark.parametrize("placement", [Shard(0), Shard(1)], ids=str)
def test_decode_and_merge(mesh, rank_device, placement) -> None:
    world = dist.get_world_size()
    q, k, v = (
        torch.randn(2 * world, h * world, s, 16, device=rank_device)
        for h, s in ((4, 1), (2, 9), (2, 9))
    )
    lens = torch.randint(1, 9, (2 * world,), dtype=torch.int32, device=rank_device)
    per_sequence = placement if placement == Shard(0) else Replicate()
    parts = [distribute_tensor(x, mesh, [placement]) for x in (q, k, v)]
    out, lse = torch_fdattn.decode(*parts, distribute_tensor(lens, mesh, [per_sequence]))
    expected, expected_lse = torch_fdattn.decode(q, k, v, lens)
    torch.testing.assert_close(out.full_tensor(), expected)
    outs, lses = torch.stack([out, out]), torch.stack([lse, lse])
    merged, merged_lse = torch_fdattn.merge_states(outs, lses)
    torch.testing.assert_close(merged.full_tensor(), expected)
    torch.testing.assert_close(
        merged_lse.full_tensor(), expected_lse + torch.log(torch.tensor(2.0))
    )
