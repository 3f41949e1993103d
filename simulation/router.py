"""The real router over modelled engines: pool, routes, backend and joining run on an event loop in virtual time.

Its HTTP (`simulation.legs`), its clients and its crashes are modelled.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec

from baton.errors import BatonError, HandoffError
from baton.event_loop import timeout
from baton.handoff.protocol.ticket import Ticket, sign_ticket
from baton.kv.block_tables import BlockTables
from baton.router.connectors.base import Connector, ConnectorConfig
from baton.router.connectors.baton import EngineConnector
from baton.router.hand_back import HandBack, HandBacks
from baton.router.policies import PolicyConfig, create_policies
from baton.router.pool import EnginePool
from baton.router.pooled_engine import PooledEngine
from baton.router.prefixes import PromptBlocks
from baton.router.router_backend import RouterBackend
from baton.router.routes import Routes
from baton.router.timers import RouterTimers
from baton.sampling_params import SamplingParams
from baton.wire import GenerateRequest, Mode, TokenChunk
from simulation.legs import SimClient
from simulation.modelled.eventloop import SimLoop
from simulation.process import TICKET_KEY
from simulation.story import Story
from simulation.world import Violation

if TYPE_CHECKING:
    from simulation.cluster import Cluster

# How often the attempt after a lost one continues the same transfer's numbering, if the prefill engine is the same.
_SAME_TRANSFER = 0.5
# The share of seeds with hand-backs, of their handoffs with one, and of those that ask an engine which holds nothing.
_HANDS_BACK, _ASKED, _IN_VAIN = 0.5, 0.8, 0.1
# The seeds below find the other mutations.
FIRST_WITH = 1200


@dataclass(slots=True, eq=False)
class Request:
    """One client's request. `story` holds the correct tokens, from the moment a router plans it; `sent` counts received
    tokens; `ended_at` is the time of its `outcome`.
    """

    index: int
    prompt: list[int]
    params: SamplingParams
    deadline: float
    story: Story | None = None
    sent: int = 0
    outcome: str = ""
    ended_at: float = 0.0
    rungs: set[str] = field(default_factory=set)

    @property
    def name(self) -> str:
        return f"request {self.index}"


class SimConnector(EngineConnector):
    """Mints tickets as the router's own connector, and in some attempts continues the numbering of the previous
    transfer, as a router may if the prefill engine is still there. All tickets are kept for forgers.
    """

    def __init__(self, config: ConnectorConfig, cluster: Cluster) -> None:
        super().__init__(config)
        self._cluster = cluster
        self._last: dict[str, Ticket] = {}  # by request, of its last attempt

    def _ticket(
        self, request: GenerateRequest, prefill: PooledEngine, decode: PooledEngine, mode: Mode, digest: bytes
    ) -> str:
        text = super()._ticket(request, prefill, decode, mode, digest)
        ticket = _read(text)
        name = request.request_id.partition(".")[0]
        last, random = self._last.get(name), self._cluster.world.random
        if last is not None and prefill is not decode and random.random() < _SAME_TRANSFER:
            same = last.prefill_incarnation == ticket.prefill_incarnation
            if same and last.decode_incarnation != last.prefill_incarnation:
                ticket = msgspec.structs.replace(ticket, transfer_id=last.transfer_id, attempt=last.attempt + 1)
                text = sign_ticket(TICKET_KEY, ticket)
        self._last[name] = ticket
        self._cluster.tickets[ticket.key] = text
        world = self._cluster.world
        world.note("router", f"{name}: {str(ticket.key)[:6]}/{ticket.attempt} {ticket.prefill_engine} {mode}")
        return text


def hands_back(seed: int) -> bool:
    return seed >= FIRST_WITH and Random(f"hand-backs in {seed}").random() < _HANDS_BACK


class SimHandBacks(HandBacks):
    """In a part of the seeds another engine is asked for what it has cached of a prompt: mostly the one that holds most
    of it at that moment, which no router knows."""

    def __init__(self, connector: Connector, cluster: Cluster, seed: int) -> None:
        super().__init__(connector, PolicyConfig(hand_back=True, min_hand_back_length=1))
        self._cluster = cluster
        # Of its own, so that no other draw depends on it.
        self._random = Random(f"hand-backs in {seed}")
        self.enabled = hands_back(seed)

    def choose(self, prompt: PromptBlocks, prefill: PooledEngine, engines: Sequence[PooledEngine]) -> HandBack | None:
        others = [engine for engine in engines if engine is not prefill]
        if not others or self._random.random() >= _ASKED:
            return None
        source = max(others, key=lambda engine: self._held(engine, prompt))
        if not self._held(source, prompt) and self._random.random() >= _IN_VAIN:
            return None
        return HandBack(source if self._random.random() < _ASKED else self._random.choice(others), 1)

    def _held(self, engine: PooledEngine, prompt: PromptBlocks) -> int:
        cache = self._cluster.processes[self._cluster.name_of(engine.url)].engine.cache
        found = cache.find(BlockTables(), prompt.tokens, len(prompt.tokens))
        return min(hit.num_tokens for hit in found.values())


def _read(text: str) -> Ticket:
    """Decode a ticket without checking its expiry."""
    body = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))[: -hashlib.sha256().digest_size]
    return msgspec.msgpack.decode(body, type=Ticket)


class WatchedPool(EnginePool):
    """The real pool, with a check of each engine that it gives up."""

    router: Router

    async def _check(self, engine: PooledEngine) -> None:
        before, unanswered = engine.evicted, engine.num_silent
        await super()._check(engine)
        if engine.evicted and not before and not engine.leaving and unanswered == 0:
            self.router.check_given_up(engine)


class Router:
    """A router process; after a crash, another one. `requests`: all that clients sent here."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.world = cluster, cluster.world
        self.requests: list[Request] = []
        self.clients: dict[str, Request] = {}  # by the ids of their engine requests, without the attempt number
        self.up = False
        random = self.world.random
        self.timers = RouterTimers(
            check=random.uniform(0.5, 2.0), answer=random.uniform(0.3, 1.0), lease=random.uniform(3.0, 6.0)
        )
        self._generation = 0
        self.loop: SimLoop
        self.backend: RouterBackend
        self.restart()

    # ------------------------------------------------------------ life and death

    def restart(self) -> None:
        world, random, settings = self.world, self.world.random, self.world.settings
        self.up = True
        self._generation += 1
        self.loop = SimLoop(world, self._fault)  # type: ignore[abstract]
        config = ConnectorConfig(TICKET_KEY, False, float(settings.life), lambda: random.randbytes(16))
        stub: Any = SimpleNamespace()
        session: Any = None
        # Which policy chooses decides no token, and the seeds of known bugs are those of these two.
        policy, config_of_policy = (
            random.choice(("round_robin", "least_loaded")),
            PolicyConfig(max_turn_prefill_length=0),
        )
        pool = WatchedPool(
            session,
            lambda _session, url, _timers, _role: SimClient(self, url, self.cluster.name_of(url)),
            timers=self.timers,
            load_tokenizer=lambda directory: stub,
        )
        modes: tuple[Mode, ...] = ("push", "pull")
        pool.router = self
        connector = SimConnector(config, self.cluster)
        hand_backs = SimHandBacks(connector, self.cluster, world.seed)
        self.backend = RouterBackend(
            pool,
            connector,
            random.choice(modes),
            recovery=settings.recovery,
            routes=Routes(
                pool,
                create_policies(policy, config=config_of_policy),
                0 if settings.harmless else random.choice((0, 0, 4)),
                hand_backs,
            ),
            hand_backs=hand_backs,
        )
        self._start(self._serve())
        world.note("router", "is up")

    async def _serve(self) -> None:
        pool = self.backend.pool
        for name, role in self.cluster.roles.items():
            # `watch` retries an engine that differs from the others or is draining.
            with contextlib.suppress(BatonError):
                await pool.add(self.cluster.url_of(name), role)
        await pool.watch()

    def _fault(self, what: str) -> None:
        # It is raised after the event, because asyncio calls this where nothing can be raised.
        self.world.violation = self.world.violation or Violation("exception", f"the router's loop: {what}")

    def _start(self, work: Any) -> asyncio.Task[Any]:
        return self.loop.create_task(work)

    def crash(self) -> None:
        """Die: every stream breaks, every request in flight is cut."""
        self.up = False
        self.world.note("router", "is dead")
        for request in self.requests:
            self._finish(request, "cut")
        self.loop.end()
        for stream in self.cluster.streams:
            if stream.router is self:
                stream.hang_up()

    # ------------------------------------------------------------ requests

    def submit(self, request: Request) -> None:
        self.requests.append(request)
        self.world.note("router", f"{request.name}: {len(request.prompt)} tokens")
        if not self.up:
            self._finish(request, "router_down")
            return
        client = self._start(self._answer(request))
        if self.world.hit("client_abort"):
            after = self.world.random.choice((0.05, 0.5, 3.0)) * self.world.random.random()
            self.world.after(after, self._leave, client, request)

    def _leave(self, client: asyncio.Task[None], request: Request) -> None:
        client.cancel()
        # A task that is cancelled before it starts does not run its `finally`.
        client.add_done_callback(lambda _: self._finish(request, "aborted"))

    async def _answer(self, request: Request) -> None:
        """Serve one client as the HTTP server does, until it has the answer or leaves."""
        outcome = "aborted"
        backend, world = self.backend, self.world
        try:
            async with timeout(request.deadline - world.now):
                model = await self._model()
                request.story = self.cluster.story(request, model.identity)
                wire = GenerateRequest(
                    request_id=f"r{request.index}g{self._generation}",
                    prompt_token_ids=request.prompt,
                    sampling_params=request.params,
                    identity=model.identity,
                )
                self.clients[wire.request_id] = request
                before = backend.recovery.counts.copy()
                attempts: list[str] = []
                on_route = lambda why, engines: attempts.append(why)  # noqa: E731
                async with contextlib.aclosing(backend.generate(wire, None, on_route)) as chunks:
                    async for chunk in chunks:
                        outcome = self._got(request, chunk) or outcome
                if len(attempts) > 1 and backend.recovery.counts != before:
                    request.rungs.add("again")
        except asyncio.TimeoutError:
            outcome = "timeout"
        except HandoffError as error:
            outcome = f"error:{error.reason}"
        except BatonError as error:
            outcome = f"error:{type(error).__name__}"
        finally:
            if not self.loop.dead:
                self._finish(request, outcome)

    async def _model(self) -> Any:
        """The served model, once an engine has been reached. Raises `EngineUnavailableError` after 20 attempts."""
        for _ in range(20):
            with contextlib.suppress(BatonError):
                return self.backend.pool.identity.model()
            await asyncio.sleep(0.2)
        return self.backend.pool.identity.model()

    def _got(self, request: Request, chunk: TokenChunk) -> str | None:
        """Check a chunk for the client. Returns the request's outcome with its last chunk."""
        story = request.story
        assert story is not None
        if chunk.token_ids:
            at = story.num_prompt + request.sent
            if chunk.position != request.sent or story.tokens[at : at + len(chunk.token_ids)] != chunk.token_ids:
                self.world.fail("wrong_token", f"{request.name} got {chunk.token_ids} at {chunk.position}")
            request.sent += len(chunk.token_ids)
            self.world.progress()
        if chunk.finish_reason in ("stop", "length"):
            if story.num_prompt + request.sent != len(story):
                self.world.fail("short_stream", f"{request.name} ended after {request.sent} tokens")
            return "exact"
        if chunk.finish_reason is not None:
            return f"error:{(chunk.error or chunk.finish_reason).partition(':')[0]}"
        return None

    def _finish(self, request: Request, outcome: str) -> None:
        if request.outcome:
            return
        request.outcome, request.ended_at = outcome, self.world.now
        self.world.progress()
        self.world.note("router", f"{request.name} ends: {outcome}")

    def operate(self, name: str, what: str) -> None:
        """An operator removes or drains an engine, perhaps in a hurry, and adds it again some seconds later."""
        pool, url, world = self.backend.pool, self.cluster.url_of(name), self.world

        async def work() -> None:
            world.note("router", f"is told to {what} {name}")
            with contextlib.suppress(BatonError):
                pool.remove(url) if what == "remove" else pool.drain(url)
                if what == "hurry":
                    await asyncio.sleep(world.random.random())
                    pool.drain(url)
            await asyncio.sleep(world.random.uniform(0.5, 4.0))
            for _ in range(200):
                with contextlib.suppress(BatonError):
                    await pool.add(url, self.cluster.roles[name])
                    return
                await asyncio.sleep(0.5)  # its last leg has not ended, or it serves another model now

        self._start(work())

    def check_leases(self) -> None:
        """Each leg on an engine that is silent for longer than a lease is given up, also if the engine was removed."""
        timers, now = self.timers, self.world.now
        longest = timers.lease + 2 * (timers.check + timers.answer) + 1.0
        if not self.up or self.loop.paused or now - self.loop.resumed_at < longest:
            return
        for stream in self.cluster.streams:
            process = stream.process
            if stream.router is not self or not stream.open or process is None or not process.paused or process.dead:
                continue
            name = stream.request.request_id
            request = self.clients.get(name.partition(".")[0])
            if request is None:
                continue  # the router's own
            since = max(stream.began, process.paused_at)
            handoff = stream.request.handoff
            if handoff is not None and handoff.role == "prefill":
                # The decode engine notices a lost prefill engine by itself, and the leg ends with the request.
                if not request.outcome:
                    continue
                since = max(since, request.ended_at)
            # A leg is read for a while after its request has ended through the other leg.
            drained = timers.drain if request.outcome else 0.0
            if now - since > longest + drained:
                self.world.fail(
                    "held_by_silence", f"{name} waits for {process.name}, silent since {process.paused_at:.2f}"
                )

    def check_given_up(self, engine: PooledEngine) -> None:
        """An engine that ran all the time is not given up after one question, when this process itself was away."""
        settings, process = self.world.settings, None
        if engine.info is not None:
            process = self.cluster.by_uid.get(engine.info.incarnation)
        if process is None or process.gone or process.paused or process.leaving or settings.has("slow_answer"):
            return
        if process.awake_since <= self.world.now - self.timers.lease:
            self.world.fail("innocent_engine", f"{process.name} is given up, and was there all the time")

    def left(self) -> list[str]:
        """Legs, tasks and counts that must be gone once all requests have ended."""
        if not self.up:
            return []
        pool = self.backend.pool
        busy = [f"{engine.url} has {engine.num_inflight} legs" for engine in pool.engines if engine.num_inflight]
        if self.backend.num_active_handoffs:
            busy.append(f"{self.backend.num_active_handoffs} handoffs are active")
        if self.backend.concurrency.num_running:
            busy.append(f"{self.backend.concurrency.num_running} places are taken")
        return [f"router: {what}" for what in busy]
