"""Flipped bytes, failed copies and wrong seeds between two real agents: detected, named, and repaired, or a named
failure.
"""

from __future__ import annotations

import logging

import msgspec
import numpy as np
import pytest

from baton.errors import ConfigError
from baton.handoff.agent.agent import AgentConfig, HandoffAgent
from baton.handoff.agent.operations import Operations
from baton.handoff.plan.planner import Instance, RankGeometry
from baton.handoff.protocol.digests import MemoryDigester
from baton.handoff.protocol.events import (
    CopyEnded,
    DecodeCommitted,
    DecodeFailed,
    DecodeProgress,
    DecodeReleased,
    PrefillReleased,
    StartCopy,
)
from baton.handoff.protocol.messages import MAX_HASHES, AttemptKey, Commit, Confirm, ControlMessage
from baton.handoff.session.base import Connection
from baton.kv.geometry import Geometry
from baton.kv.interval import Interval
from baton.kv.spec import GroupSpec, kv_planes
from baton.transports.mapped.local import LocalTransport
from testkit.handoffs.nodes import SEEDS, Node, Pair, hand_over, settle, ticket_for
from testkit.handoffs.planes import deep_rank
from testkit.inside import rank_handoffs_of

TOKENS = 150
REGION = {"target": 0, "draft": 1}


def engines(pair: Pair, mode: str, fault: str, scheme: str = "local", **config: object) -> tuple[Node, Node]:
    """P and D with different page sizes. The side that copies has the fault."""
    bad, good = f"faulty+{scheme}://?{fault}", f"{scheme}://"
    settings: dict[str, object] = {"integrity": "full", **config}
    p = pair.node("P", bad if mode == "push" else good, 8, **settings)
    d = pair.node("D", bad if mode == "pull" else good, 5, **settings)
    return p, d


def fail_over(p: Node, d: Node, mode: str, n: int = TOKENS) -> DecodeFailed:
    """One handoff that must fail, and free everything."""
    ticket = ticket_for(p, d, mode)
    source = p.pages(1, n)
    p.fill(source, n, 0.5)
    d.agent.open_decode(ticket, n, {"target": Interval(0, n), "draft": Interval(0, n)}, d.pages(1, n))
    p.agent.open_prefill(ticket)
    p.agent.declare_final(ticket.key, n, source, {"target": n, "draft": n - 1})
    p.agent.finish_prefill(ticket.key, SEEDS, False, {"draft": n})
    failed = d.next(DecodeFailed)
    d.next(DecodeReleased)
    p.next(PrefillReleased)
    settle(p, d)
    assert isinstance(failed, DecodeFailed)
    return failed


@pytest.mark.parametrize("mode", ["push", "pull"])
@pytest.mark.parametrize("group", ["target", "draft"])
@pytest.mark.parametrize("scheme", ["local", "shm"])
def test_one_flipped_byte_is_found_named_and_repaired(
    pair: Pair, mode: str, group: str, scheme: str, caplog: pytest.LogCaptureFixture
) -> None:
    p, d = engines(pair, mode, f"fault=corrupt&nbytes=1&every=1000&region={REGION[group]}", scheme)
    with caplog.at_level(logging.WARNING, "baton.handoff"):
        hand_over(p, d, mode, TOKENS, "during", hit=3, exact=False)
    stats = d.agent.stats()
    assert stats.bad_pieces == 1
    assert stats.repairs == 1
    assert stats.handoffs == 1
    lines = [record.getMessage() for record in caplog.records if "do not match" in record.getMessage()]
    assert lines
    assert f"rank 0, group {group}, layers [" in lines[-1]
    assert "tokens [" in lines[-1]
    # Only the bad piece was copied again.
    again = stats.bytes - (TOKENS - 3) * (2 + 1) * 2 * 2 * 4 * 4
    assert 0 < again <= 64 * 2 * 2 * 2 * 4 * 4


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_pieces_that_stay_bad_end_in_integrity_failed(pair: Pair, mode: str) -> None:
    p, d = engines(pair, mode, "fault=corrupt&region=1", max_retries=2)
    failed = fail_over(p, d, mode)
    assert (failed.reason, failed.recoverable) == ("integrity_failed", True)
    assert "draft" in failed.message
    assert d.agent.stats().repairs == 2


