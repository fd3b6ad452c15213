"""Tokens beside the vocabulary: those of chats, those that end a turn, and text next to them."""

from __future__ import annotations

import io
import json

import pytest

from tests.models.hf_models import reference, write_gguf
from torch_fdattn.models import ModelError, load_tokenizer
from torch_fdattn.models.gguf import GGUFFile
from torch_fdattn.models.gguf_tokenizer import gguf_tokenizer

tokenizers = pytest.importorskip("tokenizers", reason="needs the package tokenizers")
spm = pytest.importorskip("sentencepiece", reason="needs the package sentencepiece")
transformers = pytest.importorskip("transformers", reason="transformers is the reference here")

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4
ALPHABET = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
END = len(ALPHABET)  # the id of the token that is added first
HI = [ALPHABET.index("h"), ALPHABET.index("i")]


def bpe_folder(folder, added=(), *, settings=None, special_map=None, files=None):
    """A tokenizer.json of bytes with the tokens `added` (text, special), and the files beside it."""
    inner = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab={text: i for i, text in enumerate(ALPHABET)}, merges=[])
    )
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    inner.add_tokens([tokenizers.AddedToken(t, special=s, normalized=False) for t, s in added])
    inner.save(str(folder / "tokenizer.json"))
    written = {
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", **(settings or {})},
        "config.json": {"model_type": "qwen3"},
        **({} if special_map is None else {"special_tokens_map.json": special_map}),
        **(files or {}),
    }
    for name, content in written.items():
        (folder / name).write_text(json.dumps(content))
    return folder


