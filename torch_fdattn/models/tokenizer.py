"""Text to token ids and back, chat templates, and streaming without broken characters.

Built from a folder's `tokenizer.json` (package tokenizers) or `tokenizer.model` (sentencepiece, as
Llama 2 ships it), or from the fields of a GGUF file, which become one or the other: byte-level BPE is
rebuilt with tokenizers, a "llama" vocabulary is written back into a sentencepiece model.
"""

from __future__ import annotations

import re
import reprlib
import struct
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from torch_fdattn.models.config import read_json
from torch_fdattn.models.errors import ModelError, reading, require
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


class Tokenizer(ABC):
    """What the engine needs of a tokenizer."""

    bos_id: int | None = None
    eos_ids: frozenset[int] = frozenset()
    chat_template: str | None = None
    special_texts: Mapping[str, str] = {}  # bos_token, eos_token …: variables of the chat template

    @abstractmethod
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, special tokens left out; U+FFFD where bytes form no character."""

    @abstractmethod
    def id_of(self, token: str) -> int | None:
        """The id of one token by its text, a special token above all."""

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a conversation, up to where the assistant's next answer begins."""
        if self.chat_template is None:
            raise ModelError("this model has no chat template: give a plain prompt instead")
        sandbox = require("jinja2.sandbox", "A chat template")
        environment = sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals["raise_exception"] = _raise_template_error
        environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
        try:
            text = environment.from_string(self.chat_template).render(
                messages=list(messages), add_generation_prompt=True, **self.special_texts
            )
        except Exception as error:  # a template is a program: it may raise anything
            cause = " ".join(str(error).split())
            raise ModelError(f"the chat template refused the messages: {cause}") from None
        return self.encode(text, add_special_tokens=False)

    def stream(self, prompt: Sequence[int] = ()) -> StreamDecoder:
        """A decoder for the ids that follow `prompt`."""
        return StreamDecoder(self, prompt)


def _raise_template_error(message: str) -> None:
    raise require("jinja2", "A chat template").TemplateError(message)


class StreamDecoder:
    """Text piece by piece as ids arrive; a character whose bytes are incomplete is held back."""

    # Earlier ids kept as context: sentencepiece drops the space of a first word. No character has
    # more than four bytes, so the context never ends in a broken one.
    _CONTEXT = 4

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._start_after(prompt)

    def _start_after(self, ids: Sequence[int]) -> None:
        self._ids = list(ids[-self._CONTEXT :])
        self._shown = len(self._tokenizer.decode(self._ids))  # characters not to return again

    def push(self, token_id: int) -> str:
        self._ids.append(token_id)
        text = self._tokenizer.decode(self._ids)
        complete = text.rstrip("\ufffd")
        new = complete[self._shown :]
        self._shown = max(self._shown, len(complete))
        if complete == text and len(self._ids) > 2 * self._CONTEXT:
            self._start_after(self._ids)
        return new

    def flush(self) -> str:
        """What was held back and will not be completed."""
        text = self._tokenizer.decode(self._ids)[self._shown :]
        self._shown += len(text)
        return text


class BPETokenizer(Tokenizer):
    """Over a `tokenizers.Tokenizer`."""

    def __init__(self, inner: Any, bos_prefix: int | None = None) -> None:
        inner.no_truncation()
        inner.no_padding()
        self._inner = inner
        self._bos_prefix = [] if bos_prefix is None else [bos_prefix]

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids = self._inner.encode(text, add_special_tokens=add_special_tokens).ids
        return (self._bos_prefix if add_special_tokens else []) + ids

    def decode(self, ids: Sequence[int]) -> str:
        return self._inner.decode(list(ids), skip_special_tokens=True)

    def id_of(self, token: str) -> int | None:
        return self._inner.token_to_id(token)


