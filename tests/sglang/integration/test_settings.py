"""What the plug-in reads of SGLang's settings."""

from __future__ import annotations

from argparse import ArgumentParser
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest

from baton.errors import ConfigError
from baton.sglang import compat
from testkit.deploy.scripts import documented_commands, engine_commands
from testkit.sglang.launch import FLAGS

pytestmark = pytest.mark.filterwarnings("ignore")  # of imports


def test_settings_are_those_that_sglang_has_decided_on() -> None:
    """SGLang keeps its arguments as they were given: without `--device` it is None there, and MTP's name is NEXTN."""
    from sglang.srt.arg_groups.overrides import declare_resolution

    given = SimpleNamespace(
        device=None,
        speculative_algorithm="NEXTN",
        enable_multi_layer_eagle=False,
        enable_pd_role_switch=False,
        disaggregation_decode_allocation_policy="early",
        disaggregation_ib_device=None,
    )
    declare_resolution(given, "test", device="cuda", speculative_algorithm="EAGLE")
    with pytest.raises(ConfigError, match="got None"):
        compat.check_server(given, SimpleNamespace())
    compat.check_server(compat.resolved(given), SimpleNamespace())
    given.disaggregation_ib_device = "mlx5_0"
    with pytest.raises(ConfigError, match="has UCX_NET_DEVICES, and mooncake:// its device, got 'mlx5_0'"):
        compat.check_server(compat.resolved(given), SimpleNamespace())


def test_the_stand_in_for_kernels_has_none_for_amx() -> None:
    """On a processor with AMX, SGLang would use them."""
    from sglang.srt.utils import common

    with patch.object(common, "is_amx_tile_supported", True):
        assert not common.cpu_has_amx_support()


def test_sglang_takes_the_arguments_of_the_examples(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from sglang.srt.arg_groups.choices import add_disagg_transfer_backend_choices
    from sglang.srt.server_args import ServerArgs

    add_disagg_transfer_backend_choices(["baton"])
    parser = ArgumentParser()
    ServerArgs.add_cli_args(parser)
    found = [parser.parse_args(words) for words in engine_commands("sglang", tmp_path)]
    documented = [parser.parse_args(words) for words in documented_commands("sglang", tmp_path)]
    assert [(each.disaggregation_mode, each.port) for each in documented] == [("prefill", 30000), ("decode", 30001)]
    parser.parse_args(["--model-path", "x", *FLAGS])
    assert "deprecated" not in caplog.text
    modes = Counter((each.disaggregation_mode, each.port) for each in found)
    assert modes == {("prefill", 8101): 2, ("decode", 8102): 2, ("prefill", 30000): 1, ("decode", 30000): 1}
