"""A tokenizer from a Hugging Face folder, or from a GGUF file by gguf_tokenizer.py.

A folder's `tokenizer.json` is read by the package tokenizers, else `tokenizer.model` by sentencepiece, as
Llama 2 ships it.
"""

from __future__ import annotations

import io
import reprlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from torch_fdattn.models.config import read_json
from torch_fdattn.models.config_keys import check_generation_keys, check_tokenizer_settings
from torch_fdattn.models.encoding import (
    AddedToken,
    BPETokenizer,
    SentencePieceTokenizer,
    Tokenizer,
    is_panic,
)
from torch_fdattn.models.errors import ModelError, expect_text, reading, require
from torch_fdattn.models.files import MAX_TOKENIZER_BYTES, has_file, read_file
from torch_fdattn.models.gguf_tokenizer import gguf_tokenizer
from torch_fdattn.models.tokenizer_limits import check_tokenizer_json

__all__ = ["Tokenizer", "folder_tokenizer", "gguf_tokenizer"]

_FLAGS = ("special", "lstrip", "rstrip", "single_word")  # of AddedToken and of the files


def folder_tokenizer(folder: Path) -> Tokenizer:
    """From a Hugging Face folder: tokenizer.json if there is one, else tokenizer.model."""
    settings_file, map_file = folder / "tokenizer_config.json", folder / "special_tokens_map.json"
    settings, special_map = _optional_json(settings_file), _optional_json(map_file)
    with reading(settings_file):
        check_tokenizer_settings(settings)
    texts: dict[str, str] = {}
    specials: set[str] = set()
    for file, entries in ((map_file, special_map), (settings_file, settings)):
        with reading(file):
            for key in ("extra_special_tokens", "model_specific_special_tokens"):
                if isinstance(named := entries.get(key), dict):
                    entries = {**entries, **named}
            texts |= {
                key: _content(value)
                for key, value in entries.items()
                if key.endswith("_token") and isinstance(value, str | dict)
            }
            specials |= {_content(x) for x in entries.get("additional_special_tokens") or ()}
    added = _added_tokens(folder, settings)
    if has_file(path := folder / "tokenizer.json"):
        tokenizer: Tokenizer = BPETokenizer(_library_tokenizer(path, added, texts))
    elif has_file(path := folder / "tokenizer.model"):
        with reading(path):
            tokenizer = SentencePieceTokenizer(
                read_file(path, MAX_TOKENIZER_BYTES),
                str(path),
                added,
                specials | set(texts.values()),
            )
        tokenizer.add_bos = settings.get("add_bos_token") is not False
        tokenizer.add_eos = settings.get("add_eos_token") is True
        texts = tokenizer.named_texts | texts
    else:
        raise ModelError(f"{folder}: has neither tokenizer.json nor tokenizer.model")

    tokenizer.special_texts = texts
    tokenizer.chat_template = _folder_chat_template(folder, settings)
    if "bos_token" in texts:
        tokenizer.bos_id = tokenizer.id_of(texts["bos_token"])
    eos = tokenizer.id_of(texts.get("eos_token", "</s>"))
    if eos is not None:
        named = texts.get("eos_token", "</s>")
        _check_vocabulary(folder, f"{folder}: the id of eos_token {named!r}", [eos])
    # The generation config knows the end of a turn, the tokenizer's files name one too.
    tokenizer.eos_ids = _folder_eos(folder) | frozenset([] if eos is None else [eos])
    if "eos_token" in texts and not tokenizer.eos_ids:
        raise ModelError(
            f"{folder}: eos_token must be a token of the vocabulary, got {texts['eos_token']!r}: "
            "generation would never end; add it to the tokenizer, or name eos_token_id in "
            "generation_config.json"
        )
    return tokenizer


