"""What is refused: by which status, and naming which field."""

from __future__ import annotations

import json

import pytest

from tests.server.fake_engine import FakeEngine
from tests.server.running import chat, client_of, run
from torch_fdattn.models import MissingExtra

CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"
TOOL = {"type": "function", "function": {"name": "add"}}


def refused(path: str, body, status: int, param: str | None, engine: FakeEngine | None = None, **given) -> dict:  # fmt: skip
    errors = []

    async def test() -> None:
        async with client_of(engine or FakeEngine(), **given) as client:
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            headers = {"Content-Type": "application/json"}
            answer = await client.post(path, content=content, headers=headers)
            assert answer.status_code == status, answer.text
            errors.append(answer.json()["error"])

    run(test)
    assert set(errors[0]) == {"message", "type", "param", "code"}
    assert errors[0]["param"] == param, errors[0]
    if param is not None:
        assert param in errors[0]["message"]
    return errors[0]


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"best_of": 2}, "best_of"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": 10**400}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"n": 0}, "n"),
        ({"n": 1.5}, "n"),
        ({"n": 10**30}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 10**30}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"min_tokens": 20}, "min_tokens"),
        ({"seed": 2**64}, "seed"),
        ({"stop": [""]}, "stop"),
        ({"stop": [1]}, "stop[0]"),
        ({"stop": ["a"] * 65}, "stop"),
        ({"stop": "a" * 1001}, "stop"),
        ({"stop_token_ids": [1] * 1025}, "stop_token_ids"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids[0]"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"chunks": 1}}, "stream_options.chunks"),
        ({"model": "gpt-5"}, "model"),
        ({"user": 5}, "user"),
    ],
)
def test_fields_of_both(more: dict, param: str) -> None:
    status = 404 if param == "model" else 400
    refused(CHAT, chat(**more) if "min_tokens" not in more else chat(max_tokens=9, **more), status, param)  # fmt: skip
    refused(PLAIN, {"prompt": "a", **more}, status, param)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "Hi"}, "messages"),
        ({"messages": [{"role": "robot", "content": "Hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "Hi", "mood": 1}]}, "messages[0].mood"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0].image_url",
        ),
        (chat("\ud800"), "messages"),
        ({"messages": [{"role": "\ud800", "content": "Hi"}]}, "messages[0].role"),
        (chat(response_format={"type": "\ud800"}), "response_format.type"),
        (
            {"messages": [{"role": "user", "content": [{"type": "\ud800", "text": "Hi"}]}]},
            "messages[0].content[0].type",
        ),
        (chat(top_logprobs=2), "top_logprobs"),
        (chat(logprobs=True, top_logprobs=-1), "top_logprobs"),
        (chat(logprobs=True, top_logprobs=1000), "top_logprobs"),
        (chat(max_tokens=1, max_completion_tokens=1), "max_tokens"),
        (chat(max_completion_tokens=0), "max_completion_tokens"),
        (chat(response_format={"type": "xml"}), "response_format.type"),
        (chat(response_format={"type": "json_schema"}), "response_format.json_schema"),
        (chat(grammar="x", response_format={"type": "json_object"}), "grammar"),
        (chat(tools=[{"type": "web"}]), "tools[0].type"),
        (chat(tool_choice="required"), "tool_choice"),
        (chat(parallel_tool_calls=False), "parallel_tool_calls"),
        (chat(chat_template_kwargs={"mood": 1}), "chat_template_kwargs.mood"),
        (chat(chat_template_kwargs={"messages": []}), "chat_template_kwargs.messages"),
        (chat(chat_template_kwargs={"enable_thinking": True}, reasoning_effort="low"), "reasoning_effort"),
    ],
)  # fmt: skip
def test_fields_of_a_chat(body: dict, param: str) -> None:
    refused(CHAT, body, 400, param)


def test_min_tokens_names_the_limit_that_was_sent() -> None:
    for body, limit in (
        (chat(max_completion_tokens=9, min_tokens=10), "max_completion_tokens, 9"),
        (chat(max_tokens=9, min_tokens=10), "max_tokens, 9"),
        (chat(min_tokens=5000), "max_tokens, which is 4076 where it is not given"),
        ({"prompt": "a", "max_tokens": 9, "min_tokens": 10}, "max_tokens, 9"),
        ({"prompt": "a", "min_tokens": 17}, "max_tokens, which is 16 where it is not given"),
    ):
        error = refused(CHAT if "messages" in body else PLAIN, body, 400, "min_tokens")
        assert error["message"] == f"min_tokens must be at most {limit}, got {body['min_tokens']}"


@pytest.mark.parametrize("key", ["\ud800", "a\udfff", "Best", "str", "none", "list[a]", "'"])
def test_keys_of_any_name_are_named(key: str) -> None:
    shown = key.encode("utf-8", "backslashreplace").decode()
    for path, body in ((PLAIN, {"prompt": "a"}), (CHAT, chat())):
        error = refused(path, {**body, key: 1}, 400, shown)
        assert error["code"] == "unknown_parameter"
        refused(path, {**body, "stream_options": {key: 1}}, 400, f"stream_options.{shown}")
    message = {"role": "user", "content": "Hi", key: 1}
    refused(CHAT, {"messages": [message]}, 400, f"messages[0].{shown}")
    part = {"type": "text", "text": "Hi", key: 1}
    message = {"role": "user", "content": [part]}
    refused(CHAT, {"messages": [message]}, 400, f"messages[0].content[0].{shown}")


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ([], "prompt"),
        ("", None),
        ([[]], "prompt[0]"),
        (["a", ["b"]], None),
        ([-1], "prompt"),
        ([1, 2, 1.5], "prompt[2]"),
        ([[1], [1, "a"]], "prompt[1][1]"),
        ({"text": "a"}, "prompt"),
        (None, "prompt"),
    ],
)
def test_prompts(prompt, param: str | None) -> None:
    class Bare(FakeEngine):
        """Without a first token of its own."""

        def __init__(self) -> None:
            super().__init__()
            self.llm.tokenizer.encode = lambda text, add_special_tokens=True: list(map(ord, text))

    async def test() -> None:
        async with client_of(Bare()) as client:
            answer = await client.post(PLAIN, json={"prompt": prompt})
            assert answer.status_code == 400, answer.text
            error = answer.json()["error"]
            assert param is None or error["param"] == param or param in error["message"]

    run(test)


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b"null", b'"text"', b"\xff\xfe", b"{'prompt': 1}", b'{"prompt": NaN}',
        b'{"prompt": "a", "temperature": Infinity}', b"[" * 100_000, b'{"prompt": ' + b"9" * 10_000 + b"}",
        b'{"prompt": "a", "n": ' + b"[" * 5000 + b"]" * 5000 + b"}",
    ],
    ids=lambda x: x[:12].decode("latin-1"),
)  # fmt: skip
def test_malformed_bodies(body: bytes) -> None:
    for path in (CHAT, PLAIN, "/tokenize"):
        run(lambda path=path: _is_400(path, body))


