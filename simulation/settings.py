"""The settings that a seed draws before it starts: the deployment, the load, and the faults."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from random import Random
from typing import Literal

from baton.handoff.session.config import Timers
from baton.kv.interval import Kind
from baton.wire import Integrity, Recovery

Fabric = Literal["shm", "rdma"]

# Faults with a chance per message, copy or request: the range from which a seed draws the chance.
RATES: dict[str, tuple[float, float]] = {
    "delay": (0.02, 0.2),
    "reorder": (0.05, 0.5),
    "duplicate": (0.02, 0.3),
    "drop": (0.02, 0.3),
    "slow_copy": (0.05, 0.5),
    "failed_copy": (0.03, 0.3),
    "late_copy": (0.3, 1.0),
    "corrupt": (0.03, 0.3),
    "corrupt_seeds": (0.05, 0.4),
    "client_abort": (0.1, 0.7),
    "cut_stream": (0.05, 0.3),
    "late_leg": (0.2, 0.7),
    "slow_answer": (0.05, 0.4),
    "slow_turn": (0.02, 0.2),
    "slow_call": (0.05, 0.4),
    "slow_work": (0.02, 0.3),
    "no_descriptor": (0.05, 0.5),
    "full_socket": (0.01, 0.2),
    "claimed_id": (0.3, 1.0),
    "stop_after_hello": (0.05, 0.4),
}
# Faults at events that are drawn in advance: the largest number of them.
STRIKES: dict[str, int] = {
    "crash_prefill": 3,
    "crash_decode": 3,
    "crash_router": 1,
    "pause_router": 2,
    "operate_router": 2,
    "squatter": 3,
    "pause_prefill": 4,
    "pause_decode": 4,
    "crash_rank": 2,
    "pause_rank": 3,
    "cut_rank": 3,
    "partition": 3,
    "broken_connection": 3,
    "leave": 1,
    "engine_abort": 12,
    "forged_register": 3,
    "clock_step": 2,
    "stranger": 6,
}
# Properties of the whole run.
TRAITS = ("clock_rates", "full_pools", "burst", "slow_engine", "slow_rank", "prefix_store", "other_settings")
FAULTS = (*RATES, *STRIKES, *TRAITS)
# Faults that must cost a request nothing but time, however small the pools are.
HARMLESS = frozenset(
    {
        "reorder",
        "duplicate",
        "forged_register",
        "clock_step",
        "stranger",
        "late_leg",
        "slow_turn",
        *TRAITS,
    }
    - {"clock_rates", "slow_rank", "other_settings"}
)
# Faults of one rank of an engine with several.
OF_RANKS = frozenset({"crash_rank", "pause_rank", "cut_rank", "slow_rank"})
# Tensor ranks and stages of engines, by the number of heads to share.
SHAPES = {1: ((1, 1),), 2: ((1, 1), (2, 1), (1, 2), (2, 2)), 4: ((1, 1), (2, 1), (4, 1), (2, 2))}
# Faults that matter most if others occur at the same time.
COMPANIONS: dict[str, tuple[str, ...]] = {
    "corrupt": ("duplicate", "delay", "reorder", "slow_copy", "late_copy", "client_abort"),
    "stop_after_hello": ("burst", "slow_engine"),
    "late_leg": ("reorder", "delay", "engine_abort", "client_abort"),
    "slow_engine": ("reorder", "delay", "engine_abort", "client_abort"),
    "other_settings": ("crash_decode", "crash_prefill", "leave"),
    "squatter": ("crash_prefill", "crash_decode"),
    "claimed_id": ("crash_decode", "leave", "stranger"),
    "operate_router": ("pause_decode", "pause_prefill"),
}
# Faults that have no effect without another.
NEEDS: dict[str, set[str]] = {
    "other_settings": {"crash_decode", "crash_prefill"},
    "squatter": {"crash_prefill"},
    "claimed_id": {"crash_decode"},
}
# If at most this many kinds are allowed, the test is about their combination.
_FEW = 8
# The share of seeds in which prefill engines stream by layer.
_BY_LAYER = 0.3
# The last event at which a fault may be injected.
_LAST_STRIKE = 1500


@dataclass(frozen=True, slots=True)
class GroupModel:
    """A group of layers. `module` defines on which tokens an entry depends, see `Rules`."""

    name: str
    owner: Literal["target", "draft"]
    kind: Kind
    window: int | None
    module: int | None
    salt: int

    @property
    def reach(self) -> int:
        """The number of later tokens that an entry depends on."""
        return self.module or 0

    @property
    def num_planes(self) -> int:
        """Cells per token."""
        return 1 if self.kind in ("mla", "state") else 2


@dataclass(frozen=True, slots=True)
class Settings:
    """One seed's deployment. `life` is a ticket's lifetime and `patience` the router's time per request, in seconds."""

    num_routers: int
    tells_seqs: bool  # engines tell routers how many requests they compute at once
    announces: bool  # D takes pages only for requests that P has admitted; else at once
    num_prefill: int
    num_decode: int
    num_requests: int
    fabric: Fabric
    recovery: Recovery
    integrity: Integrity
    ordered: bool  # the channel drops out-of-order messages; else the state machines see them
    timers: Timers
    life: int
    patience: float
    num_drafts: int
    num_heads: int  # of K, V and states
    num_layers: int  # of each group
    by_layer: bool  # prefill engines report layers during a forward
    shapes: tuple[tuple[int, int], ...]  # (tensor ranks, stages) that engines may have
    draft_alone: bool  # the drafter is on one of the ranks that share the target's heads
    groups: tuple[GroupModel, ...]
    faults: frozenset[str]
    rates: dict[str, float] = field(default_factory=dict)
    strikes: tuple[tuple[int, str], ...] = ()  # (event, kind), in order

    @property
    def harmless(self) -> bool:
        """Whether no fault could explain a failure."""
        return self.faults <= HARMLESS

    def has(self, fault: str) -> bool:
        return fault in self.faults


