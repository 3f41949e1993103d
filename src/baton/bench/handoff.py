"""`baton bench handoff`: the duration of handoffs. P and D are processes with agents, but without a model.

*At once*: P has computed everything when D registers. *Streamed*: D registers before the prefill, whose chunks P
declares final at a prefill's pace.
"""

from __future__ import annotations

import itertools
import secrets
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from baton.bench.fragmentation import fragmented_tables
from baton.bench.handoff_peer import PrefillPeer
from baton.bench.modelled import ModelledEngine, ModelledKV
from baton.bench.progress_bar import progress_bar
from baton.handoff.protocol import events as ev
from baton.handoff.protocol.ticket import SignedTicket, Ticket, new_transfer_id, sign_ticket
from baton.wire import Mode


@dataclass(frozen=True, slots=True)
class Topology:
    prefill_tensor_parallel_size: int = 1
    decode_tensor_parallel_size: int = 1
    kv_transport: str = "shm"
    kv_mode: Mode = "push"


@dataclass(frozen=True, slots=True)
class Pace:
    """`chunk`: in tokens. `rate`: tokens per second."""

    chunk: int = 512
    rate: float = 20_000.0


@dataclass(frozen=True, slots=True)
class HandoffFigures:
    """Medians, with quartiles in `_low` and `_high`; milliseconds.

    `handoff`: REGISTER to COMMIT of a handoff at once. `transfer`: the duration of its copies, summed. `exposed`: end
    of the prefill to COMMIT of a streamed handoff. `hidden_bytes`: the share of bytes copied before that end.
    `hidden_time`: 1 - exposed / handoff. `over_fresh`: transfer over that with fresh pools.
    """

    num_tokens: int
    fragmentation: str
    num_bytes: int
    runs: int
    transfer_ms: float
    transfer_ms_low: float
    transfer_ms_high: float
    over_fresh: float | None
    handoff_ms: float
    handoff_ms_low: float
    handoff_ms_high: float
    exposed_ms: float
    exposed_ms_low: float
    exposed_ms_high: float
    hidden_bytes: float
    hidden_time: float


@dataclass(frozen=True, slots=True)
class _Round:
    num_bytes: int
    runs: int
    transfer_s: float
    seen_s: float
    hidden_bytes: float


def measure_handoffs(
    kv: ModelledKV,
    topology: Topology,
    pace: Pace,
    num_tokens: Sequence[int],
    fragmentations: Sequence[str],
    num_iters: int = 15,
) -> Iterator[HandoffFigures]:
    """Rounds of the fragmentations alternate. Raises `ConfigError`, `HandoffError`."""
    most = -(-max(num_tokens) // kv.block_size)
    num_pages = 4 * most + 64  # twice a prompt's, plus room for `Churn`
    for length in num_tokens:
        placed = {
            name: [fragmented_tables(name, num_pages, -(-length // kv.block_size), 1, seed=seed)[0] for seed in (1, 2)]
            for name in fragmentations
        }
        with _two(kv, topology, num_pages) as pair:
            at_once: dict[str, list[_Round]] = {name: [] for name in placed}
            streamed: dict[str, list[_Round]] = {name: [] for name in placed}
            turns = itertools.product(range(num_iters + 1), placed.items())
            with progress_bar((num_iters + 1) * len(placed), "handoff") as shown:
                for turn, (name, pages) in turns:
                    one = pair.hand_over(length, pages, pace.chunk, 0.0)
                    other = pair.hand_over(length, pages, pace.chunk, pace.rate)
                    if turn:  # the first round opens sessions and touches memory
                        at_once[name].append(one)
                        streamed[name].append(other)
                    shown.update()
        for name in placed:
            fresh = at_once.get("fresh") if name != "fresh" else None
            yield _figures(length, name, at_once[name], streamed[name], fresh)


class _Pair:
    def __init__(self, kv: ModelledKV, topology: Topology, num_pages: int) -> None:
        self._kv, self._mode, self._key = kv, topology.kv_mode, secrets.token_bytes(32)
        uri = topology.kv_transport
        self._peer = PrefillPeer(kv, topology.prefill_tensor_parallel_size, num_pages, uri, self._key)
        try:
            self._engine = ModelledEngine("D", kv, topology.decode_tensor_parallel_size, num_pages, uri, self._key)
        except BaseException:
            self._peer.close()
            raise

    def hand_over(self, num_tokens: int, pages: Sequence[list[int]], chunk: int, rate: float) -> _Round:
        """Hand over from pages[0] of P to pages[1] of D. `rate` 0: at once, else streamed."""
        ticket, before = self._ticket(), self._engine.copied()
        self._peer.prefill(ticket.text, num_tokens, pages[0], chunk, rate)
        ended: list[Any] | None = None if rate else self._peer.receive()
        began = time.monotonic()
        there = dict.fromkeys(self._kv.groups, pages[1])
        self._engine.together.open_decode(ticket, num_tokens, self._kv.wanted(num_tokens), there)
        if ended is None:
            ended = self._peer.receive()
            began = ended[0]
            ended[1] += self._engine.copied()[0] - before[0]
        self._engine.next(lambda event: isinstance(event, ev.DecodeCommitted))
        seen = time.monotonic() - began
        own = [after - was for was, after in zip(before, self._engine.copied(), strict=True)]
        num_bytes, transfer, runs, _ = (a + b for a, b in zip(own, self._peer.receive(), strict=True))
        return _Round(int(num_bytes), int(runs), transfer, seen, ended[1] / num_bytes)

    def _ticket(self) -> SignedTicket:
        expiry = time.monotonic() + 120.0
        ticket = Ticket(
            transfer_id=new_transfer_id(),
            prefill_engine="P",
            prefill_incarnation="P-1",
            prefill_addresses=self._peer.addresses,
            decode_engine="D",
            decode_incarnation="D-1",
            decode_addresses=[agent.address for agent in self._engine.agents],
            mode=self._mode,
            prefill_expiry=expiry,
            decode_expiry=expiry,
            request_digest=bytes(32),
        )
        return SignedTicket.of(ticket, sign_ticket(self._key, ticket))

    def close(self) -> None:
        self._engine.close()
        self._peer.close()


@contextmanager
def _two(kv: ModelledKV, topology: Topology, num_pages: int) -> Iterator[_Pair]:
    pair = _Pair(kv, topology, num_pages)
    try:
        yield pair
    finally:
        pair.close()


def _figures(
    num_tokens: int, name: str, at_once: Sequence[_Round], streamed: Sequence[_Round], fresh: Sequence[_Round] | None
) -> HandoffFigures:
    handoff, exposed = _spread([r.seen_s for r in at_once]), _spread([r.seen_s for r in streamed])
    over = [r.transfer_s / f.transfer_s for r, f in zip(at_once, fresh, strict=True)] if fresh else None
    return HandoffFigures(
        num_tokens,
        name,
        at_once[0].num_bytes,
        at_once[0].runs,
        *_spread([r.transfer_s for r in at_once]),
        statistics.median(over) if over else None,
        *handoff,
        *exposed,
        statistics.median(r.hidden_bytes for r in streamed),
        1.0 - exposed[0] / handoff[0],
    )


def _spread(seconds: Sequence[float]) -> tuple[float, float, float]:
    """Median and quartiles in milliseconds."""
    values = sorted(1e3 * one for one in seconds)
    return statistics.median(values), values[len(values) // 4], values[(3 * len(values)) // 4]
