"""Tickets: the router's signed permission for one attempt of one handoff.

It is `base64url(msgpack(Ticket) + HMAC-SHA256)` without padding, expires, and serves one attempt: `Redeemer` ensures
that for requests, tombstones for REGISTER.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Protocol

import msgspec
from msgspec import Meta

from baton.directories import own_secret
from baton.errors import (
    ConfigError,
    EngineUnavailableError,
    ForeignTicketError,
    ProtocolError,
    TicketExpiredError,
    WrongEngineError,
)
from baton.handoff.plan.topology import MAX_RANKS
from baton.handoff.protocol.messages import AttemptKey, Name, TransferId
from baton.sampling_params import SamplingParams
from baton.wire import MAX_TICKET_CHARS, LegRole, Mode

TICKET_LIFE_S = 120
# Engines remember ended attempts for this long.
MAX_TICKET_LIFE_S = 600
_KEY_BYTES = 32
_MAC_BYTES = 32
_CONTEXT = b"baton-ticket-1\0"

Address = Annotated[str, Meta(min_length=1, max_length=256, pattern=r"^[a-z]+://")]
Addresses = Annotated[list[Address], Meta(min_length=1, max_length=MAX_RANKS)]


class Party(Protocol):
    """An `EngineIdentity`. One control address per rank."""

    @property
    def engine_id(self) -> str: ...
    @property
    def incarnation(self) -> str: ...
    @property
    def control_addresses(self) -> list[str]: ...


class Ticket(msgspec.Struct, frozen=True, kw_only=True):
    """Addresses are in rank order. `prefill_expiry` and `decode_expiry`: seconds of that engine's monotonic clock."""

    transfer_id: TransferId
    attempt: Annotated[int, Meta(ge=0, lt=1 << 31)] = 0
    prefill_engine: Name
    prefill_incarnation: Name
    prefill_addresses: Addresses
    decode_engine: Name
    decode_incarnation: Name
    decode_addresses: Addresses
    mode: Mode
    prefill_expiry: Annotated[float, Meta(ge=0)]
    decode_expiry: Annotated[float, Meta(ge=0)]
    request_digest: Annotated[bytes, Meta(min_length=32, max_length=32)]

    @classmethod
    def between(
        cls,
        prefill: Party,
        decode: Party,
        mode: Mode,
        request_digest: bytes,
        expiries: tuple[float, float],
        transfer_id: bytes | None = None,
    ) -> Ticket:
        """`transfer_id`: None draws a new one.

        Raises `EngineUnavailableError` for an engine that takes no handoffs.
        """
        if not (prefill.control_addresses and decode.control_addresses):
            raise EngineUnavailableError(
                f"engine {(decode if prefill.control_addresses else prefill).engine_id} has no control address"
            )
        return cls(
            transfer_id=transfer_id or new_transfer_id(),
            prefill_engine=prefill.engine_id,
            prefill_incarnation=prefill.incarnation,
            prefill_addresses=prefill.control_addresses,
            decode_engine=decode.engine_id,
            decode_incarnation=decode.incarnation,
            decode_addresses=decode.control_addresses,
            mode=mode,
            prefill_expiry=expiries[0],
            decode_expiry=expiries[1],
            request_digest=request_digest,
        )

    @property
    def key(self) -> AttemptKey:
        return AttemptKey(self.transfer_id, self.attempt, self.prefill_incarnation, self.decode_incarnation)

    def expiry(self, role: LegRole) -> float:
        return self.prefill_expiry if role == "prefill" else self.decode_expiry


class SignedTicket(Ticket, frozen=True, kw_only=True):
    """A ticket with its signed text, for D to send to P."""

    text: str

    @classmethod
    def of(cls, ticket: Ticket, text: str) -> SignedTicket:
        return cls(text=text, **{name: getattr(ticket, name) for name in Ticket.__struct_fields__})


_decoder = msgspec.msgpack.Decoder(Ticket)


def new_transfer_id() -> bytes:
    return secrets.token_bytes(16)


def request_digest(
    prompt_token_ids: Sequence[int], sampling_params: SamplingParams, num_prompt_tokens: int | None = None
) -> bytes:
    """32 bytes. `num_prompt_tokens`: how many of the tokens are the client's prompt (None: all)."""
    # Only text keys can be sorted.
    num_prompt = len(prompt_token_ids) if num_prompt_tokens is None else num_prompt_tokens
    content = (list(prompt_token_ids), num_prompt, msgspec.to_builtins(sampling_params, str_keys=True))
    return hashlib.sha256(msgspec.msgpack.encode(content, order="deterministic")).digest()


