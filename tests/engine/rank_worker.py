"""One rank of test_ranks.py: greedy tokens for its prompts, from a cache sharded over the ranks.

Started plainly (one process) or by torchrun; rank 0 writes what it found as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from torch_fdattn.dist import ShardedKVCache
from torch_fdattn.engine import generate
from torch_fdattn.models import Transformer, load_model


def cache_for(model: Transformer, batch: int, capacity: int, kv_block: int | None, group):
    config = model.config
    return ShardedKVCache(
        config.num_layers,
        batch,
        config.num_kv_heads,
        capacity,
        config.head_dim,
        dtype=torch.float32,
        device=model.norm.weight.device,
        group_name=group and group.group_name,
        kv_block=kv_block,
    )


@torch.inference_mode()
def greedy_batch(model: Transformer, cache: ShardedKVCache, prompts: list[list[int]], count: int):
    """All prompts at once: a padded prefill, then the rows' own lengths, so the padding is overwritten."""
    device = cache.lengths.device
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    padded = [torch.tensor(prompt, device=device) for prompt in prompts]
    tokens = torch.nn.utils.rnn.pad_sequence(padded, batch_first=True)
    logits = model(tokens, cache)[torch.arange(len(prompts)), lengths - 1]
    cache.lengths.copy_(lengths)
    found = []
    for _ in range(count):
        found.append(logits.argmax(-1, keepdim=True))
        logits = model(found[-1], cache)[:, -1]
    return torch.cat(found, dim=1).tolist()


def main(task_file: str, result_file: str) -> None:
    task = json.loads(Path(task_file).read_text())
    prompts, count, kv_block = task["prompts"], task["count"], task["kv_block"]
    size, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    on_gpu = torch.cuda.device_count() >= size
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    group = None
    if size > 1:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // size))
        dist.init_process_group("nccl" if on_gpu else "gloo")
        group = dist.group.WORLD
    model = load_model("smollm2", dtype=torch.float32, device=device)

    capacity = max(map(len, prompts)) + count
    cache = cache_for(model, len(prompts), capacity, kv_block, group)
    batched = greedy_batch(model, cache, prompts, count)
    nbytes = [cache.nbytes]
    single = cache_for(model, 1, capacity, None, group)
    streamed = list(generate(model, single, prompts[1], count, prefill_chunk=5, group=group))
    if group is not None:
        nbytes *= size
        dist.all_gather_object(nbytes, cache.nbytes)
        dist.destroy_process_group()
    if rank == 0:
        found = {"batched": batched, "streamed": streamed, "nbytes": nbytes, "capacity": capacity}
        Path(result_file).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
