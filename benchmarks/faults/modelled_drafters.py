"""How the alarm on acceptance does in modelled traffic: false alarms, and requests until a broken drafter is named.

    python -m benchmarks.faults.modelled_drafters [--seeds 100] [--requests 10000]

Nothing runs but the alarm. Healthy traffic is made to mislead it (`HealthyTraffic`). Then the drafter of one of two
decode engines gets other weights, in a mix of routes. Exit status 1 for a false alarm, or if one is named too late.
"""

from __future__ import annotations

import logging
import random
import statistics
from typing import Annotated

import typer

from baton.observe.acceptance import Group, RequestAcceptance
from baton.observe.alarm import AcceptanceAlarms

K = 3
Rates = tuple[float, ...]  # of each draft, given that the ones before it are accepted
# The demo model's EAGLE-3 drafter.
HEALTHY: Rates = (0.567, 0.523, 0.585)
BROKEN: Rates = (0.03, 0.02, 0.02)
# Weights that are only somewhat wrong: the first draft is accepted in 0.35 of the verifications in place of 0.57.
PARTLY_BROKEN: Rates = (0.35, 0.323, 0.361)
# How often the first draft is accepted by kind of prompt, from questions to code (EAGLE-3's paper and its followers).
KINDS = (0.45, 0.6, 0.72, 0.85)
_LIMIT = 100
_PARTLY_LIMIT = 800  # of those that were handed off


def handed(decode: int, prefill: int = 0) -> Group:
    return Group("handed_off", f"prefill-{prefill}", f"decode-{decode}")


def local(decode: int) -> Group:
    return Group("short", "", f"decode-{decode}")


def request(
    rng: random.Random,
    group: Group,
    first: Rates,
    later: Rates,
    ease: float | None = None,
    num_later: int | None = None,
) -> RequestAcceptance:
    """A request of 1 to 20 verifications. Prompts differ in how well their continuation can be drafted: `ease`."""
    ease = rng.uniform(0.8, 1.2) if ease is None else ease

    def accepted(rates: Rates) -> int:
        for count, rate in enumerate(rates):
            if rng.random() >= min(rate * ease, 0.98):
                return count
        return K

    num_later = rng.randrange(20) if num_later is None else num_later
    found = [accepted(first), *(accepted(later) for _ in range(num_later))]
    return RequestAcceptance(group, found, [K] * len(found))


class HealthyTraffic:
    """Requests on two prefill and four decode engines of which nothing is wrong and little is alike: each decode engine
    gets mostly one kind of prompt, long prompts are harder than short ones, answers have one token or hundreds, first
    verifications are easier than later ones (an answer begins as the others do), kinds come in bursts, and move to
    other decode engines now and then.
    """

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._burst = 0
        self._engine_of = list(range(len(KINDS)))

    def request(self) -> RequestAcceptance:
        rng = self._rng
        if rng.random() < 0.01:
            self._burst = rng.randrange(len(KINDS))
        if rng.random() < 0.0005:
            rng.shuffle(self._engine_of)
        kind = self._burst if rng.random() < 0.3 else rng.randrange(len(KINDS))
        decode = self._engine_of[kind] if rng.random() < 0.8 else rng.randrange(4)
        group = handed(decode, rng.randrange(2)) if rng.random() < 0.6 else local(decode)
        rate = KINDS[kind] - (0.08 if group.handed_off else 0.0)
        first, later = (min(rate + 0.2, 0.95), rate, rate), (rate, rate - 0.05, rate - 0.05)
        return request(rng, group, first, later, rng.betavariate(8, 8) * 2, int(rng.expovariate(1 / 12)))


def requests_until_named(
    seed: int, healthy_before: int, share_handed: float, broken: Rates = BROKEN
) -> tuple[int, set[str]]:
    """The number of requests on `decode-1` until there is an alarm, once its drafter has other weights, and whom the
    alarms name. The prefill engine's drafts are good, so first verifications after a handoff are too."""
    rng, alarms, count = random.Random(seed), AcceptanceAlarms(), 0

    def group() -> Group:
        decode = rng.randrange(2)
        return handed(decode) if rng.random() < share_handed else local(decode)

    for _ in range(healthy_before):
        alarms.observe(request(rng, group(), HEALTHY, HEALTHY))
    while not alarms.alarms() and count < 20 * _LIMIT:
        found = group()
        later = broken if found.decode == "decode-1" else HEALTHY
        alarms.observe(request(rng, found, HEALTHY if found.handed_off else later, later))
        count += found.decode == "decode-1"
    return count, {alarm.suspect for alarm in alarms.alarms()}


def main(
    seeds: Annotated[int, typer.Option(help="Of healthy and of broken traffic.")] = 100,
    requests: Annotated[int, typer.Option(help="Healthy ones for each seed.")] = 10_000,
) -> None:
    """Print false alarms, and after how many of its requests a broken drafter is named."""
    logging.disable(logging.WARNING)
    false: list[str] = []
    for seed in range(seeds):
        traffic, alarms = HealthyTraffic(seed), AcceptanceAlarms()
        seen: dict[str, str] = {}
        for _ in range(requests):
            alarms.observe(traffic.request())
            seen |= {alarm.suspect: alarm.describe() for alarm in alarms.alarms()}
        false += [f"seed {seed}: {text}" for text in seen.values()]
    print(f"healthy: {len(false)} alarms in {seeds} times {requests} requests", *false, sep="\n")
    failed = bool(false)
    for name, broken, shares in (
        ("broken", BROKEN, (1.0, 0.6, 0.2)),
        ("partly broken", PARTLY_BROKEN, (1.0, 0.6)),
    ):
        for share in shares:
            limit = _LIMIT if broken is BROKEN else _PARTLY_LIMIT / share
            for before in (0, 3000):
                found = [requests_until_named(seed, before, share, broken) for seed in range(seeds)]
                counts = [count for count, _ in found]
                late, wrong = sum(count > limit for count in counts), sum(who != {"decode-1"} for _, who in found)
                failed |= bool(late or wrong)
                print(
                    f"{name}, {share:.0%} handed off, {before} healthy ones before: named after "
                    f"{statistics.median(counts):.0f} of its requests ({min(counts)} to {max(counts)}); {late} later "
                    f"than {limit:.0f}, {wrong} named others",
                    flush=True,
                )
    raise typer.Exit(int(failed))


if __name__ == "__main__":
    typer.run(main)