def draw(random: Random, allowed: Collection[str] = FAULTS) -> Settings:
    """Draw the settings of one seed, with faults from `allowed` only: none, one kind, or a mixture."""
    kinds = sorted(allowed)
    shape = random.random()
    if shape < 0.06 or not kinds:
        faults: set[str] = set()
    elif len(kinds) <= _FEW and shape < 0.7:
        faults = set(kinds)
    elif shape < 0.14:
        # An overload without harmful faults: every request must end exact, and soon.
        faults = {kind for kind in sorted(HARMLESS & set(kinds)) if kind == "full_pools" or random.random() < 0.6}
    elif shape < 0.3:
        faults = {random.choice(kinds)}
        faults |= NEEDS.get(next(iter(faults)), set()) & set(kinds)
    else:
        share = random.choice((0.15, 0.3, 0.6))
        faults = {kind for kind in kinds if random.random() < share}
        for kind in sorted(faults & set(COMPANIONS)):
            if random.random() < 0.5:
                faults |= set(COMPANIONS[kind]) & set(kinds)
    strikes = [
        (random.randrange(_LAST_STRIKE), kind)
        for kind in sorted(faults & set(STRIKES))
        for _ in range(random.randint(1, STRIKES[kind]))
    ]
    integrity: Integrity = random.choice(("off", "sampled", "full"))
    if "corrupt" in faults:
        # Nothing else detects a flipped bit.
        integrity = "full"
    elif "corrupt_seeds" in faults and integrity == "off":
        integrity = "sampled"
    harmless = faults <= HARMLESS
    # A separate generator, so that other draws do not depend on it.
    by_layer = Random(random.getstate()[1][0]).random() < _BY_LAYER
    # Only engines with several ranks can lose one rank.
    num_heads = random.choice((2, 2, 4)) if faults & OF_RANKS else random.choice((1, 1, 1, 2))
    return Settings(
        num_routers=random.choice((1, 1, 2)),
        tells_seqs=random.random() < 0.5,
        announces=harmless or num_heads > 1 or random.random() < 0.7,
        num_prefill=random.choice((1, 1, 2, 2, 3)),
        num_decode=random.choice((1, 2, 2, 3)),
        num_requests=random.randint(3, 14),
        fabric=random.choice(("shm", "rdma")),
        recovery=random.choice(("none", "retry", "source", "recompute", "full", "full", "full")),
        integrity=integrity,
        # Ordered sessions drop messages that were overtaken, and a loss is not harmless.
        ordered=random.random() < 0.4 and not (harmless and "reorder" in faults),
        timers=_timers(random, harmless),
        life=6 if harmless else random.randint(4, 12),
        patience=400.0 if harmless else random.uniform(12.0, 30.0),
        num_drafts=random.randint(0, 3),
        num_heads=num_heads,
        num_layers=(1 if num_heads == 1 else 2) * (2 if by_layer else 1),
        by_layer=by_layer,
        shapes=SHAPES[num_heads],
        draft_alone=random.random() < 0.3,
        groups=_groups(random),
        faults=frozenset(faults),
        rates={kind: random.uniform(*RATES[kind]) for kind in sorted(faults & set(RATES))},
        strikes=tuple(sorted(strikes)),
    )


def _timers(random: Random, harmless: bool) -> Timers:
    renew = random.uniform(0.5, 1.5)
    return Timers(
        retry=random.uniform(0.3, 1.0),
        retry_min=random.uniform(0.02, 0.2),
        check=random.uniform(0.1, 0.4),
        renew=renew,
        lease=renew * random.uniform(3.0, 5.0),
        handoff=100.0 if harmless else random.uniform(4.0, 12.0),
        close=random.uniform(0.5, 5.0),
    )


def _groups(random: Random) -> tuple[GroupModel, ...]:
    """Groups of the target, the first of which keeps pages for all tokens, and of a drafter, if any. A hybrid has all
    kinds: latents or not, full attention, two windows and states.
    """
    attends: tuple[Kind, ...] = ("full", "mla")
    window = random.randint(1, 8)
    groups = [GroupModel("target", "target", random.choice(attends), None, 0, 1)]
    drafter = random.random()
    if drafter < 0.1:
        groups.append(GroupModel("draft", "draft", "sliding_window", window + 1, 1, 2))
    elif drafter < 0.7:
        groups.append(GroupModel("draft", "draft", random.choice(attends), None, 1, 2))
    elif drafter < 0.8:
        groups.append(GroupModel("draft", "draft", "full", None, None, 2))
        if drafter < 0.74:
            groups.append(GroupModel("draft.state", "draft", "state", None, None, 9))
    elif drafter < 0.95:
        modules = range(1, random.randint(2, 3) + 1)
        groups += [GroupModel(f"draft{j}", "draft", random.choice(attends), None, j, 1 + j) for j in modules]
    hybrid = random.random() < 0.1
    if hybrid or random.random() < 0.3:
        groups.append(GroupModel("window", "target", "sliding_window", window, 0, 5))
    if hybrid or random.random() < 0.15:
        groups.append(GroupModel("state", "target", "state", None, 0, 6))
    if hybrid:
        groups.append(GroupModel("wide", "target", "sliding_window", window + random.randint(1, 12), 0, 7))
        groups.append(GroupModel("full", "target", "full", None, 0, 8))
    return tuple(groups)
