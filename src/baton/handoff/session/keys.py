"""CURVE keys of engines: a directory of files, or one pair for all that know the ticket key, limited to loopback.

    DIR/ticket.key          32 bytes, shared by the router and every engine
    DIR/secret/NAME.key     the secret key of engine NAME: only its own process reads it
    DIR/public/NAME.pub     the public keys of all engines that may connect: the authorised list

Keys are in Z85, ZeroMQ's text form of 32 bytes. An engine's name is its engine id.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import logging
import os
import re
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import zmq
from zmq.utils import z85

from baton.directories import OTHERS, OTHERS_WRITE, check_own, own_directory
from baton.errors import ConfigError
from baton.handoff.protocol.ticket import load_or_create_key
from baton.log_limit import LogLimit

log = logging.getLogger(__name__)
log.addFilter(LogLimit())

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}", re.ASCII)
_Z85_CHARS = 40
_TICKET_KEY = "ticket.key"
CONTROL_BIND = "kv_transfer_config.control_bind"
_CONTEXT = b"baton control socket\0"


def ticket_key_file(directory: str | Path) -> Path:
    """Raises `ConfigError` if it is missing (a new one would match no peer), or others may write to the directory."""
    path = Path(directory) / _TICKET_KEY
    if not path.is_file():
        raise ConfigError("keys", f"{path} does not exist; `baton keys` makes a key directory")
    check_own(path.parent, "keys")
    return path


def make_keys(directory: str | Path, engines: Sequence[str]) -> list[str]:
    """The ticket key and one key pair per engine, if missing. Returns the new names.

    Raises `ConfigError`.
    """
    for name in engines:
        if _NAME.fullmatch(name) is None:
            raise ConfigError("engines", f"{name!r} is no engine id: 1-64 of A-Z a-z 0-9 _ . -")
    if not str(directory):
        raise ConfigError("output", "is empty: it must be the name of a directory")
    root = Path(directory)
    created = []
    try:
        own_directory(root, "output")
        (root / "secret").mkdir(mode=0o700, exist_ok=True)
        (root / "public").mkdir(mode=0o755, exist_ok=True)
        load_or_create_key(root / _TICKET_KEY)
        for name in dict.fromkeys(engines):
            if _secret_file(root, name).exists():
                continue
            public, secret = zmq.curve_keypair()
            # The public key first: an engine whose secret exists is always authorised.
            _write(root / "public" / f"{name}.pub", public, 0o644)
            _write(_secret_file(root, name), secret, 0o600)
            created.append(name)
    except OSError as error:
        raise ConfigError("output", f"cannot write keys to {root}: {error}") from error
    return created


def public_names(directory: str | Path) -> set[str]:
    """Raises `ConfigError`."""
    folder = Path(directory) / "public"
    check_own(folder, "keys")
    return {path.stem for path in folder.glob("*.pub") if _NAME.fullmatch(path.stem)}


class Keys(Protocol):
    """An engine's key pair for control sockets, in Z85, and the engines that it admits.

    `engine_id` is in the engine's address; None if all engines share one pair.
    """

    @property
    def engine_id(self) -> str | None: ...

    @property
    def public(self) -> bytes: ...

    @property
    def secret(self) -> bytes: ...

    def public_of(self, engine_id: str) -> bytes | None:
        """Z85; None if not authorised."""
        ...

    def engine_of(self, public: bytes) -> str | None:
        """`public`: 32 bytes. None if not authorised."""
        ...


class TicketKeys:
    """One pair for all engines, derived from the ticket key: only its holders can connect or listen."""

    engine_id = None

    def __init__(self, ticket_key: bytes) -> None:
        if not ticket_key:
            raise ConfigError("ticket_key_file", "is required: there is no control socket without a key")
        self.secret: bytes = z85.encode(hmac.new(ticket_key, _CONTEXT, hashlib.sha256).digest())
        self.public = _public_of(self.secret)

    def public_of(self, engine_id: str) -> bytes | None:
        return self.public

    def engine_of(self, public: bytes) -> str | None:
        """An empty name for the pair's own public key, else None."""
        return "" if len(public) == 32 and z85.encode(public) == self.public else None


