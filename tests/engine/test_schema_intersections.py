"""JSON schemas that would make llguidance intersect patterns without end are refused before it sees them."""

from __future__ import annotations

import json
import random

import pytest

from torch_fdattn.engine.grammar_limits import check_lark, check_schema

PATTERNS = [{"pattern": f"(.*{letter}.*){{3}}"} for letter in "abcdefghijklmn"]
STRINGS = [{"type": "string", **x} for x in PATTERNS]
HALF = {"allOf": STRINGS[:7]}, {"allOf": STRINGS[7:]}
ID = "https://example.org/a/b"


def each(key, schemas, **more):
    return {"allOf": [{key: x, **more} for x in schemas]}


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": STRINGS},
        {"allOf": PATTERNS},
        {"allOf": [HALF[0], {"anyOf": [{"type": "null"}, HALF[1]]}]},
        {"allOf": [{"oneOf": [HALF[0]]}, {"allOf": [HALF[1]]}]},
        {"type": ["object", "string"], "anyOf": [True, {"properties": {"x": {"allOf": STRINGS}}}]},
        {"$defs": {"a": HALF[0]}, "$ref": "#/$defs/a", **HALF[1]},
        {"$defs": {"a/~b c": [{}, HALF[0]]}, "$ref": "#/$defs/a~1~0b%20c/01", **HALF[1]},
        {"$defs": {"a": {"$anchor": "here", **HALF[0]}}, "$ref": "#here", **HALF[1]},
        {"$id": ID, "$defs": {"a": {"$id": "c", **HALF[0]}}, "$ref": "c", **HALF[1]},
        {"$id": ID, "$defs": {"a": HALF[0]}, "$ref": f"{ID}#/$defs/a", **HALF[1]},
        {"$defs": {"a": HALF[0]}, "$ref": "json-schema:///#/$defs/a", **HALF[1]},
        {"$defs": {"a": {"allOf": [{"$ref": "#/$defs/b"}]}, "b": HALF[0]}, "items": {"$ref": "#/$defs/a", **HALF[1]}},
        each("items", STRINGS), each("prefixItems", [[True, x] for x in STRINGS]),
        each("additionalItems", STRINGS, items=[True]), each("items", [[x] for x in STRINGS]),
        {"allOf": [{"prefixItems": [HALF[0]]}, {"items": HALF[1]}]},
        each("properties", [{"x": x} for x in STRINGS]), each("additionalProperties", STRINGS),
        {"allOf": [{"properties": {"x": HALF[0]}}, {"additionalProperties": HALF[1]}]},
        each("patternProperties", [{"^x": x} for x in STRINGS]),
        {"patternProperties": {"^x": HALF[0]}, "properties": {"xy": HALF[1]}},
        {"patternProperties": {"^x?y": HALF[0]}, "properties": {"y": HALF[1]}},
        {"patternProperties": {"^x|^y": HALF[0]}, "allOf": [{"properties": {"y": HALF[1]}}]},
        {"patternProperties": {"^" + "[ab]" * 600: {}, "^" + "[bc]" * 600: {}}},
        {"allOf": [{"pattern": "[ab]" * 600}, {"pattern": "[bc]" * 600}]},
        {"format": "uri", "allOf": [{"format": "email"}, {"pattern": "a" * 20}]},
        {"minLength": 1, "format": "uri", "pattern": "[ab]?" * 250},
    ],
    ids=lambda x: json.dumps(x)[:60],
)  # fmt: skip
def test_many_patterns_for_one_string_are_refused(schema):
    with pytest.raises(ValueError, match="json_schema must have few or short patterns for one str"):
        check_schema("json_schema", schema)
    with pytest.raises(ValueError, match="grammar must have few or short patterns for one string"):
        check_lark("grammar", f"start: %json {json.dumps(schema)}")


def test_what_was_asked_for_is_named():
    with pytest.raises(ValueError, match=f"at most 4194304, got {13**7} of 7: write them as one"):
        check_schema("json_schema", HALF[0])


