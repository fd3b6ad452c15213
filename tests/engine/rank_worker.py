"""One rank of test_ranks.py: greedy tokens for its prompts, the cache and the model spread over the ranks.

Started plainly (one process) or by torchrun; rank 0 writes what it found as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from torch_fdattn.dist.decode.op import ONE_SIDED, PORTABLE
from torch_fdattn.engine import LLM, SamplingParams
from torch_fdattn.models import load_model


def hierarchy(device: torch.device, size: int) -> tuple[str, str]:
    """Two nodes, where the ranks are an even number."""
    nodes = 2 if size % 2 == 0 else 1
    mesh = init_device_mesh(device.type, (nodes, size // nodes), mesh_dim_names=("node", "place"))
    return mesh["place"].get_group().group_name, mesh["node"].get_group().group_name


def main(task_file: str, result_file: str) -> None:
    task = json.loads(Path(task_file).read_text())
    prompts, count = task["prompts"], task["count"]
    size, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    on_gpu = torch.cuda.device_count() >= size
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    model = load_model("smollm2", dtype=torch.float32, device=device)
    groups: dict[str, str | None] = {"kv_group": None, "tp_group": None}
    if size > 1:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // size))
        dist.init_process_group("nccl" if on_gpu else "gloo")
        shape = size // task["tensor_parallel"], task["tensor_parallel"]
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=("kv", "tp"))
        if shape[0] > 1:
            groups["kv_group"] = mesh["kv"].get_group().group_name
        if shape[1] > 1:
            from torch_fdattn.models.parallelize import parallelize

            groups["tp_group"] = mesh["tp"].get_group().group_name
            model = parallelize(model, mesh["tp"], strategy=task["tp_strategy"])

    options = dict(
        page_size=task["page_size"], max_model_len=max(map(len, prompts)) + count, **groups
    )
    llm = LLM(model, max_num_seqs=len(prompts), **options)
    batched = continued(llm, prompts, count)
    single = LLM(model, max_num_seqs=1, max_batch_tokens=5, **options)
    alone = continued(single, prompts[1:2], task["alone"])[0]
    nbytes = [llm.stats().kv_bytes]
    by_strategy = {}
    if size > 1 and task["strategies"]:
        for strategy in (*PORTABLE, *(ONE_SIDED if on_gpu else ())):
            few = LLM(
                model, max_num_seqs=3, strategy=strategy,
                hierarchy=hierarchy(device, size) if strategy == "hierarchical" else None, **options,
            )  # fmt: skip
            by_strategy[strategy] = continued(few, prompts[:3], task["strategies"])
            few.close()
    for each in (llm, single):
        each.close()
    if size > 1:
        nbytes *= size
        dist.all_gather_object(nbytes, llm.stats().kv_bytes)
        dist.destroy_process_group()
    if rank == 0:
        found = {"batched": batched, "alone": alone, "nbytes": nbytes, "by_strategy": by_strategy}
        Path(result_file).write_text(json.dumps(found))


def continued(llm: LLM, prompts: list[list[int]], count: int) -> list[list[int]]:
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=count))
    return [output.outputs[0].token_ids for output in outputs]


if __name__ == "__main__":
    main(*sys.argv[1:])
