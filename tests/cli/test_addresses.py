"""Engines whose API other hosts reach, and whose handoffs they do not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from baton import cli
from baton.engine.config import EngineConfig
from baton.engine.config.kv_transfer import KVTransferConfig
from baton.engine.ports import warn_if_loopback
from baton.handoff.session.keys import make_keys
from baton.transports.registry import transport_host
from testkit.servers.fake_serving import write_tokenizer
from tests.cli.logging_state import restored


@pytest.mark.parametrize(
    ("host", "transport", "warns"),
    [
        ("10.0.0.2", "nixl", True),
        ("0.0.0.0", "mooncake://?host=127.0.0.1", True),
        ("::", "file:///kv?host=::1", True),
        ("10.0.0.2", "nixl://?host=10.0.0.2", False),
        ("10.0.0.2", "shm", False),
        ("localhost", "nixl", False),
    ],
)
def test_a_transport_on_loopback(host: str, transport: str, warns: bool, caplog: pytest.LogCaptureFixture) -> None:
    transfer = KVTransferConfig(control_bind="tcp://10.0.0.2:7100", kv_transport=transport)
    warn_if_loopback(EngineConfig(model="m", role="decode", kv_transfer_config=transfer), host)
    assert [f"the transport {transport} is on loopback" in line for line in caplog.messages] == [True] * warns


def test_a_transport_within_one_host_has_no_address() -> None:
    assert [transport_host(uri) for uri in ("shm", "nixl", "nixl://?host=10.0.0.2")] == [None, "127.0.0.1", "10.0.0.2"]


@pytest.mark.parametrize(("host", "warnings"), [("0.0.0.0", 2), ("127.0.0.1", 0)])
def test_the_start_warns(host: str, warnings: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_tokenizer(tmp_path / "model")
    (model / "config.json").write_text(json.dumps({"eos_token_id": 257, "max_position_embeddings": 4096}))
    make_keys(tmp_path / "keys", ["D"])
    flags = ["--role", "decode", "--engine-id", "D", "--keys", str(tmp_path / "keys"), "--kv-transport", "file:///kv"]
    # The tokenizer is read after the warning, and ends the start.
    (model / "tokenizer.json").write_text("{")
    with restored(), pytest.raises(SystemExit):
        cli.main(["serve", str(model), "--host", host, "--port", "0", *flags])
    assert capsys.readouterr().err.count("With engines on several hosts") == warnings
