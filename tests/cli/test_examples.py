"""The examples for operators use existing flags, and allow the time that a shutdown takes."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer
import yaml

import baton.cli
from baton.cli.flag_sources import read_file
from baton.openai.http.serving import SHUTDOWN_TIMEOUT_S
from baton.sglang.config import read_config as sglang_config
from baton.vllm.config import read_config as vllm_config
from testkit.deploy.scripts import CALLS, SCRIPTS, Command, commands

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


def test_the_container_file_uses_what_is_there() -> None:
    """No container is built in tests: the paths, names and versions of its lines are checked."""
    root = DEPLOY.parents[1]
    project = msgspec.toml.decode((root / "pyproject.toml").read_bytes())["project"]
    lines = (DEPLOY / "Containerfile").read_text().replace("\\\n", " ").splitlines()
    steps = [line.split(maxsplit=1) for line in lines if line and not line.startswith("#")]
    copied = [path for word, rest in steps if word == "COPY" and "--from" not in rest for path in rest.split()[:-1]]
    assert all((root / path).exists() for path in copied)
    # The wheel is built of these alone.
    assert {"pyproject.toml", project["readme"], *project["license-files"], "src"} <= set(copied)
    for rest in (rest for word, rest in steps if word == "FROM"):
        version = tuple(map(int, rest.split()[0].removeprefix("python:").removesuffix("-slim").split(".")))
        assert version >= tuple(map(int, project["requires-python"].removeprefix(">=").split(".")))
    extras = [name for word, rest in steps if word == "RUN" for name in re.findall(r"\[(\w+)\]", rest)]
    assert extras
    assert set(extras) <= project["optional-dependencies"].keys()
    pins = (root / "constraints.txt").read_text()
    wanted = [
        "torch",
        *(re.split(r"[>=]", need)[0] for name in extras for need in project["optional-dependencies"][name]),
    ]
    assert all(re.search(rf"^{re.escape(name)}==", pins, re.MULTILINE) for name in wanted)
    assert [json.loads(rest) for word, rest in steps if word == "ENTRYPOINT"] == [["baton"]]
    assert "baton" in project["scripts"]


def test_the_unit_of_systemd() -> None:
    lines = dict(
        line.split("=", 1) for line in (DEPLOY / "baton.service").read_text().splitlines() if line[:1].isalpha()
    )
    command = shlex.split(lines["ExecStart"])
    assert command[0].endswith("/baton")
    command[-1] = str(DEPLOY / Path(command[-1]).name)
    assert parsed(command[1:])["model"]
    assert int(lines["TimeoutStopSec"]) > 2 * SHUTDOWN_TIMEOUT_S


CASES = [(script, arguments) for script in SCRIPTS for arguments in CALLS[script.name]]


@pytest.fixture(params=CASES, ids=lambda case: "-".join([case[0].parent.name, case[0].stem, case[1][0]]))
def ran(request: pytest.FixtureRequest, tmp_path: Path) -> list[Command]:
    """The commands of an example script."""
    script, arguments = request.param
    return commands(script, arguments, tmp_path)


def test_the_scripts_start_a_deployment_with_existing_flags(ran: list[Command]) -> None:
    ours = [each.words[1:] for each in ran if each.words[0] == "baton"]
    assert [words[0] for words in ours] in (["keys", "router"], ["router"], [])
    assert len(ran) == (4 if ["keys"] in [words[:1] for words in ours] else 1)
    for words in ours:
        found = parsed(words)
        if words[0] == "router":
            assert len(found["prefill"]) == len(found["decode"]) == 1
            assert found["keys"]


def test_the_settings_of_the_plug_ins_in_the_scripts_are_valid(ran: list[Command]) -> None:
    for command in (each for each in ran if each.words[0] != "baton"):
        if "--kv-transfer-config" in command.words:
            transfer = json.loads(command.flag("--kv-transfer-config"))
            assert transfer["kv_connector_module_path"] == "baton.vllm"
            assert vllm_config(transfer["kv_connector_extra_config"]).keys
        else:
            assert sglang_config(command.variables).engine_id in ("P", "D")
            assert command.flag("--disaggregation-transfer-backend") == "baton"
            assert command.variables["SGLANG_HOST_IP"], "SGLang would look for a route to the internet"
