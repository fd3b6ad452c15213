"""A thousand requests of all kinds to a server over the real engine, a third of them cancelled: nothing is left of them."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import random
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import pytest

from tests.server.running import chat, httpx, served, until
from tests.server.tiny_engine import tiny_llm
from torch_fdattn import engine

pytest.importorskip("llguidance", reason="needs the extra structured")

LIMIT_SECONDS = 600
#: Of prompts that differ: tokenizers keeps ten thousand that it has seen, on each of its threads.
WORDS = 20
THREADS = 4
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
#: What requests have beside a prompt, in turn; a random model ends none of them by itself.
KINDS = (
    {}, {"n": 2, "temperature": 1.5}, {"seed": 3, "logprobs": True, "top_logprobs": 3},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
    {"stop": ["e", "zz"], "presence_penalty": 0.5}, {"grammar": 'start: ("yes" | "no ")+'},
    {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.2}, {"temperature": 0, "min_tokens": 20},
)  # fmt: skip


class Left(NamedTuple):
    """What there is after many requests. Not what the process holds: that grows as free memory is cut into pieces."""

    tasks: int
    threads: int
    objects: int
    blocks: int  # of Python's memory
    memory: float  # MiB of C's


class _Malloc(ctypes.Structure):
    """glibc's struct mallinfo2."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    ]  # fmt: skip


_malloc = ctypes.CDLL(None).mallinfo2
_malloc.restype = _Malloc


def left() -> Left:
    gc.collect()
    found = _malloc()
    in_use = (found.uordblks + found.hblkhd) / 2**20
    return Left(
        len(asyncio.all_tasks()), threading.active_count(), len(gc.get_objects()), sys.getallocatedblocks(), in_use,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{}, {"speculation": engine.NgramSpeculation(max_tokens=3)}],
    ids=["plain", "speculation"],
)
def test_a_thousand_requests_with_a_third_cancelled_leave_nothing(options, tmp_path) -> None:
    llm = tiny_llm(tmp_path, **options)
    draw = random.Random(0)

    async def one(i: int, url: str, client: httpx.AsyncClient) -> str:
        """How it ended: a third is cancelled, streams of them after a few events."""
        body = chat(f"request {i % WORDS} " * draw.randrange(1, 4), stream=i % 2 == 0, max_tokens=draw.randrange(20, 60))  # fmt: skip
        path, body = f"{url}/v1/chat/completions", body | KINDS[i % len(KINDS)]
        if i % 3:
            answer = await client.post(path, json=body)
            assert answer.status_code == 200, answer.text
            return "answered"
        if body["stream"]:
            async with client.stream("POST", path, json=body) as answer:
                events = answer.aiter_lines()
                for _ in range(draw.randrange(8)):
                    await anext(events, None)
            return "left while it was streamed"
        try:
            await asyncio.wait_for(client.post(path, json=body), draw.uniform(0.001, 1))
            return "answered before it was left"
        except TimeoutError:
            return "left while it was waited for"

    async def ask(numbers: range, url: str) -> tuple[Left, dict[str, int]]:
        slots, ends = asyncio.Semaphore(48), []

        async def in_a_slot(i: int, client: httpx.AsyncClient) -> None:
            async with slots:
                ends.append(await one(i, url, client))

        async with httpx.AsyncClient(timeout=LIMIT_SECONDS) as client:
            await asyncio.gather(*(in_a_slot(i, client) for i in numbers))
        await until(lambda: not llm.has_unfinished, seconds=20)
        stats, scheduler = llm.stats(), llm._scheduler
        assert (stats.running, stats.waiting, stats.pages_used) == (0, 0, 0)
        assert sorted(scheduler._free_rows) == list(range(16))
        assert not llm._requests
        await asyncio.sleep(0.3)  # connections end
        return left(), {end: ends.count(end) for end in sorted(set(ends))}

    async def test() -> None:
        # Each thread keeps freed memory for itself, which counts as memory in use: few enough that all have had their share.
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(THREADS))
        asynchronous = engine.AsyncLLM(llm)
        async with served(asynchronous) as url:
            before, _ = await ask(range(500), url)
            after, ends = await ask(range(1000), url)
            assert not asynchronous._running
            assert not asynchronous._waiting
            print(before, after, ends, llm.stats())
            assert ends["answered"] == 666
            assert ends["left while it was streamed"] == 167
            assert ends["left while it was waited for"] > 50
            assert llm.stats().preemptions > 0
            assert after.tasks == before.tasks
            assert after.threads == before.threads
            assert after.objects < before.objects + 1000  # an object a request would show
            assert after.blocks < before.blocks + 4000
            assert after.memory < before.memory + 1
        await asynchronous.close()

    asyncio.run(asyncio.wait_for(test(), LIMIT_SECONDS))
