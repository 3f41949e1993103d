"""The examples for operators use existing flags, and allow the time that a shutdown takes."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

import baton.cli
from baton.cli.settings import read_file
from baton.openai.http.serving import SHUTDOWN_TIMEOUT_S

DEPLOY = Path(__file__).parents[2] / "examples" / "deploy"


def parsed(arguments: list[str]) -> dict[str, Any]:
    """The parameters of a `baton` command as it would run, including flags from the environment."""
    app: Any = typer.main.get_command(baton.cli.app)
    return dict(app.commands[arguments[0]].make_context(arguments[0], arguments[1:]).params)


@pytest.mark.parametrize(("command", "name"), [("up", "baton.toml"), ("router", "router.yaml")])
def test_example_files_of_flags_are_accepted(command: str, name: str) -> None:
    found = parsed([command, "--config", str(DEPLOY / name)])
    assert read_file(str(DEPLOY / name)).keys() <= found.keys()
    assert found["log_format"] == "json"


def test_example_containers_serve_as_configured_and_may_end_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    service = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["baton"]
    pod, door = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    container = pod["spec"]["template"]["spec"]["containers"][0]
    variables = [
        service["environment"],
        {each["name"]: each.get("value", "secret") for each in container["env"]},
    ]
    for arguments, environment in zip((service["command"], container["args"]), variables, strict=True):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        found = parsed(arguments)
        assert (found["host"], found["port"], found["log_format"]) == ("0.0.0.0", 8000, "json")
        assert found["api_key"]
    assert (DEPLOY / service["build"]["context"] / service["build"]["dockerfile"]).is_file()
    assert container["ports"][0]["containerPort"] == 8000
    assert door["spec"]["ports"][0]["targetPort"] == container["ports"][0]["name"]
    graces = (pod["spec"]["template"]["spec"]["terminationGracePeriodSeconds"], service["stop_grace_period"][:-1])
    assert all(int(grace) > 2 * SHUTDOWN_TIMEOUT_S for grace in graces)


def test_the_unit_of_systemd() -> None:
    lines = dict(
        line.split("=", 1) for line in (DEPLOY / "baton.service").read_text().splitlines() if line[:1].isalpha()
    )
    command = shlex.split(lines["ExecStart"])
    assert command[0].endswith("/baton")
    command[-1] = str(DEPLOY / Path(command[-1]).name)
    assert parsed(command[1:])["model"]
    assert int(lines["TimeoutStopSec"]) > 2 * SHUTDOWN_TIMEOUT_S
