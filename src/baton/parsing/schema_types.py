"""Converts a model's text to JSON, by the parameter's schema.

As in vLLM, the first allowed type that fits wins, in the order null, integer, number, boolean, object, array, string; a
schema without types means string. Beyond vLLM, `$ref` and `const` are followed, `allOf` allows what all its branches
allow, and text equal to an `enum` value is that value.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

_INDEX = re.compile(r"[0-9]{1,9}")
_INTEGER = re.compile(r"[+-]?[0-9]+")
_NAMES: dict[type, str] = {
    type(None): "null",
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
}
_MAX_DEPTH, _MAX_PARTS = 32, 1024


def parameter_schema(schema: Any, key: str) -> Any:
    """A parameter's schema in its function's; None if it has none."""
    parts = list(_Walk(schema).parts(schema))
    for part in parts:
        properties = part.get("properties")
        if isinstance(properties, dict) and key in properties:
            return properties[key]
    return next((p["additionalProperties"] for p in parts if isinstance(p.get("additionalProperties"), dict)), None)


def value_of(text: str, schema: Any, root: Any) -> str:
    """`text` as JSON that fits `schema`. `root`: the schema that references are resolved in."""
    bare = text.strip()
    for part in _Walk(root).parts(schema):
        for constant in _constants(part):
            if text == constant or (not isinstance(constant, str) and _same(bare, constant)):
                return _json(constant)
    types = _Walk(root).types(schema) or {"string"}
    if "null" in types and bare.lower() == "null":
        return "null"
    if "integer" in types and _INTEGER.fullmatch(bare) and (number := _number(bare)):
        return number
    if "number" in types and (number := _number(bare)):
        return number
    if "boolean" in types and bare.lower() in ("true", "1", "false", "0"):
        return "true" if bare.lower() in ("true", "1") else "false"
    for name, kind in (("object", dict), ("array", list)):
        if name in types and isinstance(found := _loads(bare), kind) and (spelt := _finite(found)):
            return spelt
    if "string" not in types and (spelt := _finite(_loads(bare))):
        return spelt
    return _json(text)


class _Walk:
    """Follows each reference once and visits at most `_MAX_PARTS` parts: clients choose the schema."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._left = _MAX_PARTS
        self._followed: set[str] = set()

    def parts(self, schema: Any) -> Iterator[dict[str, Any]]:
        pending = [schema]
        while pending and self._left:
            part = pending.pop(0)
            self._left -= 1
            if not isinstance(part, dict):
                continue
            yield part
            pending.append(self._referred(part))
            for field in ("allOf", "anyOf", "oneOf"):
                pending += _list(part, field)[: self._left]

    def types(self, schema: Any, depth: int = 0) -> set[str] | None:
        """None: the schema does not say."""
        self._left -= 1
        if not isinstance(schema, dict) or depth > _MAX_DEPTH or self._left < 0:
            return None
        said = schema.get("type")
        named = {name for name in (said if isinstance(said, list) else [said]) if isinstance(name, str)}
        allowed_types = [named | ({"integer"} if "number" in named else set())] if named else []
        if constants := _constants(schema):
            allowed_types.append({_NAMES[type(constant)] for constant in constants})
        for part in (self._referred(schema), *_list(schema, "allOf")):
            if (allowed := self.types(part, depth + 1)) is not None:
                allowed_types.append(allowed)
        for field in ("anyOf", "oneOf"):
            if branches := _list(schema, field):
                allowed_types.append(set().union(*(self.types(branch, depth + 1) or {"string"} for branch in branches)))
        if not allowed_types:
            return None
        common = set.intersection(*allowed_types) or set.union(*allowed_types)
        return common | ({"null"} if schema.get("nullable") is True else set())

    def _referred(self, schema: dict[str, Any]) -> Any:
        """The target of a reference within the root (RFC 6901), once; None for other references."""
        reference = schema.get("$ref")
        if not isinstance(reference, str) or not reference.startswith("#") or reference in self._followed:
            return None
        self._followed.add(reference)
        target = self._root
        for step in reference[1:].split("/")[1:]:
            key = step.replace("~1", "/").replace("~0", "~")
            if isinstance(target, list):
                target = target[int(key)] if _INDEX.fullmatch(key) and int(key) < len(target) else None
            else:
                target = target.get(key) if isinstance(target, dict) else None
        return target


def _list(schema: dict[str, Any], field: str) -> list[Any]:
    value = schema.get(field)
    return value if isinstance(value, list) else []


def _constants(schema: dict[str, Any]) -> list[Any]:
    return _list(schema, "enum") + ([schema["const"]] if "const" in schema else [])


def _number(text: str) -> str:
    """As the model wrote it if that is JSON; empty if it is not a number."""
    value = _loads(text)
    if type(value) in (int, float) and _finite(value):
        return text
    try:
        return _finite(int(text) if _INTEGER.fullmatch(text) else float(text))
    except ValueError:
        return ""


def _same(text: str, constant: Any) -> bool:
    if isinstance(constant, bool):
        return text.lower() == str(constant).lower()
    value = _loads(text)
    return type(value) is type(constant) and bool(value == constant)


def _loads(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return _NOTHING


def _finite(value: Any) -> str:
    """As JSON; empty if JSON or UTF-8 cannot express it (infinity, half of a surrogate pair)."""
    if value is _NOTHING:
        return ""
    try:
        spelt = json.dumps(value, ensure_ascii=False, allow_nan=False)
        spelt.encode()
        return spelt
    except (ValueError, RecursionError):
        return ""


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


_NOTHING = object()
