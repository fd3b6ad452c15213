"""`fdattn serve` on several ranks, a process each: one process's answers, and how all of them end."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import pytest

pytest.importorskip("typer", reason="needs the extra cli")

from tests import checkout
from tests.forked import Forked, forked
from tests.server.running import httpx, until
from tests.tiny_model import save_tiny_model
from torch_fdattn import engine, models

ROOT = Path(__file__).parents[2]
WORKER = Path(__file__).with_name("serve_worker.py")
ENVIRONMENT = checkout.environment(OMP_NUM_THREADS="1")
START_SECONDS, LIMIT_SECONDS = 120, 240
PROMPTS = ["aaa", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", "a"]
TENSOR_PARALLEL = ("--tensor-parallel", "2")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


def run(test: Callable) -> None:
    asyncio.run(asyncio.wait_for(test(), LIMIT_SECONDS))


def arguments(folder: Path, *options: str) -> list[str]:
    common = ["--device", "cpu", "--port", "0", "--page-size", "4", "--pages", "80", "--model-name", "tiny"]  # fmt: skip
    return ["serve", "--model", str(folder), *common, *options]


async def url_in(log: Path) -> str:
    """Of a server that is starting."""
    pattern = re.compile(r"http://[\d.]+:\d+")
    try:
        await until(lambda: log.exists() and pattern.search(log.read_text()), START_SECONDS)
    except TimeoutError:
        pytest.fail(
            f"no server within {START_SECONDS} s: {log.read_text() if log.exists() else ''}"
        )
    return pattern.search(log.read_text())[0]


@contextlib.asynccontextmanager
async def serving(
    folder: Path, ranks: int, *options: str, hangs: int | None = None
) -> AsyncIterator[tuple[list[Forked], httpx.AsyncClient]]:
    """The ranks, and a client of the server. hangs: the rank whose steps do not end."""
    environment = {**ENVIRONMENT, "FDATTN_TEST_HANGS": str(hangs)}
    with forked(WORKER, *arguments(folder, *options), environment=environment, ranks=ranks) as found:  # fmt: skip
        url = await url_in(found[0].err)
        async with httpx.AsyncClient(base_url=url, timeout=LIMIT_SECONDS) as client:
            yield found, client


def body(prompt: str, **more) -> dict:
    return {"prompt": prompt, "temperature": 0, "max_tokens": 24, "ignore_eos": True, **more}


async def texts_of(stream: httpx.Response) -> list[str]:
    """The events' data, as they come."""
    return [x.removeprefix("data: ") async for x in stream.aiter_lines() if x]


def streaming(client: httpx.AsyncClient, prompt: str, **more):
    return client.stream("POST", "/v1/completions", json=body(prompt, stream=True, **more))


@functools.cache
def of_one_process(folder: Path) -> list[str]:
    llm = engine.LLM(models.load_model(folder), models.load_tokenizer(folder), pages=80)
    params = engine.SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    return [x.outputs[0].text for x in llm.generate(PROMPTS, params)]


async def exit_codes(ranks: Sequence[Forked], seconds: float = START_SECONDS) -> list[int]:
    await until(lambda: all(x.process.exitcode is not None for x in ranks), seconds)
    return [x.process.exitcode for x in ranks]


async def pages_used(client: httpx.AsyncClient) -> int:
    text = (await client.get("/metrics")).text
    return int(float(re.search(r"^fdattn_kv_pages_used (\S+)$", text, re.MULTILINE)[1]))


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (2, TENSOR_PARALLEL),
        (2, ("--strategy", "ring", "--ngram-tokens", "3")),
        pytest.param(4, (*TENSOR_PARALLEL, "--tp-strategy", "ag_rs"), marks=pytest.mark.slow),
        pytest.param(4, (), marks=pytest.mark.slow),
    ],
)
def test_answers_and_a_graceful_end(ranks, options, tiny) -> None:
    async def test() -> None:
        async with serving(tiny, ranks, *options) as (processes, client):
            answers = await asyncio.gather(
                *(client.post("/v1/completions", json=body(prompt)) for prompt in PROMPTS)
            )
            assert [x.json()["choices"][0]["text"] for x in answers] == of_one_process(tiny)
            async with streaming(client, PROMPTS[0]) as stream:
                *events, done = await texts_of(stream)
            parts = [json.loads(x)["choices"][0]["text"] for x in events]
            assert ("".join(parts), done) == (of_one_process(tiny)[0], "[DONE]")
            refused = await client.post("/v1/completions", json=body("a", max_tokens=1000))
            assert refused.status_code == 400
            async with streaming(client, "aa", max_tokens=100) as stream:
                await anext(stream.aiter_lines())
            async with asyncio.timeout(LIMIT_SECONDS):  # the client has gone
                while await pages_used(client):
                    await asyncio.sleep(0.02)
            async with streaming(client, PROMPTS[0], max_tokens=100) as stream:
                lines = stream.aiter_lines()
                await anext(lines)
                for rank in processes:  # as torchrun does
                    os.kill(rank.process.pid, signal.SIGTERM)
                *_, last = [x async for x in lines if x]
            assert last == "data: [DONE]"
            assert await exit_codes(processes) == [0] * ranks
            assert [x.err.read_text() for x in processes[1:]] == [""] * (ranks - 1)

    run(test)


