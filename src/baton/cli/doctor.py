"""The `baton doctor` command."""

from __future__ import annotations

import asyncio
import json
from typing import Annotated

import typer

from baton.cli.results import JsonFlag
from baton.errors import ConfigError
from baton.openai.client import base_url
from baton.setting import MAX_SECONDS

_Urls = Annotated[
    list[str] | None, typer.Argument(metavar="URL", help="Servers, or a router, whose engines are asked too.")
]


def doctor_command(
    urls: _Urls = None,
    router: Annotated[
        str | None, typer.Option(metavar="URL", help="The router through which a handoff is tried.")
    ] = None,
    keys: Annotated[str | None, typer.Option(metavar="DIR", help="A key directory of this host to check.")] = None,
    timeout: Annotated[float, typer.Option(min=0.1, max=MAX_SECONDS, help="Seconds for an answer.")] = 30.0,
    api_key: Annotated[str | None, typer.Option(envvar="BATON_API_KEY", help="Bearer token for all servers.")] = None,
    json_output: JsonFlag = False,
) -> None:
    """Ask running vLLM, SGLang or Baton servers what they are, and say what cannot be handed off, and why.

    Exit status: 0 and "ready", or 1 and a line for each finding.
    """
    from baton.doctor.diagnose import check_up, findings_of
    from baton.doctor.report import checkup_json, format_checkup

    servers = [base_url(url, "url") for url in urls or ()]
    door = None if router is None else base_url(router, "router")
    if not servers and door is None:
        raise ConfigError("url", "name at least one server, or a router")
    checkup = asyncio.run(check_up(list(dict.fromkeys(servers)), door, keys, timeout, api_key))
    findings = findings_of(checkup)
    print(json.dumps(checkup_json(checkup, findings), indent=1) if json_output else format_checkup(checkup, findings))
    if findings:
        raise typer.Exit(1)
