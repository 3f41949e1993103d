"""Checks a key directory of this host against the servers that should be in it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from baton.directories import OTHERS, check_own
from baton.doctor.checkup import Finding, Server
from baton.errors import ConfigError
from baton.handoff.session.keys import KeyRing, public_names, ticket_key_file

_CURE = "mend it as it says; `baton keys --output DIR --engines NAME,...` adds what is missing"


def check_keys(directory: str, servers: Sequence[Server]) -> Iterator[Finding]:
    """What an engine or a router with this `directory` would refuse, and engines without a key in it."""
    root = Path(directory)
    try:
        check_own(ticket_key_file(root), "keys", OTHERS)
    except (ConfigError, OSError) as error:
        yield _found(directory, str(error), "so router and engines do not start with it")
        return
    secrets = sorted(path.stem for path in (root / "secret").glob("*.key"))
    for name in secrets:
        try:
            KeyRing(root, name)
        except ConfigError as error:
            yield _found(directory, str(error), f"so engine {name} does not start with it")
    try:
        known = public_names(root)
    except (ConfigError, OSError) as error:
        yield _found(directory, str(error), "so no engine starts with it")
        return
    for server in servers:
        if server.kind == "sglang" or server.identity is None or server.connector not in ("Baton", "BatonConnector"):
            continue
        name = server.identity.engine_id
        if name not in known:
            yield Finding(
                "keys",
                server.url,
                "its engine_id",
                repr(name),
                f"which has no key in {root / 'public'}",
                f"baton keys --output {directory} --engines {name}, or start it with an engine id of the list",
            )


def _found(directory: str, text: str, what: str) -> Finding:
    return Finding("keys", "this host", f"--keys {directory}", repr(text), what, _CURE)
