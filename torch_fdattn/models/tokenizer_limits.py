"""Bounds of what a tokenizer.json makes of a text: it is a program of whoever published the model.

Forty steps that each write `aa` for `a` make 2**40 characters of one. Here it is computed how many characters the steps of
such a file make of one at most, and what makes too many is refused before the library reads it, which already runs them.

Not bounded: the time of regular expressions, of which the library gives up each match after ten million retries.
"""

from __future__ import annotations

import base64
import json
import reprlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch_fdattn.models.errors import ModelError, expect_text

#: Characters that may come of one, by the bounds of the steps. Those of published files are below: 2 to 8 of Llamas,
#: 1944 of ALBERT's with two Unicode forms, sentencepiece's map and an expression.
MAX_GROWTH = 4096
MAX_STEPS = 1000
#: How often a post-processor may give the text, and how many tokens it may add.
MAX_REPEATS, MAX_ADDED = 16, 4096

#: Characters that Unicode's forms make of one at most; in a row they make no more than all of them together.
_FORMS = {
    "NFC": 3, "NFD": 4, "NFKC": 18, "NFKD": 18, "Lowercase": 3, "BertNormalizer": 12, "StripAccents": 1, "Strip": 1,
    "Nmt": 1,
}  # fmt: skip
_LARGEST_FORM = 18
_PARTS = ("normalizers", "pretokenizers", "decoders", "processors")  # of a Sequence, by its kind

Step = Mapping[str, Any]


def check_tokenizer_json(raw: bytes) -> None:
    """Refuses a tokenizer.json whose steps lengthen a text, a token or a list of tokens too much.

    Raises:
        ModelError: it does, or a key is there twice, of which the library may take the other.
        TypeError, LookupError, ValueError, ...: it is malformed.
    """
    file = json.loads(raw.decode("utf-8"), object_pairs_hook=_without_repetition)
    encoding = [*_steps(file, "normalizer"), *_steps(file, "pre_tokenizer")]
    _expect_growth("normalizer and pre_tokenizer", encoding)
    _expect_growth("decoder", list(_steps(file, "decoder")))
    _expect_few_tokens(list(_steps(file, "post_processor")))


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) != len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ModelError(f"must name no key of an object twice, got {reprlib.repr(twice)}")
    return entries


def _steps(file: Any, name: str) -> Iterator[Step]:
    """In the order in which they run, those of a Sequence one by one."""
    left, count = [file.get(name)], 0
    while left:
        step = left.pop()
        if step is None:
            continue
        if (count := count + 1) > MAX_STEPS:
            raise ModelError(f"{name} must have at most {MAX_STEPS} steps, got more")
        kind = step.get("type") if isinstance(step, dict) else None
        if not isinstance(kind, str):  # the library guesses by the keys
            raise ModelError(f"{name} must have steps with a type, got {reprlib.repr(step)}")
        if kind == "Sequence":
            left += [part for key in _PARTS for part in reversed(step.get(key, ()))]
        else:
            yield step


class _Growth:
    """Of a character before some steps, how many come of it at most: by character, and of all others."""

    def __init__(self) -> None:
        self._of: dict[str, float] = {}
        self._others = 1.0

    def of(self, text: str) -> float:
        return sum(self._of.get(x, self._others) for x in text)

    @property
    def largest(self) -> float:
        return max(self._others, *self._of.values()) if self._of else self._others

    def replace(self, pattern: str, content: str) -> None:
        """A step before that writes `content` for `pattern`; an empty pattern is before and behind each character."""
        if not pattern:
            self.insert(2 * self.of(content))
            return
        share = self.of(content) / len(pattern)
        self._of |= {x: max(self.of(x), share) for x in pattern}

    def insert(self, more: float) -> None:
        """A step before that adds what becomes so many characters to each."""
        self._others += more
        self._of = {x: growth + more for x, growth in self._of.items()}

    def multiply(self, factor: float) -> None:
        """A step before that makes so many of any kind of each character."""
        self._others, self._of = self.largest * factor, {}