class KeyRing:
    """One engine's own pair, and the public keys of all engines. Not thread-safe. The directory is read again when it
    changes; open connections stay open.

    Raises `ConfigError`, also for files that others may read (secrets) or write.
    """

    def __init__(self, directory: str | Path, engine_id: str) -> None:
        self.engine_id = engine_id
        self._public_dir = Path(directory) / "public"
        self._stamp: list[tuple[str, int]] | None = None
        self._by_name: dict[str, bytes] = {}
        self._by_key: dict[bytes, str] = {}
        file = _secret_file(Path(directory), engine_id)
        try:
            for folder in (file.parent.parent, file.parent):
                check_own(folder, "keys")
        except OSError as error:
            raise ConfigError("keys", f"cannot read {folder}: {error.strerror}") from error
        self.secret: bytes = _read(file, private=True)
        self.public = _public_of(self.secret)
        if self.public_of(engine_id) != self.public:
            raise ConfigError("keys", f"{file} does not belong to {self._public_dir / engine_id}.pub")

    def public_of(self, engine_id: str) -> bytes | None:
        self._refresh()
        return self._by_name.get(engine_id)

    def engine_of(self, public: bytes) -> str | None:
        self._refresh()
        return self._by_key.get(z85.encode(public)) if len(public) == 32 else None

    def _refresh(self) -> None:
        try:
            names = sorted(public_names(self._public_dir.parent))
            files = [self._public_dir / f"{name}.pub" for name in names]
            stamp = [(path.name, path.stat().st_mtime_ns) for path in files]
        except OSError as error:
            raise ConfigError("keys", f"cannot read {self._public_dir}: {error.strerror}") from error
        if stamp == self._stamp:
            return
        keys = {}
        for path in files:
            try:
                keys[path.stem] = _read(path, private=False)
            except ConfigError as error:
                if not self._by_name:
                    raise
                log.warning("engine %s is shut out: %s", path.stem, error)
        by_key = {key: name for name, key in keys.items()}
        if len(by_key) != len(keys):
            raise ConfigError("keys", f"two engines in {self._public_dir} have the same key")
        self._by_name, self._by_key = keys, by_key
        self._stamp = stamp if len(keys) == len(files) else None


def check_bind(address: str, has_keys: bool) -> None:
    """Raises `ConfigError` for a control address that other hosts reach without a key, or no engine could dial."""
    if not has_keys and not is_local(address):
        raise ConfigError(
            CONTROL_BIND,
            f"{address} can be reached from other hosts: give --keys DIR (see `baton keys`) or bind loopback",
        )
    if has_keys and not address.startswith("tcp://"):
        raise ConfigError(CONTROL_BIND, f"{address} is not tcp, the only one that has keys")
    if has_keys and _host(address) in ("*", "0.0.0.0", "::"):
        raise ConfigError(CONTROL_BIND, f"{address} names no interface: give the address that other engines dial")


def is_local(address: str) -> bool:
    if address.startswith("ipc://"):
        return True
    try:
        host = _host(address)
        loopback = host in ("localhost", "lo") or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
    return loopback and address.startswith("tcp://")


def _host(address: str) -> str:
    return address.partition("://")[2].rpartition(":")[0].strip("[]")


def _public_of(secret: bytes) -> bytes:
    try:
        return zmq.curve_public(secret)
    except zmq.ZMQError as error:
        raise ConfigError("keys", f"ZeroMQ {zmq.zmq_version()} has no CURVE here: {error}") from error


def _secret_file(root: Path, name: str) -> Path:
    return root / "secret" / f"{name}.key"


def _write(path: Path, key: bytes, mode: int) -> None:
    new = path.with_name(f".{path.name}.new")
    new.unlink(missing_ok=True)
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(key + b"\n")
    new.replace(path)  # engines read it


def _read(path: Path, private: bool) -> bytes:
    try:
        check_own(path, "keys", OTHERS if private else OTHERS_WRITE)
        key = path.read_bytes().strip()
    except OSError as error:
        raise ConfigError("keys", f"cannot read {path}: {error.strerror}") from error
    try:
        usable = len(key) == _Z85_CHARS and len(z85.decode(key)) == 32
    except (ValueError, KeyError, struct.error):
        usable = False
    if not usable:
        raise ConfigError("keys", f"{path} does not hold a CURVE key")
    return key
