"""Encodes spans as OTLP's protobuf message `ExportTraceServiceRequest`.

Field numbers are those of opentelemetry-proto, with which the tests parse the result.
"""

from __future__ import annotations

import functools
import struct
import time
from collections.abc import Mapping, Sequence

from baton.observe.tracing.span import Span, SpanEvent, Value

_KINDS = {"internal": b"\x30\x01", "server": b"\x30\x02", "client": b"\x30\x03"}
_IDS = struct.Struct(">BBQQBBQ")  # trace id and span id, each with its tag and length
_PARENT = struct.Struct(">BBQ")
_TIMES = struct.Struct("<BQBQ")
_EVENT_TIME = struct.Struct("<BQ")
_LINK = struct.Struct(">BBQQBBQ")
_DOUBLE = struct.Struct("<Bd")
_ERROR_CODE = b"\x18\x02"
_LOW = 2**64 - 1
_STEP = 32


def encode_request(spans: Sequence[Span], resource: bytes) -> bytes:
    """`resource`: of `encode_resource`."""
    parts = []
    for begin in range(0, len(spans), _STEP):
        parts += [_field(0x12, encode_span(span)) for span in spans[begin : begin + _STEP]]
        time.sleep(0.0)  # releases the GIL, so that no stream waits for a whole batch
    return _field(0x0A, _field(0x0A, resource) + _field(0x12, b"".join(parts)))


def encode_resource(attributes: Mapping[str, Value]) -> bytes:
    return b"".join([_field(0x0A, _pair(name, value)) for name, value in attributes.items()])


def encode_span(span: Span) -> bytes:
    trace = span.trace_id
    parts = [_IDS.pack(0x0A, 16, trace >> 64, trace & _LOW, 0x12, 8, span.span_id)]
    if span.parent_id is not None:
        parts.append(_PARENT.pack(0x22, 8, span.parent_id))
    parts += (_name(span.name), _KINDS[span.kind], _TIMES.pack(0x39, span.start, 0x41, span.end))
    parts += [_field(0x4A, _pair(name, value)) for name, value in span.attributes.items()]
    parts += [_field(0x5A, _event(event)) for event in span.events]
    parts += [_field(0x6A, _LINK.pack(0x0A, 16, trace >> 64, trace & _LOW, 0x12, 8, link)) for link in span.links]
    if span.error:
        parts.append(_field(0x7A, _field(0x12, _utf8(span.error)) + _ERROR_CODE))
    return b"".join(parts)


def _event(event: SpanEvent) -> bytes:
    return _EVENT_TIME.pack(0x09, event.at) + _event_name(event.name)


# Engines, modes and numbers recur: half of all pairs are cached. `typed`, since 1 == 1.0 == True.
@functools.lru_cache(maxsize=4096, typed=True)
def _pair(name: str, value: Value) -> bytes:
    return _field(0x0A, name.encode()) + _field(0x12, _any_value(value))


def _any_value(value: Value) -> bytes:
    if isinstance(value, str):
        return _field(0x0A, _utf8(value))
    if isinstance(value, bool):
        return b"\x10\x01" if value else b"\x10\x00"
    if isinstance(value, int):
        return b"\x18" + _varint(value & _LOW)
    if isinstance(value, float):
        return _DOUBLE.pack(0x21, value)
    return _field(0x2A, b"".join([_field(0x0A, _any_value(one)) for one in value]))


@functools.cache
def _name(name: str) -> bytes:
    return _field(0x2A, name.encode())


@functools.cache
def _event_name(name: str) -> bytes:
    return _field(0x12, name.encode())


def _utf8(text: str) -> bytes:
    """Text from servers may hold lone surrogates, which UTF-8 lacks."""
    return text.encode(errors="replace")


def _field(tag: int, content: bytes) -> bytes:
    size = len(content)
    return bytes((tag, size)) + content if size < 128 else bytes((tag,)) + _varint(size) + content


def _varint(number: int) -> bytes:
    parts = bytearray()
    while number > 127:
        parts.append(number & 127 | 128)
        number >>= 7
    parts.append(number)
    return bytes(parts)
