"""A tokenizer from the tokenizer.ggml fields of a GGUF file.

Byte-level BPE ("gpt2") is rebuilt with the package tokenizers, a "llama" vocabulary is written back into a
sentencepiece model.
"""

from __future__ import annotations

import reprlib
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch_fdattn.models.encoding import (
    AddedToken,
    BPETokenizer,
    SentencePieceTokenizer,
    Tokenizer,
)
from torch_fdattn.models.errors import ModelError, expect_text, reading, require
from torch_fdattn.models.gguf import GGUFFile
from torch_fdattn.models.gguf_keys import check_gguf_tokenizer_keys

# Token types, the same in GGUF and sentencepiece.
_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class _PreTokenizer(NamedTuple):
    """What llama.cpp's llama-vocab.cpp makes of a name in tokenizer.ggml.pre."""

    pattern: str | None  # how text is cut before BPE; None: by GPT-2's own expression
    add_bos: bool = False  # where the file does not say
    ignore_merges: bool = False  # a word that is a token is not made from merges
    single_digits: bool = False
    nfc: bool = False


_LLAMA3_PRE = _PreTokenizer(_LLAMA3, add_bos=True, ignore_merges=True)
_LLAMA3_NAMES = (
    "llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2",
    "jina-v5-nano",
)  # fmt: skip
_PRE_TOKENIZERS = {
    "gpt-2": _PreTokenizer(None),
    "smollm": _PreTokenizer(None, single_digits=True),
    "qwen2": _PreTokenizer(_LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}"), nfc=True),
    "smaug-bpe": _PreTokenizer(_LLAMA3),
    **dict.fromkeys(_LLAMA3_NAMES, _LLAMA3_PRE),
}
# Files older than the field, or written without it, are known by tokens that only Llama 3 has.
_LLAMA3_TOKENS = frozenset(("<|begin_of_text|>", "<|start_header_id|>"))

# Tokens that end a turn even where the file's eos_token_id names another, of whatever type.
_END_NAMES = (
    "<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|end|>",
    "<end_of_turn>", "<｜end▁of▁sentence｜>",
)  # fmt: skip
# Variables of a chat template, by the names of GGUF's fields.
_TEMPLATE_TOKENS = {
    "bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "seperator": "sep_token",
    "padding": "pad_token", "mask": "mask_token",
}  # fmt: skip


def gguf_tokenizer(file: GGUFFile) -> Tokenizer:
    """From the tokenizer.ggml fields of a GGUF file."""
    with reading(file.path):
        return _gguf_tokenizer(file)


def _gguf_tokenizer(file: GGUFFile) -> Tokenizer:
    kind = file.field("tokenizer.ggml.model")
    tokens = _array(file, "tokens", str)
    types = list(_array(file, "token_type", int, (_NORMAL,) * len(tokens)))
    if len(types) != len(tokens):
        raise ModelError(
            f"{file.path}: tokenizer.ggml.token_type must have {len(tokens)} entries like tokens, "
            f"got {len(types)}"
        )
    bos, *ends = (_token_id(file, name, len(tokens)) for name in ("bos", "eos", "eot", "eom"))
    others = _array(file, "eos_token_ids", int, ())
    end_ids = {_within(file, "eos_token_ids", i, len(tokens)) for i in (*ends, *others)} - {None}
    end_ids |= {i for i, text in enumerate(tokens) if text in _END_NAMES}
    for i in end_ids:  # no text, whatever the file calls it
        types[i] = _CONTROL
    add_bos, add_eos = (_flag(file, f"add_{name}_token") for name in ("bos", "eos"))
    if kind == "gpt2":
        pre = _pre_tokenizer(file, tokens)
        add_bos = pre.add_bos if add_bos is None else add_bos
        tokenizer: Tokenizer = BPETokenizer(
            _byte_level_bpe(file, tokens, types, pre),
            bos if add_bos else None,
            ends[0] if add_eos else None,
        )
    elif kind == "llama":
        proto = _sentencepiece_proto(file, tokens, types)
        # sentencepiece would take these for pieces of words and put spaces before them.
        added = {
            text: AddedToken(i)
            for i, (text, type_) in enumerate(zip(tokens, types, strict=True))
            if type_ == _USER_DEFINED
        }
        tokenizer = SentencePieceTokenizer(proto, str(file.path), added)
        tokenizer.add_bos, tokenizer.add_eos = add_bos is not False, bool(add_eos)
    else:
        raise ModelError(f"{file.path}: tokenizer.ggml.model must be gpt2 or llama, got {kind!r}")
    check_gguf_tokenizer_keys(file.fields)

    tokenizer.bos_id = bos
    tokenizer.eos_ids = frozenset(end_ids)
    template = file.field("tokenizer.chat_template", None)
    tokenizer.chat_template = None if template is None else expect_text(template)
    ids = {key: _token_id(file, name, len(tokens)) for name, key in _TEMPLATE_TOKENS.items()}
    tokenizer.special_texts = {key: tokens[i] for key, i in ids.items() if i is not None}
    return tokenizer


