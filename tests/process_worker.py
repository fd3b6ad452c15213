"""One rank of the tests in test_processes.py: python process_worker.py JOB, with torchrun's variables set."""

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import torch_fdattn
from torch_fdattn.dist import (
    SequenceShards,
    ShardMap,
    all_gather_matmul,
    decode,
    matmul_all_reduce,
    matmul_reduce_scatter,
    ring_attention,
)
from torch_fdattn.dist.consensus import assume_equal_on_all_ranks

TIMEOUT_S = 6


def ring(strategy: str, group: str) -> None:
    """Attention and its gradients equal one process's."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    whole = [torch.randn(1, heads, 40, 16, requires_grad=True) for heads in (4, 2, 2)]
    shards = SequenceShards.zigzag(40, world)
    part = [shards.shard(x.detach(), rank, 2).clone().requires_grad_() for x in whole]
    out, _ = ring_attention(*part, group, shards=shards, causal=True, strategy=strategy)
    out.sin().sum().backward()
    exact, _ = torch_fdattn.attention(*whole, causal=True)
    exact.sin().sum().backward()
    torch.testing.assert_close(out, shards.shard(exact, rank, 2))
    for x, y in zip(part, whole, strict=True):
        torch.testing.assert_close(x.grad, shards.shard(y.grad, rank, 2))


def sharded_decode(strategy: str, group: str) -> None:
    """Decode over a cache in blocks equals one process's."""
    shards = ShardMap(dist.get_rank(), dist.get_world_size(), 3)
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, n, 16) for heads, n in ((4, 1), (2, 29), (2, 29)))
    lens = torch.tensor([29, 4], dtype=torch.int32)
    mine, _ = shards.locate(torch.arange(29))
    options = by(strategy)
    out, lse = decode(q, k[:, :, mine], v[:, :, mine], lens, group, kv_block=3, **options)
    exact, exact_lse = torch_fdattn.decode(q, k, v, lens)
    torch.testing.assert_close(out, exact)
    torch.testing.assert_close(lse, exact_lse)


def by(strategy: str) -> dict:
    """`decode`'s options for a strategy; the nodes of "hierarchical" are torchrun's."""
    if strategy != "hierarchical":
        return {"strategy": strategy}
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    shape = dist.get_world_size() // ranks, ranks
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("node", "place"))
    names = tuple(mesh[name].get_group().group_name for name in ("place", "node"))
    return {"strategy": strategy, "hierarchy": names}


def uncompared_decode(x: torch.Tensor, group: str, options: dict) -> None:
    """What was compared once is not compared again: a dead rank is met by the strategy itself."""
    lens = torch.tensor([8 * dist.get_world_size()], dtype=torch.int32)
    with assume_equal_on_all_ranks():
        decode(x[:, :, :1], x, x, lens, group, **options)


def calls(group: str) -> dict:
    """Calls that every rank must join, by name."""
    x = torch.randn(1, 3, 8, 16)
    w = torch.randn(4, 8)
    options = dict(causal=True)
    exchanges = {s: by(s) for s in ("all_gather", "star", "ring", "hierarchical")}
    return {
        **{
            f"decode_{name}": lambda found=found: uncompared_decode(x, group, found)
            for name, found in exchanges.items()
        },
        "all_gather_matmul": lambda: all_gather_matmul(torch.randn(2, 8), [w], group),
        "matmul_all_reduce": lambda: matmul_all_reduce(torch.randn(6, 8), w, group),
        "matmul_reduce_scatter": lambda: matmul_reduce_scatter(torch.randn(6, 8), w, group),
        **{
            s: lambda s=s: ring_attention(x, x, x, group, strategy=s, **options)
            for s in ("ring", "all_gather", "ulysses", "star")
        },
    }


def forward_and_backward(strategy: str, group: str, die: bool) -> None:
    """`die`: rank 1 is gone when the others are in the backward's collectives."""
    x = torch.randn(1, 3, 8, 16, requires_grad=True)
    out, _ = ring_attention(x, x, x, group, strategy=strategy)
    if die and dist.get_rank() == 1:
        os._exit(3)
    out.sum().backward()


def main(job: str, name: str) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    group = dist.group.WORLD.group_name
    if job == "equals":
        for strategy in name.split(","):
            if strategy.startswith("decode_"):
                sharded_decode(strategy.removeprefix("decode_"), group)
            else:
                ring(strategy, group)
        print(f"rank {dist.get_rank()} of {dist.get_world_size()} agrees", flush=True)
        dist.destroy_process_group()
        return
    if name.endswith("_backward"):
        strategy = name.removesuffix("_backward")
        forward_and_backward(strategy, group, die=False)
        print("first call done", flush=True)
        forward_and_backward(strategy, group, die=True)
        print("survived", flush=True)
        return
    call = calls(group)[name]
    call()
    print("first call done", flush=True)
    if dist.get_rank() == 1:
        os._exit(3)  # dies without a word, as a killed process does
    call()
    call()
    print("survived", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:3])
