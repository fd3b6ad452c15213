"""A tokenizer.json whose steps make too much of a text is refused before they run; those of published files are taken."""

from __future__ import annotations

import base64
import json
import signal
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.models.test_hostile_files import refusal
from tests.server.tiny_engine import byte_tokenizer
from torch_fdattn.models import ModelError, load_tokenizer
from torch_fdattn.models.tokenizer_limits import check_tokenizer_json

MARK = "\u2581"


def _map(longest: int) -> dict:
    raw = struct.pack("<I", 4) + bytes(4) + b"x\0" + b"y" * longest + b"\0"
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(raw).decode()}


def _step(kind: str, **more) -> dict:
    return {"type": kind, **more}


def _replace(text: str, content: str, key: str = "String") -> dict:
    return _step("Replace", pattern={key: text}, content=content)


def _sequence(key: str, *steps: dict) -> dict:
    return {"type": "Sequence", key: list(steps)}


def _normalizer(*steps: dict) -> dict:
    return {"normalizer": _sequence("normalizers", *steps)}


def _decoder(*steps: dict) -> dict:
    return {"decoder": _sequence("decoders", *steps)}


def _template(*parts: str, ids: int = 1) -> dict:
    return _step(
        "TemplateProcessing",
        single=[
            {"Sequence": {"id": "A", "type_id": 0}} if x == "$A" else {"SpecialToken": {"id": x, "type_id": 0}}
            for x in parts
        ],
        pair=[],
        special_tokens={x: {"id": x, "ids": [1] * ids, "tokens": ["a"] * ids} for x in parts if x != "$A"},
    )  # fmt: skip


_BYTES = _step("ByteLevel", add_prefix_space=False, trim_offsets=True, use_regex=False)
_SPACED = {**_BYTES, "add_prefix_space": True}
_METASPACE = _step("Metaspace", replacement=MARK, prepend_scheme="always", split=True)
_GROWTH = r"must make at most 4096 characters of one, got steps that may make"
ENDLESS = {
    "a normalizer that doubles": (_normalizer(*[_replace("a", "aa")] * 40), _GROWTH),
    "that doubles by turns": (_normalizer(*[_replace("a", "bb"), _replace("b", "a")] * 40), _GROWTH),
    "that doubles more than a character": (_normalizer(*[_replace("ab", "abab")] * 40), _GROWTH),
    "that doubles by expressions": (_normalizer(*[_replace("a", "aa", "Regex")] * 40), _GROWTH),
    "that writes between characters": (_normalizer(*[_replace("", "x")] * 40), _GROWTH),
    "that prepends what grows": (
        _normalizer(*[_step("Prepend", prepend="a"), _replace("a", "aa")] * 20), _GROWTH,
    ),
    "that prepends a long text": (_normalizer(_step("Prepend", prepend="a" * 10_000)), _GROWTH),
    "that undoes Unicode's forms": (
        _normalizer(*[_replace(" ", "\ufdfa"), _step("NFKC")] * 20), _GROWTH,
    ),
    "maps of sentencepiece": (_normalizer(*[_map(2)] * 40), _GROWTH),
    "bytes of bytes": (_normalizer(*[_BYTES] * 40), _GROWTH),
    "bytes of bytes, before BPE": (
        {"pre_tokenizer": _sequence("pretokenizers", *[_BYTES] * 40)}, _GROWTH,
    ),
    "in sequences of sequences": (
        _normalizer(*[_sequence("normalizers", *[_replace("a", "aa")] * 4)] * 10), _GROWTH,
    ),
    "without types": (
        {"normalizer": {"normalizers": [{"pattern": {"String": "a"}, "content": "aa"}] * 40}},
        "normalizer must have steps with a type",
    ),
    "spaces round ideographs": (_normalizer(*[_step("BertNormalizer")] * 900), _GROWTH),
    "steps without end": (_normalizer(*[_step("Strip")] * 1001), "must have at most 1000 steps"),
    "a decoder that doubles": (_decoder(*[_replace("a", "aa")] * 40), f"decoder {_GROWTH}"),
    "a suffix of nothing": (_decoder(*[_step("BPEDecoder", suffix="")] * 40), _GROWTH),
    "a suffix that becomes a space": (
        _decoder(*[_step("BPEDecoder", suffix=" "), _replace(" ", "  ")] * 40), _GROWTH,
    ),
    "a text again and again": ({"post_processor": _template(*["$A"] * 17)}, "at most 16 times"),
    "a text again and again by turns": (
        {"post_processor": _sequence("processors", *[_template("$A", "$A")] * 40)}, "at most 16 times",
    ),
    "many tokens": ({"post_processor": _template("$A", *["x"] * 100, ids=100)}, "got 1 times and 10000"),
}  # fmt: skip
PUBLISHED = {
    "Llama 2": {
        **_normalizer(_step("Prepend", prepend=MARK), _replace(" ", MARK)),
        **_decoder(_replace(MARK, " "), _step("ByteFallback"), _step("Fuse"), _step("Strip")),
        "post_processor": _template("<s>", "$A"),
    },
    "Llama 3": {
        "pre_tokenizer": _sequence("pretokenizers", _step("Split"), _BYTES),
        "decoder": _SPACED,
        "post_processor": _sequence("processors", _SPACED, _template("<s>", "$A")),
    },
    "Qwen 2": {"normalizer": _step("NFC"), "pre_tokenizer": _BYTES, "decoder": _BYTES},
    "Gemma": {"normalizer": _replace(" ", MARK), "decoder": _decoder(_replace(MARK, " "))["decoder"]},
    "ALBERT": {
        **_normalizer(
            _replace("``", '"'), _replace("''", '"'), _step("NFKD"), _step("StripAccents"), _step("Lowercase"),
            _map(18), _replace(" {2,}", " ", "Regex"),
        ),
        "pre_tokenizer": _sequence("pretokenizers", _step("WhitespaceSplit"), _METASPACE),
        "decoder": _METASPACE,
        "post_processor": _template("[CLS]", "$A", "[SEP]"),
    },
    "CLIP": {
        **_normalizer(_step("NFC"), _replace(r"\s+", " ", "Regex"), _step("Lowercase")),
        "pre_tokenizer": _sequence("pretokenizers", _step("Split"), _BYTES),
        "post_processor": _step("RobertaProcessing"),
    },
    "BERT": {"normalizer": _step("BertNormalizer"), "decoder": _step("WordPiece", prefix="##")},
    "fractions in words": _normalizer(*[_replace(chr(0x2150 + i), f"{i}/9 ") for i in range(200)]),
}  # fmt: skip


