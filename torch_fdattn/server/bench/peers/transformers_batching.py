"""transformers' continuous batching (`generate_batch`), by its SDPA over pages.

It takes one number of new tokens for all requests: each gets the mean of the workload's.
"""

from __future__ import annotations

import time
from pathlib import Path

import torch

from torch_fdattn.server.bench.peers import PeerRun
from torch_fdattn.server.bench.workload import Workload


def run(folder: Path, workload: Workload, repeats: int) -> list[PeerRun]:
    """The workload with its mean answer, after four short requests that warm up."""
    from transformers import AutoModelForCausalLM, GenerationConfig

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", attn_implementation="sdpa")
    model = model.to(device).eval()
    new_tokens = workload.num_new_tokens // len(workload.prompts)
    prompts = [list(prompt) for prompt in workload.prompts]

    def once(prompts: list[list[int]], new_tokens: int) -> PeerRun:
        # No token ends an answer.
        config = GenerationConfig(
            max_new_tokens=new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        start = time.perf_counter()
        outputs = model.generate_batch(inputs=prompts, generation_config=config)
        seconds = time.perf_counter() - start
        counts = {len(x.generated_tokens) for x in outputs.values()}
        if counts != {new_tokens} or len(outputs) != len(prompts):
            raise RuntimeError(f"transformers must give {new_tokens} tokens each, gave {counts}")
        return PeerRun(seconds, new_tokens * len(prompts))

    once(prompts[:4], 4)
    return [once(prompts, new_tokens) for _ in range(repeats)]
