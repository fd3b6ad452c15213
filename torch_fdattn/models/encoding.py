"""Text to token ids and back: what the engine needs of a tokenizer, its two kinds, and streaming.

`BPETokenizer` stands over the package tokenizers, `SentencePieceTokenizer` over sentencepiece with the
tokens that were added to its model. tokenizer.py and gguf_tokenizer.py build them from files.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from torch_fdattn.models.chat_template import render
from torch_fdattn.models.errors import ModelError, require


class Tokenizer(ABC):
    """What the engine needs of a tokenizer.

    Examples:
        >>> tokenizer = torch_fdattn.models.load_tokenizer("smollm2")
        >>> tokenizer.decode(tokenizer.encode("Hello"))
        'Hello'
        >>> tokenizer.decode(tokenizer.chat([{"role": "user", "content": "Hello"}])).endswith("assistant\\n")
        True
    """

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

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids of a conversation, up to where the assistant's next answer begins."""
        return self.encode(self.chat_text(messages), add_special_tokens=False)

    def chat_text(
        self, messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None, **variables: Any,
    ) -> str:  # fmt: skip
        """The conversation as the chat template writes it; its special tokens are part of the text.

        tools: functions that the model may call, as OpenAI's API describes them.
        variables: more of the template's own, as `enable_thinking=False`.
        """
        if self.chat_template is None:
            raise ModelError("this model has no chat template: give a plain prompt instead")
        return render(self.chat_template, messages, self.special_texts, tools, variables)

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


class AddedToken(NamedTuple):
    """A token that is recognised wherever its text is written, as tokenizer files describe it."""

    id: int
    special: bool = False  # no part of decoded text
    lstrip: bool = False  # takes the white space before it
    rstrip: bool = False  # and behind it
    single_word: bool = False  # only where no letter stands next to it
    normalized: bool | None = None  # found in the text as the normaliser leaves it; None: not said


#: Characters from which a text is encoded without Python's lock, which takes threads of the library's: one of this length
#: takes a few milliseconds.
_LONG = 1024


def is_panic(error: BaseException) -> bool:
    """Whether code in Rust gave up, as of a regular expression that retries too often: no Exception, so that few catch it."""
    return type(error).__name__ == "PanicException"


class BPETokenizer(Tokenizer):
    """Over a `tokenizers.Tokenizer`."""

    def __init__(self, inner: Any, bos: int | None = None, eos: int | None = None) -> None:
        inner.no_truncation()
        inner.no_padding()
        self._inner = inner
        self._prefix = [] if bos is None else [bos]  # where `inner` adds none itself
        self._suffix = [] if eos is None else [eos]

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        try:
            if len(text) < _LONG:
                encoding = self._inner.encode(text, add_special_tokens=add_special_tokens)
            else:  # the same ids, made without Python's lock
                [encoding] = self._inner.encode_batch_fast(
                    [text], add_special_tokens=add_special_tokens
                )
        except BaseException as error:
            if not is_panic(error):
                raise
            raise ModelError(f"the tokenizer failed at the text: {error}") from None
        ids = encoding.ids
        return [*self._prefix, *ids, *self._suffix] if add_special_tokens else ids

    def decode(self, ids: Sequence[int]) -> str:
        shown = [i for i in ids if i not in self.eos_ids]
        try:
            return self._inner.decode(shown, skip_special_tokens=True)
        except BaseException as error:
            if not is_panic(error):
                raise
            raise ModelError(f"the tokenizer failed at token ids: {error}") from None

    def id_of(self, token: str) -> int | None:
        return self._inner.token_to_id(token)

    def to_json(self) -> str:
        """Its `tokenizer.json`, for other libraries; what of special tokens is not in there is missing."""
        return self._inner.to_str()


