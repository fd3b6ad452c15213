"""One rank of test_followers.py: an `AsyncLLM` on rank 0, a `Follower` on the others, and what they have at the end."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import random
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.engine.sharded_worker import MODELS, engine
from tests.engine.tiny import PROMPTS
from tests.server.fake_engine import CharacterTokenizer
from torch_fdattn.engine import (
    LLM,
    AsyncLLM,
    EngineDead,
    Follower,
    NgramSpeculation,
    RankLost,
    RequestOutput,
    SamplingParams,
)
from torch_fdattn.models import ModelConfig, Transformer, load_tokenizer
from torch_fdattn.models.parallelize import parallelize

LIMIT_SECONDS = 200.0  # a wait that takes longer is in vain
TOKENS = 16
GREEDY = SamplingParams(temperature=0, max_tokens=TOKENS, logprobs=3)
LONG = SamplingParams(temperature=0, max_tokens=100)
UNSEEDED = SamplingParams(temperature=1.5, max_tokens=TOKENS, n=2)
SCHEMA = '{"enum": ["red", 3]}'


async def last(stream: AsyncIterator[RequestOutput]) -> RequestOutput:
    return [output async for output in stream][-1]


async def refused(stream: AsyncIterator[RequestOutput]) -> str:
    try:
        await last(stream)
    except (ValueError, TypeError, EngineDead) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_SECONDS):
        while not condition():
            await asyncio.sleep(0.01)


def idle(stats) -> bool:
    return (stats.running, stats.waiting, stats.pages_used) == (0, 0, 0)


async def answers(asynchronous: AsyncLLM, folder: Path) -> dict:
    """Requests of all kinds at the same time, some of which are refused, aborted or left; then one that is aborted alone."""
    generate = asynchronous.generate
    stops = dataclasses.replace(GREEDY, stop=("7",), max_tokens=60)
    tasks = [asyncio.ensure_future(last(generate(x, GREEDY, f"greedy {x}"))) for x in PROMPTS]
    more = [generate([5, 9], stops, "stops"), generate(PROMPTS[1], UNSEEDED, "drawn"), generate("ab", LONG, "text")]  # fmt: skip
    tasks += [asyncio.ensure_future(last(stream)) for stream in more[:2]]
    left = generate(PROMPTS[0], LONG, "left")
    await anext(left)
    found = {
        "refused": [
            await refused(generate([], GREEDY, "empty")), await refused(generate([1], GREEDY, "left")),
            await refused(generate([1] * 500, GREEDY, "long")), await refused(more[2]),
        ]
    }  # fmt: skip
    await left.aclose()
    outputs = await asyncio.gather(*tasks)
    found["greedy"] = [dataclasses.asdict(x.outputs[0]) for x in outputs[: len(PROMPTS)]]
    found["stops"] = outputs[-2].outputs[0].text
    found["drawn"] = [x.token_ids for x in outputs[-1].outputs]
    output = await last(generate(PROMPTS[3], GREEDY, "prefix"))
    found["cached"] = output.num_cached_tokens
    stream = generate(PROMPTS[0], LONG, "aborted")
    await anext(stream)
    await asynchronous.abort("aborted")
    (folder / "aborted").touch()
    found["aborted"] = (await last(stream)).outputs[0].finish_reason
    await until(lambda: len(list(folder.glob("freed *"))) == asynchronous.llm.num_ranks - 1)
    return found


def notice_freed_pages(llm: LLM, rank: int, folder: Path) -> None:
    """On another rank, while the engine is idle behind an abort."""
    end = time.monotonic() + LIMIT_SECONDS
    while time.monotonic() < end:
        if (folder / "aborted").exists() and idle(llm.stats()):
            (folder / f"freed {rank}").touch()
            return
        time.sleep(0.01)


async def grammars(asynchronous: AsyncLLM, folder: Path) -> dict:
    """Of requests at the same time; one is refused, one is cancelled while its grammar is compiled."""
    schema = SamplingParams(json_schema=SCHEMA, max_tokens=40, seed=1)
    tasks = [
        asyncio.ensure_future(last(asynchronous.generate([i], schema, str(i)))) for i in range(3)
    ]
    cancelled = asyncio.ensure_future(last(asynchronous.generate([9], schema, "cancelled")))
    await asyncio.sleep(0)
    cancelled.cancel()
    bad = dataclasses.replace(schema, json_schema='{"type": 3}')
    found = {"refused": await refused(asynchronous.generate([1], bad, "bad"))}
    found["too long"] = await refused(asynchronous.generate([1] * 2000, schema, "long"))
    found["texts"] = [(await task).outputs[0].text for task in tasks]
    with contextlib.suppress(asyncio.CancelledError):
        await cancelled
    return found


async def many(asynchronous: AsyncLLM, folder: Path) -> dict:
    """Requests that come at drawn times, of which a third is left at drawn times."""
    draw, gate = random.Random(0), asyncio.Semaphore(12)

    async def one(number: int) -> int:
        prompt = [number % 7] * draw.randrange(1, 30)
        params = dataclasses.replace(UNSEEDED, n=1 + number % 2, max_tokens=draw.randrange(1, 40))
        async with gate:
            stream = asynchronous.generate(prompt, params, str(number))
            if number % 3:
                return sum(len(x.token_ids) == params.max_tokens for x in (await last(stream)).outputs)  # fmt: skip
            task = asyncio.ensure_future(last(stream))
            await asyncio.sleep(draw.random() * 0.03)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            return 0

    return {"ended": await asyncio.gather(*map(one, range(90)))}


async def dies(asynchronous: AsyncLLM, folder: Path) -> dict:
    """What a request is told that runs when a step fails, here or on another rank."""
    start = time.monotonic()
    told = await refused(asynchronous.generate(PROMPTS[0], LONG, "a"))
    return {"told": told, "late": await refused(asynchronous.generate([1], LONG, "b")), "seconds": time.monotonic() - start}  # fmt: skip


JOBS: dict[str, Callable[[AsyncLLM, Path], Awaitable[dict]]] = {
    "answers": answers, "grammars": grammars, "many": many, "rank 0 fails": dies, "rank 1 fails": dies
}  # fmt: skip


def make_llm(shape: tuple[int, int], job: str, options: dict) -> LLM:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("kv", "tp"))
    groups = {"kv_group": mesh["kv"]} if shape[0] > 1 else {}
    if job == "grammars":
        torch.manual_seed(0)
        config = ModelConfig("llama", 49152, 32, 48, 1, 2, 1, 16, 1024)
        return LLM(Transformer(config), load_tokenizer("smollm2"), pages=200, max_num_seqs=8, **groups)  # fmt: skip
    model = MODELS["qwen3"]()
    if shape[1] > 1:
        model, groups["tp_group"] = parallelize(model, mesh["tp"], strategy="ag_rs"), mesh["tp"]
    if options.pop("speculates", False):
        options["speculation"] = NgramSpeculation(max_tokens=3, shortest=1)
    options = {"max_model_len": 128, "max_num_seqs": 4, "tokenizer": CharacterTokenizer(), **options}  # fmt: skip
    return engine(model, shape[0], options, **groups)


def fail_in_a_step(llm: LLM) -> None:
    """After some steps."""
    step, steps = llm.step, iter(range(6))

    def fails():
        if next(steps, None) is None:
            raise ZeroDivisionError("of a step")
        return step()

    llm.step = fails


def one_rank(rank: int, folder: Path, shape: tuple[int, int], job: str, options: dict) -> None:
    torch.set_num_threads(1)
    size, store = shape[0] * shape[1], f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
    llm, found = make_llm(shape, job, dict(options)), {}
    if job == f"rank {rank} fails":
        fail_in_a_step(llm)
    if rank == 0:

        async def main() -> dict:
            asynchronous = AsyncLLM(llm)
            try:
                return await asyncio.wait_for(JOBS[job](asynchronous, folder), LIMIT_SECONDS)
            finally:
                await asynchronous.close()

        found = asyncio.run(main())
    else:
        lost = threading.Event()
        follower = Follower(llm, lost.set)
        watch = threading.Thread(target=notice_freed_pages, args=(llm, rank, folder), daemon=True)
        watch.start()
        try:
            follower.run()
        except (RankLost, ZeroDivisionError) as error:
            found["raised"] = f"{type(error).__name__}: {error}"
        found["lost"] = lost.is_set()
    found["stats"] = dataclasses.asdict(llm.stats())
    (folder / f"{rank}.json").write_text(json.dumps(found))
    if "fails" not in job:
        dist.destroy_process_group()
