"""The `baton` command of a process that runs it many times: typer reads all flags anew for each call."""

from __future__ import annotations

import functools
from typing import Any

import typer.main

# Each has read one kind of every flag.
_EXAMPLES = (["serve", "model"], ["up", "model"], ["router", "--prefill", "http://a:1"], ["verify", "model"])


def keep_commands() -> None:
    """Read the flags of an application once."""
    typer.main.get_command = functools.cache(typer.main.get_command)


def prepare_commands() -> None:
    """Read them now, for forks, and what typer imports for the first values."""
    from baton.cli import app

    keep_commands()
    command: Any = typer.main.get_command(app)
    for name, *arguments in _EXAMPLES:
        command.commands[name].make_context(name, arguments)
