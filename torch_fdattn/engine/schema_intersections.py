"""What a JSON schema makes llguidance intersect, found by walking it as llguidance does, without compiling a pattern.

Where a string has several regular expressions (patterns, formats, bounds of its length, literals), llguidance searches for
a text of all of them, before it reads a limit of its own: one step of that search costs up to the product of what each
can go on with. A search has llguidance's 10,000 operations beside that, but a schema may ask for any number of searches.
`grammar_limits.py` has the measurements.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

from torch_fdattn.engine.sampling_params import shown
from torch_fdattn.engine.schema_references import References

#: Two patterns of 2045 characters, five of 18, eleven of one.
MAX_PRODUCT = 1 << 22
MAX_SEARCHES = 1000
MAX_STEPS = 50_000

_LENGTH_SIZE = 8  # of `.{2,5}`: the first bytes of characters, in ranges
_FORMAT_SIZE = 512
_TYPES = frozenset({"null", "boolean", "number", "string", "array", "object"})
_IN_PLACE = frozenset({"allOf", "anyOf", "oneOf", "$ref"})
_NOTES = frozenset(
    {"$anchor", "$defs", "definitions", "$schema", "$id", "id", "$comment", "title", "description"}
) | {"default", "readOnly", "writeOnly", "examples", "contentMediaType", "contentEncoding"}
_NOTHING_MORE = _IN_PLACE | _NOTES


class Intersections:
    """Counts over all schemas of one request.

    name: the parameter that has them.
    """

    def __init__(self, name: str) -> None:
        self._name, self._searches, self._steps = name, 0, 0

    def add(self, schema: dict) -> None:
        """
        Raises:
            ValueError: it begins with the name.
        """
        references = References(schema, self._step)
        # What references without keywords beside them mean is compiled once.
        alone: set[int] = set()
        left = [[schema]]
        while left:
            schemas = [x for x in left.pop() if x is False or (isinstance(x, dict) and x)]
            if not schemas or [list(x) for x in schemas if x] == [["const"]]:
                continue
            for types, parts, reference in self._alternatives(schemas, references):
                if reference is not None:
                    targets = [x for x in references.of(reference) if id(x) not in alone]
                    alone.update(map(id, targets))
                    left += [[x] for x in targets]
                    continue
                if "string" in types:
                    self._string(parts)
                if "object" in types:
                    left += self._objects(parts)
                if "array" in types:
                    left += self._arrays(parts)

    def _step(self, count: int = 1) -> None:
        self._steps += count
        if self._steps > MAX_STEPS:
            raise ValueError(
                f"{self._name} must take at most {MAX_STEPS} steps to put together what allOf, anyOf, oneOf and $ref join, "
                "got more: have fewer alternatives in what is joined, and no keywords beside a $ref that leads back to itself"
            )

    def _search(self, count: int) -> None:
        self._searches += count
        if self._searches > MAX_SEARCHES:
            raise ValueError(
                f"{self._name} must have at most {MAX_SEARCHES} strings with more than one of pattern, format, bounds of their "
                f"length, enum and const, and pairs of keys of patternProperties, got {shown(self._searches)}, with those that "
                "allOf, anyOf, oneOf and $ref make: have fewer alternatives, or leave out some restrictions"
            )

    def _product(self, sizes: list[int]) -> None:
        if (product := math.prod(sizes)) > MAX_PRODUCT:
            raise ValueError(
                f"{self._name} must have few or short patterns for one string, with those that allOf and $ref add: the product "
                f"of their lengths, each + 3 (a format counts {_FORMAT_SIZE}, minLength and maxLength {_LENGTH_SIZE}), must be at most "
                f"{MAX_PRODUCT}, got {shown(product)} of {len(sizes)}: write them as one pattern, or leave out some"
            )

    def _alternatives(self, schemas: list, references: References) -> Iterator[tuple]:
        """What the schemas allow together: (types, all the schemas that apply, None), or a reference that stands alone.

        Linked lists, so that alternatives share what they begin with.
        """
        first = None
        for schema in reversed(schemas):
            first = schema, first
        left: list[tuple] = [(first, _TYPES, None, None, False)]
        while left:
            todo, types, parts, refs, resolved = left.pop()
            self._step()
            if todo is None and refs is None:
                applied = list(_listed(parts))
                self._step(len(applied))
                yield types, applied, None
                continue
            if todo is None:
                reference, refs = refs
                if parts is None and refs is None and not resolved:
                    yield types, [], reference
                    continue
                targets = references.of(reference)
                target = targets[0] if len(targets) == 1 else {"anyOf": targets or [True]}
                left.append(((target, None), types, parts, refs, True))
                continue
            schema, todo = todo
            if schema is False:
                continue
            if not isinstance(schema, dict):
                left.append((todo, types, parts, refs, resolved))
                continue
            values = _list(schema.get("enum"))
            self._step(len(values))
            if not (types := types & _types(schema)):
                continue
            if not schema.keys() <= _NOTHING_MORE:
                parts = schema, parts
            for member in _list(schema.get("allOf")):
                self._step()
                todo = member, todo
            if isinstance(schema.get("$ref"), str):
                refs = schema["$ref"], refs
            choices = [_list(schema[key]) for key in ("anyOf", "oneOf") if key in schema]
            choices += [[_literal(schema["const"])]] if _is_deep(schema.get("const")) else []
            if any(map(_is_deep, values)):
                plain = [x for x in values if not _is_deep(x)]
                choices.append(
                    [
                        {"type": list(map(_type, plain))},
                        *(_literal(x) for x in values if _is_deep(x)),
                    ]
                )
            if len(choices) > 1:
                for choice in choices[1:]:
                    todo = {"anyOf": choice}, todo
            if choices:
                self._step(len(choices[0]))
                left += [((option, todo), types, parts, refs, resolved) for option in choices[0]]
            else:
                left.append((todo, types, parts, refs, resolved))

    def _string(self, parts: list[dict]) -> None:
        patterns = {x["pattern"] for x in parts if isinstance(x.get("pattern"), str)}
        formats = {x["format"] for x in parts if isinstance(x.get("format"), str)}
        bounded = any("minLength" in x or "maxLength" in x for x in parts)
        enums = [_list(x["enum"]) for x in parts if "enum" in x]
        literals = len(enums) + sum("const" in x for x in parts)
        sizes = [len(x) + 3 for x in patterns] + [_FORMAT_SIZE] * len(formats)
        if bounded and sizes:  # of literals alone llguidance counts the characters
            sizes.append(_LENGTH_SIZE)
        if len(sizes) + literals > 1:
            self._search(math.prod(sum(type(y) is str for y in x) for x in enums))
            self._product(sizes)

    def _objects(self, parts: list[dict]) -> Iterator[list]:
        """The schemas of every property, together for each."""
        keys = "properties", "patternProperties", "additionalProperties"
        objects = [x for x in parts if any(key in x for key in keys)]
        if not objects:
            return
        own = [_dict(x.get("properties")) for x in objects]
        by_pattern = [_dict(x.get("patternProperties")) for x in objects]
        others = [x.get("additionalProperties", True) for x in objects]
        patterns = list(dict.fromkeys(key for x in by_pattern for key in x))
        if len(patterns) > 1:
            self._search(math.comb(len(patterns), 2) * len(objects))
            self._product(sorted(len(x) + 3 for x in patterns)[-2:])
        required = (key for x in parts for key in _list(x.get("required")) if type(key) is str)
        names = dict.fromkeys(key for x in own for key in x) | dict.fromkeys(required)
        self._step((len(names) + len(patterns)) * len(objects))
        for name in names:
            found = []
            for here, keys, other in zip(own, by_pattern, others, strict=True):
                # llguidance wants that no text has two of the keys.
                matching = [x for key, x in keys.items() if _may_match(key, name)]
                rest = True if name in here else other
                found += [here[name]] if name in here else []
                found += [{"anyOf": [*matching, rest]} if matching else rest]
            yield found
        for key in patterns:
            yield [x.get(key, y) for x, y in zip(by_pattern, others, strict=True)]
        yield others

    def _arrays(self, parts: list[dict]) -> Iterator[list]:
        """The schemas of every place, together for each, and of those after them."""
        keys = "items", "prefixItems", "additionalItems"
        arrays = [x for x in parts if any(key in x for key in keys)]
        if not arrays:
            return
        first = [_list(x["items"] if type(x.get("items")) is list else x.get("prefixItems")) for x in arrays]  # fmt: skip
        others = [[x[key] for key in ("items", "additionalItems") if type(x.get(key)) is dict] for x in arrays]  # fmt: skip
        longest = max(map(len, first))
        self._step(longest * len(arrays))
        for i in range(longest):
            yield [y for x, rest in zip(first, others, strict=True) for y in ([x[i]] if i < len(x) else rest)]  # fmt: skip
        yield [y for rest in others for y in rest]


def _types(schema: dict) -> frozenset[str]:
    names = schema.get("type")
    types = _TYPES
    if isinstance(names, str):
        types = frozenset({names.replace("integer", "number")})
    elif isinstance(names, list):
        types = frozenset(x.replace("integer", "number") for x in names if isinstance(x, str))
    if "const" in schema:
        types &= {_type(schema["const"])}
    if isinstance(schema.get("enum"), list):
        types &= set(map(_type, schema["enum"]))
    return types


def _type(value: Any) -> str:
    names = {str: "string", list: "array", dict: "object", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")


def _literal(value: list | dict) -> dict:
    if isinstance(value, list):
        return {"type": "array", "prefixItems": [{"const": x} for x in value]}
    return {"type": "object", "properties": {key: {"const": x} for key, x in value.items()}}


def _may_match(pattern: str, name: str) -> bool:
    """False where the pattern begins with other letters: it is read no further."""
    if not pattern.startswith("^") or "|" in pattern or "(?" in pattern:
        return True
    begin = re.match(r"[A-Za-z0-9_-]*(?![?*{])", pattern[1:])
    return begin is None or name.startswith(begin[0])


def _is_deep(value: Any) -> bool:
    return isinstance(value, list | dict)


def _listed(linked: tuple | None) -> Iterator:
    while linked is not None:
        value, linked = linked
        yield value


def _list(value: Any) -> list:
    return value if isinstance(value, list) else []


def _dict(value: Any) -> dict:
    return value if isinstance(value, dict) else {}
