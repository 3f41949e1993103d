"""The command line refuses invalid input with one clear line."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from baton import cli
from testkit.servers.fake_serving import write_tokenizer

# MODEL, TMP and PORT stand for a checkpoint, an empty directory and a port in use.
CASES = [
    (["serve", "MODEL", "--port", "PORT"], "port: PORT on 127.0.0.1 is already in use"),
    (["up", "MODEL", "--port", "PORT"], "port: PORT on 127.0.0.1 is already in use"),
    (["serve", "TMP/none", "--port", "0"], "model: must be a directory"),
    (["serve", "TMP", "--port", "0"], "model: TMP has no config.json"),
    (["serve", "MODEL", "--port", "0", "--role", "prefill"], "ticket_key_file: is required"),
    (
        ["serve", "MODEL", "--port", "0", "--speculative-config", "{"],
        "speculative_config: is not JSON",
    ),
    (["router", "--port", "0", "--prefill", "http://127.0.0.1:1"], "ticket_key_file: is required"),
    (
        ["serve", "MODEL", "--port", "0", "--kv-transfer-config", '{"control_bind": "tcp://0.0.0.0:*"}'],
        "control_bind: tcp://0.0.0.0:* can be reached from other hosts: give --keys DIR",
    ),
    (
        ["serve", "MODEL", "--port", "0", "--ticket-key-file", "TMP/ticket.key", "--kv-transport", "nixl"],
        "kv_transport: nixl needs --keys DIR (see `baton keys`)",
    ),
    (["serve", "MODEL", "--port", "0", "--kv-transport", "tcp"], "unknown transport 'tcp'; known: cuda_ipc,"),
    (["up", "MODEL", "--port", "0", "--kv-transport", "tcp"], "unknown transport 'tcp'; known: cuda_ipc,"),
    (
        ["up", "MODEL", "--port", "0", "--decode-block-size", "0"],
        "decode_block_size: must be 1 to 1024, got 0",
    ),
    (["verify", "MODEL", "--prefill-block-size", "2000"], "prefill_block_size: must be 1 to 1024, got 2000"),
    (["verify", "MODEL", "--kv-transport", "tcp"], "unknown transport 'tcp'; known: cuda_ipc,"),
    (
        ["generate", "MODEL", "hi", "--kv-transfer-config", '{"kv_transport": "nixl:"}'],
        "expected a name or scheme://?option=value, got 'nixl:'",
    ),
    (
        ["serve", "MODEL", "--port", "0", "--kv-transfer-config", '{"prefix_store": "shm"}'],
        "kv_transfer_config.prefix_store: must be file:///DIRECTORY, got 'shm'",
    ),
    (
        ["serve", "MODEL", "--port", "0", "--role", "prefill", "--keys", "MODEL"],
        "ticket.key does not exist",
    ),
    (
        ["serve", "MODEL", "--port", "0", "--kv_cache_memory", "2X"],
        "kv_cache_memory: must be bytes, or a size",
    ),
    (
        ["up", "MODEL", "--port", "0", "--gpu_memory_utilization=2"],
        "gpu_memory_utilization: must be in (0, 1]",
    ),
    (["serve", "MODEL", "--port", "0", "--kv_cache_memory=2G", "--dtype", "x"], "dtype: must be one of"),
    (["router", "--port", "0", "--keys", "MODEL"], "ticket.key does not exist"),
    (["keys", "--output", "TMP/keys", "--engines", "ok,../x"], "'../x' is no engine id"),
    (["keys", "--output", ""], "output: is empty"),
    (["serve", "MODEL", "--port", "0", "--served-model-name", "\udce6"], "served_model_name: is not UTF-8"),
    (["serve", "\udce6/a", "--port", "0", "--served-model-name", "a"], "model: is not UTF-8"),
    (["serve", "MODEL", "--port", "0", "--served-model-name", "a\nb"], r"served_model_name: 'a\nb' is not printable"),
    (["router", "--port", "0", "--both", "nonsense"], "'nonsense' is not a base URL"),
    (["router", "--port", "0", "--both", "http://a b:1"], "'http://a b:1' is not a base URL"),
    (["router", "--port", "0", "--both", "http://a..b:1"], "'http://a..b:1' is not a base URL"),
    (["router", "--port", "0", "--seed-first-token"], "seed_first_token: is for --engine vllm"),
    (["router", "--port", "0", "--kv-connector", "NixlConnector"], "kv_connector: is for --engine vllm"),
    (["router", "--port", "0", "--near-tie", "0"], "near_tie: is for --engine vllm"),
    (
        ["router", "--port", "0", "--engine", "vllm", "--kv-connector", "LMCache"],
        "kv_connector: must be one of BatonConnector, NixlConnector, NixlPushConnector, got 'LMCache'",
    ),
    (
        ["router", "--port", "0", "--engine", "vllm", "--kv-connector", "NixlConnector", "--seed-first-token"],
        "seed_first_token: is for vLLM servers with BatonConnector",
    ),
    (["generate", "TMP/none", "hi"], "model: must be a directory"),
    (
        ["serve", "MODEL", "--port", "0", "--chat-template", "no.jinja"],
        "'no.jinja' is no template",
    ),
    (
        ["up", "MODEL", "--port", "0", "--chat-template", "{% if %}"],
        "the chat template does not compile",
    ),
    (["router", "--port", "0", "--chat-template", "MODEL"], "cannot be read as a file: Is a directory"),
    (["up", "MODEL", "--port", "0", "--tool-call-parser", "none"], "tool_call_parser: "),
    (["up", "MODEL", "--port", "0", "--ssl-keyfile", "key.pem"], "ssl_keyfile: needs ssl_certfile"),
    (["up", "MODEL", "--port", "0", "--allowed-origins", "*"], "allowed_origins: must be a JSON list"),
    (
        ["serve", "MODEL", "--port", "0", "--role", "decode", "--chat-template", "{{ messages }}"],
        "chat_template: is not for role decode",
    ),
    (
        ["serve", "MODEL", "--port", "0", "--role", "prefill", "--chat-template-content-format", "openai"],
        "chat_template_content_format: is not for role prefill",
    ),
]


@pytest.mark.parametrize(("arguments", "message"), CASES, ids=[f"{case[0][0]} {case[1][:40]}" for case in CASES])
def test_bad_input_is_one_line(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        places = {
            "MODEL": str(write_tokenizer(tmp_path / "model")),
            "TMP": str(tmp_path),
            "PORT": str(taken.getsockname()[1]),
        }

        def placed(text: str) -> str:
            for name, value in places.items():
                text = text.replace(name, value)
            return text

        with pytest.raises(SystemExit) as ended:
            cli.main([*map(placed, arguments)])
    assert ended.value.code in (1, 2)
    stderr = capsys.readouterr().err
    # A command that serves has set up logging before it needs the port.
    assert stderr.count("error: ") + stderr.count(" ERROR baton: ") == 1, stderr
    assert placed(message) in stderr
    assert len(stderr.splitlines()) == 1, stderr
    assert re.search(r" \[(config|invalid_request|checkpoint)\]$", stderr.rstrip()), "its code is at the end"


def test_unknown_flag_and_help(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERMINAL_WIDTH", "200")
    with pytest.raises(SystemExit) as ended:
        cli.main(["serve", "somewhere", "--tensor-paralel-size", "2"])
    assert ended.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("error: No such option: --tensor-paralel-size")
    assert last.endswith(" [config]")
    flags: dict[str, list[str]] = {
        "serve": ["--speculative-config", "--no-enable-prefix-caching", "--kv-transfer-config", "--role"],
        "up": ["--prefill", "--decode", "--block-size", "--decode-block-size", "--kv-mode", "--kv-transport"],
        "router": ["--prefill", "--ticket-key-file", "--allow-mode-override"],
        "generate": ["--chat", "--max-tokens", "--dtype"],
    }
    for command, names in flags.items():
        with pytest.raises(SystemExit) as ended:
            cli.main([command, "--help"])
        assert ended.value.code == 0
        text = capsys.readouterr().out
        assert all(name in text for name in names), text
        assert "--ready-fd" not in text


@pytest.mark.parametrize(
    "arguments",
    [
        ["up", "m", "--shutdown-timeout", "inf"],
        ["up", "m", "--prefill", "0"],
        ["up", "m", "--decode", "0"],
        ["serve", "m", "--http-write-timeout", "inf"],
        ["verify", "m", "--request-timeout", "inf"],
        ["doctor", "http://127.0.0.1:1", "--timeout", "inf"],
        ["bench", "split", "m", "--kv-mode", "x"],
        ["bench", "split", "m", "--num-pairs", "0"],
        ["bench", "engine", "m", "--batch", "-1"],
    ],
)
def test_values_beyond_what_clocks_and_counts_can_be(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"error: Invalid value for '{arguments[-2]}': ")
    assert last.endswith(" [config]")


def test_a_directory_without_a_checkpoint_ends_with_the_status_that_errors_md_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Service managers start a process with this status not again: files do not come by themselves."""
    with pytest.raises(SystemExit) as ended:
        cli.main(["serve", str(tmp_path), "--port", "0"])
    assert ended.value.code == 2
    assert f"model: {tmp_path} has no config.json [checkpoint]" in capsys.readouterr().err


