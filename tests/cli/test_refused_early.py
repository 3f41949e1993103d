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
from baton.engine.memory.sizes import check_sizes, need_driver
from baton.engine.ports import check_ports, warn_if_loopback
from baton.errors import ConfigError
from baton.handoff.session.config import own_bind
from baton.handoff.session.keys import make_keys
from baton.wire import Role
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
        (
            ["--kv-transfer-config", '{"prefix_store": "file:///x?max_bytes=0"}'],
            "prefix_store: file: max_bytes is at least",
        ),
        (["--kv-transfer-config", '{"prefix_store": "file:///x?host=::1"}'], "prefix_store: file has no option 'host'"),
        (["--override-generation-config", '{"max_new_tokens": 0}'], "config: max_new_tokens must be between 1 and"),
        (["--override-generation-config", "[]"], "override_generation_config: must be a JSON object, got []"),
        (["--served-model-name", ""], "served_model_name: must be a name, got ''"),
        (["--attention-backend", "none"], "attention_backend: 'none' is unknown, expected one of paged_cpu, "),
        (["--attention-backend", "triton"], "attention_backend: triton runs on cuda only"),
        (["--max-num-batched-tokens", "99999999999"], "max_num_batched_tokens: must be 1 to 16777216, got 99999999999"),
        (["--max-prefill-tokens-with-decodes", "2049"], "must be at most max_num_batched_tokens, got 2049"),
        (["--kv-cache-memory", "1G", "--gpu-memory-utilization", "0.5"], "must be left out with kv_cache_memory"),
        (["--kv-events-config", '{"endpoint": "tcp://*:1"}'], "kv_events_config: has no enable_kv_cache_events"),
        (["--ssl-cert-reqs", "2"], "ssl_cert_reqs: needs ssl_certfile, got 2"),
        (["--allowed-origins", '["https://x/a"]'], "allowed_origins: must be like https://HOST or https://HOST:PORT, "),
        (["--api-key", "k", "--api-key", "k"], "api_key: has one key twice"),
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
        (["--prefill", "1024"], "prefill: 1024, with decode 1, makes 1025 engines; at most 1024"),
        (["--decode-data-parallel-size", "65"], "decode_data_parallel_size: must be 1 to 64, got 65"),
        (["--decode-pipeline-parallel-size", "9"], "decode_pipeline_parallel_size: must be 1 to 8, got 9"),
        (
            ["--prefill-tensor-parallel-size", "3", "--decode-tensor-parallel-size", "3"],
            "prefill_tensor_parallel_size: must be one of 1, 2, 4, 8, got 3",
        ),
        (["--prefill-block-size", "0"], "prefill_block_size: must be 1 to 1024, got 0"),
        (["-tp", "2", "--prefill-data-parallel-size", "2"], "prefill_data_parallel_size: must be 1 with other"),
        (
            ["--decode-tensor-parallel-size", "2", "--batch-invariant", "--kv-transport", "file"],
            "kv_transport: must be shm with several",
        ),
        (["--kv-transport", "shm://?x=1"], "kv_transport: shm has no option 'x'"),
        (["--kv-transport", "nixl://?hst=1"], "nixl has no option 'hst'; known: host, backend"),
        (["--kv-transport", "nixl://?host=localhost"], "nixl: host is a numeric address, got 'localhost'"),
        (["--kv-transport", "file:///x?max_bytes=0"], "kv_transport: file: max_bytes is at least 1, got 0"),
        (["--token-api"], "token_api: must be left out with role prefill"),
        (["--no-enable-prefix-caching", "--policy-config", '{"hand_back": true}'], "policy_config: hand_back needs"),
    ],
)
def test_what_up_would_give_its_engines(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    assert message in refused(["up", str(directory), "--port", "0", *flags], monkeypatch, capsys)


def test_what_an_engine_would_miss(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["up", str(tmp_path), "--port", "0"])
    assert ended.value.code == 2
    assert f"model: {tmp_path} has no config.json [checkpoint]" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="device: cuda:1 needs NVIDIA's driver: libnowhere"):
        need_driver("cuda:1", "libnowhere.so")