MANY = {"anyOf": [{"pattern": f"a.*{i}"} for i in range(33)]}
NAMES = [f"x{i}" for i in range(1001)]


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [MANY, MANY]},
        {"$defs": {"a": MANY}, "allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}]},
        {"properties": {x: {"pattern": "a", "minLength": 2} for x in NAMES}},
        {"required": NAMES, "additionalProperties": {"format": "email", "minLength": 2}},
        {"prefixItems": [{"enum": NAMES[:500], "pattern": "a"}] * 3},
        {"patternProperties": {f"^{x}$": True for x in NAMES[:46]}},
        {
            "$defs": {"a": {"properties": {x: {"pattern": "a", "maxLength": 9} for x in NAMES[:40]}}},
            "prefixItems": [{"$ref": "#/$defs/a", "type": "object"}] * 30,
        },
    ],
    ids=lambda x: json.dumps(x)[:60],
)  # fmt: skip
def test_too_many_searches_are_refused(schema):
    with pytest.raises(
        ValueError, match="json_schema must have at most 1000 strings with more than"
    ):
        check_schema("json_schema", schema)


def test_searches_count_over_all_schemas_of_a_grammar():
    texts = [json.dumps({"properties": {f"{x}{i}": {"pattern": x, "minLength": 2} for i in range(400)}}) for x in "abc"]  # fmt: skip
    check_lark("grammar", "start: " + " | ".join(f"%json {x}" for x in texts[:1]))
    with pytest.raises(
        ValueError, match="grammar must have at most 1000 strings with more than one"
    ):
        check_lark("grammar", "start: " + " | ".join(f"%json {x}" for x in texts))


def test_schemas_within_what_begins_in_a_comment_are_counted():
    text = f'start: %lark {{\nstart: %json // {{"x":\n{json.dumps({"allOf": STRINGS})}\n}}'
    with pytest.raises(ValueError, match="grammar must have few or short patterns for one string"):
        check_lark("grammar", text)


def test_what_is_within_a_schema_counts_once():
    names = {f"x{i}": {"pattern": "a", "minLength": 2} for i in range(300)}
    schema = {"items": {"items": {"items": {"items": {"properties": names}}}}}
    check_lark("grammar", f"start: %json {json.dumps(schema)}")


def nested(part, inside, depth):
    schema: dict = {}
    for _ in range(depth):
        schema = {part: inside(schema)}
    return schema


@pytest.mark.parametrize(
    "schema",
    [
        {"$defs": {f"{i}": {"properties": {x: {"$ref": f"#/$defs/{i + 1}", "type": "object"} for x in "ab"}} for i in range(40)}, "$ref": "#/$defs/0"},
        {"$defs": {f"{i}": {"allOf": [{"$ref": f"#/$defs/{i + 1}"}] * 2} for i in range(40)}, "$ref": "#/$defs/0"},
        {"allOf": [{"anyOf": [{"minLength": i}, {"maxLength": 99 + i}]} for i in range(40)]},
        {"properties": {"a": {"$ref": "#", "type": "object"}}},
        {"allOf": [{"anyOf": [{"minLength": i} for i in range(1500)]}] * 3},
        {"$defs": {"a": {"enum": list(range(8000))}}, "items": [{"$ref": "#/$defs/a", "x": 1}] * 200},
        {"$defs": [{"$id": "a"}] * 2000, "items": [{"$ref": f"#/b{i}"} for i in range(2000)]},
        {"allOf": [{"$ref": "#"}, {"type": "object"}]},
        {"allOf": [{"properties": {f"p{i}": True}} for i in range(1500)]},
    ],
    ids=lambda x: json.dumps(x)[:60],
)  # fmt: skip
def test_what_has_no_end_or_a_far_one_is_refused(schema):
    with pytest.raises(
        ValueError, match="json_schema must take at most 50000 steps to put together"
    ):
        check_schema("json_schema", schema)


