"""A real server on a free port: many at once, clients that go away, stop reading or never finish, its end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import random
import socket

import httpx
import pytest

from tests.server.fake_engine import FakeEngine
from tests.server.running import chat, client_of, run, served, until


async def opened(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))


def posted(body: dict, path: str = "/v1/chat/completions") -> bytes:
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    return head.encode() + content


def test_openais_client() -> None:
    openai = pytest.importorskip("openai", reason="needs the package openai")

    async def test() -> None:
        engine = FakeEngine(lambda prompt: "<think>hm</think>Tokyo.")
        async with served(engine, api_key="secret") as url:
            client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="secret", max_retries=0)
            messages = [{"role": "user", "content": "Capital of Japan?"}]
            answer = await client.chat.completions.create(model="fake", messages=messages)
            assert answer.choices[0].message.content == "Tokyo."
            # What it gives back is taken again.
            messages += [answer.choices[0].message, messages[0]]
            stream = await client.chat.completions.create(
                model="fake", messages=messages, stream=True, n=2, logprobs=True, top_logprobs=1,
                stream_options={"include_usage": True},
            )  # fmt: skip
            text, reasons, usage, places = "", [], None, 0
            async for chunk in stream:
                usage = chunk.usage or usage
                for choice in chunk.choices:
                    if choice.index == 0:
                        text += choice.delta.content or ""
                        places += len(choice.logprobs.content) if choice.logprobs else 0
                    reasons += [choice.finish_reason] if choice.finish_reason else []
            assert (text, reasons) == ("Tokyo.", ["stop", "stop"])
            assert places == len("<think>hm</think>Tokyo.")
            assert usage.completion_tokens == 2 * places + 1
            plain = await client.completions.create(model="fake", prompt="a", max_tokens=3)
            assert plain.choices[0].text == "<th"
            assert [x.id async for x in client.models.list()] == ["fake"]
            with pytest.raises(openai.BadRequestError, match="temperature") as error:
                await client.chat.completions.create(model="fake", messages=messages, temperature=-1)  # fmt: skip
            assert error.value.param == "temperature"
            with pytest.raises(openai.NotFoundError):
                await client.chat.completions.create(model="other", messages=messages)
            other = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0)
            with pytest.raises(openai.AuthenticationError):
                await other.models.list()
            engine.delay = 0.05
            stream = await client.chat.completions.create(
                model="fake", messages=messages, stream=True
            )
            await anext(stream)
            engine.kill()
            with pytest.raises(openai.APIError, match="the engine has failed"):
                [x async for x in stream]

    run(test)


def test_64_at_once() -> None:
    async def test() -> None:
        engine = FakeEngine(delay=0.001)
        async with (
            served(engine, max_sequences=64) as url,
            httpx.AsyncClient(timeout=60, limits=httpx.Limits(max_connections=64)) as client,
        ):

            async def one(i: int) -> str:
                body = {"prompt": f"request {i}", "stream": i % 2 == 0}
                answer = await client.post(f"{url}/v1/completions", json=body)
                assert answer.status_code == 200, answer.text
                if i % 2:
                    return answer.json()["choices"][0]["text"]
                events = [x[6:] for x in answer.text.split("\n\n") if x.startswith("data: {")]
                return "".join(json.loads(x)["choices"][0]["text"] for x in events)

            texts = await asyncio.gather(*map(one, range(64)))
            assert texts == [f"request {i}"[::-1] for i in range(64)]
            assert not engine.pages

    run(test)


def test_too_many_at_once() -> None:
    async def test() -> None:
        engine = FakeEngine(delay=0.01)
        async with client_of(engine, max_sequences=2) as client:
            body = {"prompt": "a" * 99, "max_tokens": 50}
            first = asyncio.ensure_future(client.post("/v1/completions", json=body | {"n": 2}))
            await until(lambda: bool(engine.pages))
            for stream in (False, True):
                answer = await client.post("/v1/completions", json=body | {"stream": stream})
                assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
                assert answer.json()["error"]["type"] == "rate_limit_error"
            assert (await first).status_code == 200
            assert (await client.post("/v1/completions", json=body)).status_code == 200

    run(test)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("half", [False, True], ids=["closed", "half-closed"])
def test_a_client_that_goes_away_frees_the_pages(stream: bool, half: bool) -> None:
    async def test() -> None:
        engine = FakeEngine(lambda prompt: "a" * 100_000, delay=0.01, max_model_len=200_000)
        async with served(engine) as url:
            reader, writer = await opened(url)
            writer.write(posted(chat(stream=stream, n=3)))
            await until(lambda: len(engine.pages) == 1)
            if stream:
                assert b"200 OK" in await reader.readline()
            if half:
                writer.write_eof()
            else:
                writer.close()
            await until(lambda: not engine.pages, seconds=1)
            writer.close()
            async with httpx.AsyncClient() as client:
                assert (await client.get(f"{url}/health")).status_code == 200

    run(test)


def test_a_reader_that_stops() -> None:
    async def test() -> None:
        engine = FakeEngine(lambda prompt: "a" * 1_000_000, max_model_len=2_000_000)
        engine.llm.tokenizer.decode = lambda ids: ""
        async with served(engine, write_seconds=0.5) as url:
            _, writer = await opened(url)
            # Log-probabilities make each event larger, so that the buffers fill.
            writer.write(posted(chat(stream=True, logprobs=True, top_logprobs=5)))
            await until(lambda: bool(engine.pages))
            await until(lambda: not engine.pages, seconds=30)
            writer.transport.abort()

    run(test)


@pytest.mark.parametrize(
    "part", [0, 1, 1 << 20], ids=["takes nothing", "next to nothing", "is slow"]
)
def test_a_reader_of_an_answer_in_one(part: int) -> None:
    """Larger than what the operating system holds of it: who takes nothing is gone, who is slow gets all of it."""

    async def test() -> None:
        size = 16 << 20
        engine = FakeEngine(lambda prompt: "a")
        engine._advance = lambda output, target, params: (
            setattr(output, "text", "a" * size), setattr(output, "finish_reason", "stop"),
        )  # fmt: skip
        async with served(engine, write_seconds=1.5) as url:
            with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as client:
                client.setblocking(False)
                loop = asyncio.get_running_loop()
                await loop.sock_sendall(client, posted(chat()))
                got = 0
                with contextlib.suppress(ConnectionError):
                    for _ in range(8):  # longer than the limit in all
                        await asyncio.sleep(0.25)
                        got += len(await loop.sock_recv(client, part)) if part else 0
                    while got < size and (rest := await loop.sock_recv(client, 1 << 20)):
                        got += len(rest)
                assert (got > size) == (part > 1)

    run(test)


def test_bodies_that_do_not_come() -> None:
    async def test() -> None:
        async with served(FakeEngine(), body_seconds=0.3) as url:
            reader, writer = await opened(url)
            writer.write(posted(chat())[:-5])
            assert b"408" in await asyncio.wait_for(reader.readline(), 5)
            writer.close()
            _, gone = await opened(url)
            gone.write(posted(chat())[:-5])
            gone.write_eof()
            gone.close()
            for junk in (b"\r\n\r\n", b"GET\r\n\r\n", b"\x16\x03\x01" + bytes(200), b"A" * 100_000):
                reader, writer = await opened(url)
                writer.write(junk)
                with contextlib.suppress(ConnectionError):
                    writer.write_eof()
                    answer = await asyncio.wait_for(reader.read(), 5)
                    assert not answer.startswith(b"HTTP/1.1 5")
                writer.close()
            async with httpx.AsyncClient() as client:
                assert (await client.get(f"{url}/health")).status_code == 200

    run(test)


def test_an_engine_that_fails() -> None:
    async def test() -> None:
        engine = FakeEngine(lambda prompt: "a" * 1000, delay=0.05)
        async with served(engine) as url, httpx.AsyncClient() as client:
            plain = asyncio.ensure_future(client.post(f"{url}/v1/chat/completions", json=chat()))
            async with client.stream("POST", f"{url}/v1/chat/completions", json=chat(stream=True)) as stream:  # fmt: skip
                lines = stream.aiter_lines()
                assert "assistant" in await anext(lines)
                engine.kill()
                *_, last = [x async for x in lines if x]
                assert json.loads(last.removeprefix("data: "))["error"]["type"] == (
                    "service_unavailable_error"
                )
            assert (await plain).status_code == 503
            for body in (chat(), chat(stream=True)):
                answer = await client.post(f"{url}/v1/chat/completions", json=body)
                assert answer.status_code == 503
            assert (await client.get(f"{url}/health")).status_code == 503
            metrics = await client.get(f"{url}/metrics")
            assert metrics.status_code == 200
            assert "fdattn_kv_pages" not in metrics.text

    run(test)


def test_an_engine_that_ends_a_request() -> None:
    class Aborting(FakeEngine):
        def _advance(self, output, target, params) -> None:
            super()._advance(output, target, params)
            if len(output.token_ids) == 3:
                output.finish_reason = "abort"

    async def test() -> None:
        async with client_of(Aborting()) as client:
            assert (await client.post("/v1/chat/completions", json=chat())).status_code == 503
            answer = await client.post("/v1/completions", json={"prompt": "abcd", "stream": True})
            assert answer.status_code == 200
            assert "error" in json.loads(answer.text.strip().split("\n\n")[-1][6:])

    run(test)


class Failing(FakeEngine):
    """Completions of grammars end at a token of theirs."""

    at = 3

    def _advance(self, output, target, params) -> None:
        super()._advance(output, target, params)
        if params.is_structured and len(output.token_ids) == self.at:
            name = "grammar" if params.json_schema is None else "json_schema"
            output.finish_reason = "error"
            output.error = f"{name} is beyond llguidance's limits: Too many items"


def test_a_grammar_that_fails_ends_its_own_request() -> None:
    engine = Failing(delay=0.001)
    schema = {"response_format": {"type": "json_object"}}
    grammar = {"prompt": "abcd", "grammar": "start: x"}

    async def test() -> None:
        async with client_of(engine) as client:

            def ask(path: str, body: dict):
                return asyncio.ensure_future(client.post(path, json=body))

            plain = ask("/v1/chat/completions", chat())
            answers = [
                (await ask("/v1/chat/completions", chat(n=2, **schema)), "response_format"),
                (await ask("/v1/completions", grammar), "grammar"),
            ]
            for answer, param in answers:
                assert answer.status_code == 400, answer.text
                error = answer.json()["error"]
                assert error["param"] == param
                assert error["message"] == f"{param} is beyond llguidance's limits: Too many items"
            answer = await ask("/v1/completions", {**grammar, "stream": True})
            assert answer.status_code == 200
            *chunks, last = answer.text.strip().split("\n\n")
            assert len(chunks) == 2
            assert json.loads(last[6:])["error"]["param"] == "grammar"
            engine.at = 1  # before the stream has begun
            answer = await ask("/v1/completions", {**grammar, "stream": True})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "grammar")
            assert (await plain).status_code == 200
            assert (await client.get("/health")).status_code == 200
            assert engine.pages == {}

    run(test)


@pytest.mark.slow
def test_a_thousand_requests_with_a_third_cancelled_leak_nothing() -> None:
    async def test() -> None:
        engine = FakeEngine(lambda prompt: "a" * 40, delay=0.002)
        generator = random.Random(0)
        async with served(engine, max_sequences=128) as url:
            slots = asyncio.Semaphore(48)

            async def one(i: int, client: httpx.AsyncClient) -> None:
                async with slots:
                    body = chat(f"request {i}", stream=i % 2 == 0, n=1 + i % 2, max_tokens=30)
                    work = client.post(f"{url}/v1/chat/completions", json=body)
                    if i % 3:
                        assert (await work).status_code == 200
                    else:
                        with contextlib.suppress(TimeoutError):
                            await asyncio.wait_for(work, generator.uniform(0.001, 0.1))

            async def rounds(numbers: range) -> tuple[int, int]:
                async with httpx.AsyncClient(timeout=60) as client:
                    await asyncio.gather(*(one(i, client) for i in numbers))
                await until(lambda: not engine.pages)
                await asyncio.sleep(0.3)
                engine.seen.clear()
                gc.collect()
                return len(asyncio.all_tasks()), len(gc.get_objects())

            before = await rounds(range(200))
            after = await rounds(range(1000))
            assert after[0] == before[0]
            assert after[1] < before[1] + 2000  # of some 300,000: an object a request would show

    run(test)
