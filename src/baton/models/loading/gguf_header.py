"""The header of a GGUF file (docs/gguf.md of ggml), without torch. `gguf.GGUFReader` takes 10 us for each string, so
seconds for a vocabulary with merges.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from baton.errors import CheckpointError

_MAGIC = b"GGUF"
_FORMS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_FLOAT32, _STRING, _ARRAY = 6, 8, 9
# Far above any model's: files must not choose how much is read. Bytes of the header, of a text and of a name; values,
# tensors, and numbers and texts in lists together.
_MAX_HEADER_BYTES, _MAX_TEXT_BYTES, _MAX_NAME_BYTES = 1 << 27, 1 << 24, 256
_MAX_VALUES, _MAX_TENSORS, _MAX_IN_LISTS, _MAX_DIMS = 1 << 16, 1 << 18, 1 << 23, 4
_MAX_ALIGNMENT = 1 << 16


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """`shape` in PyTorch's order. `kind`: a number of `gguf.GGMLQuantizationType`. `start`: from the file's start."""

    shape: tuple[int, ...]
    kind: int
    start: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """`metadata`: values by key. `tensors`: by name in the file."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]


def read_header(path: Path, with_texts: bool = True) -> GgufHeader:
    """`with_texts` False leaves lists of strings empty. Raises `CheckpointError`, also for one of several parts."""
    try:
        with path.open("rb") as file:
            begin = file.read(24)
            if begin[:4] != _MAGIC:
                raise CheckpointError(f"{path}: begins with {begin!r}, not with {_MAGIC!r}: it is no GGUF file")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as blob:
                return _Reader(path, blob, with_texts).header()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, LookupError, ArithmeticError, TypeError, struct.error) as error:
        raise CheckpointError(f"{path}: truncated or no GGUF file ({error})") from None


class _Reader:
    def __init__(self, path: Path, blob: mmap.mmap, with_texts: bool) -> None:
        self._path, self._blob, self._at, self._with_texts = path, blob, len(_MAGIC), with_texts
        self._end, self._num_in_lists = min(len(blob), _MAX_HEADER_BYTES), 0

    def header(self) -> GgufHeader:
        (version,) = self._numbers("I", 1)
        if version not in (2, 3):
            why = "is big-endian" if version & 0xFFFF == 0 else f"has version {version}, expected 2 or 3"
            raise CheckpointError(f"{self._path}: {why}")
        num_tensors, num_values = self._numbers("Q", 2)
        if num_tensors > _MAX_TENSORS or num_values > _MAX_VALUES:
            raise ValueError(f"{num_tensors} tensors and {num_values} values of metadata")
        metadata: dict[str, Any] = {}
        for _ in range(num_values):
            name = self._name(metadata)
            metadata[name] = self._value(*self._numbers("I", 1))
        if metadata.get("split.count", 1) not in (0, 1):
            join = "join them with llama-gguf-split --merge"
            raise CheckpointError(f"{self._path}: is one of {metadata['split.count']!r:.20} files: {join}")
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 0 < alignment <= _MAX_ALIGNMENT:
            raise CheckpointError(f"{self._path}: general.alignment is {alignment!r:.20}")
        return GgufHeader(self._path, metadata, self._tensors(num_tensors, alignment))

    def _tensors(self, count: int, alignment: int) -> dict[str, GgufTensor]:
        import gguf

        tensors: dict[str, GgufTensor] = {}
        size = os.stat(self._path).st_size
        for _ in range(count):
            name = self._name(tensors)
            (num_dims,) = self._numbers("I", 1)
            if num_dims > _MAX_DIMS:
                raise ValueError(f"tensor {name} has {num_dims} dimensions")
            shape = tuple(reversed(self._numbers("Q", num_dims)))
            (kind,), (offset,) = self._numbers("I", 1), self._numbers("Q", 1)
            sizes = gguf.GGML_QUANT_SIZES.get(kind)
            if sizes is None:
                raise CheckpointError(f"{self._path}: tensor {name} has the unknown type {kind}")
            numbers, num_bytes = sizes
            if not shape or not all(shape) or shape[-1] % numbers:
                raise CheckpointError(f"{self._path}: tensor {name} of shape {list(shape)} has no whole blocks")
            tensors[name] = GgufTensor(shape, kind, offset, prod(shape) // numbers * num_bytes)
        begin = -(-self._at // alignment) * alignment
        tensors = {
            name: GgufTensor(one.shape, one.kind, begin + one.start, one.num_bytes) for name, one in tensors.items()
        }
        if (missing := max((one.start + one.num_bytes for one in tensors.values()), default=0) - size) > 0:
            raise CheckpointError(f"{self._path}: truncated, its last {missing} bytes are missing: download it again")
        end = begin
        for name, one in sorted(tensors.items(), key=lambda item: item[1].start):
            if one.start < end:
                raise CheckpointError(f"{self._path}: tensor {name} overlaps the one before it")
            end = one.start + one.num_bytes
        return tensors

    def _name(self, known: Mapping[str, object]) -> str:
        name = self._text(_MAX_NAME_BYTES)
        if not name.isprintable() or name in known:
            raise ValueError(f"the name {name!r} {'occurs twice' if name in known else 'is not printable'}")
        return name

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._text()
        if kind != _ARRAY:
            (value,) = self._numbers(_FORMS[kind], 1)
            # The shortest decimal of the same float32.
            return float(str(np.float32(value))) if kind == _FLOAT32 else value
        (of,), (count,) = self._numbers("I", 1), self._numbers("Q", 1)
        self._num_in_lists += count
        if self._num_in_lists > _MAX_IN_LISTS:
            raise ValueError(f"its lists have over {_MAX_IN_LISTS} entries")
        return self._texts(count) if of == _STRING else list(self._numbers(_FORMS[of], count))

    def _numbers(self, form: str, count: int) -> tuple[Any, ...]:
        size = struct.calcsize(f"<{form}") * count
        if size > self._end - self._at:
            raise ValueError(f"{count} numbers at byte {self._at} are beyond its end")
        values = struct.unpack_from(f"<{count}{form}", self._blob, self._at)
        self._at += size
        return values

    def _text(self, limit: int = _MAX_TEXT_BYTES) -> str:
        (length,) = self._numbers("Q", 1)
        if length > min(limit, self._end - self._at):
            raise ValueError(f"a text at byte {self._at} has {length} bytes")
        self._at += length
        return self._blob[self._at - length : self._at].decode()

    def _texts(self, count: int) -> list[str]:
        """Without a call per text: a vocabulary and its merges are some 300,000."""
        blob, at, length, texts = self._blob, self._at, struct.Struct("<Q").unpack_from, []
        for _ in range(count):
            end = at + 8 + length(blob, at)[0]
            if end > self._end:
                raise ValueError(f"a list of {count} texts ends beyond its end")
            if self._with_texts:
                texts.append(blob[at + 8 : end].decode())
            at = end
        self._at = at
        return texts
