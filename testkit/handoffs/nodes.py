"""Engines without a model, for tests of complete agents: pools, an agent, and the agent's events."""

from __future__ import annotations

import time

import numpy as np

from baton.handoff.protocol.events import DecodeCommitted, DecodeProgress, HandoffEvent, PrefillReleased
from baton.handoff.protocol.messages import Seeds
from baton.handoff.protocol.ticket import SignedTicket
from baton.handoff.session.config import Timers
from baton.kv.interval import Interval
from simulation.fuzz import pair
from simulation.fuzz.pair import DIM, GROUPS, HEADS
from testkit.handoffs.tickets import make_ticket_between, signed

KEY = b"k" * 32
SEEDS = Seeds(first_token=5, draft_token_ids=[6, 7, 8])
TIMERS = Timers(retry=0.05, check=0.02, close=2.0)


class Node(pair.Node):
    """A node for tests of complete agents. `DecodeProgress` events go into `progress`, all others into `events`."""

    def __init__(self, name: str, scheme: str = "local://", page_size: int = 4, **config: object) -> None:
        self.progress: list[HandoffEvent] = []
        defaults: dict[str, object] = {"ticket_key": KEY, "timers": TIMERS}
        super().__init__(name, f"{name}-1", scheme, page_size, **{**defaults, **config})

    def note(self, event: HandoffEvent) -> None:
        (self.progress.append if isinstance(event, DecodeProgress) else self.events.put)(event)

    @property
    def address(self) -> str:
        return str(self.agent.address)

    def next(self, kind: type[HandoffEvent]) -> HandoffEvent:
        event = self.events.get(timeout=60)
        assert isinstance(event, kind), event
        return event

    def pages(self, first: int, tokens: int) -> dict[str, list[int]]:
        count = -(-tokens // self.page_size)
        # Scattered, so that a shifted or reordered table cannot pass.
        return {
            group: [first + 2 * (count - 1 - i) + shift for i in range(count)] for shift, group in enumerate(GROUPS)
        }

    def tokens(self, group: str, pages: list[int], start: int, stop: int) -> np.ndarray:
        """[tokens, layers, 2, heads, dim]"""
        pool = self.pools[group]
        where = [(pages[t // self.page_size], t % self.page_size) for t in range(start, stop)]
        return np.stack([pool[page, :, :, slot] for page, slot in where])

    def fill(self, pages: dict[str, list[int]], tokens: int, salt: float) -> None:
        for shift, (group, table) in enumerate(pages.items()):
            for t in range(tokens):
                view = self.pools[group][table[t // self.page_size], :, :, t % self.page_size]
                view[:] = salt + shift * 1000 + t + np.arange(view.size).reshape(view.shape) / 1024


class Pair:
    def __init__(self) -> None:
        self.nodes: list[Node] = []

    def node(self, name: str, scheme: str = "local://", page_size: int = 4, **config: object) -> Node:
        self.nodes.append(Node(name, scheme, page_size, **config))
        return self.nodes[-1]

    def both(self, scheme: str = "local://", p_size: int = 4, d_size: int = 4) -> tuple[Node, Node]:
        return self.node("P", scheme, p_size), self.node("D", scheme, d_size)


def ticket_for(p: Node, d: Node, mode: str, life: float = 60, **changes: object) -> SignedTicket:
    return signed(make_ticket_between(p, d, time.monotonic() + life, mode=mode, **changes), KEY)


def settle(*nodes: Node) -> None:
    """Wait until no attempt is open."""
    until = time.monotonic() + 60
    while any(node.agent.stats().outstanding for node in nodes):
        assert time.monotonic() < until, [node.agent.stats() for node in nodes]
        time.sleep(0.005)


def hand_over(
    p: Node, d: Node, mode: str, n: int, when: str, hit: int = 0, salt: float = 0.0, exact: bool = True
) -> None:
    """One complete handoff with REGISTER arriving `when` relative to the prefill. Checks every byte of both sides."""
    ticket = ticket_for(p, d, mode)
    key = ticket.key
    source, dest = p.pages(1, n), d.pages(3, n)
    p.fill(source, n, salt + 0.5)
    for pool in d.pools.values():
        pool[:] = -1
    wanted = {"target": Interval(min(hit, n), n), "draft": Interval(min(hit, n - 1), n)}

    def register() -> None:
        d.agent.open_decode(ticket, n, wanted, dest)

    if when == "before":
        register()
    p.agent.open_prefill(ticket)
    half = n // 2
    p.agent.declare_final(key, n, source, {"target": half, "draft": max(0, half - 1)})
    if when == "during":
        register()
    p.agent.declare_final(key, n, source, {"target": n, "draft": n - 1})
    p.agent.finish_prefill(key, SEEDS, False, {"target": n, "draft": n})
    if when == "after":
        register()
    committed = d.next(DecodeCommitted)
    assert isinstance(committed, DecodeCommitted)
    assert (committed.key, committed.seeds) == (key, SEEDS)
    assert p.next(PrefillReleased) == PrefillReleased(key, "committed")
    moved = 0
    for group, interval in wanted.items():
        start, stop = interval.start, interval.stop
        if start < stop:
            got = d.tokens(group, dest[group], start, stop)
            want = p.tokens(group, source[group], start, stop)
            np.testing.assert_array_equal(got, want)
            moved += want.nbytes
        touched = int((d.pools[group] != -1).sum())
        assert touched == (stop - start) * GROUPS[group] * 2 * HEADS * DIM
    # Repeated copies count again.
    assert committed.num_bytes == moved if exact else committed.num_bytes > moved
    settle(p, d)
