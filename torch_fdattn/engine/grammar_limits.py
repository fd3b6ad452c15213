"""What a schema or a grammar may be: what llguidance takes minutes for is refused by its text.

llguidance counts most of its work and ends it (`structured.py` says at what). It does not count how it builds regular
expressions: those of numbers that are multiples of a large one, and long ones of a user's. Measured with llguidance
1.9.1, on one processor: multipleOf 99,991 takes 0.3 s, 999,983 takes 15 s, 9,999,991 five minutes; a pattern of 64 KiB
up to 15 s, quadratic in its length.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from torch_fdattn.engine.sampling_params import shown

MAX_SCHEMA_CHARACTERS = 1 << 16
MAX_GRAMMAR_CHARACTERS = 1 << 14
MAX_PATTERN_CHARACTERS = 1 << 12
MAX_MULTIPLE = 10_000


def check_schema(name: str, schema: dict) -> None:
    """A JSON schema, or an object in a grammar.

    Raises:
        ValueError: it begins with the name.
    """
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
    decoder, at = json.JSONDecoder(), -1
    while (at := text.find("{", at + 1)) >= 0:
        try:
            found, _ = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):  # no JSON: nor is it for llguidance
            continue
        check_schema(name, found)


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