def test_a_port_of_the_router_is_not_an_engine_s(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    line = refused(["up", str(directory), "--port", port, "--engine-port-base", port], monkeypatch, capsys)
    assert f"engine_port_base: {port} gives an engine the router's port {port}" in line


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--engine-id", ""], "engine_id: must be 1-64 of "),
        (["--tool-call-parser", "hermes"], "tool_call_parser: is not for role prefill"),
        (["--ticket-key-file", "KEY", "--token-api"], "token_api: must be left out with role prefill"),
        (["--ticket-key-file", "/dev/null"], "ticket_key_file: /dev/null "),
        (["--keys", "KEYS", "--engine-id", "q"], "keys: cannot read "),
    ],
)
def test_an_engine_of_one_role(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    make_keys(directory / "keys", ["p"])
    places = {"KEYS": str(directory / "keys"), "KEY": str(directory / "keys/ticket.key")}
    given = [places.get(word, word) for word in flags]
    assert message in refused(
        ["serve", str(directory), "--port", "0", "--role", "prefill", *given], monkeypatch, capsys
    )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--prefill", "x"], "prefill: 'x' is not a base URL such as "),
        (["--prefill", "http://h:1", "--decode", "http://h:1/"], "decode: http://h:1/ is given twice"),
        (["--both", "http://h:1", "--policy-config", '{"turn_ratio": 0.5}'], "turn_ratio must be at least 1, got 0.5"),
        (["--both", "http://h:1", "--policy-config", '{"overload_num_waiting": 0}'], "must be at least 1, got 0"),
        (["--engine", "sglang", "--both", "http://h:1", "--policy-config", '{"hand_back": true}'], "is not for sglang"),
        (["--engine", "vllm", "--both", "http://h:1", "--near-tie", "inf"], "near_tie: must be 0.0 to 100.0, got inf"),
        (
            ["--engine", "vllm", "--both", "http://h:1", "--seed-first-token", "--near-tie", "0.2"],
            "near_tie: is not for",
        ),
        (
            ["--engine", "vllm", "--both", "http://h:1", "--kv-connector", "NixlConnector"],
            "ticket_key_file: is not for",
        ),
        (
            ["--engine", "vllm", "--both", "http://h:1", "--policy-config", '{"hand_back": true}'],
            "policy_config: hand_back needs kv_event_source",
        ),
        (
            ["--engine", "vllm", "--both", "http://h:1", "--kv-event-source", "http://h:2=tcp://h:5557"],
            "kv_event_source: http://h:2 is not an engine of this router",
        ),
        (
            ["--engine", "vllm", "--both", "http://h:1", "--kv-event-replay-source", "http://h:1=tcp://h:5558"],
            "kv_event_replay_source: http://h:1 has no kv_event_source",
        ),
    ],
)
def test_settings_of_a_router_that_contradict_each_other(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    key = ["--ticket-key-file", str(directory / "key")]
    assert message in refused(["router", "--port", "0", *key, *flags], monkeypatch, capsys)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["MODEL", "--block-size", "0"], "block_size: must be 1 to 1024, got 0"),
        (["MODEL", "--decode-pipeline-parallel-size", "9"], "decode_pipeline_parallel_size: must be 1 to 8, got 9"),
        (["MODEL", "--modes", "single", "--prefill", "3"], "prefill: is of a deployment that verify starts, "),
        (["MODEL", "--candidate", "http://h:1", "--kv-transport", "file"], "kv_transport: is of a deployment that"),
        (["--reference", "http://h:1", "--candidate", "http://h:2", "--dtype", "auto"], "dtype: is of an engine that"),
        (["MODEL", "--token-range", "1-5"], "token_range: is of random prompts, without a model, got '1-5'"),
        (["MODEL", "--modes", "single", "--concurrency", "2"], "concurrency: is of servers, got 2"),
        (["MODEL", "--modes", "push,push"], "modes: has one mode twice: 'push,push'"),
        (["MODEL", "--lengths", ""], "lengths: must be like 1-96 or 1,5,9, got ''"),
        (["MODEL", "--kv-cache-memory", "900G"], "kv_cache_memory: of 2 engines is "),
        (["MODEL", "--near-tie", "0.1", "--temperature", "1"], "near_tie: is for greedy requests"),
    ],
)
def test_verify_has_no_setting_that_it_ignores(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    given = [str(directory) if word == "MODEL" else word for word in flags]
    assert message in refused(["verify", *given], monkeypatch, capsys)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["keys", "--output", "keys", "--engines", ","], "engines: has no name: [',']"),
        (["bench", "serve", "--prefix-repetition-num-prefixes", "3"], "is of --dataset-name prefix_repetition, got 3"),
        (
            ["bench", "serve", "--dataset-name", "prefix_repetition", "--random-input-len", "3"],
            "is of --dataset-name r",
        ),
        (["bench", "serve", "--temperature", "-1"], "temperature must be between 0 and 100, got -1.0"),
        (["bench", "serve", "--save-result", "--result-dir", "/dev/null/x"], "result_dir: cannot write /dev/null/x/"),
        (["bench", "transport", "--output-json", "/dev/null/x"], "output_json: cannot write /dev/null/x: "),
        (["bench", "handoff", "--output-json", "/proc"], "output_json: /proc is a directory"),
    ],
)
def test_other_commands(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "end"),
    [
        (["--prefill", "-1"], "or equal to 1, got '-1' [config]"),
        (["--port=70000"], "or equal to 65535, got '70000' [config]"),
        (["--log-level", "loud"], "'--log-level': 'loud' is not one of 'debug', 'info', 'warning', 'error'. [config]"),
    ],
)
def test_a_usage_error_has_the_value(capsys: pytest.CaptureFixture[str], flags: list[str], end: str) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["up", "m", *flags])
    assert ended.value.code == 2
    assert capsys.readouterr().err.rstrip().endswith(end)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--policy", "nosuch"], "policy: must be one of cache_aware, "),
        (["--decode-policy", "nosuch"], "decode_policy: must be one of cache_aware, "),
        (["--policy-config", '{"hand_back": true, "hand_back": false}'], "policy_config: has hand_back twice"),
        (["--policy-config", '{"handback": true}'], "policy_config.handback: is unknown; known: hand_back, "),
        (["--policy-config", '{"hand_back": "yes"}'], "policy_config.hand_back: expected `bool`, got `str`"),
        (["--policy-config", '{"tenants": {"a": 1}}'], "policy_config.tenants[...]: expected `object`, got `int`"),
        (["--policy-config", '{"overload_kv_usage": 90}'], "overload_kv_usage must be a share of the KV, above 0 and"),
        (["--trace", "/nowhere/trace.json"], "trace: cannot be written"),
        (["--otlp-traces-endpoint", "localhost:4318"], "otlp_traces_endpoint: must be like http://"),
        (["--trace-sampling-ratio", "0.5"], "trace_sampling_ratio: needs otlp_traces_endpoint or trace, got 0.5"),
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
    assert "prefill: is needed, with --decode, or --both: without engines" in line


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


@pytest.mark.parametrize(
    ("role", "host", "bind", "warns"),
    [
        ("prefill", "0.0.0.0", "tcp://127.0.0.1:*", True),
        ("decode", "10.0.0.3", "ipc:///tmp/control", True),
        ("decode", "::", "tcp://127.0.0.1:*", True),
        ("decode", "::1", "tcp://127.0.0.1:*", False),
        ("prefill", "localhost", "tcp://127.0.0.1:*", False),
        ("prefill", "0.0.0.0", "tcp://10.0.0.2:7100", False),
        ("both", "0.0.0.0", "tcp://127.0.0.1:*", False),
    ],
)
def test_a_control_channel_on_loopback_beside_an_api_for_other_hosts(
    role: Role, host: str, bind: str, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    warn_if_loopback(EngineConfig(model="m", role=role, kv_transfer_config=KVTransferConfig(control_bind=bind)), host)
    assert [CONTROL in line and host in line for line in caplog.messages] == [True] * warns