PLAIN = (("<|im_end|>", False), ("<think>", False))
ENTRY = {"content": "<|im_end|>", "special": True, "normalized": False}
FOLDERS = {
    "special in all files": ((("<|im_end|>", True),), {"eos_token": "<|im_end|>"}, None),
    "by eos_token": (PLAIN, {"eos_token": "<|im_end|>"}, None),
    "by eos_token with settings": (PLAIN, {"eos_token": {**ENTRY, "__type": "AddedToken"}}, None),
    "by special_tokens_map.json": (PLAIN, {}, {"eos_token": "<|im_end|>"}),
    "by added_tokens_decoder": (PLAIN, {"added_tokens_decoder": {str(END): ENTRY}}, None),
    "only in added_tokens_decoder": (
        (), {"added_tokens_decoder": {str(END): ENTRY}, "eos_token": "<|im_end|>"}, None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", FOLDERS)
def test_an_end_token_is_one_token_and_no_text(form, tmp_path):
    added, settings, special_map = FOLDERS[form]
    bpe_folder(tmp_path, added, settings=settings, special_map=special_map)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ours = load_tokenizer(tmp_path)
    for text in ("hi<|im_end|>", "hi<think>x<|im_end|> y"):
        ids = theirs(text, add_special_tokens=False).input_ids
        assert ours.encode(text, add_special_tokens=False) == ids
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert ours.decode([*HI, END]) == "hi"
    stream = ours.stream(HI)
    assert stream.push(END) + stream.flush() == ""
    if form != "by added_tokens_decoder":  # special, and nobody says that it ends
        assert ours.eos_ids == {END}


def test_the_generation_configs_end_is_no_text(tmp_path):
    files = {"generation_config.json": {"eos_token_id": [END]}}
    ours = load_tokenizer(bpe_folder(tmp_path, PLAIN, files=files))
    assert ours.decode([*HI, END, END + 1]) == "hi<think>"


def test_ends_of_all_files_end(tmp_path):
    """Early Llama 3 files: the generation config has one, the tokenizer's settings the other."""
    files = {"generation_config.json": {"eos_token_id": END + 1}}
    settings = {"eos_token": "<|im_end|>"}
    assert load_tokenizer(bpe_folder(tmp_path, PLAIN, settings=settings, files=files)).eos_ids == {
        END, END + 1,
    }  # fmt: skip


def test_an_end_that_is_no_token_is_refused(tmp_path):
    bpe_folder(tmp_path, settings={"eos_token": "<|nowhere|>"})
    with pytest.raises(
        ModelError, match=r"eos_token must be a token .* got '<\|nowhere\|>': gener"
    ):
        load_tokenizer(tmp_path)


def test_ids_that_contradict_tokenizer_json_are_refused(tmp_path):
    entry = {"added_tokens_decoder": {str(END + 7): ENTRY}}
    bpe_folder(tmp_path, settings=entry)
    with pytest.raises(
        ModelError, match=rf"'<\|im_end\|>' must have the id {END + 7} .*, got {END}"
    ):
        load_tokenizer(tmp_path)


def test_added_tokens_keep_how_they_take_white_space(tmp_path):
    flags = {"lstrip": True, "rstrip": True, "special": True, "normalized": False}
    settings = {"added_tokens_decoder": {str(END): {"content": "<|end|>", **flags}}}
    bpe_folder(tmp_path, settings=settings)
    theirs, ours = transformers.AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(tmp_path)
    for text in ("hi <|end|>  \n x", "<|end|>", "  <|end|><|end|> "):
        assert ours.encode(text) == theirs(text).input_ids


@pytest.mark.parametrize("key", ["extra_special_tokens", "model_specific_special_tokens"])
def test_named_tokens_of_a_dictionary_are_variables_of_the_template(key, tmp_path):
    settings = {
        key: {"tool_token": "<think>"},
        "chat_template": "{{ tool_token }}{{ messages[0].content }}",
    }
    ours = load_tokenizer(bpe_folder(tmp_path, PLAIN, settings=settings))
    assert ours.chat([{"role": "user", "content": "hi"}]) == [END + 1, *HI]


def bpe_gguf(path, tokens, types, merges=("h i",), fields=lambda writer: None):
    def write(writer):
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list(tokens)
        writer.add_token_types(types)
        writer.add_token_merges(list(merges))
        fields(writer)

    write_gguf(path, reference("llama2"), fields=write)
    return path


@pytest.mark.parametrize("kind", [NORMAL, CONTROL, USER_DEFINED])
@pytest.mark.parametrize("named", [True, False], ids=["eos_token_id", "its name"])
def test_a_gguf_end_token_of_any_type_is_one_token_and_no_text(kind, named, tmp_path):
    text = "<|bye|>" if named else "<|im_end|>"
    types = [NORMAL] * END + [kind, NORMAL]

    def fields(writer):
        writer.add_tokenizer_pre("qwen2")
        if named:
            writer.add_eos_token_id(END)

    path = bpe_gguf(tmp_path / "model.gguf", [*ALPHABET, text, "hi"], types, fields=fields)
    ours = load_tokenizer(path)
    assert ours.encode(f"hi{text}") == [END + 1, END]
    assert ours.decode([END + 1, END]) == "hi"
    assert ours.eos_ids == {END}


def test_a_gguf_file_may_list_ends_and_add_one(tmp_path):
    """eos_token_ids is ollama's; add_eos_token is what transformers does with the same setting."""

    def fields(writer):
        writer.add_tokenizer_pre("qwen2")
        writer.add_eos_token_id(END)
        writer.add_array("tokenizer.ggml.eos_token_ids", [END, 3])
        writer.add_add_eos_token(True)

    types = [NORMAL] * END + [CONTROL, NORMAL]
    path = bpe_gguf(tmp_path / "model.gguf", [*ALPHABET, "<|bye|>", "hi"], types, fields=fields)
    ours = load_tokenizer(path)
    assert ours.eos_ids == {END, 3}
    assert ours.encode("hi") == [END + 1, END]
    assert ours.encode("hi", add_special_tokens=False) == [END + 1]


# Pieces that Llama 3's expression cuts, and no other that is read here.
LLAMA3_PIECES = ["I", "'M", "Ġok", "Ġ", "123", "45", "ĊĊ", "Ġx"]
LLAMA3_TOKENS = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|eot_id|>"]


def llama3_gguf(path, pre, specials=LLAMA3_TOKENS):
    """A vocabulary that joins anything within a piece, and Llama 3's special tokens."""
    whole = "".join(LLAMA3_PIECES)
    vocabulary, merges = list(ALPHABET), []
    for start in range(len(whole)):
        for end in range(start + 2, len(whole) + 1):
            if whole[start:end] not in vocabulary:
                vocabulary.append(whole[start:end])
                merges.append(f"{whole[start : end - 1]} {whole[end - 1]}")
    tokens = [*vocabulary, *specials]

    def fields(writer):
        if pre is not None:
            writer.add_tokenizer_pre(pre)
        writer.add_bos_token_id(len(vocabulary))

    types = [NORMAL] * len(vocabulary) + [CONTROL] * len(specials)
    return bpe_gguf(path, tokens, types, merges, fields), tokens


@pytest.mark.parametrize(
    ("pre", "bos"),
    [
        *((name, True) for name in (None, "default", "llama-bpe", "llama3", "llama-v3", "falcon3",
          "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano")),
        ("smaug-bpe", False),
    ],
)  # fmt: skip
def test_names_of_llama3s_pre_tokenizer(pre, bos, tmp_path):
    """llama.cpp's list; without a name, Llama 3's own tokens tell."""
    path, tokens = llama3_gguf(tmp_path / "model.gguf", pre)
    ids = load_tokenizer(path).encode("I'M ok 12345\n\n x")
    assert [tokens[i] for i in ids] == [LLAMA3_TOKENS[0]] * bos + LLAMA3_PIECES


@pytest.mark.parametrize("pre", [None, "default", "tekken", "deepseek-llm", "refact", "qwen35"])
def test_other_pre_tokenizers_are_refused_by_name(pre, tmp_path):
    path, _ = llama3_gguf(tmp_path / "model.gguf", pre, specials=["<|bye|>"])
    with pytest.raises(ModelError, match=r"tokenizer\.ggml\.pre must be one of gpt-2") as caught:
        load_tokenizer(path)
    assert repr(pre or "default") in str(caught.value)
    assert ("gguf-new-metadata --pre-tokenizer" in str(caught.value)) == (pre in (None, "default"))


TRAINING = [
    "the user said hello world to the assistant", "system user assistant model text",
    "a quick brown fox jumps over the lazy dog 0123456789", "say   it with    spaces", "user user the",
]  # fmt: skip


@pytest.fixture(scope="module")
def proto() -> bytes:
    model = io.BytesIO()
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(TRAINING * 6), model_writer=model, vocab_size=320, model_type="bpe",
        byte_fallback=True, character_coverage=0.99, normalization_rule_name="identity",
        remove_extra_whitespaces=False, minloglevel=2,
    )  # fmt: skip
    return model.getvalue()


def sentencepiece_gguf(path, proto, added, fields=lambda writer: None):
    inner = spm.SentencePieceProcessor(model_proto=proto)
    own = range(len(inner))

    def kind(i):
        return (
            3 if inner.is_control(i) else 6 if inner.is_byte(i) else 2 if inner.is_unknown(i) else 1
        )

    def write(writer):
        writer.add_tokenizer_model("llama")
        writer.add_token_list([inner.id_to_piece(i) for i in own] + [text for text, _ in added])
        writer.add_token_scores([inner.get_score(i) for i in own] + [-1000.0] * len(added))
        writer.add_token_types([kind(i) for i in own] + [type_ for _, type_ in added])
        writer.add_bos_token_id(inner.bos_id())
        writer.add_eos_token_id(inner.eos_id())
        writer.add_unk_token_id(inner.unk_id())
        fields(writer)

    write_gguf(path, reference("llama2"), fields=write)
    return path


def their_llama_tokenizer(proto, added):
    from transformers.convert_slow_tokenizer import generate_merges

    inner = spm.SentencePieceProcessor(model_proto=proto)
    pieces = [inner.id_to_piece(i) for i in range(len(inner))]
    merges = generate_merges(
        {piece: i for i, piece in enumerate(pieces)},
        {piece: inner.get_score(i) for i, piece in enumerate(pieces)},
    )
    theirs = transformers.LlamaTokenizer(
        vocab={piece: i for i, piece in enumerate(pieces)}, merges=merges, legacy=True,
        add_bos_token=True,
    )  # fmt: skip
    theirs.add_tokens(
        [transformers.AddedToken(t, special=k == CONTROL, normalized=False) for t, k in added]
    )
    return theirs


@pytest.mark.parametrize("kind", [USER_DEFINED, CONTROL])
def test_text_next_to_tokens_of_a_llama_vocabulary(kind, proto, tmp_path):
    added = [("<|im_start|>", kind), ("<tool>", kind), ("<|im_end|>", CONTROL), ("<tool>s", kind)]
    theirs = their_llama_tokenizer(proto, added)
    ours = load_tokenizer(sentencepiece_gguf(tmp_path / "model.gguf", proto, added))
    first = len(spm.SentencePieceProcessor(model_proto=proto))
    assert [ours.id_of(text) for text, _ in added] == list(range(first, first + len(added)))
    for text in (
        "<|im_start|>user hello<|im_end|>", "<|im_start|>", "the<|im_start|>user", "user",
        "hello <|im_start|> user", "<|im_start|> user", "<|im_end|>user", "a<tool>b", "a<tool>sb",
        "<|im_start|><|im_start|>x", "<tool> <tool>", "<tool>  <tool>  x ", "<tool>\n<tool>",
        "<unk>a</s>b", "</s> the", "<|im_start|>\u2581user",
    ):  # fmt: skip
        ids = theirs(text).input_ids
        assert ours.encode(text) == ids, text
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True), text


