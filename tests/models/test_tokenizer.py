"""Tokenizers from every source against the libraries they come from, chat templates, streaming."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.models.tokenizer_sources import CHAT, TEXTS, write_tokenizer_gguf
from torch_fdattn.models import Tokenizer, load_tokenizer


@pytest.fixture(scope="module", params=["bpe_folder", "bpe_gguf", "llama2_folder", "llama2_gguf"])
def tokenizer(request) -> Tokenizer:
    return load_tokenizer(request.getfixturevalue(request.param))


@pytest.mark.parametrize("source", ["bpe_folder", "bpe_gguf"])
def test_byte_level_bpe_equals_transformers(source, bpe_folder, request):
    transformers = pytest.importorskip("transformers", reason="transformers is the reference here")
    theirs = transformers.AutoTokenizer.from_pretrained(bpe_folder)
    ours = load_tokenizer(request.getfixturevalue(source))
    for text in [*TEXTS, "<|user|>hi<|end|>"]:
        ids = ours.encode(text)
        assert ids == theirs(text).input_ids
        assert ours.encode(text, add_special_tokens=False) == ids[1:]
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert (ours.bos_id, ours.eos_ids) == (0, {1})
    chat = theirs.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=False)
    assert ours.chat(CHAT) == theirs(chat, add_special_tokens=False).input_ids
    assert ours.chat(CHAT)[0] == 0
    assert ours.chat(CHAT).count(0) == 1


@pytest.mark.parametrize("source", ["llama2_folder", "llama2_gguf"])
def test_sentencepiece_equals_its_library(source, sentencepiece_model, request):
    import sentencepiece

    inner = sentencepiece.SentencePieceProcessor(model_proto=sentencepiece_model)
    ours = load_tokenizer(request.getfixturevalue(source))
    for text in TEXTS:
        assert ours.encode(text, add_special_tokens=False) == inner.encode(text)
        assert ours.encode(text) == [inner.bos_id(), *inner.encode(text)]
        assert ours.decode(ours.encode(text)) == text
    turn = ours.encode("<s>hi there</s>", add_special_tokens=False)
    assert turn == [inner.bos_id(), *inner.encode("hi there"), inner.eos_id()]
    assert (ours.bos_id, ours.eos_ids) == (inner.bos_id(), {inner.eos_id()})


ADDED = {"<tool>": 420, "<|end|>": 421, "<tool>s": 422, "<|pad|>": 423}


SPECIAL = ("<|end|>", "<|pad|>")


def added_in_settings(folder, settings) -> None:
    entries = {str(i): {"content": text, "special": text in SPECIAL} for text, i in ADDED.items()}
    settings["added_tokens_decoder"] = entries


def added_in_files_of_their_own(folder, settings) -> None:
    (folder / "added_tokens.json").write_text(json.dumps(ADDED))
    special = {"pad_token": "<|pad|>", "additional_special_tokens": [{"content": "<|end|>"}]}
    (folder / "special_tokens_map.json").write_text(json.dumps(special))


@pytest.mark.parametrize("add_bos", [True, False])
@pytest.mark.parametrize("form", [added_in_settings, added_in_files_of_their_own])
def test_tokens_added_to_sentencepiece_equal_transformers(
    form, add_bos, sentencepiece_model, tmp_path
):
    import sentencepiece

    transformers = pytest.importorskip("transformers", reason="transformers is the reference here")
    from transformers.convert_slow_tokenizer import generate_merges

    settings = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    form(tmp_path, settings)
    settings["add_bos_token"] = add_bos
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_model)
    ours = load_tokenizer(tmp_path)

    inner = sentencepiece.SentencePieceProcessor(model_proto=sentencepiece_model)
    pieces = [inner.id_to_piece(i) for i in range(len(inner))]
    merges = generate_merges(
        {piece: i for i, piece in enumerate(pieces)},
        {piece: inner.get_score(i) for i, piece in enumerate(pieces)},
    )
    theirs = transformers.LlamaTokenizer(
        vocab={piece: i for i, piece in enumerate(pieces)}, merges=merges, legacy=True,
        add_bos_token=add_bos,
    )  # fmt: skip
    theirs.add_tokens(
        [transformers.AddedToken(text, special=text in SPECIAL, normalized=False) for text in ADDED]
    )
    written = ["a <tool>b<|end|>c", "<tool>x", "hi<tool>s", "the<tool><tool>fox the", "<unk>a</s>b"]
    # (Where a text begins with a space, transformers leaves out the one that sentencepiece adds.)
    for text in [*(text for text in TEXTS if text and text[0] != " "), *written]:
        ids = theirs(text).input_ids
        assert ours.encode(text) == ids
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
        decoder = ours.stream()
        pushed = "".join(decoder.push(i) for i in ids) + decoder.flush()
        assert pushed == ours.decode(ids)
    assert [ours.id_of(text) for text in ADDED] == list(ADDED.values())
    beyond = [300, 424, 5000, 301, 420]  # a model's vocabulary may be padded
    assert ours.decode(beyond) == theirs.decode(beyond, skip_special_tokens=True)
    assert ours.decode(beyond) == ours.decode([300, 301, 420])


def test_ids_beyond_the_vocabulary_have_no_text(tokenizer):
    ids = tokenizer.encode("the fox", add_special_tokens=False)
    assert tokenizer.decode([*ids, 100_000]) == tokenizer.decode(ids) == "the fox"


def test_template_files_and_named_templates(bpe_folder, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes((bpe_folder / "tokenizer.json").read_bytes())
    named = [{"name": "tools", "template": "no"}, {"name": "default", "template": "A"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert load_tokenizer(tmp_path).chat_template == "A"
    (tmp_path / "chat_template.jinja").write_text("B")
    assert load_tokenizer(tmp_path).chat_template == "B"


def test_end_tokens_come_from_the_generation_config(bpe_folder, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes((bpe_folder / "tokenizer.json").read_bytes())
    (tmp_path / "config.json").write_text('{"eos_token_id": 1}')
    assert load_tokenizer(tmp_path).eos_ids == {1}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    assert load_tokenizer(tmp_path).eos_ids == {1, 2}


@settings(deadline=None, max_examples=150)
@given(prompt=st.text(max_size=8), text=st.text(max_size=30), data=st.data())
def test_streaming_gives_the_text_and_no_broken_character(tokenizer, prompt, text, data):
    """Any text, met at any token: the pieces join to what decoding all at once gives."""
    ids = tokenizer.encode((prompt + text).replace("\ufffd", ""), add_special_tokens=False)
    whole = tokenizer.decode(ids)
    cut = data.draw(st.integers(0, len(ids)))
    while tokenizer.decode(ids[:cut]) != whole[: len(tokenizer.decode(ids[:cut]))]:
        cut -= 1  # a prompt does not end inside a character
    decoder = tokenizer.stream(ids[:cut])
    pieces = [decoder.push(i) for i in ids[cut:]]
    assert not any("\ufffd" in piece for piece in pieces)
    assert tokenizer.decode(ids[:cut]) + "".join(pieces) == whole
    assert decoder.flush() == ""


def test_streaming_holds_back_and_flushes(bpe_folder):
    tokenizer = load_tokenizer(bpe_folder)
    ids = tokenizer.encode("é\U00020000", add_special_tokens=False)
    decoder = tokenizer.stream()
    assert "".join(decoder.push(i) for i in ids[:-1]) == "é"
    assert decoder.flush() == "\ufffd"  # the end came within a character: say so, once
    assert decoder.flush() == ""


def test_streaming_keeps_the_space_between_prompt_and_text(llama2_folder):
    tokenizer = load_tokenizer(llama2_folder)
    ids = tokenizer.encode("the quick brown fox")
    for cut in range(2, len(ids)):
        decoder = tokenizer.stream(ids[:cut])
        text = tokenizer.decode(ids[:cut]) + "".join(decoder.push(i) for i in ids[cut:])
        assert text == "the quick brown fox"


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("gpt-2", "I'M ok 12345\n\n x", ["I", "'", "M", " ok", " 12345", "\n\n", " x"]),
        ("smollm", "ok 123!", ["ok", " ", "1", "2", "3", "!"]),
        ("llama-bpe", "I'M ok 12345\n\n x", ["I", "'M", " ok", " ", "123", "45", "\n\n", " x"]),
        ("qwen2", "I'M ok 123\n\n x", ["I", "'M", " ok", " ", "1", "2", "3", "\n\n", " x"]),
    ],
)
def test_text_is_cut_as_each_pre_tokenizer_says(pre, text, pieces, tmp_path):
    """A vocabulary that joins anything within a piece shows where the pieces end."""
    tokenizers = pytest.importorskip("tokenizers", reason="needs the package tokenizers")
    written = [piece.replace("\n", "Ċ").replace(" ", "Ġ") for piece in pieces]
    whole = "".join(written)
    vocabulary = list(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    merges = []
    for start in range(len(whole)):
        for end in range(start + 2, len(whole) + 1):
            if whole[start:end] not in vocabulary:
                vocabulary.append(whole[start:end])
                merges.append(f"{whole[start : end - 1]} {whole[end - 1]}")

    def fields(writer):
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(vocabulary)
        writer.add_token_merges(merges)

    write_tokenizer_gguf(tmp_path / "model.gguf", fields)
    ids = load_tokenizer(tmp_path / "model.gguf").encode(text)
    assert [vocabulary[i] for i in ids] == written