def adapter_digest(request: bytes, adapter: str) -> bytes:
    """32 bytes. `request`: its `request_digest`; `adapter`: NAME@DIGEST of its files."""
    return hashlib.sha256(request + adapter.encode()).digest()


def prefix_digest(prompt_token_ids: Sequence[int], cache_salt: str | None) -> bytes:
    """32 bytes for a ticket that moves cached KV (`HandoffParams.prefix_len`); never equal to a request's. It covers
    the salt, so that both engines use one tenant's cache.
    """
    content = ("prefix", list(prompt_token_ids), cache_salt)
    return hashlib.sha256(msgspec.msgpack.encode(content)).digest()


def sign_ticket(key: bytes, ticket: Ticket) -> str:
    """Equal tickets under one key give equal strings."""
    body = msgspec.msgpack.encode({name: getattr(ticket, name) for name in Ticket.__struct_fields__})
    signed = body + hmac.digest(key, _CONTEXT + body, "sha256")
    return base64.urlsafe_b64encode(signed).rstrip(b"=").decode("ascii")


def verify_ticket(key: bytes, text: str, role: LegRole, now: float) -> SignedTicket:
    """Checks the signature, decodes, and checks that the ticket expires after `now`, in this engine's monotonic
    seconds.

    Raises `ProtocolError`: `ForeignTicketError` for another key, `TicketExpiredError` if only its time is over.
    """
    if len(text) > MAX_TICKET_CHARS:
        raise ProtocolError("ticket is too long")
    try:
        padded = text.encode("ascii") + b"=" * (-len(text) % 4)
        signed = base64.b64decode(padded, altchars=b"-_", validate=True)
    except (UnicodeEncodeError, binascii.Error) as error:
        raise ProtocolError("ticket is not base64url") from error
    body, mac = signed[:-_MAC_BYTES], signed[-_MAC_BYTES:]
    if not hmac.compare_digest(mac, hmac.digest(key, _CONTEXT + body, "sha256")):
        raise ForeignTicketError("ticket signature does not match: it is signed with another ticket key")
    try:
        ticket = _decoder.decode(body)
    except (msgspec.MsgspecError, ValueError) as error:
        raise ProtocolError(f"ticket is malformed: {error}") from error
    left = ticket.expiry(role) - now
    if left <= 0:
        raise TicketExpiredError("ticket has expired")
    if not left <= MAX_TICKET_LIFE_S:
        raise ProtocolError(f"ticket is valid for more than {MAX_TICKET_LIFE_S} s")
    return SignedTicket.of(ticket, text)


class Redeemer:
    """Admits each ticket once per leg. `refused` counts the others. Not thread-safe."""

    def __init__(self, key: bytes, engine_id: str, incarnation: str) -> None:
        self.refused = 0
        self._key = key
        self._self = (engine_id, incarnation)
        self._used: dict[tuple[str, AttemptKey], float] = {}

    def redeem(self, text: str, role: LegRole, digest: bytes | None, now: float) -> SignedTicket:
        """`now`: monotonic seconds. Without `digest` the leg is only ended, not served.

        Raises `ProtocolError`.
        """
        # Tickets arrive in order of expiry.
        while self._used and next(iter(self._used.values())) <= now:
            del self._used[next(iter(self._used))]
        try:
            ticket = verify_ticket(self._key, text, role, now)
            prefill = (ticket.prefill_engine, ticket.prefill_incarnation)
            decode = (ticket.decode_engine, ticket.decode_incarnation)
            if (prefill if role == "prefill" else decode) != self._self:
                raise WrongEngineError("the ticket names another engine")
            if digest is not None and not hmac.compare_digest(ticket.request_digest, digest):
                raise ProtocolError("the ticket was signed for another request")
            if (role, ticket.key) in self._used:
                raise ProtocolError("the ticket was used before")
        except ProtocolError:
            self.refused += 1
            raise
        self._used[role, ticket.key] = ticket.expiry(role)
        return ticket


def load_or_create_key(path: str | Path) -> bytes:
    """Creates it readable by its owner only.

    Raises `ConfigError`.
    """
    key = own_secret(Path(path), "ticket_key_file", lambda: secrets.token_bytes(_KEY_BYTES))
    if len(key) != _KEY_BYTES:
        raise ConfigError("ticket_key_file", f"{path} must hold {_KEY_BYTES} bytes, has {len(key)}")
    return key
