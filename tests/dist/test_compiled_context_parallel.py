"""`torch.compile(backend="fdattn", options={"context_parallel": …})` against the same layer on one process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import torch_fdattn
from torch_fdattn.compile_backend import fdattn
from torch_fdattn.dist import SequenceShards, shard_batch
from torch_fdattn.dist.kv_cache.shard_map import ShardMap

DIM = 16


class Layer(nn.Module):
    """Llama's attention: rotary q and k at the positions it is given, grouped heads (a pair a rank), causal."""

    def __init__(self, written_out: bool = False) -> None:
        super().__init__()
        self.written_out = written_out
        self.kv_heads = dist.get_world_size()  # ulysses splits them over the ranks
        width = 2 * self.kv_heads * DIM
        self.qkv = nn.Linear(width, 2 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """x (B, S, width), positions (S,)."""
        heads = self.qkv(x).unflatten(-1, (-1, DIM)).transpose(1, 2)
        q, k, v = heads.split([2 * self.kv_heads, self.kv_heads, self.kv_heads], dim=1)
        angles = positions[:, None] / 100 ** (torch.arange(DIM // 2, device=x.device) / (DIM // 2))
        q, k = (_turned(y, angles) for y in (q, k))
        if self.written_out:
            k, v = (y.repeat_interleave(2, 1) for y in (k, v))
            attended = ((q @ k.mT) / DIM**0.5).softmax(-1) @ v
        else:
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(attended.transpose(1, 2).flatten(2))


def _turned(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def compare(
    group, device, shards, option, lower, layers=(False,), checkpointed: bool = False
) -> None:
    """Two layers in a row: the second's input is what the first attended to."""
    total, rank = shards.total, dist.get_rank()
    model = nn.ModuleList(Layer(written_out) for written_out in layers).to(device)
    x = torch.randn(2, total, model[0].out.in_features, device=device)
    weights = torch.randn_like(x)

    def run(x, positions):
        for layer in model:
            if checkpointed:
                x = x + checkpoint(layer, x, positions, use_reentrant=False)
            else:
                x = x + layer(x, positions)
        return x

    def gradients(call, x, positions, weights):
        x = x.clone().requires_grad_()
        out = call(x, positions)
        return out, torch.autograd.grad((out * weights).sum(), [x, *model.parameters()])

    positions = torch.arange(total, device=device)
    expected, (dx, *expected_grads) = gradients(run, x, positions, weights)
    torch._dynamo.reset()
    compiled = torch.compile(
        run, backend=fdattn, fullgraph=True,
        options={"context_parallel": option, "lower": lower},
    )  # fmt: skip
    own = shard_batch(group, shards, x, weights)
    out, (own_dx, *grads) = gradients(compiled, own[0], shards.positions(rank, device), own[1])
    close = dict(rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(out, shards.shard(expected, rank), **close)
    torch.testing.assert_close(own_dx, shards.shard(dx, rank), **close)
    for found, wanted in zip(grads, expected_grads, strict=True):
        dist.all_reduce(found)
        torch.testing.assert_close(found, wanted, **close)


@pytest.mark.parametrize(
    ("shards", "strategy"),
    [
        ("zigzag", "ring"),
        ("contiguous", "all_gather"),
        ("zigzag", "ulysses"),
        ("contiguous", "star"),
    ],
)
def test_shards_by_name(group, rank_device, mesh, shards, strategy) -> None:
    world = dist.get_world_size()
    whole = getattr(SequenceShards, shards)(8 * world, world)
    option = {"group": mesh, "shards": shards, "strategy": strategy}
    compare(group, rank_device, whole, option, "aot_eager")


def test_uneven_and_striped_shards(group, rank_device) -> None:
    world = dist.get_world_size()
    striped = SequenceShards.from_positions([range(r, 6 * world, world) for r in range(world)])
    for shards in (SequenceShards.zigzag(8 * world + 3, world), striped):
        option = {"group": group, "shards": shards}
        compare(group, rank_device, shards, option, "aot_eager", layers=(False, True))


def test_checkpoints(group, rank_device) -> None:
    """The backward runs the ring of the forward again."""
    world = dist.get_world_size()
    shards = SequenceShards.zigzag(8 * world, world)
    option = {"group": group, "shards": shards}
    compare(group, rank_device, shards, option, "aot_eager", (False, False), checkpointed=True)


def test_sequences_without_a_batch_in_bfloat16(group, rank_device) -> None:
    """What the eager context manager does not take: three dimensions, and autocast's dtype."""
    world, rank = dist.get_world_size(), dist.get_rank()
    shards = SequenceShards.zigzag(8 * world, world)
    x = torch.randn(2, shards.total, 16, device=rank_device)

    def attend(x):
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            return F.scaled_dot_product_attention(x, x, x, is_causal=True)

    torch._dynamo.reset()
    compiled = torch.compile(
        attend, backend=fdattn, fullgraph=True,
        options={"context_parallel": {"group": group, "shards": shards}, "lower": "aot_eager"},
    )  # fmt: skip
    expected = attend(x)
    found = compiled(shards.shard(x, rank, 1))
    assert found.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(found, shards.shard(expected, rank, 1), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("strategy", ["ulysses", "star"])
def test_our_own_op_over_a_view(group, rank_device, strategy) -> None:
    """The result lies as the local one does, so that what is a view of it on one rank is one here."""
    world, rank = dist.get_world_size(), dist.get_rank()

    def attend(x):
        x = x.transpose(1, 2)
        return torch_fdattn.attention(x, x, x, causal=True)[0].transpose(1, 2).view(2, -1)

    x = torch.randn(2, 8 * world, 2 * world, DIM, device=rank_device)
    torch._dynamo.reset()
    compiled = torch.compile(
        attend, backend=fdattn, fullgraph=True,
        options={"context_parallel": {"group": group, "strategy": strategy}, "lower": "aot_eager"},
    )  # fmt: skip
    expected = attend(x).view(x.shape).chunk(world, 1)[rank]
    torch.testing.assert_close(compiled(x.chunk(world, 1)[rank]), expected.reshape(2, -1))


@pytest.mark.slow
def test_through_inductor(group, rank_device) -> None:
    world = dist.get_world_size()
    shards = SequenceShards.zigzag(8 * world, world)
    compare(group, rank_device, shards, {"group": group, "shards": "zigzag"}, "inductor")


def test_lengths_compile_each_for_itself(group, rank_device) -> None:
    """And the default shards are contiguous."""
    world, rank = dist.get_world_size(), dist.get_rank()
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True), backend=fdattn,
        options={"context_parallel": group, "lower": "aot_eager"}, fullgraph=True,
    )  # fmt: skip
    for length in (4, 6, 9, 4):
        shards = SequenceShards.contiguous(length * world, world)
        x = torch.randn(1, 2, shards.total, 16, device=rank_device)
        expected = F.scaled_dot_product_attention(x, x, x, is_causal=True)
        found = compiled(shards.shard(x, rank, 2).contiguous())
        torch.testing.assert_close(found, shards.shard(expected, rank, 2), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("cache", ["contiguous", 3])
def test_steps_over_a_sharded_cache(group, rank_device, cache) -> None:
    """Each rank writes the new tokens that are its own, and attends over all ranks' shards; one compilation."""
    world, rank, local = dist.get_world_size(), dist.get_rank(), 12
    shard_map = ShardMap(rank, world, local if cache == "contiguous" else cache)
    total = local * world
    q, k, v = (torch.randn(2, heads, total, DIM, device=rank_device) for heads in (4, 2, 2))
    first = torch.tensor([total - 5, 4], dtype=torch.int32, device=rank_device)
    shards = [x.new_full((2, 2, local, DIM), torch.nan) for x in (k, v)]
    here = torch.arange(total, device=rank_device)
    mine, slots = shard_map.locate(here)
    for shard, whole in zip(shards, (k, v), strict=True):
        shard[:, :, slots[mine]] = whole[:, :, mine]

    def step(q, k_shard, v_shard, lens):
        out, lse = torch_fdattn.decode(q * 2, k_shard, v_shard, lens, window=(17, 0))
        return out + 1, lse

    torch._dynamo.reset()
    options = {"context_parallel": {"group": group, "cache": cache}, "lower": "aot_eager"}
    compiled = torch.compile(step, backend=fdattn, options=options, fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for lens in (first, first + 1, first - 4):
            found = compiled(q[:, :, :2], *shards, lens)
            torch.testing.assert_close(found, step(q[:, :, :2], k, v, lens), rtol=1e-4, atol=1e-5)


def test_a_step_that_sees_the_whole_of_a_sharded_cache(group, rank_device) -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    q, k, v = (torch.randn(2, 4, n, DIM, device=rank_device) for n in (1, 6 * world, 6 * world))
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v), backend=fdattn, fullgraph=True,
        options={"context_parallel": {"group": group, "cache": "contiguous"}, "lower": "aot_eager"},
    )  # fmt: skip
    found = compiled(q, *(x.chunk(world, 2)[rank] for x in (k, v)))
    torch.testing.assert_close(found, F.scaled_dot_product_attention(q, k, v))
