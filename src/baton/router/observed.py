"""The router's backend with observers: each request's route and verifications are counted when it ends."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Iterator, Sequence

from baton.observe.acceptance import HANDED_OFF, AcceptanceTotals, Group, RequestAcceptance
from baton.observe.alarm import AcceptanceAlarms
from baton.openai import ServedModel
from baton.openai.backend import OnRoute
from baton.openai.http.metrics import Row, gauge, histogram
from baton.router.backend import RouterBackend
from baton.sampling_params import SamplingParams
from baton.wire import GenerateRequest, Mode, TokenChunk


class ObservedBackend:
    """A `Backend` that passes everything on to a `RouterBackend`.

    Acceptance is counted for requests whose tokens after the first all come from one attempt: drafts of a resumed
    request are not compared.
    """

    def __init__(self, backend: RouterBackend) -> None:
        self.backend = backend
        self.totals = AcceptanceTotals()
        self.alarms = AcceptanceAlarms()

    @property
    def allows_kv_mode(self) -> bool:
        return self.backend.allows_kv_mode

    def model(self) -> ServedModel:
        return self.backend.model()

    def check(self, params: SamplingParams) -> None:
        self.backend.check(params)

    async def generate(
        self, request: GenerateRequest, kv_mode: Mode | None = None, on_route: OnRoute | None = None
    ) -> AsyncGenerator[TokenChunk, None]:
        """Yield the request's chunks, and count their verifications after the last."""
        group: Group | None = None
        num_tokens, resumed = 0, False
        accepted: list[int] = []
        drafted: list[int] = []

        def routed(why: str, engines: Sequence[str] = ()) -> None:
            nonlocal group, resumed
            resumed |= num_tokens > 1
            group = Group(why, engines[0] if why == HANDED_OFF else "", engines[-1])
            if on_route is not None:
                on_route(why, engines)

        async with contextlib.aclosing(self.backend.generate(request, kv_mode, routed)) as chunks:
            async for chunk in chunks:
                num_tokens += len(chunk.token_ids)
                accepted += chunk.accepted
                drafted += chunk.drafted
                if chunk.finish_reason in ("stop", "length") and group is not None and not resumed and any(drafted):
                    self._count(RequestAcceptance(group, accepted, drafted))
                yield chunk

    def _count(self, request: RequestAcceptance) -> None:
        self.totals.observe(request)
        self.alarms.observe(request)

    def describe(self) -> dict[str, object]:
        """Acceptance and its alarms, for `/status`."""
        return {
            "alarms": [alarm.describe() for alarm in self.alarms.alarms()],
            "num_comparisons": self.alarms.num_comparisons(),
            "groups": self.totals.describe(),
        }

    def rows(self) -> Iterator[Row]:
        """Acceptance and its alarms, for `/metrics`."""
        for group, totals in self.totals:
            labels = {"route": group.route, "prefill_engine": group.prefill, "decode_engine": group.decode}
            text = "Accepted drafts of a request's first verification."
            yield histogram("router_first_verification_accepted", text, totals.first.histogram, **labels)
            text = "Accepted drafts of each later verification."
            yield histogram("router_later_verifications_accepted", text, totals.later.histogram, **labels)
        text = "Alarms on acceptance that hold now."
        yield gauge("router_acceptance_alarms", text, len(self.alarms.alarms()))
