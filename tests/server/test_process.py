"""The server as a process: how it says where it is, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from tests.server.fake_engine import FakeEngine
from tests.server.running import IMMORTAL, chat, run
from torch_fdattn.server import ServerOptions
from torch_fdattn.server.run import serve

ROOT = Path(__file__).parents[2]
#: The fake engine behind `serve`; SIGUSR1 kills it, and a thread of it never ends.
PROGRAM = """
import asyncio, signal, sys, threading, time
from tests.server.fake_engine import FakeEngine
from torch_fdattn.server import ServerOptions
from torch_fdattn.server.run import exit_within_limit, serve

def make_engine():
    engine = FakeEngine(lambda prompt: "a" * 100, delay=float(sys.argv[1]))
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, engine.kill)
    if "hangs" in sys.argv:
        threading.Thread(target=time.sleep, args=(1000,)).start()
    return engine

options = ServerOptions(model_name="fake", port=0, grace_seconds=float(sys.argv[2]))
code = serve(make_engine, options, lambda url: print(url, flush=True))
exit_within_limit()
sys.exit(code)
"""


@contextlib.contextmanager
def process(delay: float, grace: float, *more: str):
    """(the process, its URL)."""
    command = [sys.executable, "-c", PROGRAM, str(delay), str(grace), *more]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as server:
        try:
            yield server, server.stdout.readline().strip()
        finally:
            server.kill()


def test_garbage_collection_leaves_alone_what_was_there_before() -> None:
    """A full collection would stop answers for as long as it takes to visit all that is imported."""
    frozen, urls = [], []

    class Engine(FakeEngine):
        def stats(self):
            if urls:  # asked for all the time while the server runs
                frozen.append(gc.get_freeze_count())
                os.kill(os.getpid(), signal.SIGTERM)
            return super().stats()

    assert serve(Engine, ServerOptions(model_name="fake", port=0), urls.append) == 0
    assert frozen[0] > IMMORTAL > gc.get_freeze_count()


def test_a_signal_lets_answers_end() -> None:
    async def test() -> None:
        with process(0.01, 20) as (server, url):
            async with httpx.AsyncClient(timeout=30) as client:
                body = chat(stream=True)
                async with client.stream("POST", f"{url}/v1/chat/completions", json=body) as stream:
                    lines = stream.aiter_lines()
                    await anext(lines)
                    server.send_signal(signal.SIGTERM)
                    *_, last = [x async for x in lines if x]
            assert last == "data: [DONE]"
            assert await asyncio.to_thread(server.wait, 10) == 0
            assert server.stderr.read() == ""

    run(test)


@pytest.mark.parametrize("more", [(), pytest.param(("hangs",), marks=pytest.mark.slow)])
def test_a_signal_does_not_wait_for_ever(more: tuple[str, ...]) -> None:
    """Behind the grace what is in progress is told so. A thread that never ends does not hold the process."""

    async def test() -> None:
        with process(0.3, 1, *more) as (server, url):
            async with httpx.AsyncClient(timeout=30) as client:
                path = f"{url}/v1/chat/completions"
                plain = asyncio.ensure_future(client.post(path, json=chat(n=2)))
                async with client.stream("POST", path, json=chat(stream=True)) as stream:
                    lines = stream.aiter_lines()
                    await anext(lines)
                    server.send_signal(signal.SIGINT)
                    *_, last = [x async for x in lines if x]
                told = [(await plain).json(), json.loads(last.removeprefix("data: "))]
            assert (await plain).status_code == 503
            assert {x["error"]["type"] for x in told} == {"service_unavailable_error"}
            assert await asyncio.to_thread(server.wait, 15) == (1 if more else 0)

    run(test)


@pytest.mark.parametrize(
    "more",
    [pytest.param((), id="ends"), pytest.param(("hangs",), id="hangs", marks=pytest.mark.slow)],
)
def test_a_dead_engine_ends_the_process(more: tuple[str, ...]) -> None:
    async def test() -> None:
        with process(0.05, 20, *more) as (server, url):
            async with httpx.AsyncClient(timeout=30) as client:
                plain = asyncio.ensure_future(client.post(f"{url}/v1/chat/completions", json=chat()))  # fmt: skip
                body = chat(stream=True)
                async with client.stream("POST", f"{url}/v1/chat/completions", json=body) as stream:
                    lines = stream.aiter_lines()
                    await anext(lines)
                    start = time.monotonic()
                    server.send_signal(signal.SIGUSR1)
                    *_, last = [x async for x in lines if x]
                assert "error" in json.loads(last.removeprefix("data: "))
                assert (await plain).status_code == 503
            assert await asyncio.to_thread(server.wait, 12) == 1
            assert time.monotonic() - start < 10

    run(test)


@pytest.mark.slow
def test_a_dead_engine_ends_an_idle_process() -> None:
    with process(0.05, 20) as (server, _):
        server.send_signal(signal.SIGUSR1)
        assert server.wait(10) == 1


def test_the_event_loop_waits_little_for_the_engine() -> None:
    """Python's own interval holds again when the server has ended."""
    from tests.server.running import options
    from torch_fdattn.server.run import serve

    before, seen = sys.getswitchinterval(), []

    def make_engine():
        seen.append(sys.getswitchinterval())
        raise RuntimeError("no engine")

    with pytest.raises(RuntimeError, match="no engine"):
        serve(make_engine, options(port=0), print)
    assert seen == [pytest.approx(1e-4)]
    assert sys.getswitchinterval() == before


def test_a_port_that_is_taken() -> None:
    from tests.server.fake_engine import FakeEngine
    from tests.server.running import options
    from torch_fdattn.server.run import AddressError, serve

    with process(0.05, 20) as (_, url):
        port = int(re.search(r":(\d+)$", url)[1])
        with pytest.raises(AddressError, match=rf"port {port} .*--port"):
            serve(FakeEngine, options(port=port), print)
    with pytest.raises(AddressError, match=r"no\.such\.host"):
        serve(FakeEngine, options(host="no.such.host.example", port=port), print)