def _pre_tokenizer(file: GGUFFile, tokens: Sequence[str]) -> _PreTokenizer:
    pre = file.field("tokenizer.ggml.pre", "default")
    if pre == "default" and set(tokens) >= _LLAMA3_TOKENS:
        return _LLAMA3_PRE
    if pre not in _PRE_TOKENIZERS:
        remedy = "" if pre != "default" else (
            " or none: say which the model was trained with by gguf-new-metadata --pre-tokenizer NAME"
        )  # fmt: skip
        raise ModelError(
            f"{file.path}: tokenizer.ggml.pre must be one of {', '.join(_PRE_TOKENIZERS)}, got "
            f"{pre!r}{remedy}"
        )
    return _PRE_TOKENIZERS[pre]


def _flag(file: GGUFFile, name: str) -> bool | None:
    value = file.field(f"tokenizer.ggml.{name}", None)
    if not isinstance(value, bool | None):
        raise ModelError(
            f"{file.path}: tokenizer.ggml.{name} must be true or false, got {reprlib.repr(value)}"
        )
    return value


def _array(file: GGUFFile, name: str, kind: type, *default: tuple) -> tuple:
    values = file.field(f"tokenizer.ggml.{name}", *default)
    if not (isinstance(values, tuple) and all(type(value) is kind for value in values)):
        raise ModelError(
            f"{file.path}: tokenizer.ggml.{name} must be an array of {kind.__name__}, got "
            f"{reprlib.repr(values)}"
        )
    return values


def _token_id(file: GGUFFile, name: str, count: int) -> int | None:
    key = f"{name}_token_id"
    return _within(file, key, file.field(f"tokenizer.ggml.{key}", None), count)


def _within(file: GGUFFile, key: str, value: Any, count: int) -> int | None:
    if value is not None and not (type(value) is int and 0 <= value < count):
        raise ModelError(
            f"{file.path}: tokenizer.ggml.{key} must be from 0 to {count - 1}, got "
            f"{reprlib.repr(value)}"
        )
    return value


def _byte_level_bpe(
    file: GGUFFile, tokens: Sequence[str], types: Sequence[int], pre: _PreTokenizer
) -> Any:
    library = require("tokenizers", "A GGUF file's tokenizer")
    pre_tokenizers = library.pre_tokenizers
    merges = [tuple(merge.split(" ", 1)) for merge in _array(file, "merges", str)]
    try:
        bpe = library.models.BPE(
            vocab={text: i for i, text in enumerate(tokens)},
            merges=merges,
            ignore_merges=pre.ignore_merges,
        )
    except Exception as error:  # the library raises plain Exception
        raise ModelError(f"{file.path}: malformed tokenizer.ggml.merges ({error})") from None
    inner = library.Tokenizer(bpe)
    steps: list[Any] = []
    if pre.pattern is not None:
        steps.append(pre_tokenizers.Split(library.Regex(pre.pattern), "isolated"))
    if pre.single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    use_regex = pre.pattern is None
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex))
    inner.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if pre.nfc:
        inner.normalizer = library.normalizers.NFC()
    inner.decoder = library.decoders.ByteLevel()
    added = [
        library.AddedToken(text, special=kind == _CONTROL, normalized=False)
        for text, kind in zip(tokens, types, strict=True)
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    inner.add_tokens(added)
    return inner


def _sentencepiece_proto(file: GGUFFile, tokens: Sequence[str], types: Sequence[int]) -> bytes:
    """A serialised sentencepiece ModelProto: https://github.com/google/sentencepiece (src/*.proto)."""
    scores = _array(file, "scores", float)
    if len(scores) != len(tokens):
        raise ModelError(
            f"{file.path}: tokenizer.ggml.scores must have {len(tokens)} entries like tokens, "
            f"got {len(scores)}"
        )
    vocabulary = b"".join(
        _message(1, _message(1, text.encode()) + b"\x15" + struct.pack("<f", s) + _number(3, kind))
        for text, s, kind in zip(
            tokens, scores, (_UNUSED if k == _USER_DEFINED else k for k in types), strict=True
        )
    )

    def special(name: str) -> int:
        i = _token_id(file, name, len(tokens))
        return -1 if i is None else i

    trainer = _number(3, 2) + _number(35, 1)  # model_type BPE, byte_fallback
    for number, name in ((40, "unknown"), (41, "bos"), (42, "eos"), (43, "padding")):
        trainer += _number(number, special(name))
    normalizer = _number(3, _flag(file, "add_space_prefix") is not False)
    normalizer += _number(4, _flag(file, "remove_extra_whitespaces") is True)
    normalizer += _number(5, True)  # spaces are written as U+2581
    return vocabulary + _message(2, trainer) + _message(3, normalizer)


def _message(number: int, payload: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(payload)) + payload


def _number(number: int, value: int) -> bytes:
    return _varint(number << 3) + _varint(value % 2**64)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value >= 128:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)
