"""Turns OpenAI's `response_format` and vLLM's `structured_outputs` into `StructuredOutputsParams`."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from baton.errors import RequestError
from baton.sampling_params import StructuredOutputsParams

FIELD = "structured_outputs"
_SCHEMA = "response_format.json_schema.schema"
_ANY_OBJECT = '{"type":"object"}'


class JsonSchema(msgspec.Struct, kw_only=True):
    """`response_format.json_schema`. The schema is always enforced, whether or not `strict`. The model does not see
    name and description."""

    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | bool | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True):
    """`schema`: of a `json_object`, as accepted by llama.cpp and Together."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema: dict[str, Any] | None = None


class StructuredOutputs(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`structured_outputs`: exactly one of the first five. `json`: a schema, as an object or text."""

    json: dict[str, Any] | bool | str | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    disable_any_whitespace: bool | None = None


def structured_params(
    response_format: ResponseFormat | None, structured: StructuredOutputs | None
) -> tuple[StructuredOutputsParams | None, str]:
    """The grammar of the output, if any, and the request field with it. Raises `RequestError` with that name."""
    form = None if response_format is None or response_format.type == "text" else response_format
    if form is not None and structured is not None:
        raise RequestError("response_format and structured_outputs exclude each other", FIELD)
    if structured is not None:
        params, field = _to_params(structured), FIELD
    elif form is None:
        return None, FIELD
    elif form.type == "json_object":
        field = "response_format" if form.schema is None else "response_format.schema"
        params = StructuredOutputsParams(json=_ANY_OBJECT if form.schema is None else _text(form.schema))
    else:
        field = _SCHEMA
        schema = form.json_schema.schema if form.json_schema is not None else None
        if schema is None:
            raise RequestError(f"{field} is required if response_format.type is json_schema", field)
        params = StructuredOutputsParams(json=_text(schema))
    try:
        params.check()
    except RequestError as error:
        raise with_field_name(error, field) from None
    return params, field


def with_field_name(error: RequestError, field: str) -> RequestError:
    return RequestError(f"{field}: {error}", field) if error.param == FIELD else error


def _to_params(structured: StructuredOutputs) -> StructuredOutputsParams:
    schema = structured.json
    if structured.json_object:
        if schema is not None:
            raise RequestError("structured_outputs: json and json_object exclude each other", FIELD)
        schema = _ANY_OBJECT
    return StructuredOutputsParams(
        json=schema if schema is None or isinstance(schema, str) else _text(schema),
        regex=structured.regex,
        choice=None if structured.choice is None else tuple(structured.choice),
        grammar=structured.grammar,
        disable_any_whitespace=bool(structured.disable_any_whitespace),
    )


def _text(schema: dict[str, Any] | bool) -> str:
    return msgspec.json.encode(schema).decode()
