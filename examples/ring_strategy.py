"""A strategy of your own for attention over sequences that are split over ranks.

    torchrun --nproc-per-node 2 examples/ring_strategy.py

A strategy is a module with `forward` and `backward`: this file is one. It decides how K and V travel; the
parts do the rest: `plan` says which calls of the kernels a block of keys needs under the mask, `State` runs and
merges them, `add_gradients` adds up theirs. Here each rank in turn broadcasts its keys to all others. (For torch.compile
its collectives would have to be functional ones, as those of torch_fdattn/dist/ring_attention are.)
"""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F

from torch_fdattn.dist import SequenceShards, ring_attention, shard_batch, unshard_batch
from torch_fdattn.dist.ring_attention.local import Saved, State, add_gradients, zero_gradients
from torch_fdattn.dist.ring_attention.op import STRATEGIES
from torch_fdattn.dist.ring_attention.plan import block_calls


def blocks(k, v, problem):
    """For each rank: its K and V, and the calls of this rank's queries over them."""
    lengths, runs = problem.shards.lengths, problem.shards.ranks
    for source in range(problem.world_size):
        block = k.new_empty(2, *k.shape[:2], lengths[source], k.shape[3])
        if source == problem.rank:
            torch.stack([k, v], out=block)
        dist.broadcast(block, group=problem.group, group_src=source)
        calls = block_calls(runs[problem.rank], runs[source], problem.left, problem.right)
        yield source, *block.unbind(), calls


def forward(q, k, v, problem):
    state = State(q, problem)
    for _, block_k, block_v, calls in blocks(k, v, problem):
        state.add(block_k, block_v, calls)
    out, lse = state.finish()
    return out, lse, Saved(q, k, v, out, lse)


def backward(dout, dlse, saved, problem):
    dq, own = zero_gradients(saved.q, saved.k.shape)
    for source, k, v, calls in blocks(saved.k, saved.v, problem):
        block = Saved(saved.q, k, v, saved.out, saved.lse)
        dkv = own.new_zeros(2, *k.shape)
        add_gradients(dout, dlse, block, calls, problem, dq, dkv)
        dist.all_reduce(dkv, group=problem.group)
        if source == problem.rank:
            own = dkv
    return dq, *own.unbind()


def main() -> None:
    STRATEGIES["broadcast"] = sys.modules[__name__]
    if "LOCAL_WORLD_SIZE" not in os.environ:
        raise SystemExit(__doc__)  # not started by torchrun
    cuda = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if cuda else "cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    group = dist.group.WORLD

    torch.manual_seed(0)  # the same whole sequence on all ranks, of which each takes its part
    whole = torch.randn(3, 1, 4, 40, 32, device=device)  # q, k and v
    shards = SequenceShards.zigzag(40, dist.get_world_size())
    part = shard_batch(group, shards, whole, dim=3)[0].requires_grad_()
    out, _ = ring_attention(*part, group, shards=shards, causal=True, strategy="broadcast")
    out.square().sum().backward()

    whole.requires_grad_()
    expected = F.scaled_dot_product_attention(*whole, is_causal=True)
    expected.square().sum().backward()
    out = unshard_batch(group, shards, out, dim=2)[0] - expected
    gradient = unshard_batch(group, shards, part.grad, dim=3)[0] - whole.grad
    if dist.get_rank() == 0:
        print(f"outputs, largest difference from SDPA: {out.abs().max():.1e}")
        print(f"gradients, largest difference from SDPA: {gradient.abs().max():.1e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
