"""The page of settings is what the declarations say, and every declared setting is a flag."""

from __future__ import annotations

import typer

import baton.cli
from baton.engine.config import ServingSettings, declared
from tools.settings_table import DOC, table


def test_the_page_is_as_declared() -> None:
    assert DOC.read_text() == table(), "run python -m tools.settings_table"


def test_every_setting_is_a_flag() -> None:
    app = typer.main.get_command(baton.cli.app)
    for command in ("serve", "up", "generate"):
        flags = {flag for parameter in app.commands[command].params for flag in parameter.opts}  # type: ignore[attr-defined]
        for one in declared(ServingSettings).values():
            assert {one.flag, one.setting.short or one.flag} <= flags, one.name
