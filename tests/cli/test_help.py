"""`--help`: sentences that fit, flags in groups, and an example that the command accepts."""

from __future__ import annotations

import re
import shlex

import pytest
import typer
from typer.testing import CliRunner

import baton.cli
from baton.cli.help import panel_of
from tests.cli.logging_state import restored


def shown(*arguments: str, columns: int = 80) -> str:
    result = CliRunner().invoke(baton.cli.app, [*arguments, "--help"], terminal_width=columns)
    assert result.exit_code == 0
    return result.output


@pytest.mark.parametrize(("arguments", "num_commands"), [([], 10), (["bench"], 5)])
def test_sentences_on_commands_fit(arguments: list[str], num_commands: int) -> None:
    commands = shown(*arguments).partition("Commands:")[2]
    assert commands.count("\n  ") == num_commands
    assert "..." not in commands


@pytest.mark.parametrize("arguments", [[], ["bench"], ["--help"], ["--version"]])
def test_a_command_line_of_one_word_or_none(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit), restored():
        baton.cli.main(arguments)
    streams = capsys.readouterr()
    assert re.search(r"Commands:|^\d+\.\d+", streams.out + streams.err)
    assert "Traceback" not in streams.err


@pytest.mark.parametrize("command", ["serve", "up", "router", "generate", "verify"])
def test_flags_are_in_groups(command: str) -> None:
    text = shown(command)
    sections = [line[:-1] for line in text.splitlines() if re.fullmatch(r"[A-Z][\w ]+:", line)]
    assert len(sections) >= 4
    assert len(sections) == len(set(sections))
    server = re.search(r"^Server:\n((?: .*\n|\n)+)", text, re.MULTILINE)
    assert (server is not None and "--port" in server[1]) == (command in ("serve", "up", "router"))
    ungrouped = re.search(r"^Options:\n((?: .*\n|\n)+)", text, re.MULTILINE)
    assert ungrouped is not None
    assert set(re.findall(r"^  (--[\w-]+)", ungrouped[1], re.MULTILINE)) <= {"--help", "--json"}


@pytest.mark.parametrize("command", ["serve", "up", "router"])
def test_the_example_is_one(command: str) -> None:
    words = shlex.split(shown(command).partition("Example:\n")[2].replace("\\\n", " "))
    assert words[:2] == ["baton", command]
    app = typer.main.get_command(baton.cli.app)
    with app.make_context("baton", ["--help"], resilient_parsing=True) as context:
        parsed = app.commands[command].make_context(command, words[2:], parent=context)  # type: ignore[attr-defined]
    assert parsed.params["prefill" if command == "router" else "port"]


def test_flags_of_one_role() -> None:
    assert panel_of("decode_block_size") == "Engines of one role"
    assert panel_of("decode") == "Deployment"
    assert panel_of("a_new_flag") == "Options"
