"""`baton keys`: the key directory of a deployment."""

from __future__ import annotations

from typing import Annotated

import typer

from baton.errors import ConfigError
from baton.handoff.session.keys import make_keys

Output = Annotated[str, typer.Option(metavar="DIR", help="Directory to make, or to add engines to.")]
Engines = Annotated[
    list[str] | None, typer.Option(metavar="NAME", help="Engine ids (--engine-id); repeat, or separate by commas.")
]


def keys_command(output: Output, engines: Engines = None) -> None:
    """Make keys for the control sockets: a ticket key, and per engine a secret and a public key.

    Run it again with more names to let engines join; delete DIR/public/NAME.pub to shut one out.
    """
    names = [name for part in engines or [] for name in part.split(",") if name]
    if engines and not names:
        raise ConfigError("engines", f"has no name: {engines!r}")
    created = make_keys(output, names)
    print(f"{output}: {', '.join(created) if created else 'no new engine'}")
    print("Give it to engines and router with --keys; an engine's host needs no secret but its own.")
