"""Tokenizers of which something is unknown, malformed or damaged: refused by name."""

from __future__ import annotations

import random
import re
import shutil

import pytest

from tests.models.tokenizer_sources import CHAT, write_tokenizer_gguf
from torch_fdattn.models import ModelError, load_tokenizer
from torch_fdattn.models.gguf import GGUFFile
from torch_fdattn.models.tokenizer import gguf_tokenizer


def test_a_bos_token_that_is_not_in_the_vocabulary_is_not_added(sentencepiece_model, tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_model)
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<|nowhere|>"}')
    ours = load_tokenizer(tmp_path)
    assert ours.encode("the") == ours.encode("the", add_special_tokens=False)


def test_chat_without_a_template_is_refused(llama2_gguf):
    with pytest.raises(ModelError, match="no chat template"):
        load_tokenizer(llama2_gguf).chat(CHAT)


def test_chat_templates_can_refuse_messages(bpe_folder):
    with pytest.raises(ModelError, match="refused the messages: no robots"):
        load_tokenizer(bpe_folder).chat([{"role": "robot", "content": "x"}])


@pytest.mark.parametrize(
    ("kind", "pre", "message"),
    [
        ("bert", "gpt-2", "tokenizer.ggml.model must be gpt2 or llama, got 'bert'"),
        ("gpt2", "tekken", "tokenizer.ggml.pre must be one of .*, got 'tekken'"),
        ("gpt2", "gpt-2", "metadata field tokenizer.ggml.merges is missing"),
        ("llama", "gpt-2", "tokenizer.ggml.scores must have 2 entries like tokens, got 1"),
    ],
)
def test_unknown_gguf_tokenizers_are_refused(kind, pre, message, tmp_path):
    def fields(writer):
        writer.add_tokenizer_model(kind)
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(["a", "b"])
        writer.add_token_scores([0.0])

    path = tmp_path / "model.gguf"
    write_tokenizer_gguf(path, fields)
    with pytest.raises(ModelError, match=message) as caught:
        load_tokenizer(path)
    assert str(path) in str(caught.value)


MALFORMED_FILES = {
    "tokenizer_config.json": [
        '{"added_tokens_decoder": []}',
        '{"added_tokens_decoder": {"a": {"content": "x"}}}',
        '{"added_tokens_decoder": {"1": {}}}',
        '{"added_tokens_decoder": {"1": "x"}}',
        '{"eos_token": {}}',
        '{"eos_token": {"content": 3}}',
        '{"chat_template": [1]}',
        '{"chat_template": 3}',
        "[" * 100_000,
    ],
    "added_tokens.json": ["[1]", '{"x": "1"}', '{"x": -1}', '{"x": null}'],
    "special_tokens_map.json": [
        "[]",
        '{"eos_token": {}}',
        '{"additional_special_tokens": [1]}',
        '{"additional_special_tokens": 1}',
    ],
    "generation_config.json": [
        '{"eos_token_id": 1.5}',
        '{"eos_token_id": "a"}',
        '{"eos_token_id": {}}',
        '{"eos_token_id": [[1]]}',
    ],
    "chat_template.jinja": [b"\xff"],
}


@pytest.mark.parametrize(
    ("name", "content"),
    [(name, content) for name, contents in MALFORMED_FILES.items() for content in contents],
    ids=lambda value: str(value)[:50],
)
def test_malformed_files_beside_the_tokenizer_are_named(name, content, bpe_folder, tmp_path):
    folder = shutil.copytree(bpe_folder, tmp_path / "model")
    (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ModelError, match=re.escape(f"model/{name}: ")):
        load_tokenizer(folder)


@pytest.mark.parametrize(
    "template",
    ["{{ 1/0 }}", "{{ messages + 1 }}", "{% for i in range(999999) %}{% endfor %}", "{%"],
)
def test_templates_that_raise_are_refused(template, bpe_folder):
    tokenizer = load_tokenizer(bpe_folder)
    tokenizer.chat_template = template
    with pytest.raises(ModelError, match="refused the messages: "):
        tokenizer.chat(CHAT)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *((f"ggml.{name}", value) for name in ("tokens", "token_type", "merges") for value in
          ("abc", 1, (1.5, 2.5), (("a",),), (True,))),
        ("ggml.merges", ("zzzqq yyqqw",)),
        ("ggml.merges", ("nospace",)),
        *((f"ggml.{end}_token_id", value) for end in ("bos", "eos", "eot", "eom")
          for value in ("a", -1, 10**6, True)),
        ("chat_template", 3),
        ("ggml.pre", ()),
    ],
)  # fmt: skip
def test_malformed_gguf_fields_name_the_file(field, value, bpe_gguf):
    file = GGUFFile(bpe_gguf)
    file.fields[f"tokenizer.{field}"] = value
    with pytest.raises(ModelError, match=re.escape(str(bpe_gguf))):
        gguf_tokenizer(file)


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("bpe_gguf", ""),
        ("llama2_gguf", ""),
        ("bpe_folder", "tokenizer.json"),
        ("bpe_folder", "tokenizer_config.json"),
        ("llama2_folder", "tokenizer_config.json"),
    ],
)
def test_random_damage_never_escapes_as_another_error(source, name, request, tmp_path):
    """Bytes flipped at random: either it loads or it is a ModelError."""
    good, draw = request.getfixturevalue(source), random.Random(3)
    path = (shutil.copytree if name else shutil.copy)(good, tmp_path / good.name)
    raw = (path / name).read_bytes()
    end = len(raw) if name else raw.index(b"token_embd.weight")
    refused = []
    for _ in range(60):
        damaged = bytearray(raw)
        for _ in range(8):
            damaged[draw.randrange(4, end)] = draw.randrange(256)
        (path / name).write_bytes(damaged)
        try:
            load_tokenizer(path)
        except ModelError as error:
            refused.append(str(error))
    assert len(refused) > 10
    assert all(str(path) in message for message in refused)


def test_corrupt_tokenizer_files_are_named(tmp_path):
    for content in (b"", b"nonsense"):
        (tmp_path / "tokenizer.model").write_bytes(content)
        with pytest.raises(ModelError, match=r"tokenizer\.model: not a sentencepiece model"):
            load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer\.json: not a tokenizer"):
        load_tokenizer(tmp_path)
