"""An unsupported model or setting is refused before anything is loaded, by one line that names it."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from baton import cli
from baton.cli import serve
from baton.cli.flag_sources import named_after_source
from baton.cli.roles import RoleOptions
from baton.cli.serve import FleetOptions
from baton.engine.config import EngineConfig
from baton.engine.config.kv_transfer import KVTransferConfig
from baton.engine.memory.sizes import check_sizes
from baton.engine.ports import check_ports
from baton.errors import ConfigError
from baton.handoff.session.config import own_bind
from testkit.servers.fake_serving import write_tokenizer
from tests.cli.logging_state import restored


@pytest.fixture(autouse=True)
def _nothing_is_loaded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def loads(*args: object, **options: object) -> None:
        raise AssertionError("something is loaded")

    monkeypatch.setattr(serve, "Deployment", loads)
    monkeypatch.setitem(sys.modules, "baton.engine.async_engine", None)  # type: ignore[arg-type]
    with restored():
        yield


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    path = write_tokenizer(tmp_path / "model")
    settings = {"eos_token_id": 257, "max_position_embeddings": 4096}
    (path / "config.json").write_text(json.dumps(settings))
    return path


@pytest.mark.parametrize("command", ["serve", "up"])
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--max-model-len", "999999"], "max_model_len: must be at most the checkpoint's 4096, got 999999"),
        (["--kv-cache-memory", "900G"], "kv_cache_memory: "),
        (["--kv-cache-memory", "10T"], "kv_cache_memory: "),
        (["--kv-cache-memory", "99999999999T"], "kv_cache_memory: "),
        (["--speculative-config", '{"method": "medusa"}'], "speculative_config.method: must be one of assistant, "),
        (["--speculative-config", '{"method": ""}'], "speculative_config.method: must be one of assistant, "),
        (["--speculative-config", '{"method": "eagle3"}'], "speculative_config.model: is required"),
        (["--ssl-certfile", "/nowhere.pem"], "ssl_certfile: cannot be used"),
        (["--ssl-keyfile", "/nowhere.pem"], "ssl_keyfile: needs ssl_certfile"),
        (["--ssl-cert-reqs", "2", "--ssl-certfile", "/nowhere.pem"], "ssl_cert_reqs: needs ssl_ca_certs"),
        (["--tool-call-parser", "llama9"], "tool_call_parser: "),
        (["--enable-auto-tool-choice"], "tool_call_parser: is needed with enable_auto_tool_choice"),
        (["--reasoning-parser", "none"], "reasoning_parser: "),
        (["--allowed-origins", "*"], "allowed_origins: must be a JSON list"),
        (["--chat-template", "{% if %}"], "the chat template does not compile"),
        (["--api-key", ""], "api_key: must not be empty"),
        (["--host", ""], "host: must be an address or a name"),
        (["--config", ""], "config: is empty"),
        (["--block-size", "16,draft=8,draft=4"], "block_size: has two sizes for draft: 16,draft=8,draft=4"),
        (["--block-size", "16,8"], "block_size: has two sizes for all other groups: 16,8"),
        (["--speculative-config", '{"method": "ngram", "method": "mtp"}'], "speculative_config: has method twice"),
        (["--kv-events-config", '{"hwm": 1, "hwm": 2}'], "kv_events_config: has hwm twice"),
        (["--kv-transfer-config", '{"prefix_store": "file://x"}'], "prefix_store: must be file:///DIRECTORY, got '"),
        (["--override-generation-config", '{"max_new_tokens": 0}'], "config: max_new_tokens must be between 1 and"),
    ],
)
def test_one_line_before_anything_is_loaded(
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: str,
    flags: list[str],
    message: str,
) -> None:
    assert message in refused([command, str(directory), "--port", "0", *flags], monkeypatch, capsys)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--policy", "nosuch"], "policy: must be one of cache_aware, "),
        (["--decode-policy", "nosuch"], "decode_policy: must be one of cache_aware, "),
        (["--policy-config", '{"hand_back": true, "hand_back": false}'], "policy_config: has hand_back twice"),
        (["--policy-config", '{"overload_kv_usage": 90}'], "overload_kv_usage must be a share of the KV, 0 to 1"),
        (["--trace", "/nowhere/trace.json"], "trace: cannot be written"),
        (["--otlp-traces-endpoint", "localhost:4318"], "otlp_traces_endpoint: must be like http://"),
    ],
)
@pytest.mark.parametrize("command", [["up", "MODEL"], ["router", "--both", "http://127.0.0.1:1", "--workers", "2"]])
def test_routing_is_checked_before_there_are_processes(
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: list[str],
    flags: list[str],
    message: str,
) -> None:
    arguments = [str(directory) if one == "MODEL" else one for one in command]
    assert message in refused([*arguments, "--port", "0", *flags], monkeypatch, capsys)


def test_a_router_that_serves_nobody(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    line = refused(["router", "--port", "0"], monkeypatch, capsys)
    assert "admin_token_file: is needed, or --prefill and --decode, or --both: without engines" in line


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("HOST", "tcp://1.2.3.4:5", "host: in the variable BATON_FLAG_HOST: cannot listen on tcp://1.2.3.4:5:"),
        ("HOST", "a..b", "host: in the variable BATON_FLAG_HOST: cannot listen on a..b:"),
        ("MAX_MODEL_LEN", "999999", "max_model_len: in the variable BATON_FLAG_MAX_MODEL_LEN: must be at most"),
        ("SPECULATIVE_CONFIG", '{"method": "x"}', "method: in the variable BATON_FLAG_SPECULATIVE_CONFIG: must be one"),
        ("KV_TRANSPORT", "x", "transport: in the variable BATON_FLAG_KV_TRANSPORT: unknown transport 'x'"),
        (
            "KV_TRANSFER_CONFIG",
            '{"kv_transport": "x"}',
            "transport: in the variable BATON_FLAG_KV_TRANSFER_CONFIG: ",
        ),
        ("TICKET_KEY_FILE", "/nowhere/key", "ticket_key_file: in the variable BATON_FLAG_TICKET_KEY_FILE: /nowhere"),
        ("PREFILL", "x", "prefill: in the variable BATON_FLAG_PREFILL: "),
        ("SSL_CERTFILE", "/nowhere", "ssl_certfile: in the variable BATON_FLAG_SSL_CERTFILE: cannot be used"),
    ],
)
def test_an_error_names_the_variable(
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    variable: str,
    value: str,
    message: str,
) -> None:
    monkeypatch.setenv(f"BATON_FLAG_{variable}", value)
    arguments = ["router"] if variable == "TICKET_KEY_FILE" else ["up", str(directory)]
    assert message in refused([*arguments, "--port", "0"], monkeypatch, capsys)


def test_an_error_names_the_file(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "baton.toml"
    file.write_text('max-model-len = 999999\nhost = "a..b"')
    monkeypatch.setenv("BATON_FLAG_CONFIG", str(file))
    arguments = ["up", str(directory), "--port", "0"]
    assert f"host: in {file}: cannot listen on a..b:" in refused(arguments, monkeypatch, capsys)
    line = refused([*arguments, "--host", "127.0.0.1"], monkeypatch, capsys)
    assert f"max_model_len: in {file}: must be at most" in line
    monkeypatch.setenv("BATON_FLAG_HOST", "b..c")
    assert "host: in the variable BATON_FLAG_HOST: cannot listen on b..c:" in refused(arguments, monkeypatch, capsys)
    line = refused([*arguments, "--host", "c..d"], monkeypatch, capsys)
    assert "host: cannot listen on c..d:" in line


def test_an_error_of_an_engine_names_what_was_given(tmp_path: Path) -> None:
    """As `up` names what its engines refuse: the flag of their role, or the part of a flag that holds the setting."""
    taken = ConfigError("port", "8000 on 127.0.0.1 is already in use")
    assert str(FleetOptions(engine_port_base=8000).named(taken)) == f"engine_port_base: {taken.message}"
    assert FleetOptions().named(taken) is taken
    roles = RoleOptions(decode_block_size="16,mla=8")
    error = ConfigError("block_size", "there is no group 'mla'")
    assert str(roles.named("decode", error)) == "decode_block_size: there is no group 'mla'"
    assert roles.named("prefill", error) is error
    file = tmp_path / "baton.toml"
    file.write_text('[kv-transfer-config]\nprefix_store = "file:///proc/x"')
    app: Any = typer.main.get_command(cli.app)
    given = ["m", "--config", str(file), "--kv-transport", "nixl"]
    for arguments, field, told in (
        (given, "transport", "kv_transport: no"),
        (given[:3], "transport", f"kv_transfer_config.kv_transport: in {file}: no"),
        (given, "kv_transfer_config.prefix_store", f"kv_transfer_config.prefix_store: in {file}: no"),
        (["m"], "transport", "kv_transport: no"),
        (["m"], "something.else", "something.else: no"),
    ):
        context = app.commands["up"].make_context("up", list(arguments))
        named = named_after_source(context, ConfigError(field, "no"))
        assert str(named) == str(named_after_source(context, named)) == told


def refused(arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(" [config]")
    return line


@pytest.mark.parametrize(
    ("settings", "longest"),
    [
        ({"max_position_embeddings": 100}, 100),
        ({"max_position_embeddings": 100, "rope_scaling": {"rope_type": "linear", "factor": 4.0}}, 400),
        ({"max_position_embeddings": 100, "rope_scaling": None}, 100),
        ({"text_config": {"max_position_embeddings": 100, "rope_parameters": {"full": {"factor": 8}}}}, 800),
        ({"max_position_embeddings": "long"}, None),
        ({}, None),
    ],
)
def test_the_longest_context_of_a_checkpoint(tmp_path: Path, settings: dict[str, Any], longest: int | None) -> None:
    (tmp_path / "config.json").write_text(json.dumps(settings))

    def check(length: int) -> None:
        check_sizes(EngineConfig(model=str(tmp_path), max_model_len=length))

    check(longest or 10**9)
    if longest is not None:
        with pytest.raises(ConfigError, match=f"must be at most the checkpoint's {longest}"):
            check(longest + 1)


def test_the_kv_of_all_engines_counts(tmp_path: Path) -> None:
    half = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2 + 1
    config = EngineConfig(model=str(tmp_path), kv_cache_memory=half)
    check_sizes(config)
    with pytest.raises(ConfigError, match=f"of 2 engines is {2 * half} bytes in all"):
        check_sizes(config, 2)


CONTROL, EVENTS = "kv_transfer_config.control_bind", "kv_events_config.endpoint"


@pytest.mark.parametrize(
    ("flag", "name", "settings"),
    [
        ("--kv-transfer-config", CONTROL, '{"control_bind": "%s"}'),
        ("--kv-events-config", EVENTS, '{"enable_kv_cache_events": true, "endpoint": "%s"}'),
        (
            "--kv-events-config",
            "kv_events_config.replay_endpoint",
            '{"enable_kv_cache_events": true, "endpoint": "tcp://127.0.0.1:*", "replay_endpoint": "%s"}',
        ),
    ],
)
@pytest.mark.parametrize("command", ["serve", "up"])
@pytest.mark.parametrize("scheme", ["tcp", "ipc"])
def test_an_address_that_is_taken(
    directory: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: str,
    scheme: str,
    flag: str,
    name: str,
    settings: str,
) -> None:
    with socket.socket(socket.AF_INET if scheme == "tcp" else socket.AF_UNIX) as taken:
        taken.bind(("127.0.0.1", 0) if scheme == "tcp" else str(tmp_path / "socket"))
        taken.listen()
        place = f"127.0.0.1:{taken.getsockname()[1]}" if scheme == "tcp" else taken.getsockname()
        arguments = [command, str(directory), "--port", "0", flag, settings % f"{scheme}://{place}"]
        if command == "serve":
            arguments += ["--ticket-key-file", str(tmp_path / "ticket.key")]
        line = refused(arguments, monkeypatch, capsys)
    why = "cannot listen at" if command == "serve" else "is for one engine, but 2 start"
    assert name in line
    assert f"{scheme}://{place}" in line
    assert why in line


def test_each_rank_has_its_own_address(tmp_path: Path) -> None:
    """A path too: ZeroMQ would take it from the rank before."""
    for bind, second in ((f"ipc://{tmp_path}/c", f"ipc://{tmp_path}/c_1"), ("tcp://127.0.0.1:7000", "7001")):
        assert own_bind(bind, 0) == bind
        assert own_bind(bind, 1).endswith(second)
    with socket.socket(socket.AF_UNIX) as taken:
        taken.bind(f"{tmp_path}/c_1")
        transfer = KVTransferConfig(control_bind=f"ipc://{tmp_path}/c")
        two = {"kv_transfer_config": transfer, "ticket_key_file": tmp_path / "ticket.key", "tensor_parallel_size": 2}
        config = EngineConfig(model=str(tmp_path), **two)
        check_ports(config)  # left by a killed process
        taken.listen()
        with pytest.raises(ConfigError, match=f"{CONTROL}: cannot listen at ipc://{tmp_path}/c_1: another process"):
            check_ports(config)


def test_engines_that_round_differently_are_told(caplog: pytest.LogCaptureFixture) -> None:
    config, mixed = EngineConfig(model="m"), RoleOptions(prefill_tensor_parallel_size=2)
    assert RoleOptions().alike(config, False) == mixed.alike(config, False) == config
    (line,) = caplog.messages
    assert line.startswith("2 and 1 tensor ranks round differently")
    assert mixed.alike(config, True).reduction_slices == 2
    assert len(caplog.messages) == 1
