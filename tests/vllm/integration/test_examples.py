"""vLLM takes the arguments that the example scripts and docs/vllm.md give it."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import typer

import baton.cli
from testkit.deploy.scripts import documented_commands, engine_commands

PAGES = Path(__file__).parents[3] / "docs"


@pytest.fixture(scope="module")
def parser() -> Any:
    cli_args = pytest.importorskip("vllm.entrypoints.launchers.cli_args")
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    return cli_args.make_arg_parser(FlexibleArgumentParser())


def test_vllm_takes_the_arguments_of_the_page(parser: Any, tmp_path: Path) -> None:
    found = [parser.parse_args(words) for words in documented_commands("vllm", tmp_path)]
    roles = [(each.kv_transfer_config.kv_role, each.kv_transfer_config.engine_id, each.port) for each in found]
    assert roles == [("kv_producer", "P", 8100), ("kv_consumer", "D", 8200)]


@pytest.mark.parametrize("page", ["vllm.md", "reference/vllm-design.md"])
def test_every_flag_of_the_pages_exists(parser: Any, page: str) -> None:
    """In vLLM, or in a command of Baton."""
    commands: Any = typer.main.get_command(baton.cli.app)
    own = {name for command in commands.commands.values() for option in command.params for name in option.opts}
    known = own | set(re.findall(r"--[a-z][a-z-]+", parser.format_help()))
    text = (PAGES / page).read_text("utf-8")
    of_python = {flag for line in re.findall(r"python3? [^`]*", text) for flag in re.findall(r"--[a-z][a-z-]+", line)}
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text)) - known <= of_python


def test_vllm_takes_the_arguments_of_the_examples(parser: Any, tmp_path: Path) -> None:
    found = [parser.parse_args(words) for words in engine_commands("vllm", tmp_path)]
    roles = Counter((each.kv_transfer_config.kv_role, each.port) for each in found)
    one_host = {("kv_producer", 8101): 2, ("kv_consumer", 8102): 2}
    assert roles == one_host | {("kv_producer", 8100): 1, ("kv_consumer", 8100): 1}
    assert {each.kv_transfer_config.kv_connector for each in found} == {"BatonConnector"}
