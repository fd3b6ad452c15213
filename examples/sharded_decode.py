"""Decode with one sequence's KV cache spread over the ranks: each holds a part, outputs are on all of them.

    torchrun --nproc-per-node 2 examples/sharded_decode.py

Every rank gets the same queries and the same new K and V, and keeps its own positions. A step attends locally and
merges the ranks' (out, lse). `strategy` says how they are exchanged; "auto" takes what was measured to be fastest.
"""

import os

import torch
import torch.distributed as dist

from torch_fdattn.dist import ShardedKVCache

BATCH, HEADS, KV_HEADS, DIM, CAPACITY = 2, 8, 2, 64, 512


def main() -> None:
    if "LOCAL_WORLD_SIZE" not in os.environ:
        raise SystemExit(__doc__)  # not started by torchrun
    cuda = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if cuda else "cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")

    sizes = dict(num_layers=1, batch=BATCH, kv_heads=KV_HEADS, capacity=CAPACITY, head_dim=DIM)
    sizes |= dict(dtype=torch.float32, device=device)
    # kv_block=16: positions are dealt to the ranks in blocks of 16, so that all ranks read equally much at any length.
    cache = ShardedKVCache(**sizes, group=dist.group.WORLD, kv_block=16, strategy="auto")
    whole = ShardedKVCache(**sizes)  # the same on one process, to compare

    torch.manual_seed(0)  # the same tokens on all ranks
    for tokens in (100, 1, 1, 1):  # a prompt, then three decode steps
        q = torch.randn(BATCH, HEADS, tokens, DIM, device=device)
        k, v = torch.randn(2, BATCH, KV_HEADS, tokens, DIM, device=device)
        outs = []
        for each in (cache, whole):
            each.append(0, k, v)  # for each layer
            outs.append(each.attend(0, q))
            each.advance(tokens)  # after the last layer
        difference = (outs[0] - outs[1]).abs().max().item()
        if dist.get_rank() == 0:
            print(
                f"{tokens} new, {cache.held[0]} held: largest difference from one process: {difference:.1e}"
            )
    if dist.get_rank() == 0:
        print(f"rank 0 holds {cache.bytes_used() / whole.bytes_used():.0%} of the cache")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
