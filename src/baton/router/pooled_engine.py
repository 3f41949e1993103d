"""One engine of a router's pool: its state, and the legs that run on it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from baton.comparison import token_identity
from baton.errors import EngineLostError
from baton.router.client import EngineClient
from baton.router.prefixes import KnownPrefixes
from baton.wire import EngineInfo, GenerateRequest, Role

OnLost = Callable[[EngineLostError], None]


@dataclass(frozen=True, slots=True, eq=False)
class _Leg:
    on_lost: OnLost
    may_move: Callable[[], bool]


@dataclass(slots=True, eq=False)
class PooledEngine:
    """One engine. `num_inflight`: this router's legs on it. `problem`: why it cannot be used.

    - `answered`: when it last answered, in monotonic seconds. `num_silent`: unanswered questions since.
    - `gone`: since then nothing, or the wrong server, listened at its address. If that is silent now, an engine is
      starting there.
    - `evicted`: its lease has expired, and its legs were failed.
    - `draining`: it gets no new requests, by its own word or the operator's (`leaving`).
    - `known`: the prefixes that it probably holds.
    """

    client: EngineClient
    role: Role
    info: EngineInfo | None = None
    problem: str | None = "not reached yet"
    num_inflight: int = 0
    order: int = 0
    answered: float = 0.0
    num_silent: int = 0
    gone: bool = False
    evicted: bool = False
    draining: bool = False
    leaving: bool = False
    known: KnownPrefixes = field(default_factory=KnownPrefixes)
    when_busy: Callable[[], None] = lambda: None
    when_idle: Callable[[], None] = lambda: None
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
        """The `comparison.token_identity`; None until the engine has answered."""
        return None if self.info is None else token_identity(self.info.fingerprint)

    def may_serve(self, request: GenerateRequest) -> bool:
        """Whether it gives the request the tokens for which it was planned, and room for all of them."""
        if self.info is None or request.identity not in (None, self.identity):
            return False
        return len(request.prompt_token_ids) - request.num_known + request.sampling_params.max_tokens <= (
            self.info.max_model_len
        )

    @property
    def healthy(self) -> bool:
        return self.problem is None and self.info is not None and not self.leaving

    @property
    def suspected(self) -> bool:
        """Whether it is silent, but not yet given up."""
        given_up = self.gone or self.evicted or self.leaving
        return self.info is not None and self.num_silent > 0 and not given_up

    @contextlib.contextmanager
    def leg(self, on_lost: OnLost, may_move: Callable[[], bool] = lambda: False) -> Iterator[None]:
        """Count a leg while it runs. `on_lost` is called if the engine is given up. It is called as soon as the engine
        falls silent if `may_move`: the leg loses nothing, and another engine can take it.
        """
        self.num_inflight += 1
        leg = _Leg(on_lost, may_move)
        self._legs.append(leg)
        self.when_busy()
        try:
            yield
        finally:
            self.num_inflight -= 1
            self._legs.remove(leg)
            if not self.num_inflight:
                self.when_idle()

    def evict(self, error: EngineLostError) -> None:
        """Give the engine up: fail its legs."""
        self.evicted = True
        for leg in list(self._legs):
            leg.on_lost(error)

    def move(self, error: EngineLostError) -> None:
        """Fail the legs that may move, before the engine's lease expires."""
        for leg in [leg for leg in self._legs if leg.may_move()]:
            leg.on_lost(error)