def _expect_growth(name: str, steps: list[Step]) -> None:
    """By the steps from the last to the first: what a character becomes depends on what follows."""
    growth, forms = _Growth(), 1.0
    for step in reversed(steps):
        kind = step["type"]
        if kind == "BertNormalizer":  # spaces around each ideograph
            growth.insert(2 * growth.of(" "))
        if kind in _FORMS:
            more = min(forms * _FORMS[kind], _LARGEST_FORM)
            growth.multiply(more / forms)
            forms = more
            continue
        forms = 1.0
        if kind in _BOUNDS:
            _BOUNDS[kind](growth, step)
    if not growth.largest <= MAX_GROWTH:
        raise ModelError(
            f"{name} must make at most {MAX_GROWTH} characters of one, got steps that may make "
            f"{growth.largest:.3g}: take out those that repeat what they replace, insert or prepend"
        )


def _replace(growth: _Growth, step: Step) -> None:
    pattern, content = step["pattern"], expect_text(step["content"])
    if isinstance(pattern, dict) and "String" in pattern:
        growth.replace(expect_text(pattern["String"]), content)
    else:  # of an expression, which may match between characters
        growth.insert(2 * growth.of(content))
        growth.multiply(1)


def _byte_level(growth: _Growth, step: Step) -> None:
    """A character for each of at most four bytes, and before each word a space."""
    growth.multiply(4 * (2 if step.get("add_prefix_space", False) else 1))


def _metaspace(growth: _Growth, step: Step) -> None:
    """A mark for a space, or a space for a mark, and a mark before each word."""
    mark = expect_text(step["replacement"])
    growth.insert(max(growth.of(mark), growth.of(" ")))
    growth.multiply(1)


def _precompiled(growth: _Growth, step: Step) -> None:
    """sentencepiece's map: four bytes of its trie's size, the trie, and texts that end with a NUL each."""
    raw = base64.b64decode(expect_text(step["precompiled_charsmap"]))
    size = int.from_bytes(raw[:4], "little")
    if size > len(raw) - 4:  # the library would take so much memory, or abort
        raise ModelError(f"precompiled_charsmap must hold the {size} bytes of its trie, got {max(len(raw) - 4, 0)}")  # fmt: skip
    texts = raw[4 + size :].split(b"\0")
    growth.multiply(max(1, *(len(text.decode("utf-8", "replace")) for text in texts)))


_BOUNDS: dict[str, Callable[[_Growth, Step], None]] = {
    "Replace": _replace,
    "Prepend": lambda growth, step: growth.insert(growth.of(expect_text(step["prepend"]))),
    "Precompiled": _precompiled,
    "ByteLevel": _byte_level,  # as a decoder it makes no more characters than there are
    "Metaspace": _metaspace,
    "BPEDecoder": lambda growth, step: growth.replace(expect_text(step["suffix"]), " "),
    "WordPiece": lambda growth, step: growth.insert(growth.of(" ")),
    "CTC": lambda growth, step: growth.replace(expect_text(step["word_delimiter_token"]), " "),
    "ByteFallback": lambda growth, step: growth.multiply(1),
}


def _expect_few_tokens(steps: list[Step]) -> None:
    """Of a post-processor: how often the text comes, and what is added to it."""
    repeats, added = 1, 0
    for step in steps:
        if step["type"] != "TemplateProcessing":
            added += 2  # a pair around the text, at most
            continue
        tokens = {name: len(token["ids"]) for name, token in step["special_tokens"].items()}
        texts = sum("Sequence" in part for part in step["single"])
        specials = [x["SpecialToken"]["id"] for x in step["single"] if "SpecialToken" in x]
        repeats, added = repeats * texts, added * texts + sum(tokens[x] for x in specials)
        if repeats > MAX_REPEATS or added > MAX_ADDED:
            raise ModelError(
                f"post_processor must give a text at most {MAX_REPEATS} times and add at most {MAX_ADDED} tokens, "
                f"got {repeats} times and {added} tokens"
            )