async def _is_400(path: str, body: bytes) -> None:
    async with client_of(FakeEngine()) as client:
        answer = await client.post(path, content=body, headers={"Content-Type": "application/json"})
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["message"]


def test_deep_schemas() -> None:
    nested = '{"a":' * 900 + "{}" + "}" * 900
    form = f'{{"type": "json_schema", "json_schema": {{"name": "x", "schema": {nested}}}}}'
    body = f'{{"messages": [{{"role": "user", "content": "Hi"}}], "response_format": {form}}}'

    async def test() -> None:
        async with client_of(FakeEngine()) as client:
            headers = {"Content-Type": "application/json"}
            answer = await client.post(CHAT, content=body, headers=headers)
            assert answer.status_code in (200, 400), answer.text

    run(test)


def test_a_body_of_another_type() -> None:
    async def test() -> None:
        async with client_of(FakeEngine()) as client:
            answer = await client.post(PLAIN, content=b'{"prompt": "a"}')
            assert answer.status_code == 400
            assert "Content-Type: application/json" in answer.json()["error"]["message"]

    run(test)


def test_large_bodies() -> None:
    refused(PLAIN, {"prompt": "a" * 2000}, 413, None, max_body_bytes=1000)

    async def test() -> None:
        async def parts():
            for _ in range(50):
                yield b"a" * 100

        async with client_of(FakeEngine(), max_body_bytes=1000) as client:
            assert (await client.post(PLAIN, content=parts())).status_code == 413

    run(test)


