"""The facts and findings of a check-up."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import urlsplit

from baton.comparison import facts_of
from baton.handoff.session.keys import is_local
from baton.wire import EngineIdentity, LegRole, Role

EngineMake = Literal["baton", "vllm", "sglang", "unknown"]
BOTH: tuple[LegRole, ...] = ("prefill", "decode")
# Precedes the number in the URL of a vLLM server's data-parallel rank.
RANK = "#dp_rank="
# Hosts whose monotonic clocks are this close count as one.
_SAME_CLOCK_S = 1.0


@dataclass(frozen=True, slots=True)
class Problem:
    """Why a server reports nothing or serves nobody. `name`: a finding's."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Reading:
    """A server's monotonic clock: it showed `told` seconds when ours showed `own`; `error_s`: half the question's
    duration.
    """

    own: float
    told: float
    error_s: float

    @classmethod
    def of(cls, asked: float, told: float) -> Reading:
        now = time.monotonic()
        return cls((asked + now) / 2, told, (now - asked) / 2)

    @property
    def offset(self) -> float:
        return self.told - self.own


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """The facts that an engine's server reports.

    - `roles`: the legs that it takes; both if unknown.
    - `connector`: "Baton" for its own engines, else the KV connector; None: none is known.
    - `settings`: reported ones that must be equal on P and D, besides `identity`, by name.
    - `unreached`: control addresses that nothing listens on.
    - `not_reported`: what it does not report, and how to make it.
    - `page_size`: in tokens.
    """

    url: str
    kind: EngineMake = "unknown"
    problem: Problem | None = None
    version: str | None = None
    model: str | None = None
    max_model_len: int | None = None
    identity: EngineIdentity | None = None
    roles: tuple[LegRole, ...] = BOTH
    connector: str | None = None
    token_api: bool = True
    max_num_seqs: int = 0
    settings: Mapping[str, str] = field(default_factory=dict)
    clocks: tuple[Reading, ...] = ()
    unreached: tuple[str, ...] = ()
    not_reported: tuple[str, ...] = ()
    page_size: str | None = None

    @property
    def host(self) -> str:
        return urlsplit(self.url).hostname or ""

    @property
    def control_addresses(self) -> Sequence[str]:
        return () if self.identity is None else self.identity.control_addresses

    def facts(self) -> dict[str, object]:
        return {} if self.identity is None else facts_of(self.identity.fingerprint)

    def is_here(self) -> bool:
        """Judged by its URL and its clock: a forwarded port has another clock."""
        near = not self.clocks or abs(self.clocks[0].offset) < _SAME_CLOCK_S + self.clocks[0].error_s
        return near and is_loopback(self.host)


def is_loopback(host: str) -> bool:
    return is_local(f"tcp://[{host}]:1" if ":" in host else f"tcp://{host}:1")


def host_and_port(address: str) -> tuple[str, int] | None:
    """Parts of `tcp://HOST:PORT` or `curve://ENGINE@HOST:PORT`; None for other addresses."""
    parts = urlsplit(address)
    try:
        return (parts.hostname, parts.port) if parts.hostname and parts.port else None
    except ValueError:
        return None


def is_local_address(address: str) -> bool:
    """Whether a control address can only be dialled on its own host."""
    parts = host_and_port(address)
    return address.startswith("ipc://") if parts is None else is_loopback(parts[0])


def same_host(one: Server, other: Server) -> bool:
    """Compare the servers' clocks if both report them, else their URLs."""
    if one.clocks and other.clocks:
        a, b = one.clocks[0], other.clocks[0]
        return abs(a.offset - b.offset) < _SAME_CLOCK_S + a.error_s + b.error_s
    return one.host == other.host or (is_loopback(one.host) and is_loopback(other.host))


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterEntry:
    """An engine as a router reports it. `problem`: why it is not used."""

    url: str
    role: Role
    engine_id: str | None = None
    problem: str | None = None
    draining: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterFacts:
    url: str
    problem: Problem | None = None
    version: str | None = None
    ready: bool = False
    engines: tuple[RouterEntry, ...] = ()

    @property
    def is_here(self) -> bool:
        return is_loopback(urlsplit(self.url).hostname or "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """This process's limits, in bytes. `memlock` None: unlimited. `shm_bytes` None: there is no /dev/shm."""

    memlock: int | None = None
    num_files: int = 2**20
    shm_bytes: int | None = None
    shm_free: int = 0
    rdma: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One handoff tried through a router. Counts are increases while it ran, of other requests too.

    - `problem`: the router's answer instead of tokens.
    - `handoffs`, `failures`, `decisions`: of the router, by outcome, reason and place; `failures` also of vLLM servers.
    - `refused`: what engines refused, by kind; `leg`: a vLLM server's, of a bad ticket or a role that it lacks.
    - `num_bytes`, `num_runs`: of KV that decode engines received; None: not reported.
    """

    num_prompt_tokens: int = 0
    num_tokens: int = 0
    ttft_s: float = 0.0
    total_s: float = 0.0
    problem: str | None = None
    handoffs: Mapping[str, int] = field(default_factory=dict)
    failures: Mapping[str, int] = field(default_factory=dict)
    decisions: Mapping[str, int] = field(default_factory=dict)
    refused: Mapping[str, int] = field(default_factory=dict)
    num_bytes: int | None = None
    num_runs: int | None = None


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that prevents handoffs or service. `other`: the other server's value, or the needed one."""

    name: str
    server: str
    setting: str
    value: str
    other: str
    cure: str

    def __str__(self) -> str:
        return f"{self.name}: {self.server}: {self.setting} is {self.value}, {self.other}: {self.cure}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkup:
    """`host` None: limits were not read. `key_findings`: of the key directory."""

    servers: tuple[Server, ...] = ()
    router: RouterFacts | None = None
    host: Host | None = None
    trial: Trial | None = None
    key_findings: tuple[Finding, ...] = ()
