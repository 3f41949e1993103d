"""The modelled router: tickets, both legs at once, one exact stream per request, and what it does on failure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from baton.handoff.protocol.ticket import Ticket, mint, request_digest
from baton.wire import LegRole, SamplingParams
from simulation.process import TICKET_KEY
from simulation.story import Story

if TYPE_CHECKING:
    from simulation.cluster import Cluster
    from simulation.process import Process

_ONE_WAY = (0.0005, 0.005)
_MAX_RUNS = 3


@dataclass(slots=True, eq=False)
class Request:
    """One client's request. `sent` tokens were forwarded; `ahead` came before their turn, by position."""

    index: int
    story: Story
    deadline: float
    sent: int = 0
    ahead: dict[int, int] = field(default_factory=dict)
    outcome: str = ""
    rungs: set[str] = field(default_factory=set)
    runs: int = 0
    transfer_id: bytes = b""
    attempt: int = 0
    streams: dict[str, Stream] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """For the trace."""
        return f"request {self.index}"

    @property
    def params(self) -> SamplingParams:
        """What both legs are asked for."""
        return SamplingParams(max_tokens=self.story.max_tokens, temperature=0.0)


class Stream:
    """One leg's HTTP response: tokens and an end, in order, until either side breaks it."""

    def __init__(self, router: Router, request: Request, role: LegRole, process: Process) -> None:
        self.router, self.request, self.role, self.process = router, request, role, process
        self.world = router.world
        self.open = True
        self.gone = False  # the engine has noticed that nobody listens
        self.request_id = ""
        self._last = 0.0

    def _deliver(self, call: object, *args: object) -> None:
        """In order, and not at all when the stream breaks on the way."""
        assert callable(call)
        at = max(self._last, self.world.now + self.world.random.uniform(*_ONE_WAY)) + 1e-6
        self._last = at
        self.world.after(at - self.world.now, self._arrive, call, args)

    def _arrive(self, call: object, args: tuple[object, ...]) -> None:
        assert callable(call)
        if self.open:
            call(self, *args)

    # ------------------------------------------------------------ the engine's side

    def tokens(self, position: int, tokens: list[int]) -> None:
        """Tokens of the request, the first of which is number `position` of prompt and output together."""
        if self.world.hit("cut_stream"):
            self.cut(0.0, self.world.random.uniform(0.0, 0.5))
            return
        self._deliver(self.router.got_tokens, position, tokens)

    def end(self, outcome: str, recoverable: bool) -> None:
        """The leg is over."""
        self._deliver(self.router.leg_ended, outcome, recoverable)

    # ------------------------------------------------------------ breaks

    def hang_up(self) -> None:
        """The router is done with it; the engine sees that the client is gone."""
        if self.open:
            self.open = False
            # A server notices when it writes next, or when it looks.
            late = self.world.random.choice((0.0, 0.4, 3.0)) * self.world.random.random()
            self.world.after(late + self.world.random.uniform(*_ONE_WAY), self.noticed)

    def cut(self, engine_after: float, router_after: float) -> None:
        """The connection breaks; each side notices in its time."""
        if not self.open:
            return
        self.open = False
        self.world.note("http", f"the {self.role} stream of {self.request.name} breaks")
        self.world.after(engine_after, self.noticed)
        self.world.after(router_after, self.router.stream_lost, self)

    def noticed(self) -> None:
        """The engine sees that nobody listens."""
        self.gone = True
        if not self.process.dead:
            self.process.post(lambda: self.process.engine.hung_up(self))


