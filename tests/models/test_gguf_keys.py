"""Every key of a GGUF file's metadata is used, harmless, or refused where it would change the result."""

from __future__ import annotations

import math

import pytest

from tests.models.hf_models import reference, write_gguf
from tests.models.test_config_keys import SOMETHING, TABLES
from torch_fdattn.models import ModelError
from torch_fdattn.models.gguf import GGUFFile, gguf_config
from torch_fdattn.models.gguf_tokenizer import gguf_tokenizer

gguf = pytest.importorskip("gguf", reason="needs the package gguf")


@pytest.fixture(scope="module")
def gguf_path(tmp_path_factory):
    def fields(writer):
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list(["a", "b", "ab"])
        writer.add_token_merges(["a b"])
        writer.add_array("quantize.imatrix.file", ["x"])
        writer.add_string("somebody.else", "x")

    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    write_gguf(path, reference("qwen3"), fields=fields)
    return path


def read_with(path, key, value):
    """The configuration and the tokenizer of a file with one field more."""
    file = GGUFFile(path)
    file.fields[key] = value
    gguf_tokenizer(file)
    return gguf_config(file)


def their_keys(*groups):
    for group in groups:
        for name, key in vars(group).items():
            if isinstance(key, str) and not name.startswith("_"):
                yield key.format(arch="qwen3", dense="dense", id=0, name="tools")


def test_every_key_of_ggufs_models_is_known_or_refused_by_name(gguf_path):
    used, harmless, only = TABLES["gguf"]
    right = gguf_config(GGUFFile(gguf_path))
    groups = (gguf.Keys.LLM, gguf.Keys.Attention, gguf.Keys.Attention.Indexer, gguf.Keys.Rope)
    for key in {*their_keys(*groups)}:
        name = key.removeprefix("qwen3.")
        if name in used:
            continue
        if name in harmless:
            assert read_with(gguf_path, key, 7) == right, key
            continue
        with pytest.raises(ModelError, match=rf"{key} must be .*, got 'something else'"):
            read_with(gguf_path, key, SOMETHING)
        for value in only.get(name, ((), ""))[0]:
            assert read_with(gguf_path, key, value) == right, key


def test_every_key_of_ggufs_tokenizers_is_known_or_refused_by_name(gguf_path):
    used, harmless, _ = TABLES["tokenizer"]
    for key in {*their_keys(gguf.Keys.Tokenizer)}:
        name = key.removeprefix("tokenizer.ggml.")
        if name in used or key == "tokenizer.chat_template":
            continue
        if name in harmless or not key.startswith("tokenizer.ggml."):
            read_with(gguf_path, key, 1)
            continue
        with pytest.raises(ModelError, match=rf"{key} must be .*, got 'something else'"):
            read_with(gguf_path, key, SOMETHING)


def test_general_keys_are_harmless(gguf_path):
    special = {"general.type", "general.architecture", "general.alignment", "split.count"}
    for key in {*their_keys(gguf.Keys.General, gguf.Keys.Split)} - special:
        read_with(gguf_path, key, SOMETHING)
    with pytest.raises(ModelError, match=r"general\.type must be 'model' or absent, got 'adapter'"):
        read_with(gguf_path, "general.type", "adapter")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (
            "qwen3.attention.causal",
            False,
            "qwen3.attention.causal must be true or absent, got False",
        ),
        ("qwen3.rope.scaling.attn_factor", 1.25, "attn_factor must be 1 or absent: .*, got 1.25"),
        (
            "qwen3.attention.indexer.top_k",
            4,
            "metadata field qwen3.attention.indexer.top_k must be ",
        ),
        ("qwen3.of_next_year", 1, "gguf-new-metadata --remove-metadata qwen3.of_next_year"),
        ("rope.of_next_year", 1, "metadata field rope.of_next_year must be absent"),
        ("attention.of_next_year", 1, "metadata field attention.of_next_year must be absent"),
        ("tokenizer.ggml.suppress_tokens", (3,), r"suppress_tokens must be empty, got \(3,\)"),
        ("tokenizer.ggml.of_next_year", True, "metadata field tokenizer.ggml.of_next_year"),
    ],
)
def test_gguf_keys_that_change_the_result_are_refused(key, value, message, gguf_path):
    with pytest.raises(ModelError, match=message) as caught:
        read_with(gguf_path, key, value)
    assert str(gguf_path) in str(caught.value)


def test_numbers_of_a_file_are_compared_as_numbers(gguf_path):
    assert read_with(gguf_path, "qwen3.rope.scaling.attn_factor", 1.0)
    with pytest.raises(ModelError, match="logit_scale must be 1 or absent, got nan"):
        read_with(gguf_path, "qwen3.logit_scale", math.nan)
