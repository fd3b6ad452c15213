"""Each endpoint's answers, without a socket."""

from __future__ import annotations

import json
import re

import pytest

from tests.server.fake_engine import FakeEngine
from tests.server.running import chat, client_of, httpx, run

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def events(response: httpx.Response) -> list[dict]:
    """The chunks of a stream, which ends with [DONE]."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    *data, last, rest = response.text.split("\n\n")
    assert (last, rest) == ("data: [DONE]", "")
    assert all(x.startswith("data: ") and "\n" not in x for x in data)
    return [json.loads(x.removeprefix("data: ")) for x in data]


def joined(chunks: list[dict], index: int = 0, field: str = "content") -> str:
    choices = [c for x in chunks for c in x["choices"] if c["index"] == index]
    return "".join(c["delta"].get(field) or "" for c in choices)


def post(path: str, body: dict, engine: FakeEngine | None = None, **given) -> httpx.Response:
    answers = []

    async def test() -> None:
        async with client_of(engine or FakeEngine(), **given) as client:
            answers.append(await client.post(path, json=body))

    run(test)
    return answers[0]


def test_chat() -> None:
    answer = post("/v1/chat/completions", chat("Hi", model="fake")).json()
    assert answer["object"] == "chat.completion"
    assert answer["model"] == "fake"
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": " :tnatsissa\niH :resu"}
    assert choice["finish_reason"] == "stop"
    assert choice["logprobs"] is None
    assert answer["usage"]["prompt_tokens"] == len("user: Hi\nassistant: ")
    assert answer["usage"]["completion_tokens"] == len(choice["message"]["content"])


def test_chat_streams_what_it_answers() -> None:
    body = chat("Hi", n=2, stream=True, stream_options={"include_usage": True}, max_tokens=7)
    *chunks, last = events(post("/v1/chat/completions", body))
    assert [joined(chunks, i) for i in (0, 1)] == [" :tnats", "* :tnat"]
    for index in (0, 1):
        choices = [c for x in chunks for c in x["choices"] if c["index"] == index]
        assert choices[0]["delta"] == {"role": "assistant", "content": ""}
        assert [c["finish_reason"] for c in choices].count("length") == 1
        assert choices[-1]["delta"] == {}
        assert choices[-1]["finish_reason"] == "length"
    assert all(x["usage"] is None and x["object"] == "chat.completion.chunk" for x in chunks)
    assert len({x["id"] for x in [*chunks, last]}) == 1
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 14


def test_usage_is_in_no_chunk_unless_asked_for() -> None:
    chunks = events(post("/v1/chat/completions", chat(stream=True)))
    assert not [x for x in chunks if "usage" in x]


def test_chat_logprobs_streamed_and_not() -> None:
    body = chat("Hi", logprobs=True, top_logprobs=2, max_tokens=4)
    (choice,) = post("/v1/chat/completions", body).json()["choices"]
    tokens = choice["logprobs"]["content"]
    assert [x["token"] for x in tokens] == [" ", ":", "t", "n"]
    assert tokens[0]["bytes"] == [32]
    assert tokens[0]["logprob"] == -0.5
    assert [x["logprob"] for x in tokens[0]["top_logprobs"]] == [-0.5, -1.0]
    chunks = events(post("/v1/chat/completions", body | {"stream": True}))
    parts = [c["logprobs"] for x in chunks for c in x["choices"] if c["logprobs"]]
    assert [x for part in parts for x in part["content"]] == tokens


def test_completions_of_several_prompts() -> None:
    body = {"prompt": ["abc", "de"], "n": 2, "logprobs": 1}
    answer = post("/v1/completions", body).json()
    assert [(x["index"], x["text"]) for x in answer["choices"]] == [
        (0, "cba"), (1, "*cba"), (2, "ed"), (3, "*ed"),
    ]  # fmt: skip
    assert answer["choices"][0]["logprobs"] == {
        "tokens": ["c", "b", "a"],
        "token_logprobs": [-0.5] * 3,
        "top_logprobs": [{x: -0.5} for x in "cba"],
        "text_offset": [0, 1, 2],
    }
    assert answer["usage"]["completion_tokens"] == 3 + 4 + 2 + 3
    chunks = events(post("/v1/completions", body | {"stream": True}))
    texts = {i: "" for i in range(4)}
    for chunk in chunks:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
    assert list(texts.values()) == ["cba", "*cba", "ed", "*ed"]


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [("ab", ["ba"]), ([97, 98], ["ba"]), ([[97], [98]], ["a", "b"]), (["a"], ["a"])],
)
def test_forms_of_a_prompt(prompt, texts) -> None:
    answer = post("/v1/completions", {"prompt": prompt}).json()
    assert [x["text"] for x in answer["choices"]] == texts


def test_a_completion_has_16_tokens_unless_told() -> None:
    (choice,) = post("/v1/completions", {"prompt": "a" * 99}).json()["choices"]
    assert (len(choice["text"]), choice["finish_reason"]) == (16, "length")


def test_sampling_fields_reach_the_engine() -> None:
    engine = FakeEngine()
    given = {
        "n": 2, "min_tokens": 1, "temperature": 0.5, "top_k": 7, "top_p": 0.9, "min_p": 0.1, "seed": 3,
        "repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": -0.3, "ignore_eos": True,
    }  # fmt: skip
    post("/v1/completions", {"prompt": "a", "stop": "x", "stop_token_ids": [5], **given}, engine)
    ((_, params),) = engine.seen
    assert {name: getattr(params, name) for name in given} == given
    assert (params.stop, params.stop_token_ids) == (("x",), (5,))


def test_the_budget_of_a_chat_is_the_context() -> None:
    engine = FakeEngine(max_model_len=100)
    post("/v1/chat/completions", chat("Hi"), engine)
    prompt, params = engine.seen[0]
    assert len(prompt) + params.max_tokens == 100
    post("/v1/chat/completions", chat("Hi", max_completion_tokens=9), engine)
    assert engine.seen[1][1].max_tokens == 9


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_and_tool_calls(stream: bool) -> None:
    text = '<think>\nadd them\n</think>\n\nSo:\n<tool_call>\n{"name": "add", "arguments": {"x": 2}}\n</tool_call>'
    engine = FakeEngine(lambda prompt: text)
    answer = post("/v1/chat/completions", chat("2?", tools=[TOOL], stream=stream), engine)
    if stream:
        chunks = events(answer)
        deltas = [c["delta"] for x in chunks for c in x["choices"]]
        content, reasoning = joined(chunks), joined(chunks, field="reasoning_content")
        calls = [call for x in deltas for call in x.get("tool_calls", ())]
        assert calls[0].pop("index") == 0
        reason = chunks[-1]["choices"][0]["finish_reason"]
    else:
        (choice,) = answer.json()["choices"]
        message, reason = choice["message"], choice["finish_reason"]
        content, reasoning, calls = (
            message[x] for x in ("content", "reasoning_content", "tool_calls")
        )
    assert (content, reasoning, reason) == ("So:", "add them", "tool_calls")
    assert re.fullmatch(r"call_\w+", calls[0].pop("id"))
    assert calls == [{"type": "function", "function": {"name": "add", "arguments": '{"x": 2}'}}]


@pytest.mark.parametrize("stream", [False, True])
def test_half_a_surrogate_pair_in_a_call(stream: bool) -> None:
    text = (
        r'<tool_call>{"name": "f\ud800", "arguments": {"\udfff": "\ud83d\ude00\ud83d"}}</tool_call>'
    )
    engine = FakeEngine(lambda prompt: text)
    answer = post("/v1/chat/completions", chat("2?", tools=[TOOL], stream=stream), engine)
    assert answer.status_code == 200, answer.text
    if stream:
        deltas = [c["delta"] for x in events(answer) for c in x["choices"]]
        (call,) = [call for x in deltas for call in x.get("tool_calls", ())]
    else:
        (call,) = answer.json()["choices"][0]["message"]["tool_calls"]
    assert call["function"] == {"name": "f?", "arguments": '{"?": "\U0001f600?"}'}


def test_a_conversation_with_calls_goes_back_into_the_template() -> None:
    engine = FakeEngine()
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"x": 2}'}}  # fmt: skip
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "2"}, {"type": "text", "text": "+2?"}]},
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None},
        {"role": "tool", "content": "4", "tool_call_id": "call_1"},
    ]  # fmt: skip
    answer = post("/v1/chat/completions", {"messages": messages, "tools": [TOOL]}, engine)
    assert answer.status_code == 200, answer.text
    prompt = engine.llm.tokenizer.decode(engine.seen[0][0])
    assert '"name": "add"' in prompt
    assert "system: Be brief." in prompt
    assert "user: 2+2?" in prompt
    assert '"arguments": {"x": 2}' in prompt
    assert prompt.endswith("tool: 4\nassistant: ")
    post("/v1/chat/completions", {"messages": messages, "tools": [TOOL], "tool_choice": "none"}, engine)  # fmt: skip
    assert "<tools>" not in engine.llm.tokenizer.decode(engine.seen[1][0])


def test_a_variable_of_the_template() -> None:
    engine = FakeEngine(lambda prompt: "<think>is text now")
    body = chat(chat_template_kwargs={"enable_thinking": False})
    (choice,) = post("/v1/chat/completions", body, engine).json()["choices"]
    assert choice["message"]["content"] == "<think>is text now"
    assert engine.llm.tokenizer.decode(engine.seen[0][0]).endswith("</think>\n\n")


def test_a_json_schema_reaches_the_engine() -> None:
    engine = FakeEngine()
    schema = {"type": "object", "properties": {"answer": {"type": "integer"}}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    (choice,) = post("/v1/chat/completions", chat(response_format=form), engine).json()["choices"]
    assert json.loads(choice["message"]["content"]) == {"answer": 4}
    assert json.loads(engine.seen[0][1].json_schema) == schema
    post("/v1/chat/completions", chat(response_format={"type": "json_object"}), engine)
    assert json.loads(engine.seen[1][1].json_schema) == {"type": "object"}


def test_tokenize() -> None:
    answer = post("/tokenize", {"prompt": "ab"}).json()
    assert answer == {"tokens": [1, 97, 98], "count": 3, "max_model_len": 4096}
    assert post("/tokenize", {"prompt": "ab", "add_special_tokens": False}).json()["count"] == 2
    assert post("/tokenize", chat("Hi")).json()["count"] == len("user: Hi\nassistant: ")


def test_models_health_metrics_and_page() -> None:
    async def test() -> None:
        async with client_of(FakeEngine()) as client:
            (model,) = (await client.get("/v1/models")).json()["data"]
            assert (model["id"], model["max_model_len"]) == ("fake", 4096)
            assert (await client.get("/v1/models/fake")).json() == model
            assert (await client.get("/v1/models/other")).status_code == 404
            assert (await client.get("/health")).json() == {"status": "ok"}
            await client.post("/v1/completions", json={"prompt": "abc"})
            text = (await client.get("/metrics")).text
            assert "\nfdattn_generated_tokens_total 3.0" in text
            assert "\nfdattn_proposed_tokens_total 5.0" in text
            assert "\nfdattn_accepted_tokens_total 2.0" in text
            assert "\nfdattn_time_to_first_token_seconds_count 1.0" in text
            assert "\nfdattn_inter_token_seconds_count 2.0" in text
            assert 'fdattn_http_requests_total{path="/v1/completions",status="200"} 1.0' in text
            page = await client.get("/")
            assert "text/html" in page.headers["content-type"]
            assert "default-src 'none'" in page.headers["content-security-policy"]

    run(test)


def test_the_page_takes_nothing_from_elsewhere() -> None:
    from pathlib import Path

    import torch_fdattn.server

    text = (Path(torch_fdattn.server.__file__).parent / "page.html").read_text(encoding="utf-8")
    assert not re.findall(r"(?:src|href)=\"(?!#|data:)[^\"]*\"|@import|url\(", text)
    assert {x for x in re.findall(r"https?://[^\s'\"<]+", text)} == {"http://www.w3.org/2000/svg"}
