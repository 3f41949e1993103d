"""The output of `baton doctor`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from baton.doctor.checkup import Checkup, Finding, RouterFacts, Server
from baton.doctor.pairs import rounding_notes

_NAMES = {"baton": "Baton", "vllm": "vLLM", "sglang": "SGLang", "unknown": "?"}


def format_checkup(checkup: Checkup, findings: Sequence[Finding]) -> str:
    """The last line is `ready`, or the number of findings."""
    lines = [] if checkup.router is None else [_router_line(checkup.router)]
    lines += [_server_line(server) for server in checkup.servers]
    if checkup.trial is not None and checkup.trial.problem is None:
        lines.append(_trial_line(checkup))
    lines += [f"note: {note}" for note in notes_of(checkup)]
    lines += [f"FINDING {finding}" for finding in findings]
    lines.append(_count(findings) if findings else "ready")
    return "\n".join(lines)


def checkup_json(checkup: Checkup, findings: Sequence[Finding]) -> dict[str, Any]:
    return {
        "ready": not findings,
        "findings": [{**dataclasses.asdict(finding), "text": str(finding)} for finding in findings],
        "notes": list(notes_of(checkup)),
        "router": None if checkup.router is None else _plain(checkup.router),
        "servers": [_plain(server) for server in checkup.servers],
        "host": None if checkup.host is None else _plain(checkup.host),
        "handoff": None if checkup.trial is None else _plain(checkup.trial),
    }


def notes_of(checkup: Checkup) -> Iterator[str]:
    for server in checkup.servers:
        for not_reported in server.not_reported if server.problem is None else ():
            yield f"{server.url} {not_reported}"
    yield from rounding_notes(checkup.servers)
    if checkup.router is None:
        yield "no handoff was tried: give --router URL"
    elif checkup.trial is None:
        yield "no handoff was tried: the router is not ready, or lacks prefill or decode engines"
    if any(not server.is_here() for server in checkup.servers if server.problem is None):
        yield "limits of other hosts are not seen from here: run baton doctor there too"


def _router_line(router: RouterFacts) -> str:
    if router.problem is not None:
        return f"{router.url}  router: {router.problem.text}"
    roles = [engine.role for engine in router.engines]
    counts = ", ".join(f"{roles.count(role)} {role}" for role in dict.fromkeys(roles)) or "no engine"
    return f"{router.url}  router, Baton {router.version or '?'}, {'ready' if router.ready else 'not ready'}: {counts}"


def _server_line(server: Server) -> str:
    if server.problem is not None:
        return f"{server.url}  {server.problem.name}"
    facts = server.facts()
    name = "" if server.identity is None or server.kind != "baton" else f" {server.identity.engine_id}"
    parts = [
        f"{server.url}  {_NAMES[server.kind]} {server.version or '?'}",
        f"{'/'.join(server.roles) or 'no role'}{name}",
    ]
    if server.kind != "baton":
        parts.append(str(server.connector))
    parts.append(f"model {server.model}")
    method = facts.get("drafter.method") or server.settings.get("speculative_config.method")
    drafts = server.identity.num_speculative_tokens if server.identity is not None else 0
    if method not in (None, "none"):
        verifier = facts.get("drafter.verifier")
        parts.append(f"drafter {method}, k = {drafts}" + (f", {verifier}" if verifier else ""))
    parts.append(f"{server.max_model_len} tokens")
    if server.page_size is not None:
        parts.append(f"pages of {server.page_size}")
    transport = server.settings.get("kv_transport")
    return ", ".join(parts) + (f", {transport}" if transport else "")


def _trial_line(checkup: Checkup) -> str:
    trial = checkup.trial
    assert trial is not None
    # A vLLM server computes a request whose leg it refused, and the router sees its tokens.
    handed_off = trial.handoffs.get("completed") and not trial.refused.get("leg")
    way = "handed off" if handed_off else "not handed off"
    text = (
        f"handoff: {trial.num_prompt_tokens} prompt tokens {way}: first token after {1000 * trial.ttft_s:.1f} ms, "
        f"{trial.num_tokens} tokens in {1000 * trial.total_s:.1f} ms"
    )
    if trial.num_bytes is not None:
        text += f"; {trial.num_bytes:,} bytes of KV"
        text += "" if trial.num_runs is None else f" in {trial.num_runs:,} runs"
    transports = {server.settings.get("kv_transport") for server in checkup.servers} - {None}
    return text + (f" over {', '.join(sorted(str(name) for name in transports))}" if transports else "")


def _count(findings: Sequence[Finding]) -> str:
    return f"{len(findings)} finding{'s' if len(findings) > 1 else ''}"


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if hasattr(value, "__struct_fields__"):
        return {name: _plain(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, dict) or hasattr(value, "items"):
        return {str(name): _plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value