@pytest.mark.parametrize("fault", ["drop", "drop-last-page", "shift-page"])
def test_copies_that_lie_are_found(pair: Pair, fault: str) -> None:
    p, d = engines(pair, "push", f"fault={fault}&every=3")
    hand_over(p, d, "push", TOKENS, "during", hit=3, exact=False)
    assert d.agent.stats().repairs >= 1


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_a_failed_copy_is_made_good_without_digests(pair: Pair, mode: str) -> None:
    p, d = engines(pair, mode, "fault=fail&every=3", integrity="off")
    for n in (5, 33):
        hand_over(p, d, mode, n, "during")
    issuer = p if mode == "push" else d
    assert issuer.agent.stats().retries >= 1
    assert d.agent.stats().failures == {}


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_copies_that_always_fail_end_the_attempt(pair: Pair, mode: str) -> None:
    p, d = engines(pair, mode, "fault=fail", integrity="off", max_retries=2)
    failed = fail_over(p, d, mode)
    assert (failed.reason, failed.recoverable) == ("transfer_failed", True)
    assert (p if mode == "push" else d).agent.stats().retries == 2


class Spoiler:
    """Flips a bit of the first token in the first `times` messages with seeds."""

    def __init__(self, node: Node, times: int) -> None:
        self.times = times
        channel = node.agent._channel
        send = channel.send

        def spoiled(connection: Connection, message: ControlMessage) -> None:
            if isinstance(message, Commit | Confirm) and self.times:
                self.times -= 1
                seeds = msgspec.structs.replace(message.seeds, first_token=message.seeds.first_token ^ 1)
                message = msgspec.structs.replace(message, seeds=seeds)
            send(connection, message)

        channel.send = spoiled  # type: ignore[method-assign]


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_wrong_seeds_are_asked_for_again(pair: Pair, mode: str) -> None:
    p, d = engines(pair, mode, "fault=delay&delay_s=0")
    spoiler = Spoiler(p, 1)
    hand_over(p, d, mode, TOKENS, "during")  # checks the seeds too
    assert spoiler.times == 0
    assert d.agent.stats().repairs == 1


def test_sampled_finds_what_it_looks_at_and_takes_the_rest_on_trust(pair: Pair) -> None:
    p, d = engines(pair, "push", "fault=delay&delay_s=0", integrity="sampled")
    for n in (1, 64, 65, TOKENS):
        hand_over(p, d, "push", n, "during")
    p, d = engines(pair, "push", "fault=drop", integrity="sampled", max_retries=0)
    ticket = ticket_for(p, d, "push", transfer_id=bytes(16))  # the block of tokens [0, 64) is checked
    d.agent.open_decode(ticket, 70, {"target": Interval(0, 70), "draft": Interval(69, 70)}, d.pages(1, 70))
    source = p.pages(1, 70)
    p.fill(source, 70, 0.5)
    p.agent.open_prefill(ticket)
    p.agent.declare_final(ticket.key, 70, source, {"target": 70, "draft": 69})
    p.agent.finish_prefill(ticket.key, SEEDS, False, {"draft": 70})
    failed = d.next(DecodeFailed)
    assert isinstance(failed, DecodeFailed)
    assert failed.message == "tokens target [0, 64) do not match their digests"


def test_progress_is_proven_while_the_prefill_goes_on(pair: Pair) -> None:
    p, d = engines(pair, "push", "fault=delay&delay_s=0")
    ticket = ticket_for(p, d, "push")
    n, source = TOKENS, p.pages(1, TOKENS)
    p.fill(source, n, 0.5)
    d.agent.open_decode(ticket, n, {"target": Interval(3, n), "draft": Interval(3, n)}, d.pages(1, n))
    p.agent.open_prefill(ticket)
    p.agent.declare_final(ticket.key, n, source, {"target": 100, "draft": 99})
    seen: dict[str, int] = {}
    while seen != {"target": 100, "draft": 99}:
        seen = d.progress[-1].proven if d.progress else {}  # type: ignore[union-attr]
    p.agent.abort(ticket.key, "failed")
    failed = d.next(DecodeFailed)
    assert isinstance(failed, DecodeFailed)
    assert failed.recoverable
    d.next(DecodeReleased)
    # Proven tokens stay correct until the pages are freed.
    for group, proven in seen.items():
        np.testing.assert_array_equal(
            d.tokens(group, d.pages(1, n)[group], 3, proven), p.tokens(group, source[group], 3, proven)
        )
    assert all(isinstance(event, DecodeProgress) for event in d.progress)
    settle(p, d)


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_three_bad_handoffs_in_a_row_take_a_peer_out_of_rotation(pair: Pair, mode: str) -> None:
    p, d = engines(pair, mode, "fault=corrupt&nbytes=1&region=0")
    other = pair.node("Q", "local://", 8, integrity="full")
    for _ in range(3):
        assert fail_over(p, d, mode, 9).reason == "integrity_failed"
    failed = fail_over(p, d, mode, 9)
    assert (failed.reason, failed.recoverable) == ("unhealthy_peer", True)
    assert "3 handoffs in a row" in failed.message
    if mode == "push":  # in pull it is D's own transport that is bad
        hand_over(other, d, mode, 9, "during")


