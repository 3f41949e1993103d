"""The table of `python -m benchmarks.vllm.handoffs`: ratios within rounds, with failed rounds omitted and counted."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from benchmarks.vllm import first_tokens
from benchmarks.vllm.handoffs import Deployment, Row, rounds, table
from benchmarks.vllm.legs import Answer


def answer(first: float, gap: float, num: int) -> Answer:
    """`num` tokens: the first after `first` seconds, then one every `gap`."""
    return Answer(list(range(num)), [first + gap * index for index in range(num)])


def test_a_row_takes_times_in_milliseconds() -> None:
    row = Row()
    row.add(answer(0.030, 0.002, 1000))
    assert row.ttft == [30.0]
    assert row.second == pytest.approx([32.0])
    assert row.tpot == pytest.approx([2.0])


def test_ratios_are_within_rounds_and_failures_are_told() -> None:
    one, other = Row(), Row()
    for slow in (1, 10, 1):
        one.add(answer(0.010 * slow, 0.002, 10))
    other.add(answer(0.020, 0.002, 10))
    other.add(answer(0.200, 0.002, 10))
    other.add(None)
    lines = table({"one vLLM": one, "two": other}, "one vLLM")
    cells = [cell.strip() for cell in lines[-1].split("|")]
    assert cells[1:4] == ["two", "110.00", "2.00 (2.00-2.00)"]
    assert cells[-2] == "1 failed"


def test_first_tokens_are_compared_with_one_vllm_and_with_a_peer() -> None:
    rows = {name: Row() for name in ("one vLLM", "peer at its best", "ours")}
    for _ in range(3):
        rows["one vLLM"].add(answer(0.010, 0.002, 12))
        rows["peer at its best"].add(answer(0.020, 0.002, 12))
        rows["ours"].add(Answer(list(range(12)), [0.010, 0.016, *(0.018 + 0.002 * at for at in range(10))]))
    lines = first_tokens.table(rows, "one vLLM", "peer at its best")
    cells = [cell.strip().partition(" ")[0] for cell in lines[-1].split("|")]
    # 26 ms for the 11 tokens after the first.
    assert cells[1:5] == ["ours", "10.0", "16.0", "32.0"]
    assert cells[5:8] == ["1.00", "2.54", "1.18"]
    assert cells[8:11] == ["0.50", "0.73", "0.84"]
    assert "1st over peer" in lines[0]


@dataclass(eq=False)
class Pausable:
    """In place of a `VllmServer`."""

    running: bool = True

    def signal(self, number: signal.Signals) -> None:
        self.running = number == signal.SIGCONT


@dataclass
class Observing:
    """Legs that note which servers run."""

    servers: Sequence[Pausable]
    seen: list[list[bool]] = field(default_factory=list)

    async def ask(self, session: object, prompt: Sequence[int], num: int) -> Answer:
        self.seen.append([server.running for server in self.servers])
        return answer(0.01, 0.001, num)


@pytest.mark.parametrize("pause", [True, False])
async def test_only_the_servers_that_are_measured_run(pause: bool) -> None:
    servers: Any = [Pausable() for _ in range(5)]
    used = (servers[:1], servers[1:3], servers[1:3], servers[3:])
    found = [Deployment(str(at), cast(Any, Observing(servers)), tuple(own)) for at, own in enumerate(used)]
    rows = await rounds(found[0], found[1:], 4, 2, 3, pause=pause, sleep_s=0.0)
    assert [len(row.ttft) for row in rows.values()] == [2] * 4
    for deployment in found:
        expected = [not pause or any(server is own for own in deployment.servers) for server in servers]
        assert cast(Any, deployment.legs).seen == [expected] * 4
    assert all(server.running for server in servers)
