"""What a schema or a grammar may be: what llguidance takes minutes for is refused by its text.

llguidance counts most of its work and ends it (`structured.py` says at what). It does not count how it builds regular
expressions: those of numbers that are multiples of a large one, and long ones of a user's. Measured with llguidance
1.9.1, on one processor: multipleOf 99,991 takes 0.3 s, 999,983 takes 15 s, 9,999,991 five minutes; a pattern of 64 KiB
up to 15 s, quadratic in its length.

Nor does it count one step of the search for a text of several patterns, or how many such searches there are
(`schema_intersections.py` does): 14 patterns `(.*a.*){3}` for one string take 0.4 s, 16 take 2.5 s, 18 take 15 s and
700 MB, more have no end; 400 keys of patternProperties, whose pairs are searched, more than 8 s; two anyOf of 200 patterns
for one string 5 s; objects with two $ref each, keywords beside them, 40 levels deep, 6 GB within 8 s. What is taken comes
to an end within 2 s and 100 MB: 421 drawn schemas up to the limits took 1.8 s at most, on a busy machine. Two patterns such
as `(.*a.*){1000}` cost nothing: llguidance gives up within its 10,000 operations. In Lark's syntax itself (`&`, `~`) such
patterns end at its own limits, within 0.3 s.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from torch_fdattn.engine.sampling_params import shown
from torch_fdattn.engine.schema_intersections import Intersections

MAX_SCHEMA_CHARACTERS = 1 << 16
MAX_GRAMMAR_CHARACTERS = 1 << 14
MAX_PATTERN_CHARACTERS = 1 << 12
MAX_MULTIPLE = 10_000


def check_schema(name: str, schema: dict) -> None:
    """A JSON schema.

    Raises:
        ValueError: it begins with the name.
    """
    _check_numbers_and_lengths(name, schema)
    Intersections(name).add(schema)


def _check_numbers_and_lengths(name: str, schema: dict) -> None:
    multiple = 1
    for part in _objects(schema):
        own = part.get("pattern"), part.get("whitespace_pattern")  # of a schema; of "x-guidance"
        patterns = [*own, *_keys(part.get("patternProperties"))]
        for pattern in patterns:
            if isinstance(pattern, str) and len(pattern) > MAX_PATTERN_CHARACTERS:
                raise ValueError(
                    f"{name} must have patterns of at most {MAX_PATTERN_CHARACTERS} characters, got {len(pattern)}"
                )
        multiple = math.lcm(multiple, _digits(part.get("multipleOf")))
        if multiple > MAX_MULTIPLE:
            raise ValueError(
                f"{name} must have values of multipleOf whose least common multiple, without its zeros at the end and its "
                f"decimal point, is at most {MAX_MULTIPLE}, got {shown(part['multipleOf'])} with a multiple of {shown(multiple)}"
            )


def check_lark(name: str, text: str) -> None:
    """A grammar in Lark's syntax: JSON schemas in it (`%json {…}`) are as others.

    Raises:
        ValueError: it begins with the name.
    """
    if "%json" not in text:
        return
    # Comments may stand before an object: each brace that begins one is looked at.
    decoder, at, end, intersections = json.JSONDecoder(), -1, 0, Intersections(name)
    while (at := text.find("{", at + 1)) >= 0:
        try:
            found, stop = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):  # no JSON: nor is it for llguidance
            continue
        _check_numbers_and_lengths(name, found)
        if at >= end:
            intersections.add(found)
            line = text[text.rfind("\n", 0, at) + 1 : at]
            # What is within another is counted there, if that does not begin in a comment.
            end = at if "//" in line or "#" in line else stop


def check_length(name: str, text: str, limit: int) -> None:
    if len(text) > limit:
        raise ValueError(f"{name} must have at most {limit} characters, got {len(text)}")


def _objects(value: Any) -> Iterator[dict]:
    """All objects in a JSON value."""
    left = [value]
    while left:
        value = left.pop()
        if isinstance(value, dict):
            yield value
            left += value.values()
        elif isinstance(value, list):
            left += value


def _keys(value: Any) -> list[str]:
    return list(value) if isinstance(value, dict) else []


def _digits(value: Any) -> int:
    """Of a number without its zeros at the end and its point, which cost nothing; 1 for what is none."""
    if type(value) not in (int, float) or value == 0:
        return 1
    if type(value) is float and not math.isfinite(value):  # which fails for large ints
        return 1
    number = Decimal(str(abs(value)))
    return int("".join(map(str, number.as_tuple().digits)).rstrip("0"))