class SentencePieceTokenizer(Tokenizer):
    """Over a sentencepiece model, and tokens added to it, which are recognised when written out in the text.

    Text next to such a token gets the space that sentencepiece puts before a first word, unless it begins
    with one, as transformers' LlamaTokenizer has it.

    Args:
        proto: the serialised model.
        where: what messages call it.
        added: by text, of the vocabulary or beyond it.
        specials: texts of the vocabulary that are no part of decoded text either.
    """

    def __init__(
        self, proto: bytes, where: str, added: Mapping[str, AddedToken] | None = None,
        specials: Collection[str] = (),
    ) -> None:  # fmt: skip
        library = require("sentencepiece", "A sentencepiece tokenizer")
        if not proto:  # the library would take it for "no model yet"
            raise ModelError(f"{where}: not a sentencepiece model (empty)")
        try:
            self._inner = library.SentencePieceProcessor(model_proto=proto)
        except Exception as error:  # the library raises plain RuntimeError and others
            raise ModelError(f"{where}: not a sentencepiece model ({error})") from None
        own = {self._inner.id_to_piece(i): i for i in range(len(self._inner))}
        tokens = {
            text: AddedToken(i, special=True)
            for text, i in own.items()
            if self._inner.is_control(i) or self._inner.is_unknown(i) or text in specials
        }
        for text, token in (added or {}).items():
            if token.single_word:
                raise ModelError(
                    f"{where}: single_word of the added token {text!r} must be false, got true: save the "
                    "folder with a tokenizer.json, by transformers' save_pretrained"
                )
            tokens[text] = token._replace(special=token.special or text in specials)
        self._tokens = {text: token for text, token in tokens.items() if text}
        self._special_ids = frozenset(t.id for t in self._tokens.values() if t.special)
        # What sentencepiece does not write out itself: ids beyond its own, and those that it leaves alone.
        self._texts = {
            token.id: text
            for text, token in self._tokens.items()
            if token.id >= len(self._inner) or self._inner.is_unused(token.id)
        }
        # Of two that begin alike, the longer is meant.
        longest_first = sorted(self._tokens.items(), key=lambda item: len(item[0]), reverse=True)
        self._split = re.compile(
            "|".join(
                f"({re.escape(text)})" + r"\s*" * token.rstrip for text, token in longest_first
            )
            or r"(?!)"
        )
        self._space = next(iter(self._inner.encode("a", out_type=str)), "").startswith("\u2581")
        if self._inner.bos_id() >= 0:
            self.bos_id = self._inner.bos_id()
        self.add_bos, self.add_eos = True, False

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        bos = add_special_tokens and self.add_bos and self.bos_id is not None
        ids, at = [self.bos_id] if bos else [], 0
        for match in self._split.finditer(text):
            part, token = text[at : match.start()], self._tokens[match[match.lastindex]]
            # By the expression, it would be looked for behind each space anew.
            ids += self._encode_part(part.rstrip() if token.lstrip else part, follows=at > 0)
            ids.append(token.id)
            at = match.end()
        ids += self._encode_part(text[at:], follows=at > 0)
        if add_special_tokens and self.add_eos and self._inner.eos_id() >= 0:
            ids.append(self._inner.eos_id())
        return ids

    def _encode_part(self, part: str, follows: bool) -> list[int]:
        if follows and self._space and part[:1] in (" ", "\u2581") and part:
            part = part[1:]  # the library puts one there
            if not part:  # where there is a word
                return [self._inner.piece_to_id("\u2581")]
        return self._inner.encode(part)

    def decode(self, ids: Sequence[int]) -> str:
        text, run = "", []
        for i in [*ids, None]:  # None: the end of the last run
            hidden = i in self._special_ids or i in self.eos_ids
            if i is None or (i in self._texts and not hidden):
                text += self._decode_run(run, bool(text)) + self._texts.get(i, "")
                run = []
            # A model's vocabulary may be padded beyond the tokenizer's: such ids have no text.
            elif not hidden and 0 <= i < len(self._inner):
                run.append(i)
        return text

    def _decode_run(self, run: list[int], follows: bool) -> str:
        """Of the vocabulary's ids; the library drops a first word's space, also where text comes before it."""
        space = follows and run and self._inner.id_to_piece(run[0]).startswith("\u2581")
        return (" " if space else "") + self._inner.decode(run)

    def id_of(self, token: str) -> int | None:
        if token in self._tokens:
            return self._tokens[token].id
        i = self._inner.piece_to_id(token)
        return i if 0 <= i < len(self._inner) and self._inner.id_to_piece(i) == token else None

    @property
    def named_texts(self) -> dict[str, str]:
        """The special tokens that the model itself names, as variables of a chat template."""
        ids = {"bos_token": "bos_id", "eos_token": "eos_id", "unk_token": "unk_id"}
        found = {name: getattr(self._inner, method)() for name, method in ids.items()}
        return {name: self._inner.id_to_piece(i) for name, i in found.items() if i >= 0}
