"""Text to token ids and back: what the engine needs of a tokenizer, its two kinds, and streaming.

`BPETokenizer` stands over the package tokenizers, `SentencePieceTokenizer` over sentencepiece with the
tokens that were added to its model. tokenizer.py and gguf_tokenizer.py build them from files.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch_fdattn.models.chat_template import render
from torch_fdattn.models.errors import ModelError, require


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
        text = render(self.chat_template, messages, self.special_texts)
        return self.encode(text, add_special_tokens=False)

    def stream(self, prompt: Sequence[int] = ()) -> StreamDecoder:
        """A decoder for the ids that follow `prompt`."""
        return StreamDecoder(self, prompt)


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
