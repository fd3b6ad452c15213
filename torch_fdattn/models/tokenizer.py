"""A tokenizer from a Hugging Face folder, or from a GGUF file by gguf_tokenizer.py.

A folder's `tokenizer.json` is read by the package tokenizers, else `tokenizer.model` by sentencepiece, as
Llama 2 ships it.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch_fdattn.models.config import read_json
from torch_fdattn.models.encoding import BPETokenizer, SentencePieceTokenizer, Tokenizer
from torch_fdattn.models.errors import ModelError, expect_text, reading, require
from torch_fdattn.models.gguf_tokenizer import gguf_tokenizer

__all__ = ["Tokenizer", "folder_tokenizer", "gguf_tokenizer"]


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
            added[text := expect_text(entry["content"])] = int(index)
            if entry.get("special"):
                specials.add(text)
    return added


def _content(value: Any) -> str:
    """A token's text, alone or with its settings."""
    return expect_text(value["content"] if isinstance(value, dict) else value)


def _folder_chat_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    if (path := folder / "chat_template.jinja").exists():
        with reading(path):
            return path.read_text(encoding="utf-8")
    with reading(folder / "tokenizer_config.json"):
        template = settings.get("chat_template")
        if isinstance(template, list):  # several, by name
            template = {entry["name"]: entry["template"] for entry in template}.get("default")
        return None if template is None else expect_text(template)


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
