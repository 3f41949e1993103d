"""A directory of KV bytes that processes of many hosts may share: `put` and `get` by content key.

An entry is one safetensors file of named uint8 tensors and strings. Its key is 32 hex digits: the digest of its
content, or a name of it, such as `content_key(context, token_ids)`.

An entry appears atomically, but a power failure may truncate it (docs/transports.md). Whoever can write there can forge
an entry under a name, but not under a digest.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import secrets
import stat
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
import safetensors
from msgspec import Meta
from numpy.typing import NDArray
from safetensors.numpy import save as encode

from baton.directories import own_directory
from baton.errors import ConfigError, TransportError

ByteArray = NDArray[np.uint8]
KEEP_S = 5.0
_ABANDONED_S = 3600.0
_KEY = re.compile(r"[0-9a-f]{32}", re.ASCII)
_TEMPORARY = re.compile(r"[0-9a-f]{32}\.tmp", re.ASCII)
_DIGEST, _NAME = "baton-digest", "baton-key"


class Entry(NamedTuple):
    """Each tensor is uint8 `[bytes]`. `about`: strings stored with them."""

    tensors: dict[str, ByteArray]
    about: dict[str, str]


class StoreOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`max_bytes`: of all entries."""

    path: Annotated[str, Meta(min_length=1)] = os.path.join("~", ".cache", "baton", "kv")
    max_bytes: int = 8 << 30

    def __post_init__(self) -> None:
        if self.max_bytes < 1:
            raise ValueError(f"max_bytes is at least 1, got {self.max_bytes}")


class FileStore:
    """A store that any number of threads and processes use at once."""

    def __init__(self, directory: str | Path, max_bytes: int = 8 << 30) -> None:
        """Creates a missing directory for this user only; expands `~`. `max_bytes` bounds all entries together; each
        further writing process may exceed it by a 32nd.

        Raises `ConfigError`, also if another user owns it or may write to it.
        """
        self.max_bytes = max_bytes
        if max_bytes < 1:
            raise ConfigError("transport", f"file: max_bytes is at least 1, got {max_bytes}")
        self._margin = max_bytes // 32
        self._room = 0  # bytes that may be put before the directory is scanned again
        self._lock = threading.Lock()
        try:
            self.directory = own_directory(Path(directory).expanduser(), "transport")
            if not os.access(self.directory, os.R_OK | os.W_OK | os.X_OK):
                raise PermissionError("not readable and writable")
        except (OSError, ValueError, RuntimeError) as error:  # a null byte; `~` of an unknown user
            raise ConfigError("transport", f"file: cannot use the directory {directory}: {error}") from error

    def put(self, tensors: Mapping[str, ByteArray], about: Mapping[str, str] | None = None, key: str = "") -> str:
        """Store uint8 arrays `[bytes]`. Returns the key: `key`, or by default the digest of the content.

        Raises `TransportError`.
        """
        if key and self.use(key):
            return key
        about = {**(about or {}), **({_NAME: key} if key else {})}
        digest = entry_digest(tensors, about)
        path = self._path(key or digest)
        if self._touch(path):
            return key or digest
        data = encode(
            {name: np.ascontiguousarray(array) for name, array in tensors.items()}, {**about, _DIGEST: digest}
        )
        if len(data) > self.max_bytes:
            raise TransportError(f"an entry of {len(data)} bytes does not fit into a store of {self.max_bytes}")
        part = self.directory / f"{secrets.token_hex(16)}.tmp"
        try:
            self._make_room(len(data))
            fd = os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            with _closing(fd), open(fd, "wb", closefd=False) as file:
                file.write(data)
            os.rename(part, path)
        except OSError as error:
            with contextlib.suppress(OSError):
                part.unlink()
            raise TransportError(f"cannot write to the store {self.directory}: {error.strerror}") from error
        return key or digest

    def get(self, key: str, named: bool = False) -> Entry | None:
        """`named`: the key is not a digest. Raises `TransportError` for an unreadable entry, and after removing a
        damaged one, or another key's.
        """
        path = self._path(key)
        try:
            data = self._read(path)
            if data is None:
                return None
            entry = _decode(data, key, named)
        except ValueError as error:
            with contextlib.suppress(OSError):
                path.unlink()
            raise TransportError(f"entry {key} of the store is damaged: {error}") from error
        except OSError as error:
            raise TransportError(f"entry {key} of the store cannot be read: {error.strerror}") from error
        self._touch(path)
        return entry

    def use(self, key: str) -> bool:
        """Mark an entry as just used. False if none."""
        return self._touch(self._path(key))

    def remove(self, key: str) -> None:
        self._path(key).unlink(missing_ok=True)

    def keys(self) -> list[str]:
        """Least recently used first."""
        return [path.name for _, _, path in self._entries()]

    def _path(self, key: str) -> Path:
        if _KEY.fullmatch(key) is None:
            raise TransportError(f"not a key of a store: {key!r}")
        return self.directory / key

    def _touch(self, path: Path) -> bool:
        try:
            os.utime(path, follow_symlinks=False)
        except OSError:
            return False
        return True

    def _read(self, path: Path) -> bytes | None:
        try:
            # Without O_NONBLOCK, a pipe in place of the file would block forever.
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENXIO):  # a link, a socket
                raise ValueError(error.strerror) from error
            raise
        # `open` leaves a descriptor open that it refuses, such as a directory's.
        with _closing(fd):
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode) or status.st_size > self.max_bytes:
                raise ValueError("not a regular file of a size that the store may have")
            # A file that shrinks under a mapping kills the process.
            with open(fd, "rb", closefd=False) as file:
                return file.read(status.st_size)

    def _entries(self) -> list[tuple[float, int, Path]]:
        """(time of last use, bytes, path), oldest first. Removes abandoned temporary files."""
        entries = []
        with os.scandir(self.directory) as items:
            for item in items:
                with contextlib.suppress(FileNotFoundError):
                    status = item.stat(follow_symlinks=False)
                    if _KEY.fullmatch(item.name):
                        entries.append((status.st_mtime, status.st_size, Path(item.path)))
                    elif _TEMPORARY.fullmatch(item.name) and abs(time.time() - status.st_mtime) > _ABANDONED_S:
                        os.unlink(item.path)
        return sorted(entries)

    def _make_room(self, nbytes: int) -> None:
        with self._lock:
            if nbytes > self._room:
                self._room = self._evict(nbytes)
            self._room -= nbytes

    def _evict(self, nbytes: int) -> int:
        """Remove old entries until `nbytes` and a margin fit, or at least `nbytes`. Returns the room."""
        entries = self._entries()
        room, now = self.max_bytes - sum(size for _, size, _ in entries), time.time()
        # First those of the future: the clock was set back.
        for used, size, path in sorted(entries, key=lambda entry: entry[0] < now + KEEP_S):
            if room >= nbytes + self._margin or abs(now - used) < KEEP_S:
                break
            try:
                if path.lstat().st_mtime != used:  # used meanwhile
                    continue
                path.unlink()
            except FileNotFoundError:
                pass
            except OSError:
                continue
            room += size
        if room < nbytes:
            raise TransportError(f"the store {self.directory} is full of entries of the last {KEEP_S:g} seconds")
        return min(room, nbytes + self._margin)


