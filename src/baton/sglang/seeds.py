"""Converts SGLang's metadata row of a request, spread over several buffers, to Baton's seeds, and back."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from baton.errors import ProtocolError
from baton.handoff.protocol.messages import Seeds

# The first buffer holds int32 output tokens.
_TOKEN_BYTES = 4


@dataclass(frozen=True, slots=True)
class MetadataRows:
    """Buffers in host memory: addresses, bytes of a row, and bytes."""

    addresses: Sequence[int]
    row_bytes: Sequence[int]
    num_bytes: Sequence[int]

    def read(self, row: int) -> Seeds:
        parts = [ctypes.string_at(address, size) for address, size in self._places(row)]
        token = int.from_bytes(parts[0][:_TOKEN_BYTES], "little")
        return Seeds(first_token=token, drafter_states=msgspec.msgpack.encode(parts))

    def write(self, row: int, seeds: Seeds) -> None:
        """Fill a row of D. Raises `ProtocolError`, without changes, if the seeds are not of such a row."""
        try:
            parts = msgspec.msgpack.decode(seeds.drafter_states, type=list[bytes])
        except msgspec.MsgspecError as error:
            raise ProtocolError(f"the seeds are no metadata row: {error}") from error
        places = self._places(row)
        if [len(part) for part in parts] != [size for _, size in places]:
            raise ProtocolError("the seeds are of a metadata row of another shape")
        if int.from_bytes(parts[0][:_TOKEN_BYTES], "little") != seeds.first_token:
            raise ProtocolError("the seeds' first token is not that of the metadata row")
        for (address, size), part in zip(places, parts, strict=True):
            ctypes.memmove(address, part, size)

    def _places(self, row: int) -> list[tuple[int, int]]:
        buffers = list(zip(self.addresses, self.row_bytes, self.num_bytes, strict=True))
        if row < 0 or any((row + 1) * size > total for _, size, total in buffers):
            raise ProtocolError(f"there is no metadata row {row}")
        return [(address + row * size, size) for address, size, _ in buffers]