def test_a_vocabulary_without_the_space_before_a_word(proto, tmp_path):
    """As Llama files with add_prefix_space false: text next to a token stays as it is."""
    path = sentencepiece_gguf(
        tmp_path / "model.gguf", proto, [("<tool>", USER_DEFINED)],
        lambda writer: writer.add_add_space_prefix(False),
    )  # fmt: skip
    ours = load_tokenizer(path)
    assert ours.encode("<tool> the") == [*ours.encode("<tool>"), *ours.encode(" the", False)]
    assert ours.decode(ours.encode("the<tool>the")) == "the<tool>the"


@pytest.mark.parametrize("kind", [NORMAL, CONTROL, USER_DEFINED])
def test_a_llama_vocabularys_end_of_any_type_is_no_text(kind, proto, tmp_path):
    file = GGUFFile(sentencepiece_gguf(tmp_path / "model.gguf", proto, [("<|bye|>", kind)]))
    end = len(file.fields["tokenizer.ggml.tokens"]) - 1
    file.fields["tokenizer.ggml.eos_token_id"] = end
    ours = gguf_tokenizer(file)
    assert ours.encode("hello<|bye|>", False) == [*ours.encode("hello", False), end]
    assert ours.decode([*ours.encode("hello", False), end]) == "hello"
    assert ours.eos_ids == {end}


def test_a_llama_vocabulary_names_the_templates_tokens(proto, tmp_path):
    template = "{{ bos_token }}{{ unk_token }}{{ messages[0].content }}{{ eos_token }}"
    path = sentencepiece_gguf(
        tmp_path / "model.gguf", proto, [], lambda writer: writer.add_chat_template(template)
    )
    (tmp_path / "tokenizer.model").write_bytes(proto)
    (tmp_path / "chat_template.jinja").write_text(template)
    for source in (path, tmp_path):
        ids = load_tokenizer(source).chat([{"role": "user", "content": "the"}])
        assert [ids[0], ids[1], ids[-1]] == [1, 0, 2]


def test_settings_of_white_space_and_of_single_words(proto, tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(proto)
    entry = {"content": "<t>", "lstrip": True, "rstrip": True}
    settings = {"added_tokens_decoder": {"320": entry}, "add_eos_token": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    ours = load_tokenizer(tmp_path)
    assert ours.encode("the  <t>\n the") == [*ours.encode("the<t>the")]
    assert ours.encode("the")[-1] == 2
    entry["single_word"] = True
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(ModelError, match="single_word of the added token '<t>' must be false"):
        load_tokenizer(tmp_path)