@contextlib.contextmanager
def _closing(fd: int) -> Iterator[None]:
    try:
        yield
    finally:
        os.close(fd)


def content_key(context: str, token_ids: Sequence[int]) -> str:
    """The key of the KV of `token_ids` after `context`: the name of a model (weights, drafter, geometry), or the key of
    the tokens before."""
    state = hashlib.blake2b(digest_size=16)
    _feed(state, context.encode())
    _feed(state, np.asarray(token_ids, dtype="<i8").tobytes())
    return state.hexdigest()


def entry_digest(tensors: Mapping[str, ByteArray], about: Mapping[str, str]) -> str:
    """32 hex digits of BLAKE2b over names, strings and bytes."""
    state = hashlib.blake2b(digest_size=16)
    _feed(state, json.dumps([sorted(about.items()), sorted(tensors)]).encode())
    for name in sorted(tensors):
        array = tensors[name]
        if array.dtype != np.uint8 or array.ndim != 1:
            raise TransportError(f"tensor {name!r} of an entry must be uint8 [bytes]")
        _feed(state, np.ascontiguousarray(array).data)
    return state.hexdigest()


def _feed(state: hashlib.blake2b, data: bytes | memoryview) -> None:
    state.update(len(data).to_bytes(8, "little"))  # different sequences of parts never hash the same bytes
    state.update(data)


def _decode(data: bytes, key: str, named: bool) -> Entry:
    """Raises `ValueError`."""
    deserialize: Any = safetensors.deserialize  # not annotated in the library
    try:
        parts = deserialize(data)
    except safetensors.SafetensorError as error:
        raise ValueError(str(error)) from error
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    about: dict[str, str] = header.get("__metadata__") or {}
    tensors = {}
    for name, part in parts:
        if part["dtype"] != "U8" or len(part["shape"]) != 1:
            raise ValueError(f"tensor {name!r} is not uint8 [bytes]")
        tensors[name] = np.frombuffer(part["data"], dtype=np.uint8)
    digest = about.pop(_DIGEST, "")
    if digest != entry_digest(tensors, about):
        raise ValueError("its digest does not match")
    if key != (about.pop(_NAME, "") if named else digest):
        raise ValueError("it is another key's")  # a copied or linked file
    return Entry(tensors, about)
