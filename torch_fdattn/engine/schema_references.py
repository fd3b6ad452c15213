"""What a $ref in a JSON schema may mean: whatever fits, so that no base URI has to be known."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import unquote


class References:
    """Within one schema; nothing else is known.

    step: takes the number of steps that a look-up needs.
    """

    def __init__(self, schema: dict, step: Callable[[int], None]) -> None:
        self._step = step
        self._found: dict[str, list] = {}
        self._bases: list[tuple[str, dict]] = []
        self._anchors: dict[str, list] = {}
        left: list = [schema]
        while left:
            value = left.pop()
            if isinstance(value, list):
                left += value
            elif isinstance(value, dict):
                left += value.values()
                ids = [x for x in (value.get("$id"), value.get("id")) if isinstance(x, str)]
                if value is schema and not ids:
                    self._bases.append(("", value))
                self._bases += [(_last_segment(x), value) for x in ids]
                anchors = [value.get("$anchor"), value.get("$dynamicAnchor")]
                anchors += [x.partition("#")[2] for x in ids]  # "$id": "#name" of old drafts
                for anchor in anchors:
                    if isinstance(anchor, str):
                        self._anchors.setdefault(anchor, []).append(value)

    def of(self, reference: str) -> list:
        if reference not in self._found:
            fragment = reference.partition("#")[2]
            if fragment and not fragment.startswith("/"):
                found = self._anchors.get(unquote(fragment), [])
            else:
                # However two URIs are joined, the last part of the second stays.
                end = _last_segment(reference)
                self._step(len(self._bases))
                bases = [x for last, x in self._bases if not end or last == end]
                found = [x for base in bases for x in _pointed(base, fragment)]
            self._found[reference] = list({id(x): x for x in found}.values())
        return self._found[reference]


def _last_segment(uri: str) -> str:
    """Without the fragment; "" where another URI decides it."""
    last = unquote(uri.partition("#")[0].rpartition("/")[2])
    return "" if last in (".", "..") else last


def _pointed(value: Any, fragment: str) -> Iterator:
    """What a JSON pointer of a URI leads to, `/` and `%2F` taken in every way."""
    if fragment in ("", "/"):
        yield value
    parts = fragment.split("/")[1:]
    for names in (list(map(unquote, parts)), unquote(fragment).split("/")[1:]):
        found = value
        for name in names:
            name = name.replace("~1", "/").replace("~0", "~")
            if isinstance(found, dict) and name in found:
                found = found[name]
            elif isinstance(found, list) and (index := _index(name)) < len(found):
                found = found[index]
            else:
                break
        else:
            yield found


def _index(name: str) -> int:
    digits = name.removeprefix("+").lstrip("0") or "0"
    return int(digits) if digits.isdecimal() and len(digits) < 7 else 1 << 30