def test_underscores_are_dashes_in_flags_alone() -> None:
    given = ["generate", "my_model", "--max_tokens=1", "--dtype", "a_b", "--", "--a_b"]
    assert cli.with_dashes(given) == ["generate", "my_model", "--max-tokens=1", "--dtype", "a_b", "--", "--a_b"]


def test_a_command_without_arguments_shows_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([])
    shown = "".join(capsys.readouterr())
    assert ended.value.code in (0, 2)
    assert "Router and P/D engines on this host." in shown
    assert "[config]" not in shown


_IN_A_REMOVED_DIRECTORY = """
import os, sys
os.rmdir(os.getcwd())
from baton.cli import main
try:
    main(["--version"])
finally:
    print(os.getcwd())
"""


def test_a_working_directory_may_be_removed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _IN_A_REMOVED_DIRECTORY]
    told = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert told.stdout.splitlines()[-1] == "/"


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_that_cannot_be_written_is_one_line(unbuffered: str) -> None:
    command = [sys.executable, "-m", "baton.cli", "--version"]
    with open("/dev/full", "wb") as full:
        environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, env=environment, text=True)
    assert (ended.returncode, ended.stderr) == (1, "error: stdout: No space left on device [config]\n")


@pytest.mark.parametrize("command", [["serve"], ["up"]])
def test_too_little_memory_for_the_libraries_is_one_error(command: list[str], tmp_path: Path) -> None:
    model = str(Path("models/baton-demo-llama").resolve())
    run = ["sh", "-c", 'ulimit -v 400000; exec "$@"', "-", sys.executable, "-m", "baton.cli"]
    asked = [*run, *command, model, "--port", "0"]
    ended = subprocess.run(asked, cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 2, ended.stderr
    assert "Traceback" not in ended.stderr
    *_, last = ended.stderr.splitlines()
    assert " ERROR baton: " in last
    assert "processes may have 0.38 GiB of addresses (ulimit -v), which is too little" in last
