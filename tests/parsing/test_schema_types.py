"""Arguments that a model wrote as text are converted to the types of the function's schema."""

from __future__ import annotations

from typing import Any

import pytest

from baton.parsing import TOOL_PARSERS
from tests.parsing.test_parsers import found

STRING, NULL, INTEGER = {"type": "string"}, {"type": "null"}, {"type": "integer"}
TREE: dict[str, Any] = {"anyOf": [{"$ref": "#/$defs/tree"}, {"type": "array", "items": {"$ref": "#/$defs/tree"}}]}
LOOP: dict[str, Any] = {"$ref": "#/$defs/loop"}
DEFS = {
    "age": INTEGER,
    "name/~": {"type": ["string", "null"]},
    "mood": {"enum": ["1", "2"]},
    "tree": TREE,
    "loop": LOOP,
}
# Schema, text, JSON. Without a comment, vLLM 0.32 gives the same.
CASES: list[tuple[Any, str, str]] = [
    (STRING, "123", '"123"'),
    (STRING, " a ", '" a "'),
    ({"anyOf": [STRING, NULL]}, "123", '"123"'),
    ({"anyOf": [STRING, NULL]}, "null", "null"),
    ({"oneOf": [STRING, NULL]}, "true", '"true"'),
    ({"type": ["string", "null"]}, "1.5", '"1.5"'),
    ({"type": ["string", "integer"]}, "15", "15"),
    ({"type": ["string", "integer"]}, "15 m", '"15 m"'),
    ({"type": "string", "nullable": True}, "null", "null"),  # OpenAPI's
    (INTEGER, " 7 ", "7"),
    (INTEGER, "+7", "7"),
    (INTEGER, "12345678901234567890123", "12345678901234567890123"),
    (INTEGER, "seven", '"seven"'),
    (INTEGER, "9" * 5000, '"' + "9" * 5000 + '"'),  # more digits than Python reads
    ({"type": "number"}, "9" * 5000, '"' + "9" * 5000 + '"'),
    ({"type": "number"}, "1.10", "1.10"),
    ({"type": "number"}, "3", "3"),
    ({"type": "number"}, ".5", "0.5"),
    ({"type": "number"}, "nan", '"nan"'),
    ({"type": "boolean"}, "True", "true"),
    ({"type": "boolean"}, "FALSE", "false"),
    ({"type": "boolean"}, "1", "true"),
    ({"type": ["boolean", "null"]}, "Null", "null"),
    ({"type": "object"}, '{"a": [1]}', '{"a": [1]}'),
    ({"type": "array"}, "[1, 2", '"[1, 2"'),
    ({"type": ["array", "string"]}, "[1]", "[1]"),
    ({"enum": ["1", "2"]}, "1", '"1"'),
    ({"enum": [1, 2]}, "1", "1"),
    ({"enum": ["1", 2]}, "1", '"1"'),  # vLLM: 1, which is neither of the two
    ({"enum": [True, None]}, "True", "true"),
    ({"const": "5"}, "5", '"5"'),  # vLLM does not support const
    ({"const": 5}, "5", "5"),
    ({"$ref": "#/$defs/age"}, "5", "5"),  # vLLM follows no reference
    ({"$ref": "#/$defs/name~1~0"}, "5", '"5"'),
    ({"$ref": "#/$defs/mood"}, "2", '"2"'),
    ({"$ref": "#/$defs/tree/anyOf/1"}, "[1]", "[1]"),  # an index of a list
    ({"$ref": "#/$defs/tree/anyOf/2"}, "[1]", '"[1]"'),
    ({"$ref": "#/$defs/tree/anyOf/-1"}, "[1]", '"[1]"'),
    ({"$ref": "#/$defs/none"}, "5", '"5"'),
    ({"$ref": "https://a.example/schema"}, "5", '"5"'),
    ({"$ref": "#/$defs/tree"}, "5", '"5"'),
    ({"$ref": "#/$defs/loop"}, "5", '"5"'),
    ({"allOf": [{"$ref": "#/$defs/age"}, {"description": "x"}]}, "5", "5"),
    ({"allOf": [{"type": ["string", "null"]}, STRING]}, "null", '"null"'),  # vLLM: null
    ({"allOf": [{"type": "number"}, {"enum": [1, 2]}]}, "2", "2"),
    ({"anyOf": [{"allOf": [INTEGER]}, NULL]}, "4", "4"),
    ({"anyOf": [{"enum": ["4"]}, INTEGER]}, "4", '"4"'),
    ({}, "[1, 2]", '"[1, 2]"'),
    (True, "1", '"1"'),
    (7, "1", '"1"'),
    ({"type": 7, "enum": 7, "anyOf": 7, "allOf": [7], "$ref": 7}, "1", '"1"'),
]


@pytest.mark.parametrize(("schema", "text", "expected"), CASES)
def test_a_value_is_of_its_schema(schema: Any, text: str, expected: str) -> None:
    call = f"<tool_call><function=f><parameter=x>{text}</parameter></function></tool_call>"
    for root in (
        {"properties": {"x": schema}},
        {"additionalProperties": schema},
        {"allOf": [{"properties": {"x": schema}}]},
    ):
        if root == {"additionalProperties": True}:
            continue
        made = TOOL_PARSERS["qwen3_xml"].make({"f": {"type": "object", "$defs": DEFS, **root}})
        assert found(made, [call])[2] == [("f", f'{{"x": {expected}}}')]


def test_a_schema_that_branches_without_end_costs_little() -> None:
    """Each reference leads to two more: 2 ** 16 of them, if all were followed."""
    schema = {"$defs": {"t": {"anyOf": [{"$ref": "#/$defs/t"}] * 40}}, "properties": {"x": {"$ref": "#/$defs/t"}}}
    call = "<tool_call><function=f><parameter=x>1</parameter></function></tool_call>"
    assert found(TOOL_PARSERS["qwen3_xml"].make({"f": schema}), [call])[2] == [("f", '{"x": "1"}')]
