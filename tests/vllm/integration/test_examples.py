"""vLLM takes the arguments that the example scripts give it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from testkit.deploy.scripts import engine_commands


def test_vllm_takes_the_arguments_of_the_examples(tmp_path: Path) -> None:
    cli_args = pytest.importorskip("vllm.entrypoints.launchers.cli_args")
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = cli_args.make_arg_parser(FlexibleArgumentParser())
    found = [parser.parse_args(words) for words in engine_commands("vllm", tmp_path)]
    roles = Counter((each.kv_transfer_config.kv_role, each.port) for each in found)
    one_host = {("kv_producer", 8101): 2, ("kv_consumer", 8102): 2}
    assert roles == one_host | {("kv_producer", 8100): 1, ("kv_consumer", 8100): 1}
    assert {each.kv_transfer_config.kv_connector for each in found} == {"BatonConnector"}