class Router:
    """Knows engines by what they told it last; serves requests until it crashes."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.world = cluster, cluster.world
        self.up = True
        self.requests: list[Request] = []
        self._known: dict[str, Process] = {}

    # ------------------------------------------------------------ engines

    def joined(self, process: Process) -> None:
        """A health check found an engine."""
        if self.up and not process.gone:
            self._known[process.name] = process

    def process_died(self, process: Process) -> None:
        """Its connections break."""
        random = self.world.random
        for request in self.requests:
            for stream in list(request.streams.values()):
                if stream.process is process:
                    stream.cut(0.0, random.uniform(0.0, 0.5))
        self.world.after(random.uniform(0.0, 1.0), self._left, process)

    def _left(self, process: Process) -> None:
        if self._known.get(process.name) is process:
            del self._known[process.name]

    def _choose(self, role: LegRole, avoid: str | None = None) -> Process | None:
        fit = [process for _, process in sorted(self._known.items()) if process.role == role and not process.leaving]
        others = [process for process in fit if process.name != avoid]
        return self.world.random.choice(others or fit) if fit else None

    # ------------------------------------------------------------ requests

    def submit(self, request: Request) -> None:
        """A client's request arrives."""
        self.requests.append(request)
        self.world.note("router", f"{request.name}: {request.story.num_prompt} tokens, {len(request.story)} in the end")
        if not self.up:
            self._finish(request, "router_down")
            return
        if self.world.hit("client_abort"):
            self.world.after(
                self.world.random.choice((0.05, 0.5, 3.0)) * self.world.random.random(), self._abort, request
            )
        self.world.after(request.deadline - self.world.now, self._give_up, request)
        self._run(request)

    def _abort(self, request: Request) -> None:
        self._finish(request, "aborted")

    def _give_up(self, request: Request) -> None:
        self._finish(request, "timeout")

    def _finish(self, request: Request, outcome: str) -> None:
        if request.outcome:
            return
        request.outcome = outcome
        self.world.progress()
        self.world.note("router", f"{request.name} ends: {outcome}")
        for stream in request.streams.values():
            stream.hang_up()
        request.streams = {}

    def _run(self, request: Request, avoid: str | None = None, same_prefill: Process | None = None) -> None:
        """Post both legs, under a new transfer id or, to the same prefill engine, as its next attempt."""
        for stream in request.streams.values():
            stream.hang_up()
        request.streams = {}
        prefill = same_prefill or self._choose("prefill", avoid)
        decode = self._choose("decode", avoid)
        request.runs += 1
        if prefill is None or decode is None:
            self._finish(request, "no_engine")
            return
        random = self.world.random
        if same_prefill is None:
            request.transfer_id, request.attempt = random.randbytes(16), 0
        else:
            request.attempt += 1
        known = request.story.num_prompt + request.sent
        ticket = Ticket(
            transfer_id=request.transfer_id,
            attempt=request.attempt,
            prefill_engine=prefill.name,
            prefill_incarnation=prefill.uid,
            prefill_addresses=[rank.address for rank in prefill.ranks],
            decode_engine=decode.name,
            decode_incarnation=decode.uid,
            decode_addresses=[rank.address for rank in decode.ranks],
            mode=random.choice(("push", "pull")),
            prefill_expiry=prefill.clock.read(random.random()) + self.world.settings.life,
            decode_expiry=decode.clock.read(random.random()) + self.world.settings.life,
            request_digest=request_digest(request.story.tokens[:known], request.params, request.story.num_prompt),
        )
        self.world.note(
            "router", f"{request.name}: {str(ticket.key)[:6]}/{ticket.attempt} {prefill.uid} {ticket.mode} {decode.uid}"
        )
        text = mint(TICKET_KEY, ticket)
        self.cluster.tickets[ticket.key] = text
        for role, process in (("prefill", prefill), ("decode", decode)):
            stream = request.streams[role] = Stream(self, request, process.role, process)
            late = random.uniform(0.0, 1.5) if self.world.hit("late_leg") else 0.0
            self.world.after(late + random.uniform(*_ONE_WAY), self.cluster.post_leg, stream, text, known)

    # ------------------------------------------------------------ what legs say

    def got_tokens(self, stream: Stream, position: int, tokens: list[int]) -> None:
        """Forward what is next; what was sent already must be equal."""
        request, story = stream.request, stream.request.story
        if request.outcome:
            return
        for at, token in enumerate(tokens, position):
            if at >= len(story) or token != story.tokens[at]:
                self.world.fail("wrong_token", f"{request.name} got {token} at {at} from {stream.process.name}")
            request.ahead[at - story.num_prompt] = token
        while request.sent in request.ahead:
            del request.ahead[request.sent]
            request.sent += 1
        if story.num_prompt + request.sent == len(story):
            self._finish(request, "exact")

    def leg_ended(self, stream: Stream, outcome: str, recoverable: bool) -> None:
        """A leg is over, well or not."""
        request = stream.request
        stream.open = False
        self.world.note("router", f"{request.name}: the {stream.role} leg ends with {outcome}")
        if request.outcome:
            return
        if stream.role == "prefill":
            # The decode leg tells how the handoff ended.
            return
        if outcome == "stop":
            self.world.fail("short_stream", f"{request.name} stopped after {request.sent} tokens")
        elif recoverable and self.world.settings.recovery in ("source", "full") and request.runs < _MAX_RUNS:
            request.rungs.add("source")
            self.cluster.rungs["source"] += 1
            failed = request.streams.get("prefill")
            self._run(request, avoid=failed.process.name if failed else None)
        else:
            self._finish(request, f"error:{outcome.partition(':')[0]}")

    def stream_lost(self, stream: Stream) -> None:
        """A leg's connection broke."""
        request = stream.request
        if request.outcome or request.streams.get(stream.role) is not stream or stream.role == "prefill":
            return
        if self.world.settings.recovery != "full" or request.runs >= _MAX_RUNS:
            self._finish(request, "error:decode_lost")
            return
        request.rungs.add("resume")
        self.cluster.rungs["resume"] += 1
        prefill = request.streams.get("prefill")
        again = None
        if prefill is not None and prefill.open and request.sent == 0 and self.world.random.random() < 0.7:
            again = prefill.process
        self._run(request, avoid=stream.process.name, same_prefill=again)

    # ------------------------------------------------------------ life and death

    def crash(self) -> None:
        """Every stream breaks, every request in flight is cut."""
        self.up = False
        self.world.note("router", "is dead")
        self._known = {}
        for request in self.requests:
            self._finish(request, "cut")

    def restart(self) -> None:
        """A new router finds the engines."""
        self.up = True
        self.world.note("router", "is back")
        for process in self.cluster.processes.values():
            if not process.gone:
                self.world.after(self.world.random.uniform(0.0, 1.0), self.joined, process)
