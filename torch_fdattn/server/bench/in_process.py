"""The workload through `LLM` in this process, all requests at the start."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Protocol

from torch_fdattn.engine.heap import frozen_heap
from torch_fdattn.engine.llm import LLM
from torch_fdattn.engine.outputs import RequestOutput
from torch_fdattn.engine.sampling_params import SamplingParams
from torch_fdattn.engine.step_trace import StepTrace
from torch_fdattn.server.bench.timings import TimedRun, Timing
from torch_fdattn.server.bench.workload import Workload, reordered

_TEMPERATURE = 0.6  # drawing is part of a step
_WARM_REQUESTS, _WARM_TOKENS = 64, 4
_TRACED_STEPS = 64  # a trace of a thousand would be of gigabytes


class SteppedLLM(Protocol):
    """What is asked of `torch_fdattn.engine.LLM`."""

    has_unfinished: bool

    def add_request(self, request_id: str, prompt: list[int], params: SamplingParams) -> None: ...

    def step(self) -> list[RequestOutput]: ...


def run_workload(llm: SteppedLLM, workload: Workload, repeats: int = 2) -> list[TimedRun]:
    """Runs of the workload, after one of short requests that warms up; as a server runs, with what there is frozen."""
    warm = Workload(
        tuple(prompt[:50] for prompt in workload.prompts[:_WARM_REQUESTS]),
        (_WARM_TOKENS,) * min(_WARM_REQUESTS, len(workload.prompts)),
        workload.num_ids,
    )
    _run_once(llm, warm)
    with frozen_heap():
        return [_run_once(llm, reordered(workload, i + 1)) for i in range(repeats)]


def trace_workload(llm: LLM, workload: Workload, path: Path) -> StepTrace:
    """The first steps of one more run, traced; the rest of it is left."""
    ids = _add(llm, reordered(workload, -1))
    with llm.trace(path) as trace:
        for _ in range(_TRACED_STEPS):
            if llm.has_unfinished:
                llm.step()
    for request_id in ids:
        llm.abort(request_id)
    return trace


def _add(llm: SteppedLLM, workload: Workload) -> list[str]:
    """The requests' ids."""
    for i, (prompt, new) in enumerate(zip(workload.prompts, workload.new_tokens, strict=True)):
        params = SamplingParams(temperature=_TEMPERATURE, max_tokens=new, ignore_eos=True)
        llm.add_request(str(i), list(prompt), params)
    return [str(i) for i in range(len(workload.prompts))]


def _run_once(llm: SteppedLLM, workload: Workload) -> TimedRun:
    start = time.perf_counter()
    timings = {request_id: Timing(start) for request_id in _add(llm, workload)}
    while llm.has_unfinished:
        outputs = llm.step()
        now = time.perf_counter()
        for output in outputs:
            timings[output.request_id].saw(now, len(output.outputs[0].token_ids))
    run = TimedRun(list(timings.values()), workload.num_prompt_tokens)
    if (new := run.figures()["new_tokens"]) != workload.num_new_tokens:
        raise RuntimeError(f"the engine must give {workload.num_new_tokens} tokens, gave {new}")
    return run
