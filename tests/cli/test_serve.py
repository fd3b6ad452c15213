"""`fdattn serve` and `fdattn bench serve`: what their options refuse, before anything is loaded."""

from __future__ import annotations

import asyncio
import gc
import importlib
import json
import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.cli.commands import invoke, refused
from tests.forked import call_on_ranks
from tests.ports import free_port
from tests.server.fake_engine import FakeEngine
from tests.server.running import IMMORTAL, served
from torch_fdattn import models
from torch_fdattn.cli import setup
from torch_fdattn.cli.world import World


@pytest.mark.parametrize(
    ("message", "arguments"),
    [
        ("no such file or folder", ["serve", "--model", "no such model"]),
        ("--model-name must not be empty", ["serve", "--model", ".", "--model-name", ""]),
        ("--api-key must be printable ASCII", ["serve", "--model", ".", "--api-key", "é"]),
        ("--tensor-parallel must divide .*, 1, got 3", ["serve", "--model", "x", "--tensor-parallel", "3"]),
        ("--tensor-parallel must divide .*, 1, got 3", ["bench", "serve", "--tensor-parallel", "3"]),
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


@pytest.mark.parametrize(
    ("arguments", "device", "capability", "ranks", "expected"),
    [
        ([], "cuda", (9, 0), 1, setup.SERVED_PROMPT_GRAPH_TOKENS),
        (["--prompt-graph-tokens", "0"], "cuda", (9, 0), 1, 0),
        (["--prompt-graph-tokens", "64"], "cuda", (8, 0), 1, 64),
        ([], "cpu", (9, 0), 1, 0),
        ([], "cuda", (8, 0), 1, 0),
        (["--kv-dtype", "int8"], "cuda", (9, 0), 1, 0),
        ([], "cuda:1", (9, 0), 2, 0),
    ],
)
def test_which_prompts_a_server_captures(
    monkeypatch, arguments, device, capability, ranks, expected
) -> None:
    """By default what was measured, and what the engine takes."""
    asked = []
    monkeypatch.setattr(setup, "LLM", lambda *_, **given: asked.append(given))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    group = SimpleNamespace(group_name="cache") if ranks > 1 else None
    world = World(0, ranks, torch.device(device), group)

    def run(_, model, dtype, engine, server) -> int:
        engine.make(None, None, world)
        return 0

    # The package's attribute of this name is the command.
    monkeypatch.setattr(importlib.import_module("torch_fdattn.cli.serve"), "run", run)
    done = invoke("serve", "--model", "x", *arguments)
    assert done.exit_code == 0, done.output
    assert asked[0]["prompt_graph_tokens"] == expected


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


def bench_rank(rank: int, folder: Path, ports: list[int]) -> None:
    """One of two ranks, as torchrun starts them, twice."""
    own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_PORT": ports[0]}
    os.environ.update({name: str(value) for name, value in own.items()} | {"MASTER_ADDR": "127.0.0.1"})  # fmt: skip
    config = models.ModelConfig("qwen3", 16, 32, 48, 1, 4, 2, 16, 128)
    models.named_config = lambda shape: config
    common = ["bench", "serve", "--requests", "4", "--longest", "40", "--shortest", "20", "--device", "cpu"]  # fmt: skip
    peer = invoke(*common, "--peer", "transformers")
    assert peer.exit_code == 2
    assert "--peer is for one process" in peer.stderr
    os.environ["MASTER_PORT"] = str(ports[1])
    out = folder / f"{rank}.json"
    done = invoke(*common, "--tensor-parallel", "2", "--out", str(out), "--repeats", "1")
    (folder / f"{rank}.out").write_text(done.output)
    assert done.exit_code == 0, done.output


def test_bench_on_ranks(tmp_path) -> None:
    call_on_ranks(bench_rank, (tmp_path, [free_port(), free_port()]), 2)
    told, silent = ((tmp_path / f"{rank}.out").read_text() for rank in range(2))
    assert "each of 2 ranks: 4 requests" in told
    assert "% of what the memory allows" in told
    assert silent == ""
    assert not (tmp_path / "1.json").exists()
    record = json.loads((tmp_path / "0.json").read_text())
    assert (record["ranks"], record["tensor_parallel"]) == (2, 2)
    assert len(record["runs"]["torch_fdattn"]) == 1


def test_other_ranks_visit_no_old_objects_either(monkeypatch) -> None:
    """Rank 0 waits for them: see tests/server/test_process.py."""
    serve, frozen = importlib.import_module("torch_fdattn.cli.serve"), []
    follower = SimpleNamespace(run=lambda: frozen.append(gc.get_freeze_count()))
    monkeypatch.setattr(serve, "Follower", lambda llm, at_end: follower)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    assert serve._follow(None) == 0
    assert frozen[0] > IMMORTAL > gc.get_freeze_count()


def test_no_server(tmp_path) -> None:
    done = invoke("bench", "serve", "--url", "http://127.0.0.1:9", "--requests", "1")
    assert done.exit_code == 1
    assert "1 of 1 requests failed" in done.stdout