def test_long_prompts() -> None:
    error = refused(PLAIN, {"prompt": "a" * 50}, 400, "prompt", max_prompt_tokens=20)
    assert error["code"] == "context_length_exceeded"
    assert "20 tokens, got 51" in error["message"]
    refused(CHAT, chat("a" * 5000), 400, "messages")
    refused(PLAIN, {"prompt": "a", "max_tokens": 4096}, 400, "max_tokens")
    refused(PLAIN, {"prompt": ["a"] * 300}, 400, "prompt")
    refused(PLAIN, {"prompt": "a", "n": 300}, 400, "n")


@pytest.mark.parametrize("n", [2**31 - 1, 10**30])
def test_large_n_is_refused_before_anything_is_made(n: int, monkeypatch) -> None:
    made = []
    for module in ("chat.Choice", "completions._Choice"):
        monkeypatch.setattr(f"torch_fdattn.server.{module}", lambda *_: made.append(1) or 1 / 0)
    for stream in (False, True):
        error = refused(CHAT, chat(n=n, stream=stream), 400, "n")
        assert error["message"] == (
            f"n times the number of prompts must be at most 256, got {n} times 1: ask for fewer in one request"
        )
        refused(PLAIN, {"prompt": "a", "n": n, "stream": stream}, 400, "n")
    refused(PLAIN, {"prompt": ["a"] * 16, "n": 17}, 400, "n")
    assert made == []


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_beyond_the_vocabulary_are_refused_before_any_prompt_starts(stream: bool) -> None:
    engine = FakeEngine()
    engine.llm.vocab_size = 200
    body = {"stream": stream, "max_tokens": 4}
    for prompt, param in (
        ([[1], [97], [98, 200]], "prompt[2]"),
        ([97, -1], "prompt"),
        (["a", "ä\u0100"], "prompt[1]"),
    ):
        error = refused(PLAIN, {"prompt": prompt, **body}, 400, param, engine)
        assert f"{param} must hold token ids from 0 to 199, got " in error["message"]
    refused(CHAT, chat("\u0100", **body), 400, "messages", engine)
    for given in (
        {"stop_token_ids": [5, 200]},
        {"stop_token_ids": list(range(200)), "min_tokens": 1},
    ):
        refused(PLAIN, {"prompt": ["a", "b"], **body, **given}, 400, "stop_token_ids", engine)
        refused(CHAT, chat(**body, **given), 400, "stop_token_ids", engine)
    assert engine.seen == []


def test_templates_without_what_is_asked_for() -> None:
    refused(CHAT, chat(), 400, "messages", FakeEngine(chat_template=None))
    plain = "{% for message in messages %}{{ message.content }}{% endfor %}"
    refused(CHAT, chat(tools=[TOOL]), 400, "tools", FakeEngine(chat_template=plain))
    comment = plain + "{# tools: <tool_call> #}"
    refused(CHAT, chat(tools=[TOOL]), 400, "tools", FakeEngine(chat_template=comment))
    llama = plain + "{% if tools %}{{ tools }}{% endif %}"
    refused(CHAT, chat(tools=[TOOL]), 400, "tools", FakeEngine(chat_template=llama))
    strict = "{{ raise_exception('roles must alternate') }}"
    error = refused(CHAT, chat(), 400, "messages", FakeEngine(chat_template=strict))
    assert "roles must alternate" in error["message"]