@pytest.fixture(autouse=True)
def bounded() -> Iterator[None]:
    """Steps that never end hold Python's lock: the process ends, as a failure."""
    signal.alarm(60)
    yield
    signal.alarm(0)


def _written(folder: Path, steps: dict) -> Path:
    byte_tokenizer(folder)
    path = folder / "tokenizer.json"
    raw = json.loads(path.read_text())
    for token in raw["added_tokens"]:
        token["normalized"] = True  # the library then runs the normalizer while it loads
    path.write_text(json.dumps({**raw, **steps}))
    return path


@pytest.mark.parametrize("name", ENDLESS)
def test_steps_that_make_too_much_are_refused(name, tmp_path):
    steps, message = ENDLESS[name]
    path, begin = _written(tmp_path, steps), time.thread_time()
    with pytest.raises(ModelError, match=message) as caught:
        load_tokenizer(tmp_path)
    assert str(path) in str(caught.value)
    assert time.thread_time() - begin < 2


@pytest.mark.parametrize("name", PUBLISHED)
def test_steps_of_published_tokenizers_are_taken(name):
    check_tokenizer_json(json.dumps(PUBLISHED[name]).encode())


def test_the_bound_is_exact_where_single_characters_are_replaced(tmp_path):
    """12 steps that double are as many characters as may be."""
    _written(tmp_path, {**_normalizer(*[_replace("b", "bb")] * 12), "pre_tokenizer": None})
    assert len(load_tokenizer(tmp_path).encode("b", add_special_tokens=False)) == 4096
    _written(tmp_path, {**_normalizer(*[_replace("b", "bb")] * 13), "pre_tokenizer": None})
    with pytest.raises(ModelError, match=r"of one, got steps that may make 8\.19e\+03"):
        load_tokenizer(tmp_path)


def test_a_key_that_is_there_twice_is_refused(tmp_path):
    """The library may take the other."""
    path = _written(tmp_path, {"normalizer": None})
    hostile = json.dumps(_normalizer(*[_replace("a", "aa")] * 40)["normalizer"])
    path.write_text(path.read_text().replace('"normalizer": null', f'"normalizer": {hostile}, "normalizer": null'))  # fmt: skip
    with pytest.raises(ModelError, match=r"must name no key of an object twice, got 'normalizer'"):
        load_tokenizer(tmp_path)


def test_an_expression_that_the_library_gives_up_is_an_error(tmp_path):
    again = _step("Split", pattern={"Regex": "(a+)+c"}, behavior="Isolated", invert=False)
    _written(tmp_path, {"pre_tokenizer": _sequence("pretokenizers", again, _BYTES)})
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.decode(tokenizer.encode("aac")) == "aac"
    for count in (500, 5000):  # in this thread, and in the library's
        with pytest.raises(ModelError, match=r"the tokenizer failed at the text: .*retry-limit"):
            tokenizer.encode("a" * count)


def test_a_map_that_is_none_is_an_error_and_no_panic(tmp_path):
    for broken in (None, 1, "!", "AAAA", base64.b64encode(b"\xff" * 64).decode()):
        path = _written(tmp_path, _normalizer({**_map(1), "precompiled_charsmap": broken}))
        told = refusal(load_tokenizer, tmp_path)
        assert str(path) in told