LEGAL = [
    {
        "$defs": {"Base": {"properties": {f"p{i}": {"pattern": f"^a{i}+$"} for i in range(300)}}},
        "allOf": [
            {"$ref": "#/$defs/Base"},
            {"properties": {f"q{i}": {"pattern": "^b+$", "maxLength": 9} for i in range(300)}},
        ],
        "type": "object",
    },
    {"type": "string", "allOf": [{"pattern": "^[a-z]+$"}, {"pattern": "a"}], "minLength": 2},
    {"anyOf": STRINGS},
    {"allOf": STRINGS[:1] * 14},
    {"type": "object", "allOf": PATTERNS},
    {"type": "object", "$defs": {"unused": {"allOf": STRINGS}}},
    {"type": "array", "prefixItems": STRINGS},
    {"type": "object", "properties": {f"e{i}": {"type": "string", "enum": NAMES[:90]} for i in range(50)}},
    {"enum": [*NAMES, [NAMES], {"a": "b"}]},
    {"const": [1] * 30_000},
    {
        "type": "object",
        "patternProperties": {f"^x{i}-": {"pattern": f"^a{i}+$"} for i in range(20)},
        "properties": {f"p{i}": {"type": "string", "pattern": f"^b{i}+$"} for i in range(100)},
    },
    {
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
                    "first": {"allOf": [{"$ref": "#/$defs/node"}], "description": "A pydantic one."},
                    "name": {"type": "string", "pattern": "^a+$"},
                },
            }
        },
        "$ref": "#/$defs/node",
    },
    {
        "allOf": [
            {"type": "object", "properties": {"id": {"type": "string", "pattern": "^[a-z]{1,36}$"}}},
            {"anyOf": [{"properties": {"kind": {"const": x}, "x": {"pattern": x}}} for x in NAMES[:50]]},
        ]
    },
]  # fmt: skip


@pytest.mark.parametrize("schema", LEGAL, ids=lambda x: json.dumps(x)[:60])
def test_ordinary_schemas_are_taken(schema):
    check_schema("json_schema", schema)
    llguidance = pytest.importorskip("llguidance", reason="needs the extra structured")
    grammar = llguidance.LLMatcher.grammar_from_json_schema(schema)
    assert not llguidance.LLMatcher.validate_grammar(grammar)


def test_deep_ones_are_walked_without_recursion():
    for depth in (1000, 4000):
        check_schema("a", nested("items", lambda x: x, depth))
        check_schema("a", nested("properties", lambda x: {"a": x}, depth))
        check_schema("a", nested("allOf", lambda x: [{"pattern": "a"}, x], depth))
        check_schema("a", {"const": nested("a", lambda x: [x], depth)})


def test_nothing_but_value_errors_of_drawn_schemas():
    draw = random.Random(0)
    keys = "type allOf anyOf oneOf $ref $id $anchor const enum pattern format properties required items prefixItems"
    keys = [*keys.split(), "additionalProperties", "patternProperties", "additionalItems", "minLength", "$defs"]  # fmt: skip
    values = [
        None,
        True,
        False,
        0,
        1e9,
        "",
        "#",
        "#/",
        "#/items",
        "#a",
        "string",
        "integer",
        [],
        {},
    ]

    def drawn(depth):
        kind = draw.randrange(4) if depth else 0
        if kind == 0:
            return draw.choice(values)
        if kind == 1:
            return [drawn(depth - 1) for _ in range(draw.randrange(4))]
        return {draw.choice(keys): drawn(depth - 1) for _ in range(draw.randrange(6))}

    refused = 0
    for _ in range(600):
        schema = {draw.choice(keys): drawn(5) for _ in range(3)}
        refused += not is_taken(schema)
    assert refused < 60


def is_taken(schema) -> bool:
    try:
        check_schema("a", schema)
    except ValueError:
        return False
    return True
