"""Checks of servers: each alone, their roles together, their addresses and clocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations

from baton.doctor.checkup import RANK, Finding, Server, host_and_port, is_local_address, same_host

# How much a clock may drift between two readings, beyond the questions' durations.
_MAX_DRIFT_S = 0.25
_CURES = {
    "unreachable": "start the server, or correct the URL, the port or the firewall",
    "api_key": "give its key with --api-key or BATON_API_KEY",
    "not_an_engine": "give URLs of vLLM, SGLang or Baton servers, not that of another proxy",
    "unhealthy": "read its log; restart it if it stays so",
    "draining": "wait until it has ended and start it again, or leave it out",
}


def check_servers(servers: Sequence[Server]) -> Iterator[Finding]:
    for server in servers:
        yield from _single_server(server)
    usable = [server for server in servers if server.problem is None]
    yield from _kinds(usable)
    if len(usable) == len(servers):  # else some roles are unknown
        yield from _roles(usable)
    yield from _names(usable)
    yield from _addresses(usable)
    for server in usable:
        yield from _clock(server)


def _single_server(server: Server) -> Iterator[Finding]:
    if server.problem is not None:
        name, text = server.problem.name, server.problem.text
        yield Finding(name, server.url, "its answer", repr(text), "where an engine's was expected", _CURES[name])
        return
    if server.kind == "vllm" and server.connector is None:
        yield Finding(
            "connector",
            server.url,
            "kv_transfer_config",
            "none that hands off",
            "where BatonConnector, NixlConnector or NixlPushConnector is needed",
            'start it with --kv-transfer-config \'{"kv_connector": "BatonConnector", ...}\' (docs/vllm.md)',
        )
    rank = None if server.identity is None else server.identity.data_parallel_rank
    if server.kind == "vllm" and rank is not None and RANK not in server.url:
        yield Finding(
            "data_parallel_rank",
            server.url,
            "its URL",
            "one of several engines",
            f"of which rank {rank} answered",
            f"name each rank as a server: {server.url}{RANK}0 and so on",
        )
    if server.kind == "sglang" and not server.roles:
        yield Finding(
            "disaggregation_mode",
            server.url,
            "--disaggregation-mode",
            "null",
            "where prefill or decode is needed",
            "start it with --disaggregation-mode prefill or decode",
        )
    if server.kind == "baton" and not server.control_addresses and len(server.roles) == 1:
        yield Finding(
            "control_bind",
            server.url,
            "its list of control addresses",
            "empty",
            f"but its role is {server.roles[0]}",
            "start it with --keys DIR or --ticket-key-file, so that it takes handoffs",
        )


def _kinds(servers: Sequence[Server]) -> Iterator[Finding]:
    kinds: dict[str, Server] = {}
    for server in servers:
        kinds.setdefault(server.kind, server)
    for one, other in list(combinations(kinds.values(), 2))[:1]:
        yield Finding(
            "mixed_engines",
            other.url,
            "its kind of engine",
            other.kind,
            f"{one.url} is {one.kind}",
            "hand off between engines of one kind: prefill and decode must be the same",
        )
    named = [server for server in servers if server.kind == "vllm" and server.connector is not None]
    for server in named[1:]:
        if server.connector != named[0].connector:
            yield Finding(
                "connector",
                server.url,
                "kv_connector",
                str(server.connector),
                f"{named[0].url} has {named[0].connector}",
                "start all with the same connector",
            )


def _roles(servers: Sequence[Server]) -> Iterator[Finding]:
    if not servers or all(len(server.roles) == 2 and server.kind == "baton" for server in servers):
        return  # engines of role both hand nothing off
    for role, other in (("prefill", "decode"), ("decode", "prefill")):
        if not any(role in server.roles for server in servers):
            yield Finding(
                f"no_{role}",
                servers[0].url,
                "its role",
                "/".join(servers[0].roles) or "none",
                f"and none of {len(servers)} servers takes {role} legs",
                f"start one that does (baton serve --role {role}; kv_role of vLLM; --disaggregation-mode of SGLang), "
                f"beside those that {other}",
            )


def _names(servers: Sequence[Server]) -> Iterator[Finding]:
    """Two engines of one id would take each other's legs."""
    known: dict[str, Server] = {}
    for server in servers:
        if server.identity is None:
            continue
        first = known.setdefault(server.identity.engine_id, server)
        if first is server:
            continue
        assert first.identity is not None
        twice = first.identity.incarnation == server.identity.incarnation
        yield Finding(
            "engine_id",
            server.url,
            "engine_id",
            repr(server.identity.engine_id),
            f"and so is that of {first.url}" + (", the same process" if twice else ""),
            "name each engine once" if twice else "give each a name of its own: --engine-id, or engine_id of vLLM",
        )


def _addresses(servers: Sequence[Server]) -> Iterator[Finding]:
    """On another host, a loopback address means another engine."""
    for server in servers:
        local = [address for address in server.control_addresses if is_local_address(address)]
        peers = [other for other in servers if other is not server and set(server.roles) != set(other.roles)]
        peers = peers or [other for other in servers if other is not server]
        afar = next((other for other in peers if not same_host(server, other)), None)
        if local and afar is not None:
            yield Finding(
                "loopback",
                server.url,
                "its control address",
                local[0],
                f"which {afar.url}, on another host, cannot dial",
                "bind an address of the network: control_bind of --kv-transfer-config, with --keys; "
                "for NIXL VLLM_NIXL_SIDE_CHANNEL_HOST and host of nixl://",
            )
        for address in server.unreached:
            yield Finding(
                "control_unreachable",
                server.url,
                "its control address",
                address,
                "where nothing answers from here",
                "open the port between the engines' hosts, or bind another address (control_bind)",
            )


def _clock(server: Server) -> Iterator[Finding]:
    """Tickets expire by the engine's clock; routers extrapolate it from its last answer."""
    if len(server.clocks) < 2:
        return
    first, last = server.clocks[0], server.clocks[-1]
    here, there = last.own - first.own, last.told - first.told
    if abs(here - there) > _MAX_DRIFT_S + first.error_s + last.error_s:
        yield Finding(
            "clock",
            server.url,
            "its clock's advance",
            f"{there:.3f} s",
            f"in {here:.3f} s of ours",
            "tickets would expire early or late: mend that host's clock source (a paused or migrated machine), then "
            "restart the server",
        )


def dialled_addresses(server: Server) -> list[tuple[str, int, str]]:
    addresses = [(host_and_port(address), address) for address in server.control_addresses]
    here = server.is_here()
    return [(*parts, address) for parts, address in addresses if parts and (here or not is_local_address(address))]
