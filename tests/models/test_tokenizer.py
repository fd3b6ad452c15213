"""Tokenizers from every source against the libraries they come from, chat templates, streaming."""

from __future__ import annotations

import io
import json
import random
import re
import shutil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.models.hf_models import reference, write_gguf
from torch_fdattn.models import ModelError, Tokenizer, load_tokenizer
from torch_fdattn.models.gguf import GGUFFile
from torch_fdattn.models.tokenizer import gguf_tokenizer

TEXTS = [
    "The capital of France is",
    "Hello 12345, wörld! 😀 👩‍👩‍👧 ça va？",
    "  leading and   inner spaces \n\n\ttabs\r\n",
    "def f(x):\n    return x**2  # naïve",
    "I'm you'll THEY'VE 3.14159 2024-05-06",
    "日本の首都は東京です。",
    "",
    " ",
]
TRAINING = [*TEXTS, "the quick brown fox jumps over the lazy dog 0123456789 2024 2025"] * 4
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is <b> & 2+2?"},
]
TEMPLATE = (
    "{%- for message in messages %}{% if message.role == 'robot' %}"
    "{{ raise_exception('no robots') }}{% endif %}\n"
    "    {%- if loop.first %}{{ bos_token }}{% endif %}"
    "<|{{ message['role'] }}|>\n{{ message['content'] | trim }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


@pytest.fixture(scope="module")
def bpe_folder(tmp_path_factory):
    """As Llama 3 ships it: tokenizer.json that adds BOS, settings and template beside it."""
    tokenizers = pytest.importorskip("tokenizers", reason="needs the package tokenizers")
    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|begin|>", "<|end|>", "<|user|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    inner.train_from_iterator(TRAINING, trainer)
    inner.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", 0)]
    )
    folder = tmp_path_factory.mktemp("bpe")
    inner.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": {"content": "<|begin|>", "__type": "AddedToken"},
        "eos_token": "<|end|>",
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="module")
def sentencepiece_model() -> bytes:
    """As Llama 2 ships it: BPE with byte fallback, no normalisation."""
    library = pytest.importorskip("sentencepiece", reason="needs the package sentencepiece")
    model = io.BytesIO()
    library.SentencePieceTrainer.train(
        sentence_iterator=iter(TRAINING),
        model_writer=model,
        vocab_size=420,
        model_type="bpe",
        byte_fallback=True,
        character_coverage=0.98,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    return model.getvalue()


@pytest.fixture(scope="module")
def llama2_folder(tmp_path_factory, sentencepiece_model):
    folder = tmp_path_factory.mktemp("llama2")
    (folder / "tokenizer.model").write_bytes(sentencepiece_model)
    settings = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def write_tokenizer_gguf(path, fields) -> None:
    write_gguf(path, reference("llama2"), fields=fields)


@pytest.fixture(scope="module")
def llama2_gguf(tmp_path_factory, sentencepiece_model):
    library = pytest.importorskip("sentencepiece", reason="needs the package sentencepiece")
    inner = library.SentencePieceProcessor(model_proto=sentencepiece_model)

    def kind(i):
        if inner.is_control(i):
            return 3
        return 6 if inner.is_byte(i) else 2 if inner.is_unknown(i) else 1

    def fields(writer):
        pieces = range(len(inner))
        writer.add_tokenizer_model("llama")
        writer.add_token_list([inner.id_to_piece(i) for i in pieces])
        writer.add_token_scores([inner.get_score(i) for i in pieces])
        writer.add_token_types([kind(i) for i in pieces])
        writer.add_bos_token_id(inner.bos_id())
        writer.add_eos_token_id(inner.eos_id())

    path = tmp_path_factory.mktemp("llama2") / "model.gguf"
    write_tokenizer_gguf(path, fields)
    return path


@pytest.fixture(scope="module")
def bpe_gguf(tmp_path_factory, bpe_folder):
    raw = json.loads((bpe_folder / "tokenizer.json").read_text())["model"]

    def fields(writer):
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list(list(raw["vocab"]))
        writer.add_token_types([3, 3, 3] + [1] * (len(raw["vocab"]) - 3))
        writer.add_token_merges([" ".join(merge) for merge in raw["merges"]])
        writer.add_bos_token_id(0)
        writer.add_eos_token_id(1)
        writer.add_add_bos_token(True)
        writer.add_chat_template(TEMPLATE)

    path = tmp_path_factory.mktemp("bpe") / "model.gguf"
    write_tokenizer_gguf(path, fields)
    return path


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
