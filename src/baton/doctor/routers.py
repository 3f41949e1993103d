"""Checks of a router's report on its engines, and of one handoff tried through it. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from baton.doctor.checkup import Checkup, Finding, RouterEntry, RouterFacts, Server, Trial

_REASONS = (
    ("ticket", "give router and engines the same ticket key: --keys DIR or --ticket-key-file FILE"),
    ("incompatible", "read the differences in its text; start both servers alike"),
    ("no_room", "raise --kv-cache-memory, or try when there is less load"),
    ("timeout", "open the control and data ports between the engines' hosts"),
    ("lease", "open the control ports between the engines' hosts; look for pauses in the engines' logs"),
    ("connect", "open the control and data ports between the engines' hosts"),
    ("integrity", "check the link and the memory of both hosts"),
)
_LOGS = "read the router's and both engines' logs of this minute"


def check_router(checkup: Checkup) -> Iterator[Finding]:
    router = checkup.router
    if router is None:
        return
    if router.problem is not None:
        cure = "start the router, or correct --router"
        yield Finding(router.problem.name, router.url, "its answer", repr(router.problem.text), "no router's", cure)
        return
    yield from _engines(router, checkup.servers)
    if not router.ready:
        yield Finding(
            "not_ready",
            router.url,
            "ready of /status",
            "false",
            f"with {len(router.engines)} engines",
            "start engines, or let them join (POST /instances/add)",
        )
    baton = [server for server in checkup.servers if server.kind == "baton" and server.version is not None]
    other = next((server for server in baton if server.version != router.version), None)
    if other is not None:
        yield Finding(
            "version",
            router.url,
            "its version",
            repr(router.version),
            f"{other.url} has {other.version!r}",
            "run one version everywhere",
        )
    if checkup.trial is not None and router.ready:
        yield from check_trial(router.url, checkup.trial)


def _engines(router: RouterFacts, servers: Sequence[Server]) -> Iterator[Finding]:
    by_url = {server.url: server for server in servers}
    for engine in router.engines:
        server = by_url.get(engine.url)
        if server is not None and server.problem is None:
            yield from _placed(router, engine, server)
        if engine.problem is not None:
            yield Finding(
                "router_engine",
                engine.url,
                f"its problem in {router.url}/status",
                repr(engine.problem),
                "so it gets no requests",
                "mend what it says; the router asks again by itself",
            )
        elif engine.draining:
            yield Finding(
                "draining",
                engine.url,
                f"draining in {router.url}/status",
                "true",
                "so it gets no new requests",
                "let it join again (POST /instances/add) once it has left",
            )
    ids = {engine.engine_id for engine in router.engines}
    urls = {engine.url for engine in router.engines}
    for server in servers:
        named = server.identity is not None and server.identity.engine_id in ids
        if server.url not in urls and not named and server.problem is None:
            yield Finding(
                "not_joined",
                server.url,
                f"its entry in {router.url}/status",
                "missing",
                f"which lists {', '.join(sorted(urls)) or 'no engine'}",
                "start the router with it (--prefill, --decode), or POST /instances/add",
            )


def _placed(router: RouterFacts, engine: RouterEntry, server: Server) -> Iterator[Finding]:
    roles = ("prefill", "decode") if engine.role == "both" else (engine.role,)
    if not set(roles) <= set(server.roles):
        yield Finding(
            "role",
            server.url,
            "its role",
            "/".join(server.roles) or "none",
            f"{router.url} uses it for {engine.role}",
            f"start the router with --{server.roles[0] if server.roles else 'both'} for it, or the server with another",
        )
    if not server.token_api:
        yield Finding(
            "token_api",
            server.url,
            "--token-api",
            "off",
            f"and {router.url} needs it",
            "start it with --token-api",
        )


def check_trial(url: str, trial: Trial) -> Iterator[Finding]:
    if trial.problem is not None:
        setting = f"the answer to {trial.num_prompt_tokens} prompt tokens"
        yield Finding("handoff_failed", url, setting, repr(trial.problem), "not tokens", _cure(trial, trial.problem))
        return
    for reason, count in trial.failures.items():
        setting = f"handoff_failures of {reason!r}"
        yield Finding("handoff_failed", url, setting, str(count), "where 0 were expected", _cure(trial, reason))
    # Connections are also refused to strangers.
    refused = {kind: count for kind, count in trial.refused.items() if kind != "connection"}
    if refused and not trial.failures:
        cure = _cure(trial, "")
        yield Finding("handoff_failed", url, "handoff_refused of engines", _counts(refused), "not 0", cure)
    if not trial.handoffs.get("started"):
        yield Finding(
            "not_handed_off",
            url,
            f"the way of {trial.num_prompt_tokens} prompt tokens",
            _counts(trial.decisions) or "unknown",
            "not handed_off",
            "lower --max-local-prefill-length; have a prefill and a decode engine in the router",
        )


def _cure(trial: Trial, text: str) -> str:
    words = f"{text} {' '.join(trial.failures)}".lower()
    if any(trial.refused.get(kind) for kind in ("ticket", "connection", "leg")):
        words = f"ticket {words}"
    return next((cure for word, cure in _REASONS if word in words), _LOGS)


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))