def _library_tokenizer(
    path: Path, added: Mapping[str, AddedToken], named: Mapping[str, str]
) -> Any:
    """tokenizer.json, with the tokens that only the files next to it add or call special."""
    library = require("tokenizers", "tokenizer.json")
    raw = read_file(path, MAX_TOKENIZER_BYTES)
    with reading(path):
        check_tokenizer_json(raw)
    try:
        inner = library.Tokenizer.from_buffer(raw)
    except BaseException as error:  # the library raises plain Exception, or panics
        if not (isinstance(error, Exception) or is_panic(error)):
            raise
        raise ModelError(f"{path}: not a tokenizer ({error})") from None
    for text, token in sorted(added.items(), key=lambda item: item[1].id):
        if token.normalized is not None or inner.token_to_id(text) is None:
            flags = {key: getattr(token, key) for key in _FLAGS}
            normalized = bool(token.normalized)
            inner.add_tokens([library.AddedToken(text, normalized=normalized, **flags)])
        if (there := inner.token_to_id(text)) != token.id:
            raise ModelError(
                f"{path}: token {text!r} must have the id {token.id} that the files beside it say, "
                f"got {there}: save the tokenizer anew with transformers' save_pretrained"
            )
    own = inner.get_added_tokens_decoder()
    for text in set(named.values()):
        if (i := inner.token_to_id(text)) is not None:
            token = own.get(i) or library.AddedToken(text, normalized=False)
            token.special = True
            inner.add_special_tokens([token])
    return inner


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if has_file(path) else {}


def _added_tokens(folder: Path, settings: Mapping[str, Any]) -> dict[str, AddedToken]:
    """By text, the tokens that a folder's files add to its vocabulary."""
    with reading(folder / "added_tokens.json"):
        ids = _optional_json(folder / "added_tokens.json")
        if wrong := [i for i in ids.values() if type(i) is not int or i < 0]:
            raise TypeError(f"expected ids, got {reprlib.repr(wrong[0])}")
        added = {text: AddedToken(i) for text, i in ids.items()}
    with reading(folder / "tokenizer_config.json"):
        for index, entry in settings.get("added_tokens_decoder", {}).items():
            flags = {key: bool(entry.get(key)) for key in _FLAGS}
            flags["normalized"] = bool(entry.get("normalized", not flags["special"]))
            added[expect_text(entry["content"])] = AddedToken(int(index), **flags)
    return added


def _content(value: Any) -> str:
    """A token's text, alone or with its settings."""
    return expect_text(value["content"] if isinstance(value, dict) else value)


def _folder_chat_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    if has_file(path := folder / "chat_template.jinja"):
        with reading(path), io.TextIOWrapper(io.BytesIO(read_file(path)), "utf-8") as text:
            return text.read()  # line ends are one \n, as in every text file
    with reading(folder / "tokenizer_config.json"):
        template = settings.get("chat_template")
        if isinstance(template, list):  # several, by name
            template = {entry["name"]: entry["template"] for entry in template}.get("default")
        return None if template is None else expect_text(template)


def _folder_eos(folder: Path) -> frozenset[int]:
    """The ids that the generation's or the model's configuration names; of the model's vocabulary, where that says its size."""
    with reading(folder / "generation_config.json"):
        check_generation_keys(_optional_json(folder / "generation_config.json"))
    for name in ("generation_config.json", "config.json"):  # the first knows the end of a turn too
        ids = _optional_json(folder / name).get("eos_token_id")
        if ids is not None:
            ids = ids if isinstance(ids, list) else [ids]
            if not all(type(i) is int for i in ids):
                raise ModelError(
                    f"{folder / name}: eos_token_id must be an integer or a list of them, got "
                    f"{reprlib.repr(ids)}"
                )
            _check_vocabulary(folder, f"{folder / name}: eos_token_id", ids)
            return frozenset(ids)
    return frozenset()


def _check_vocabulary(folder: Path, name: str, ids: Collection[int]) -> None:
    """Refuses ids that no logit of the model has; it may have more than the tokenizer has tokens."""
    config = _optional_json(folder / "config.json")
    text = config.get("text_config")  # of a model that takes images
    size = {**config, **(text if isinstance(text, dict) else {})}.get("vocab_size")
    limit = size if type(size) is int else 2**31  # without a model its vocabulary may be any
    if wrong := [i for i in ids if not 0 <= i < limit]:
        of_model = f", the model's vocab_size being {limit}" if limit == size else ""
        raise ModelError(
            f"{name} must be from 0 to {limit - 1}{of_model}, got {reprlib.repr(wrong[0])}: name a token of the "
            "vocabulary, or leave it out"
        )