@pytest.mark.parametrize(
    ("ranks", "options"), [(2, TENSOR_PARALLEL), pytest.param(4, (), marks=pytest.mark.slow)]
)
def test_a_killed_rank_ends_answers_and_all_processes(ranks, options, tiny) -> None:
    async def test() -> None:
        async with serving(tiny, ranks, *options) as (processes, client):
            plain = asyncio.ensure_future(client.post("/v1/completions", json=body("a", max_tokens=100)))  # fmt: skip
            async with streaming(client, "aa", max_tokens=100) as stream:
                lines = stream.aiter_lines()
                await anext(lines)
                start = time.monotonic()
                processes[1].process.kill()
                *_, last = [x async for x in lines if x]
            error = json.loads(last.removeprefix("data: "))["error"]
            assert error["type"] == "service_unavailable_error"
            assert (await plain).status_code == 503
            codes = await exit_codes(processes)
            assert time.monotonic() - start < 10
            assert codes == [1, -signal.SIGKILL, *[1] * (ranks - 2)]
            told = processes[0].err.read_text()
            assert "the engine ends: rank 1 of the engine is gone" in told
            for rank in range(2, ranks):
                assert f"(rank {rank}): rank 0 of the engine" in processes[rank].err.read_text()

    run(test)


def test_rank_0_killed_while_it_answers(tiny) -> None:
    async def test() -> None:
        async with serving(tiny, 2) as (processes, client):
            async with streaming(client, "aa", max_tokens=100) as stream:
                await anext(stream.aiter_lines())
                start = time.monotonic()
                processes[0].process.kill()
                assert await exit_codes(processes) == [-signal.SIGKILL, 1]
            assert time.monotonic() - start < 10
            told = processes[1].err.read_text()
            assert "fdattn (rank 1): rank 0 of the engine is gone" in told

    run(test)


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1])
def test_a_rank_killed_while_nobody_asks(killed, tiny) -> None:
    async def test() -> None:
        async with serving(tiny, 2, *TENSOR_PARALLEL) as (processes, _):
            start = time.monotonic()
            processes[killed].process.kill()
            codes = await exit_codes(processes)
            assert time.monotonic() - start < 10
            assert codes == ([-signal.SIGKILL, 1] if killed == 0 else [1, -signal.SIGKILL])

    run(test)


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1])
def test_a_rank_whose_step_waits_for_the_killed_one_ends_too(killed, tiny) -> None:
    async def test() -> None:
        async with serving(tiny, 2, hangs=1 - killed) as (processes, client):
            plain = asyncio.ensure_future(client.post("/v1/completions", json=body("a")))
            await asyncio.sleep(1)
            start = time.monotonic()
            processes[killed].process.kill()
            if killed == 0:
                with pytest.raises(httpx.TransportError):
                    await plain
            else:
                assert (await plain).status_code == 503
            codes = await exit_codes(processes)
            assert time.monotonic() - start < 10
            assert codes == ([-signal.SIGKILL, 1] if killed == 0 else [1, -signal.SIGKILL])

    run(test)


@pytest.mark.slow
def test_a_port_that_is_taken_ends_all_ranks(tiny) -> None:
    async def test() -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            own = arguments(tiny, "--port", str(taken.getsockname()[1]))
            with forked(WORKER, *own, environment=ENVIRONMENT, ranks=2) as processes:
                assert await exit_codes(processes) == [2, 1]
                told = [x.err.read_text() for x in processes]
        assert "fdattn (rank 0): cannot listen on 127.0.0.1" in told[0]
        assert "fdattn (rank 1): not all of the engine's 2 ranks came" in told[1]
        assert "Traceback" not in told[1]

    run(test)


@pytest.mark.slow
def test_ranks_that_wait_take_no_processor_time(tiny) -> None:
    """No more than threads that look around once a second."""

    def ticks(rank: Forked) -> int:
        fields = Path(f"/proc/{rank.process.pid}/stat").read_text().rpartition(") ")[2].split()
        return int(fields[11]) + int(fields[12])

    async def test() -> None:
        async with serving(tiny, 2) as (processes, client):
            await client.post("/v1/completions", json=body("a"))
            before = [ticks(x) for x in processes]
            await asyncio.sleep(5)
            used = [ticks(x) - y for x, y in zip(processes, before, strict=True)]
            assert max(used) < 0.1 * 5 * os.sysconf("SC_CLK_TCK")

    run(test)


@pytest.mark.slow
def test_torchrun_that_is_told_to_end(tiny, tmp_path) -> None:
    """It hands the signal on; an answer in progress ends as it should."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [sys.executable, *launcher, str(WORKER), *arguments(tiny, *TENSOR_PARALLEL)]
    log = tmp_path / "log"

    async def test() -> None:
        with log.open("w") as file:
            launched = subprocess.Popen(command, env=ENVIRONMENT, cwd=ROOT, stderr=file)
        try:
            url = await url_in(log)
            async with (
                httpx.AsyncClient(base_url=url, timeout=LIMIT_SECONDS) as client,
                streaming(client, "aa", max_tokens=100) as stream,
            ):
                lines = stream.aiter_lines()
                await anext(lines)
                launched.terminate()
                *_, last = [x async for x in lines if x]
            assert last == "data: [DONE]"
            await asyncio.to_thread(launched.wait, START_SECONDS)
            assert "exitcode" not in log.read_text()  # of a rank that failed
        finally:
            launched.kill()

    run(test)
