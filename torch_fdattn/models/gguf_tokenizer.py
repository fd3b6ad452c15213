"""A tokenizer from the tokenizer.ggml fields of a GGUF file.

Byte-level BPE ("gpt2") is rebuilt with the package tokenizers, a "llama" vocabulary is written back into a
sentencepiece model.
"""

from __future__ import annotations

import reprlib
import struct
from collections.abc import Sequence
from typing import Any

from torch_fdattn.models.encoding import BPETokenizer, SentencePieceTokenizer, Tokenizer
from torch_fdattn.models.errors import ModelError, expect_text, reading, require
from torch_fdattn.models.gguf import GGUFFile

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4  # token types, the same in GGUF and sentencepiece

# How text is cut before BPE, by GGUF's tokenizer.ggml.pre (None: GPT-2's own expression).
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_PRE_TOKENIZERS = {
    "gpt-2": None,
    "smollm": None,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "qwen2": _QWEN2,
}
# Tokens that end a turn even where the file's eos_token_id names another.
_END_NAMES = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end_of_text|>")


def gguf_tokenizer(file: GGUFFile) -> Tokenizer:
    """From the tokenizer.ggml fields of a GGUF file."""
    with reading(file.path):
        return _gguf_tokenizer(file)


def _gguf_tokenizer(file: GGUFFile) -> Tokenizer:
    kind = file.field("tokenizer.ggml.model")
    tokens = _array(file, "tokens", str)
    types = _array(file, "token_type", int, (_NORMAL,) * len(tokens))
    if len(types) != len(tokens):
        raise ModelError(
            f"{file.path}: tokenizer.ggml.token_type must have {len(tokens)} entries like tokens, "
            f"got {len(types)}"
        )
    bos, eos, *others = (
        _token_id(file, name, len(tokens)) for name in ("bos", "eos", "eot", "eom")
    )
    controls = {text: i for i, text in enumerate(tokens) if types[i] == _CONTROL}
    if kind == "gpt2":
        pre = file.field("tokenizer.ggml.pre", "gpt-2")
        add_bos = file.field("tokenizer.ggml.add_bos_token", pre in ("llama-bpe", "llama3"))
        inner = _byte_level_bpe(file, tokens, types, pre)
        tokenizer: Tokenizer = BPETokenizer(inner, bos if add_bos else None)
        tokenizer.bos_id = bos
    elif kind == "llama":
        proto = _sentencepiece_proto(file, tokens, types)
        tokenizer = SentencePieceTokenizer(proto, str(file.path))
        tokenizer.bos_id = bos
        tokenizer.add_bos = file.field("tokenizer.ggml.add_bos_token", True)
    else:
        raise ModelError(f"{file.path}: tokenizer.ggml.model must be gpt2 or llama, got {kind!r}")

    ends = {i for i in (eos, *others) if i is not None}
    tokenizer.eos_ids = frozenset(ends | {controls[n] for n in _END_NAMES if n in controls})
    template = file.fields.get("tokenizer.chat_template")
    tokenizer.chat_template = None if template is None else expect_text(template)
    ids = {"bos_token": bos, "eos_token": eos}
    tokenizer.special_texts = {key: tokens[i] for key, i in ids.items() if i is not None}
    return tokenizer


def _array(file: GGUFFile, name: str, kind: type, default: tuple | None = None) -> tuple:
    values = file.field(f"tokenizer.ggml.{name}", default)
    if not (isinstance(values, tuple) and all(type(value) is kind for value in values)):
        raise ModelError(
            f"{file.path}: tokenizer.ggml.{name} must be an array of {kind.__name__}, got "
            f"{reprlib.repr(values)}"
        )
    return values


def _token_id(file: GGUFFile, name: str, count: int) -> int | None:
    value = file.fields.get(f"tokenizer.ggml.{name}_token_id")
    if value is not None and not (type(value) is int and 0 <= value < count):
        raise ModelError(
            f"{file.path}: tokenizer.ggml.{name}_token_id must be from 0 to {count - 1}, got "
            f"{reprlib.repr(value)}"
        )
    return value


def _byte_level_bpe(file: GGUFFile, tokens: Sequence[str], types: Sequence[int], pre: str) -> Any:
    if pre not in _PRE_TOKENIZERS:
        raise ModelError(
            f"{file.path}: tokenizer.ggml.pre must be one of {', '.join(_PRE_TOKENIZERS)}, got {pre!r}"
        )
    library = require("tokenizers", "A GGUF file's tokenizer")
    pre_tokenizers = library.pre_tokenizers
    merges = [tuple(merge.split(" ", 1)) for merge in _array(file, "merges", str)]
    try:
        bpe = library.models.BPE(
            vocab={text: i for i, text in enumerate(tokens)},
            merges=merges,
            ignore_merges=_PRE_TOKENIZERS[pre] == _LLAMA3,
        )
    except Exception as error:  # the library raises plain Exception
        raise ModelError(f"{file.path}: malformed tokenizer.ggml.merges ({error})") from None
    inner = library.Tokenizer(bpe)
    pattern = _PRE_TOKENIZERS[pre]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    steps: list[Any] = [byte_level]
    if pattern is not None:
        steps.insert(0, pre_tokenizers.Split(library.Regex(pattern), "isolated"))
    elif pre == "smollm":
        steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
    inner.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if pre == "qwen2":
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
    pieces = b"".join(
        _message(1, _message(1, text.encode()) + b"\x15" + struct.pack("<f", s) + _number(3, kind))
        for text, s, kind in zip(tokens, scores, types, strict=True)
    )

    def special(name: str) -> int:
        return file.fields.get(f"tokenizer.ggml.{name}_token_id", -1)

    trainer = _number(3, 2) + _number(35, 1)  # model_type BPE, byte_fallback
    for number, name in ((40, "unknown"), (41, "bos"), (42, "eos"), (43, "padding")):
        trainer += _number(number, special(name))
    normalizer = _number(3, file.field("tokenizer.ggml.add_space_prefix", True))
    normalizer += _number(4, file.field("tokenizer.ggml.remove_extra_whitespaces", False))
    normalizer += _number(5, True)  # spaces are written as U+2581
    return pieces + _message(2, trainer) + _message(3, normalizer)


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
