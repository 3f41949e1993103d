"""A request trace with the published figures of Mooncake's conversation trace (FAST '25).

Published: 12,031 requests in 3,537 s, of about 7,900 conversations; 12,035 input and 343 output tokens on average; 40%
of the input is a prefix of an earlier request. What is not published is drawn: prompts are lognormal, conversations
begin as a Poisson process, their numbers of turns are geometric, and they begin with one of a few system prompts.
"""

from __future__ import annotations

import math
import random
from array import array
from collections.abc import Iterator
from dataclasses import dataclass

NUM_REQUESTS, NUM_CONVERSATIONS, DURATION_S = 12_031, 7_900, 3_537.0
MEAN_INPUT, MEAN_OUTPUT, SHARED = 12_035, 343, 0.40
MOST_INPUT = 120_000
_SYSTEMS, _SYSTEM_TOKENS = 16, 1_100
# Of the logarithms of lengths. Means are fitted to the published ones.
_SPREAD = 1.1
_FIRST, _NEXT, _ANSWER = 10_300.0, 1_150.0, MEAN_OUTPUT
_THINKS_S = 45.0


@dataclass(slots=True)
class TraceRequest:
    """One request. `text`: all tokens of its conversation, which begin with those of its prompt and its answer."""

    at_s: float
    conversation: int
    turn: int
    num_prompt: int
    num_output: int
    text: array[int]

    @property
    def prompt(self) -> array[int]:
        return self.text[: self.num_prompt]

    @property
    def num_tokens(self) -> int:
        return self.num_prompt + self.num_output

    @property
    def answered(self) -> array[int]:
        """The prompt and its answer."""
        return self.text[: self.num_tokens]


def make_trace(num_requests: int, speed: float, seed: int = 0) -> list[TraceRequest]:
    """The beginning of such a trace, played `speed` times as fast, in the order of arrival."""
    rng = random.Random(seed)
    rate = NUM_CONVERSATIONS / DURATION_S
    begins, found = 0.0, list[TraceRequest]()
    conversation = 0
    # Later turns come late: take the first of more than enough.
    while len(found) < 1.3 * num_requests:
        begins += rng.expovariate(rate)
        found += _conversation(rng, conversation, begins)
        conversation += 1
    found = sorted(found, key=lambda request: request.at_s)[:num_requests]
    for request in found:
        request.at_s /= speed
    return found


def _conversation(rng: random.Random, number: int, at_s: float) -> Iterator[TraceRequest]:
    system = rng.randrange(_SYSTEMS)
    text = array("q", range(system << 20, (system << 20) + _SYSTEM_TOKENS))
    unused, turn = (number + _SYSTEMS + 1) << 32, 0

    def write(num: int) -> None:
        nonlocal unused
        text.extend(range(unused, unused + num))
        unused += num

    while True:
        write(_length(rng, _NEXT if turn else _FIRST))
        num_prompt, num_output = len(text), _length(rng, _ANSWER)
        if num_prompt > MOST_INPUT:
            return
        write(num_output)
        yield TraceRequest(at_s, number, turn, num_prompt, num_output, text)
        turn += 1
        if rng.random() >= 1.0 - NUM_CONVERSATIONS / NUM_REQUESTS:
            return
        at_s += 10.0 + rng.expovariate(1.0 / _THINKS_S)


def _length(rng: random.Random, mean: float) -> int:
    """Lognormal, with this mean."""
    return max(1, round(rng.lognormvariate(math.log(mean) - _SPREAD**2 / 2, _SPREAD)))


def describe(trace: list[TraceRequest]) -> str:
    """The figures of a trace beside the published ones."""
    seen: dict[int, int] = {}
    systems: set[int] = set()
    shared = 0
    for request in trace:
        first = request.text[0]
        held = seen.get(request.conversation, _SYSTEM_TOKENS if first in systems else 0)
        shared += min(held, request.num_prompt)
        systems.add(first)
        seen[request.conversation] = request.num_tokens
    inputs, outputs = sum(r.num_prompt for r in trace), sum(r.num_output for r in trace)
    num = len(trace)
    return (
        f"{num} requests of {len(seen)} conversations in {trace[-1].at_s:.0f} s; input {inputs / num:.0f} tokens "
        f"(published {MEAN_INPUT}), output {outputs / num:.0f} ({MEAN_OUTPUT}), of the input {shared / inputs:.2f} is "
        f"known ({SHARED})"
    )
