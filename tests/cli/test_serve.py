"""`fdattn serve` and `fdattn bench serve`: what their options refuse, before anything is loaded."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.cli.commands import invoke, refused
from tests.server.fake_engine import FakeEngine
from tests.server.running import served
from torch_fdattn import models


@pytest.mark.parametrize(
    ("message", "arguments"),
    [
        ("no such file or folder", ["serve", "--model", "no such model"]),
        ("--model-name must not be empty", ["serve", "--model", ".", "--model-name", ""]),
        ("--api-key must be printable ASCII", ["serve", "--model", ".", "--api-key", "é"]),
        ("--device", ["serve", "--model", "x", "--device", "tpu"]),
        ("--rate needs --url", ["bench", "serve", "--rate", "3"]),
        ("--peer is for", ["bench", "serve", "--url", "http://x", "--peer", "nano-vllm"]),
        ("--trace is for", ["bench", "serve", "--url", "http://x", "--trace", "trace.json"]),
        ("--trace no such folder/trace.json: No such file", ["bench", "serve", "--trace", "no such folder/trace.json"]),
        ("lengths must be", ["bench", "serve", "--url", "http://x", "--shortest", "9", "--longest", "8"]),
    ],
)  # fmt: skip
def test_refusals(message: str, arguments: list[str]) -> None:
    refused(message, *arguments)


def test_bench_of_a_running_server(tmp_path) -> None:
    out = tmp_path / "figures.json"
    common = ["bench", "serve", "--requests", "4", "--shortest", "2", "--longest", "6", "--out", str(out)]  # fmt: skip

    async def measure(text: str):
        async with served(FakeEngine(lambda prompt: text)) as url:
            return await asyncio.to_thread(invoke, *common, "--url", url, "--rate", "100")

    done = asyncio.run(measure("a" * 9))
    assert done.exit_code == 0, done.output
    assert "100 requests/s (Poisson): " in done.stdout
    assert "TTFT ms: mean" in done.stdout
    record = json.loads(out.read_text())
    assert (record["requests"], record["failures"], record["rate"]) == (4, [], 100.0)
    done = asyncio.run(measure(""))
    assert done.exit_code == 1
    assert "requests failed: an answer must have" in done.stdout


def test_bench_with_speculation(monkeypatch, tmp_path) -> None:
    """In this process; of a tiny model, so that random weights repeat themselves."""
    config = models.ModelConfig("qwen3", 16, 32, 48, 1, 4, 2, 16, 128)
    monkeypatch.setattr(models, "named_config", lambda shape: config)
    out = tmp_path / "figures.json"
    common = ["bench", "serve", "--requests", "4", "--longest", "40", "--shortest", "20", "--device", "cpu"]  # fmt: skip
    done = invoke(*common, "--repeats", "1", "--ngram-tokens", "3", "--out", str(out))
    assert done.exit_code == 0, done.output
    counts = json.loads(out.read_text())["speculation"]
    assert 0 < counts["accepted"] < counts["proposed"]
    line = f"n-grams: {counts['accepted']:,} of {counts['proposed']:,} proposed tokens accepted"
    assert line in done.stdout


def test_no_server(tmp_path) -> None:
    done = invoke("bench", "serve", "--url", "http://127.0.0.1:9", "--requests", "1")
    assert done.exit_code == 1
    assert "1 of 1 requests failed" in done.stdout
