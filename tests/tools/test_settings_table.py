"""The page of settings is what the declarations say, and every declared setting is a flag."""

from __future__ import annotations

import pytest
import typer

import baton.cli
from baton.engine.config import ServingSettings, declared_settings
from baton.router.config.router_settings import RouterSettings, RoutingSettings
from tools.settings_table import DOC, table


def test_the_page_is_as_declared() -> None:
    assert DOC.read_text() == table(), "run python -m tools.settings_table"


@pytest.mark.parametrize(
    ("command", "kind"),
    [
        ("serve", ServingSettings),
        ("up", ServingSettings),
        ("generate", ServingSettings),
        ("up", RoutingSettings),
        ("router", RouterSettings),
    ],
)
def test_every_setting_is_a_flag(command: str, kind: type) -> None:
    app = typer.main.get_command(baton.cli.app)
    flags = {flag for parameter in app.commands[command].params for flag in parameter.opts}  # type: ignore[attr-defined]
    for one in declared_settings(kind).values():
        assert {one.flag, one.setting.short or one.flag} <= flags, one.name