def test_a_handoff_without_repair_clears_the_count(pair: Pair) -> None:
    _, d = pair.both()
    sessions = rank_handoffs_of(d.agent).sessions
    event = DecodeCommitted(AttemptKey(bytes(16), 0, "P-1", "D-1"), SEEDS, 1, 1)
    for repaired in (True, True, False, True, True):
        sessions.health.note(event, repaired)
        assert sessions.health.why_not(("P-1", 0)) == ""
    sessions.health.note(event, True)
    assert sessions.health.why_not(("P-1", 0))
    assert not sessions.health.why_not(("P-1", 1))
    assert not sessions.health.why_not(("P-2", 0))


def test_engines_that_differ_in_integrity_are_refused_by_name(pair: Pair) -> None:
    p, d = pair.node("P", integrity="full"), pair.node("D")
    ticket = ticket_for(p, d, "push")
    d.agent.open_decode(ticket, 4, {"target": Interval(0, 4), "draft": Interval(0, 4)}, d.pages(1, 4))
    failed = d.next(DecodeFailed)
    assert isinstance(failed, DecodeFailed)
    assert failed.reason == "incompatible_peer"
    assert "handoff.integrity: here 'off', peer 'full'" in failed.message
    d.next(DecodeReleased)


def test_integrity_needs_a_digester() -> None:
    transport = LocalTransport()
    with pytest.raises(ConfigError, match="digester"):
        HandoffAgent(AgentConfig("P", "P-1", integrity="full"), {}, transport, b"", print)
    transport.close()


def test_a_piece_with_more_digests_than_fit_is_refused_at_the_start() -> None:
    layers = MAX_HASHES // 2 + 1
    instance = Instance(rank=0, groups={"deep": [deep_rank(layers)]})
    transport, digester = LocalTransport(), MemoryDigester({}, [])
    with pytest.raises(ConfigError, match=f"group 'deep' has {2 * layers} planes in all, at most {MAX_HASHES} fit"):
        HandoffAgent(AgentConfig("P", "P-1", integrity="full"), instance, transport, b"", print, digester)
    transport.close()


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_a_copy_that_raises_what_nobody_expects_fails_alone(pair: Pair, mode: str) -> None:
    """The agent keeps running, and the next handoff succeeds."""
    p, d = engines(pair, mode, "fault=delay&delay_s=0", max_retries=0)
    issuer = p if mode == "push" else d
    submit = issuer.transport.submit

    def broken(*arguments: object, **options: object) -> object:
        raise KeyError("surprise")

    issuer.transport.submit = broken  # type: ignore[method-assign, assignment]
    failed = fail_over(p, d, mode)
    assert (failed.reason, failed.recoverable) == ("transfer_failed", True)
    assert "surprise" in failed.message
    issuer.transport.submit = submit  # type: ignore[method-assign]
    hand_over(p, d, mode, 5, "during")


def test_a_copy_with_nothing_to_move_fails() -> None:
    """The caller expects bytes, which would then be missing."""
    found = Geometry.block_major(
        GroupSpec(
            name="target",
            owner="target",
            kind="full",
            planes=kv_planes(1, 1, "uint8"),
            page_size=4,
            layer_ids=(0,),
        ),
        4,
    )
    ranks = [RankGeometry(rank=rank, geometry=found) for rank in (0, 1)]
    # Both hold everything, so that only rank 0 sends to rank 0.
    source, dest = Instance(rank=1, groups={"target": ranks}), Instance(rank=0, groups={"target": ranks[:1]})
    moving: Operations[str] = Operations(LocalTransport(), print)
    for group, told in (("target", "rank 1 has nothing for rank 0"), ("draft", "rank 1 has nothing for rank 0")):
        copy = StartCopy(3, group, Interval(0, 2), [1], [1])
        end = moving.start("attempt", copy, None, "write", source, dest, "tag")  # type: ignore[arg-type]
        assert end == CopyEnded(3, ok=False, message=f"group {group}: {told}")
