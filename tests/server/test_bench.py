"""`fdattn bench serve`: its figures of known times, its workload, its client against a real server."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import json
import math

import pytest
import torch

from tests.server.fake_engine import FakeEngine
from tests.server.running import IMMORTAL, served
from torch_fdattn.engine.outputs import CompletionOutput, RequestOutput
from torch_fdattn.models import ModelConfig
from torch_fdattn.server.bench.http_client import AnswerError, post_events
from torch_fdattn.server.bench.in_process import run_workload
from torch_fdattn.server.bench.memory_limit import Ceilings, measure_ceilings, memory_limit
from torch_fdattn.server.bench.over_http import send_workload
from torch_fdattn.server.bench.report import figure_lines, write_record
from torch_fdattn.server.bench.timings import TimedRun, Timing
from torch_fdattn.server.bench.workload import Workload, make_workload, reordered

CONFIG = ModelConfig("qwen3", 64, 32, 48, 2, 4, 2, 16, 128)


def test_figures_of_known_times() -> None:
    first, second, lost = Timing(0.0), Timing(1.0), Timing(1.0)
    for time, count in ((0.5, 1), (0.6, 2), (0.8, 4)):
        first.saw(time, count)
    first.saw(0.9, 4)  # no token
    for time, count in ((3.0, 1), (4.0, 2)):
        second.saw(time, count)
    figures = TimedRun([first, second, lost], 7).figures()
    assert (figures["requests"], figures["prompt_tokens"], figures["new_tokens"]) == (2, 7, 6)
    assert (figures["seconds"], figures["tokens_per_s"]) == (4.0, 1.5)
    assert figures["ttft_ms"] == {"mean": 1250, "p50": 500, "p90": 2000, "p99": 2000}
    assert figures["tpot_ms"]["p50"] == pytest.approx(100)
    assert figures["tpot_ms"]["p99"] == pytest.approx(1000)
    # Two tokens that came together after 0.2 s are 0.1 s apart.
    assert figures["itl_ms"]["mean"] == pytest.approx((100 + 2 * 100 + 1000) / 4)
    assert "6 new tokens of 2 requests in 4.00 s" in figure_lines("x", figures)[0]
    assert "50.0 % of what the memory allows" in figure_lines("x", figures, 2.0)[0]


def test_the_workload_is_drawn_by_its_seed() -> None:
    workload = make_workload(200, (100, 1024), 151936)
    assert workload == make_workload(200, (100, 1024), 151936)
    assert workload != make_workload(200, (100, 1024), 151936, seed=1)
    lengths = [len(x) for x in workload.prompts]
    for drawn in (lengths, workload.new_tokens):
        assert 100 <= min(drawn) <= max(drawn) <= 1024
        assert sum(drawn) / len(drawn) == pytest.approx(562, abs=4 * 267 / math.sqrt(200))
    assert all(0 <= x <= 10_000 for prompt in workload.prompts for x in prompt)
    small = make_workload(99, (1, 50), 64)
    assert all(x < 64 for w in (small, reordered(small, 1)) for p in w.prompts for x in p)
    other = reordered(workload, 1)
    assert [x[1:] for x in other.prompts] == [x[1:] for x in workload.prompts]
    assert all(a[0] != b[0] for a, b in zip(other.prompts, workload.prompts, strict=True))
    with pytest.raises(ValueError, match="lengths must be"):
        make_workload(1, (5, 4), 64)


def test_the_memorys_limit_by_hand() -> None:
    workload = Workload(((1, 2, 3), (4,)), (2, 4), 64)
    ceilings = Ceilings(bandwidth=1e6, matmul_rate=1e9)
    limit = memory_limit(
        CONFIG, workload, dtype=torch.bfloat16, kv_dtype="int8", max_num_seqs=2, ceilings=ceilings
    )
    # One token after 3 + 1 stored, three after 1 + 1 to 1 + 3.
    assert (limit.steps, limit.cached_tokens_read) == (4, 4 + (2 + 3 + 4))
    assert limit.cached_token_bytes == 2 * 2 * 2 * (16 + 4)
    # q, k, v, out; gate, up, down; two norms of the layer, two of the heads; the last norm; the output matrix.
    layer = 32 * 16 * (4 + 2 + 2 + 4) + 3 * 32 * 48 + 2 * 32 + 2 * 16
    weights = 2 * layer + 32 + 64 * 32
    assert limit.weight_bytes == 2 * weights
    assert limit.prefill_flops == 2 * 4 * weights
    assert limit.seconds == pytest.approx((4 * 2 * weights + 13 * 160) / 1e6 + 8 * weights / 1e9)
    one_row = memory_limit(
        CONFIG, workload, dtype=torch.bfloat16, kv_dtype="int8", max_num_seqs=1, ceilings=ceilings
    )
    assert one_row.steps == 6
    of_four = memory_limit(
        CONFIG, workload, dtype=torch.bfloat16, kv_dtype="int8", max_num_seqs=2, ceilings=ceilings,
        ranks=4, tensor_parallel=2,
    )  # fmt: skip
    assert of_four.weight_bytes == weights
    assert of_four.cached_token_bytes == 40
    assert of_four.prefill_flops == 2 * weights
    assert "measured: a copy's bandwidth" in limit.lines()[-1]
    assert json.loads(json.dumps(limit.record()))["steps"] == 4


def test_ceilings_are_measured() -> None:
    ceilings = measure_ceilings(torch.device("cpu"), torch.float32)
    assert 1e8 < ceilings.bandwidth < 1e13
    assert 1e8 < ceilings.matmul_rate < 1e14


class SteppedLLM:
    """A token a step for each request; `short`: one too few."""

    def __init__(self, short: bool = False) -> None:
        self.short, self.requests, self.prompts = short, {}, []
        self.frozen = []

    @property
    def has_unfinished(self) -> bool:
        return bool(self.requests)

    def add_request(self, request_id, prompt, params) -> None:
        assert params.ignore_eos
        self.prompts.append(tuple(prompt))
        completion = CompletionOutput(0)
        output = RequestOutput(request_id, prompt, outputs=[completion])
        self.requests[request_id] = (output, params.max_tokens - self.short)

    def step(self) -> list[RequestOutput]:
        self.frozen.append(gc.get_freeze_count() > IMMORTAL)
        outputs = [output for output, _ in self.requests.values()]
        for output, limit in list(self.requests.values()):
            output.outputs[0].token_ids.append(5)
            if len(output.outputs[0].token_ids) >= limit:
                del self.requests[output.request_id]
        return outputs


def test_in_process() -> None:
    workload = make_workload(5, (2, 9), 64)
    llm = SteppedLLM()
    runs = run_workload(llm, workload, repeats=2)
    assert [x.figures()["new_tokens"] for x in runs] == [workload.num_new_tokens] * 2
    # Garbage collection leaves alone what the warm-up has made.
    warm = llm.frozen.index(True)
    assert warm
    assert all(llm.frozen[warm:])
    assert gc.get_freeze_count() < IMMORTAL
    # After the warm-up no run has another's prompts.
    assert len({*llm.prompts[5:]}) == 10
    with pytest.raises(RuntimeError, match="must give"):
        run_workload(SteppedLLM(short=True), workload)


def test_against_a_server() -> None:
    workload = make_workload(8, (3, 12), 10_000)

    async def measure(engine: FakeEngine, rate: float | None, **given):
        async with served(engine, **given) as url:
            return await send_workload(f"{url}/v1/completions", workload, rate, "secret", 0)

    for rate in (None, 50.0):
        engine = FakeEngine(lambda prompt: "a" * 99, delay=0.002)
        result = asyncio.run(measure(engine, rate, api_key="secret"))
        assert result.failures == []
        figures = result.run.figures()
        assert figures["new_tokens"] == workload.num_new_tokens
        assert [len(x.seen) for x in result.run.timings] == list(workload.new_tokens)
        assert all(params.ignore_eos for _, params in engine.seen)
        starts = [x.start for x in result.run.timings]
        assert (starts[-1] - starts[0] > 0.02) == (rate is not None)
    refused = asyncio.run(measure(FakeEngine(), None, api_key="other"))
    assert len(refused.failures) == 8
    assert "status 401" in refused.failures[0]
    short = asyncio.run(measure(FakeEngine(lambda prompt: "a"), None))
    assert "answers" not in short.failures
    assert "had 1" in short.failures[0]


def test_streams_that_break_off() -> None:
    async def read(answer: bytes) -> list[dict]:
        async def respond(reader, writer) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer)
            await writer.drain()
            writer.close()

        async with await asyncio.start_server(respond, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            return [x async for x in post_events(f"http://127.0.0.1:{port}/", {})]

    head = b"HTTP/1.1 200 OK\r\n\r\n"
    assert asyncio.run(read(head + b'data: {"a": 1}\n\ndata: [DONE]\n\n')) == [{"a": 1}]
    for answer, message in (
        (head + b'data: {"a": 1}\n\n', "without"),
        (head + b'data: {"error": {"message": "it failed"}}\n\n', "it failed"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nda", "no HTTP answer"),
        (b"junk\r\n", "no HTTP answer"),
        (b"", "no HTTP answer"),
        (b'HTTP/1.1 400 Bad\r\n\r\n{"error": {"message": "n must be"}}', "status 400: n must be"),
    ):
        with pytest.raises(AnswerError, match=message):
            asyncio.run(read(answer))


def test_a_record_is_written(tmp_path) -> None:
    write_record(tmp_path / "new" / "figures.json", {"runs": {}})
    record = json.loads((tmp_path / "new" / "figures.json").read_text())
    assert {"version", "torch", "triton", "command", "device", "time", "runs"} == set(record)


def test_a_record_of_a_cpu_says_so(tmp_path) -> None:
    write_record(tmp_path / "figures.json", {"runs": {}}, torch.device("cpu"))
    assert json.loads((tmp_path / "figures.json").read_text())["device"] == "cpu"


def test_a_checkpoints_tokens_have_text(tmp_path) -> None:
    """All but the first, which ends a text: in a stream each has an event of its own."""
    from torch_fdattn.models import Transformer, load_tokenizer
    from torch_fdattn.server.bench.peers.checkpoint import save_checkpoint

    save_checkpoint(Transformer(dataclasses.replace(CONFIG, vocab_size=1500)), tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert [i for i in range(1500) if not tokenizer.decode([i])] == [0]


def test_a_checkpoint_is_transformers_model(tmp_path) -> None:
    """The folder that peers read gives our model's logits."""
    transformers = pytest.importorskip("transformers", reason="transformers is the reference here")
    from torch_fdattn.models import Transformer
    from torch_fdattn.server.bench.peers.checkpoint import save_checkpoint

    torch.manual_seed(0)
    model = Transformer(CONFIG).eval().requires_grad_(False)
    save_checkpoint(model, tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    ids = torch.tensor([[5, 9, 33, 60]])
    with torch.no_grad():
        torch.testing.assert_close(model(ids), theirs(ids).logits, rtol=1e-4, atol=1e-4)
