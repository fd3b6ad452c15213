"""nano-vllm (https://github.com/GeeeekExplorer/nano-vllm), which needs CUDA, a `flash_attn` and xxhash."""

from __future__ import annotations

import time
from pathlib import Path

from torch_fdattn.server.bench.peers import PeerRun
from torch_fdattn.server.bench.workload import Workload, reordered


def run(folder: Path, workload: Workload, repeats: int) -> list[PeerRun]:
    """The workload, after one of short requests that warms up."""
    from nanovllm import LLM, SamplingParams

    llm = LLM(str(folder), enforce_eager=False, max_model_len=max(4096, workload.max_length))

    def once(prompts: list[list[int]], new_tokens: list[int]) -> float:
        params = [
            SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=new) for new in new_tokens
        ]
        start = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - start

    # It compiles parts of itself at first.
    warm = [list(prompt[:50]) for prompt in workload.prompts[:64]]
    once(warm, [4] * len(warm))
    runs = []
    for i in range(repeats):
        prompts = reordered(workload, i + 1).prompts
        seconds = once([list(x) for x in prompts], list(workload.new_tokens))
        runs.append(PeerRun(seconds, workload.num_new_tokens))
    return runs
