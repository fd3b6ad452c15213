"""Times of steps by layer and part, and the trace's file; an engine without a trace has nothing of it."""

from __future__ import annotations

import json
from collections import Counter

import pytest
import torch

from tests.engine.tiny import PROMPTS, random_model
from torch_fdattn.engine import LLM, SamplingParams
from torch_fdattn.engine.step_trace import PARTS
from torch_fdattn.models import ModelConfig, Transformer

PARAMS = SamplingParams(temperature=0, max_tokens=6)


def hooks(model) -> int:
    return sum(len(x._forward_hooks) + len(x._forward_pre_hooks) for x in model.modules())


def engine(model, **options) -> LLM:
    return LLM(model, max_model_len=64, pages=32, enable_prefix_caching=False, **options)


def gemma() -> Transformer:
    torch.manual_seed(0)
    return Transformer(ModelConfig("gemma3_text", 64, 32, 48, 2, 4, 2, 16, 128))


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_each_part_of_each_layer_is_a_range(device, tmp_path, family):
    llm = engine(random_model(device) if family == "qwen3" else gemma().to(device))
    before = [x.outputs[0].token_ids for x in llm.generate(PROMPTS, PARAMS)]
    path = tmp_path / "trace.json"
    with llm.trace(path) as trace:
        during = [x.outputs[0].token_ids for x in llm.generate(PROMPTS, PARAMS)]
    assert during == before
    assert hooks(llm.model) == 0
    layers = range(len(llm.model.layers))
    assert set(trace.seconds) == {(i, part) for i in layers for part in PARTS}
    assert 0 < min(trace.seconds.values()) <= sum(trace.seconds.values()) < trace.elapsed
    assert trace.passes == 6
    events = json.loads(path.read_text())["traceEvents"]
    counts = Counter(x["name"] for x in events if x.get("cat") == "user_annotation")
    for i in layers:
        assert counts[f"layer {i}"] == trace.passes
        # Before attention, between, and behind the MLP.
        assert [counts[f"layer {i} {part}"] // trace.passes for part in PARTS] == [
            3,
            1,
            1,
            1,
            1,
            1,
            1,
        ]
    # The next one begins anew, and an engine that is not traced has no ranges.
    with llm.trace() as second:
        llm.generate(PROMPTS[:1], SamplingParams(max_tokens=2))
    assert second.passes == 2
    with pytest.raises(RuntimeError, match="trace must be opened once"), second:
        pass


def test_parts_follow_one_another_within_their_layer(device, tmp_path):
    llm = engine(random_model(device))
    with llm.trace(tmp_path / "trace.json") as trace:
        llm.generate(PROMPTS[:1], SamplingParams(max_tokens=1))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    ranges = [x for x in events if x.get("cat") == "user_annotation" and "layer" in x["name"]]
    ranges.sort(key=lambda x: (x["ts"], -x["dur"]))
    parts = ["norm", "qkv", "rotate", "append", "attend", "output", "norm", "mlp", "norm"]
    expected = []
    for i in range(len(llm.model.layers)):
        expected += [f"layer {i}", *(f"layer {i} {part}" for part in parts)]
    assert [x["name"] for x in ranges] == expected
    for i, layer in enumerate(ranges[:: len(parts) + 1]):
        inner = ranges[i * 10 + 1 : i * 10 + 10]
        assert sum(x["dur"] for x in inner) <= layer["dur"]
    assert trace.passes == 1


def test_the_table(device):
    llm = engine(random_model(device))
    with llm.trace() as trace:
        llm.generate(PROMPTS[:1], SamplingParams(max_tokens=2))
    trace.elapsed, trace.seconds = 0.5, {}
    for i in range(len(llm.model.layers)):
        trace.seconds |= {(i, part): 0.001 * (j + 1) for j, part in enumerate(PARTS)}
    head, names, *rows = trace.table().splitlines()
    assert head.startswith(
        "2 passes of the model in 0.500 s, 0.056 s of it in the layers; ms of a pass"
    )
    assert names.split() == ["layer", *PARTS, "all"]
    assert rows[1].split() == [
        "1",
        "0.500",
        "1.000",
        "1.500",
        "2.000",
        "2.500",
        "3.000",
        "3.500",
        "14.000",
    ]
    assert rows[-2].split() == [
        "all",
        "1.000",
        "2.000",
        "3.000",
        "4.000",
        "5.000",
        "6.000",
        "7.000",
        "28.000",
    ]
    assert rows[-1].split() == ["%", "3.6", "7.1", "10.7", "14.3", "17.9", "21.4", "25.0", "100.0"]


def test_an_error_within_leaves_nothing_behind(device, monkeypatch):
    llm = engine(random_model(device))
    monkeypatch.setattr(type(llm.model.layers[1].mlp), "forward", lambda *_: 1 // 0)
    with pytest.raises(ZeroDivisionError), llm.trace() as trace:
        llm.generate(PROMPTS[:1], PARAMS)
    assert hooks(llm.model) == 0
    assert trace.seconds[0, "attend"] > 0
    monkeypatch.undo()
    assert llm.generate(PROMPTS[:1], PARAMS)[0].finished


def test_a_model_over_ranks_is_refused():
    llm = engine(random_model(torch.device("cpu")))
    llm._runner.num_ranks = 2  # as of a group
    with pytest.raises(NotImplementedError, match="trace needs an LLM on one process"):
        llm.trace()


def test_a_file_that_cannot_be_is_refused_before_anything_runs(tmp_path):
    llm = engine(random_model(torch.device("cpu")))
    for path in (tmp_path / "none" / "trace.json", tmp_path):
        with pytest.raises(OSError, match=path.name):
            llm.trace(path)