def test_variables_of_the_template() -> None:
    template = (
        "{# mood is a word of a comment #}mood{% set style = 'plain' %}"
        "{% if not date is defined %}{% set date = 'today' %}{% endif %}"
        "{% for message in messages %}{{ message.content }}{{ loop.index }}{% endfor %}"
        "{{ style }}{{ bos_token }}{{ strftime_now('%Y') }}{% if thinking %}{{ raise_exception('no') }}{% endif %}"
    )
    engine = FakeEngine(chat_template=template)
    engine.llm.tokenizer.special_texts = {"bos_token": "<s>"}

    def message(name: str) -> str:
        body = chat(chat_template_kwargs={"date": "1 May", name: 1})
        return refused(CHAT, body, 400, f"chat_template_kwargs.{name}", engine)["message"]

    for name in (
        "mood",
        "style",
        "message",
        "loop",
        "content",
        "strftime_now",
        "raise_exception",
        "namespace",
        "self",
    ):
        assert "no variable of this model's chat template (date, thinking): take it out" in message(
            name
        )
    for name in ("messages", "tools", "documents", "add_generation_prompt", "bos_token"):
        assert (
            "what the server itself gives the chat template (add_generation_prompt, bos_token, docu"
            in message(name)
        )
    assert engine.seen == []
    error = refused(CHAT, chat(chat_template_kwargs={"thinking": True}), 400, "messages", engine)
    assert error["message"] == "the chat template refused the messages: no"
    broken = FakeEngine(chat_template="{% if %}")
    refused(CHAT, chat(chat_template_kwargs={"date": 1}), 400, "messages", broken)


@pytest.mark.parametrize("stream", [False, True])
def test_what_the_engine_refuses(stream: bool) -> None:
    engine = FakeEngine()
    engine.raises = ValueError("json_schema must be a schema, got 'x'")
    form = {"type": "json_object"}
    refused(CHAT, chat(stream=stream, response_format=form), 400, "response_format", engine)
    engine.raises = MissingExtra("grammar needs the package llguidance")
    refused(CHAT, chat(stream=stream, grammar="x"), 400, "grammar", engine)
    engine.raises = NotImplementedError("json_schema and grammar need another tokenizer")
    refused(CHAT, chat(stream=stream, response_format=form), 400, "response_format", engine)
    engine.raises = KeyError("a fault of ours")  # its text is for the log alone
    assert "ours" not in refused(CHAT, chat(stream=stream), 500, None, engine)["message"]


def test_keys() -> None:
    async def test() -> None:
        engine = FakeEngine()
        async with client_of(engine, api_key="secret") as client:
            for path in ("/", "/health"):
                assert (await client.get(path)).status_code == 200
            for given in (None, "secret", "Bearer", "Bearer secre", "Bearer secrets", "Basic secret", "Bearer é"):  # fmt: skip
                headers = {} if given is None else {"Authorization": given.encode()}
                for path in ("/v1/models", "/metrics", "/openapi.json", "/nope"):
                    answer = await client.get(path, headers=headers)
                    assert answer.status_code == 401, given
                    assert answer.headers["www-authenticate"] == "Bearer"
            headers = {"Authorization": "Bearer secret"}
            assert (await client.get("/v1/models", headers=headers)).status_code == 200

    run(test)


def test_pages_of_other_sites() -> None:
    async def test() -> None:
        async with client_of(FakeEngine()) as client:
            for name, value, status in (
                ("Origin", "http://localhost", 200),
                ("Origin", "http://evil.example", 403),
                ("Origin", "null", 403),
                ("Host", "evil.example", 403),
                ("Host", "127.0.0.1:8000", 200),
                ("Host", "127.0.0.1.evil.example", 403),
            ):
                answer = await client.get("/v1/models", headers={name: value})
                assert answer.status_code == status, (name, value)
        async with client_of(FakeEngine(), host="0.0.0.0") as client:
            answer = await client.get("/v1/models", headers={"Host": "machine.example"})
            assert answer.status_code == 200

    run(test)


def test_wrong_methods_and_paths() -> None:
    async def test() -> None:
        async with client_of(FakeEngine()) as client:
            answer = await client.get(CHAT)
            assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
            assert (await client.post("/nope")).json()["error"]["type"] == "not_found_error"

    run(test)
