"""The workload against a running server: requests arrive as a Poisson process, or all at the start."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass

from torch_fdattn.server.bench.http_client import AnswerError, post_events
from torch_fdattn.server.bench.timings import TimedRun, Timing
from torch_fdattn.server.bench.workload import Workload


@dataclass(frozen=True)
class ServedRun:
    """failures: what went wrong with the requests that are not in `run`."""

    run: TimedRun
    failures: list[str]


def run_against(
    url: str, workload: Workload, *, rate: float | None, api_key: str | None = None, seed: int = 0
) -> ServedRun:
    """Sends the workload to `url`'s /v1/completions.

    Args:
        url: of the server, as http://127.0.0.1:8000.
        rate: requests a second; None: all at the start.
        seed: of the arrivals.
    """
    return asyncio.run(
        send_workload(url.rstrip("/") + "/v1/completions", workload, rate, api_key, seed)
    )


async def send_workload(
    url: str, workload: Workload, rate: float | None, api_key: str | None, seed: int
) -> ServedRun:
    """`run_against` in a running event loop; url: of the completions."""
    generator = random.Random(seed)
    tasks, timings = [], []
    failures: list[str] = []
    arrival = time.perf_counter()
    for prompt, new in zip(workload.prompts, workload.new_tokens, strict=True):
        if rate is not None:
            arrival += generator.expovariate(rate)
            await asyncio.sleep(max(0.0, arrival - time.perf_counter()))
        timings.append(Timing(time.perf_counter()))
        body = {"prompt": list(prompt), "max_tokens": new, "ignore_eos": True, "temperature": 0.6}
        tasks.append(asyncio.ensure_future(_one(url, body, api_key, timings[-1], failures)))
    await asyncio.gather(*tasks)
    return ServedRun(TimedRun(timings, workload.num_prompt_tokens), failures)


async def _one(
    url: str, body: dict, api_key: str | None, timing: Timing, failures: list[str]
) -> None:
    """A chunk is a token, unless it holds more: the usage at the end says how many there were."""
    body = body | {"stream_options": {"include_usage": True}}
    chunks: list[float] = []
    count = 0
    try:
        async for event in post_events(url, body, api_key):
            if event["choices"]:
                chunks.append(time.perf_counter())
            if event.get("usage"):
                count = event["usage"]["completion_tokens"]
    except (AnswerError, OSError) as error:
        failures.append(str(error))
        return
    if count != body["max_tokens"]:
        failures.append(f"an answer must have {body['max_tokens']} tokens, had {count}")
        return
    # The tokens that came without a chunk of their own (text is held back, or a slow reader was given
    # several at once) are spread over the chunks in equal parts.
    for i, seen in enumerate(chunks):
        timing.saw(seen, max(1, round((i + 1) * count / len(chunks))))