class SentencePieceTokenizer(Tokenizer):
    """Over a sentencepiece model, and tokens added to it, which are recognised when written out in the text.

    Args:
        proto: the serialised model.
        where: what messages call it.
        added: ids by text, of the vocabulary or beyond it.
        specials: texts of the vocabulary or of `added` that are no part of decoded text.
    """

    def __init__(
        self, proto: bytes, where: str, added: Mapping[str, int] | None = None,
        specials: Collection[str] = (),
    ) -> None:  # fmt: skip
        library = require("sentencepiece", "A sentencepiece tokenizer")
        if not proto:  # the library would take it for "no model yet"
            raise ModelError(f"{where}: not a sentencepiece model (empty)")
        try:
            self._inner = library.SentencePieceProcessor(model_proto=proto)
        except Exception as error:  # the library raises plain RuntimeError and others
            raise ModelError(f"{where}: not a sentencepiece model ({error})") from None
        pieces = {self._inner.id_to_piece(i): i for i in range(len(self._inner))}
        controls = {text for text, i in pieces.items() if self._inner.is_control(i)}
        known = pieces | dict(added or {})
        named = [*controls, *(added or {}), *(text for text in specials if text in known)]
        self._ids = {text: known[text] for text in named}
        self._special_ids = frozenset(self._ids[t] for t in {*controls, *specials} & {*self._ids})
        self._beyond = {i: text for text, i in self._ids.items() if i >= len(self._inner)}
        # Of two that begin alike, the longer is meant.
        longest_first = sorted(filter(None, self._ids), key=len, reverse=True)
        self._split = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")")
        if self._inner.bos_id() >= 0:
            self.bos_id = self._inner.bos_id()
        self.add_bos = True

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        bos = add_special_tokens and self.add_bos and self.bos_id is not None
        ids = [self.bos_id] if bos else []
        for part in self._split.split(text) if self._ids else [text]:
            if part in self._ids:
                ids.append(self._ids[part])
            elif part:
                ids.extend(self._inner.encode(part))
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        text, run = "", []
        for i in [*ids, None]:  # None: the end of the last run
            if i is None or (i in self._beyond and i not in self._special_ids):
                text += self._decode_run(run, bool(text)) + self._beyond.get(i, "")
                run = []
            # A model's vocabulary may be padded beyond the tokenizer's: such ids have no text.
            elif i not in self._special_ids and 0 <= i < len(self._inner):
                run.append(i)
        return text

    def _decode_run(self, run: list[int], follows: bool) -> str:
        """Of the vocabulary's ids; the library drops a first word's space, also where text comes before it."""
        space = follows and run and self._inner.id_to_piece(run[0]).startswith("\u2581")
        return (" " if space else "") + self._inner.decode(run)

    def id_of(self, token: str) -> int | None:
        return self._ids.get(token)


def folder_tokenizer(folder: Path) -> Tokenizer:
    """From a Hugging Face folder: tokenizer.json if there is one, else tokenizer.model."""
    settings_file, map_file = folder / "tokenizer_config.json", folder / "special_tokens_map.json"
    settings, special_map = _optional_json(settings_file), _optional_json(map_file)
    texts: dict[str, str] = {}
    specials: set[str] = set()
    for file, entries in ((map_file, special_map), (settings_file, settings)):
        with reading(file):
            texts |= {
                key: _content(value)
                for key, value in entries.items()
                if key.endswith("_token") and isinstance(value, str | dict)
            }
            specials |= {_content(x) for x in entries.get("additional_special_tokens") or ()}
    added = _added_tokens(folder, settings, specials)
    if (path := folder / "tokenizer.json").exists():
        library = require("tokenizers", "tokenizer.json")
        try:
            inner = library.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise ModelError(f"{path}: not a tokenizer ({error})") from None
        tokenizer: Tokenizer = BPETokenizer(inner)
    elif (path := folder / "tokenizer.model").exists():
        with reading(path):
            tokenizer = SentencePieceTokenizer(
                path.read_bytes(), str(path), added, specials | set(texts.values())
            )
        tokenizer.add_bos = settings.get("add_bos_token") is not False
    else:
        raise ModelError(f"{folder}: has neither tokenizer.json nor tokenizer.model")

    tokenizer.special_texts = texts
    tokenizer.chat_template = _folder_chat_template(folder, settings)
    if "bos_token" in texts:
        tokenizer.bos_id = tokenizer.id_of(texts["bos_token"])
    eos = tokenizer.id_of(texts.get("eos_token", "</s>"))
    tokenizer.eos_ids = _folder_eos(folder) or frozenset([] if eos is None else [eos])
    return tokenizer


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def _added_tokens(folder: Path, settings: Mapping[str, Any], specials: set[str]) -> dict[str, int]:
    """Ids by text of the tokens that a folder adds to its vocabulary; the special ones go into `specials`."""
    with reading(folder / "added_tokens.json"):
        added = dict(_optional_json(folder / "added_tokens.json"))
        if wrong := [i for i in added.values() if type(i) is not int or i < 0]:
            raise TypeError(f"expected ids, got {reprlib.repr(wrong[0])}")
    with reading(folder / "tokenizer_config.json"):
        for index, entry in settings.get("added_tokens_decoder", {}).items():
            added[text := _text(entry["content"])] = int(index)
            if entry.get("special"):
                specials.add(text)
    return added


def _content(value: Any) -> str:
    """A token's text, alone or with its settings."""
    return _text(value["content"] if isinstance(value, dict) else value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected a string, got {reprlib.repr(value)}")
    return value


def _folder_chat_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    if (path := folder / "chat_template.jinja").exists():
        with reading(path):
            return path.read_text(encoding="utf-8")
    with reading(folder / "tokenizer_config.json"):
        template = settings.get("chat_template")
        if isinstance(template, list):  # several, by name
            template = {entry["name"]: entry["template"] for entry in template}.get("default")
        return None if template is None else _text(template)


def _folder_eos(folder: Path) -> frozenset[int]:
    for name in ("generation_config.json", "config.json"):  # the first knows the end of a turn too
        ids = _optional_json(folder / name).get("eos_token_id")
        if ids is not None:
            ids = ids if isinstance(ids, list) else [ids]
            if not all(type(i) is int for i in ids):
                raise ModelError(
                    f"{folder / name}: eos_token_id must be an integer or a list of them, got "
                    f"{reprlib.repr(ids)}"
                )
            return frozenset(ids)
    return frozenset()


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
    tokenizer.chat_template = None if template is None else _text(template)
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
