"""One engine of a router's pool, and its legs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import msgspec

from baton.comparison import token_identity
from baton.errors import EngineLostError
from baton.router.clients.engine_client import EngineClient
from baton.router.prefixes import KnownPrefixes, Prefixes
from baton.router.workers.loads import NO_LOAD, OtherLoad
from baton.wire import EngineInfo, GenerateRequest, Role

OnLost = Callable[[EngineLostError], None]


class Charge(msgspec.Struct, frozen=True):
    """A leg's cost for its engine, in tokens: to compute, and of KV to hold."""

    prefill_tokens: int = 0
    kv_tokens: int = 0


NO_CHARGE = Charge()


@dataclass(slots=True, eq=False)
class _Leg:
    """`charge.prefill_tokens` counts until `has_prefilled`."""

    engine: PooledEngine
    on_lost: OnLost
    may_move: Callable[[], bool]
    charge: Charge
    has_prefilled: bool = False

    def __enter__(self) -> Callable[[], None]:
        engine = self.engine
        engine.num_inflight += 1
        engine.queued_tokens += self.charge.prefill_tokens
        engine.kv_tokens += self.charge.kv_tokens
        engine._legs.append(self)
        engine.on_load(engine)
        engine.when_busy()
        return self.prefilled

    def __exit__(self, *error: object) -> None:
        engine = self.engine
        engine.num_inflight -= 1
        engine.kv_tokens -= self.charge.kv_tokens
        engine._legs.remove(self)
        self.prefilled()
        engine.on_load(engine)
        if not engine.num_inflight:
            engine.when_idle()

    def prefilled(self) -> None:
        if not self.has_prefilled:
            self.has_prefilled = True
            self.engine.queued_tokens -= self.charge.prefill_tokens
            self.engine.on_load(self.engine)


@dataclass(eq=False)  # slots allow no weak references
class PooledEngine:
    """Counts cover this process's requests, with tokens as expected at routing. `others`: those of the router's other
    processes; `all_...`: the sums.
    """

    client: EngineClient
    role: Role
    info: EngineInfo | None = None
    problem: str | None = "not reached yet"  # why it cannot be used
    num_inflight: int = 0  # legs of this process on it
    queued_tokens: int = 0  # prompt tokens not yet computed
    kv_tokens: int = 0  # the KV of its legs
    others: OtherLoad = NO_LOAD
    overloaded: bool = False  # no new requests, by its last report (`PolicyConfig`)
    order: int = 0
    answered: float = 0.0  # when it last answered, in monotonic seconds
    num_silent: int = 0  # unanswered questions since
    # Nothing, or the wrong server, listened at its address: if it is silent now, the engine is starting.
    gone: bool = False
    unasked: bool = False  # this process had no descriptor to ask; the engine keeps its last state
    evicted: bool = False  # its lease has expired, and its legs were failed
    barred: str | None = None  # an incarnation with another ticket key
    draining: bool = False  # no new requests, by its own report or the operator's (`leaving`)
    leaving: bool = False
    known: Prefixes = field(default_factory=KnownPrefixes)  # prefixes that it probably holds
    when_busy: Callable[[], None] = lambda: None
    when_idle: Callable[[], None] = lambda: None
    on_load: Callable[[PooledEngine], None] = lambda engine: None  # called when its counts change
    _legs: list[_Leg] = field(default_factory=list)

    @property
    def url(self) -> str:
        return self.client.url

    @property
    def name(self) -> str:
        """The engine id, or the URL until it is known."""
        return self.url if self.info is None else self.info.engine_id

    @property
    def identity(self) -> str | None:
        """None until the engine has answered."""
        return None if self.info is None else token_identity(self.info.fingerprint)

    def may_serve(self, request: GenerateRequest) -> bool:
        info = self.info
        if info is None or (request.identity is not None and request.identity != token_identity(info.fingerprint)):
            return False
        if request.adapter is not None and request.adapter not in info.adapters.values():
            return False
        num_tokens = len(request.prompt_token_ids) - request.num_known + request.sampling_params.max_tokens
        return num_tokens <= info.max_model_len

    @property
    def all_inflight(self) -> int:
        return self.num_inflight + self.others.num_inflight

    @property
    def all_queued_tokens(self) -> int:
        return self.queued_tokens + self.others.queued_tokens

    @property
    def all_kv_tokens(self) -> int:
        return self.kv_tokens + self.others.kv_tokens

    @property
    def refuses_tickets(self) -> bool:
        """Until it restarts."""
        return self.info is not None and self.barred == self.info.incarnation

    @property
    def healthy(self) -> bool:
        return self.problem is None and self.info is not None and not self.leaving

    @property
    def suspected(self) -> bool:
        """Silent, but not given up yet."""
        given_up = self.gone or self.evicted or self.leaving
        return self.info is not None and self.num_silent > 0 and not given_up

    def leg(
        self, on_lost: OnLost, may_move: Callable[[], bool] = lambda: False, charge: Charge = NO_CHARGE
    ) -> AbstractContextManager[Callable[[], None]]:
        """Count a leg while it runs. `on_lost` is called if the engine is given up, or as soon as it falls silent if
        `may_move`. Call the yielded function when the leg's prompt is computed."""
        return _Leg(self, on_lost, may_move, charge)

    def evict(self, error: EngineLostError) -> None:
        self.evicted = True
        for leg in list(self._legs):
            leg.on_lost(error)

    def move(self, error: EngineLostError) -> None:
        """Fail the legs that may move, before the engine's lease expires."""
        for leg in [leg for leg in self._legs if leg.may_move()]:
            leg.on_lost(error)
