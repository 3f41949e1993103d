"""The command line refuses invalid input with one clear line."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from baton import cli
from tests.server.fake_serving import write_tokenizer


def test_bad_input_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = str(write_tokenizer(tmp_path / "model"))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        key = str(tmp_path / "ticket.key")
        cases = [
            (["serve", directory, "--port", port], f"port: {port} on 127.0.0.1 is already in use"),
            (["up", directory, "--port", port], f"port: {port} on 127.0.0.1 is already in use"),
            (["serve", str(tmp_path / "none"), "--port", "0"], "model: must be a directory"),
            (["serve", str(tmp_path), "--port", "0"], "tokenizer.json: no such file"),
            (["serve", directory, "--port", "0", "--role", "prefill"], "ticket_key_file: is required"),
            (
                ["serve", directory, "--port", "0", "--speculative-config", "{"],
                "speculative_config: is not JSON",
            ),
            (["router", "--port", "0", "--prefill", "http://127.0.0.1:1"], "ticket_key_file: is required"),
            (
                ["serve", directory, "--port", "0", "--kv-transfer-config", '{"control_bind": "tcp://0.0.0.0:*"}'],
                "control_bind: tcp://0.0.0.0:* can be reached from other hosts: give --keys DIR",
            ),
            (
                ["serve", directory, "--port", "0", "--ticket-key-file", key, "--kv-transport", "nixl"],
                "kv_transfer_config.kv_transport: nixl needs --keys DIR (see `baton keys`)",
            ),
            (["serve", directory, "--port", "0", "--kv-transport", "tcp"], "unknown transport 'tcp'; known: cuda_ipc,"),
            (["up", directory, "--port", "0", "--kv-transport", "tcp"], "unknown transport 'tcp'; known: cuda_ipc,"),
            (
                ["up", directory, "--port", "0", "--decode-block-size", "0"],
                "decode_block_size: must be 1 to 1024, got 0",
            ),
            (["verify", directory, "--prefill-block-size", "2000"], "prefill_block_size: must be 1 to 1024, got 2000"),
            (["verify", directory, "--kv-transport", "tcp"], "unknown transport 'tcp'; known: cuda_ipc,"),
            (
                ["generate", directory, "hi", "--kv-transfer-config", '{"kv_transport": "nixl:"}'],
                "expected a name or scheme://?option=value, got 'nixl:'",
            ),
            (
                ["serve", directory, "--port", "0", "--kv-transfer-config", '{"prefix_store": "shm"}'],
                "kv_transfer_config.prefix_store: must be file:///DIRECTORY, got 'shm'",
            ),
            (
                ["serve", directory, "--port", "0", "--role", "prefill", "--keys", directory],
                "ticket.key does not exist",
            ),
            (
                ["serve", directory, "--port", "0", "--kv_cache_memory", "2X"],
                "kv_cache_memory: must be bytes, or a size",
            ),
            (
                ["up", directory, "--port", "0", "--gpu_memory_utilization=2"],
                "gpu_memory_utilization: must be in (0, 1]",
            ),
            (["serve", directory, "--port", "0", "--kv_cache_memory=2G", "--dtype", "x"], "dtype: must be one of"),
            (["router", "--port", "0", "--keys", directory], "ticket.key does not exist"),
            (["keys", "--output", str(tmp_path / "keys"), "--engines", "ok,../x"], "'../x' is no engine id"),
            (["router", "--port", "0", "--both", "nonsense"], "'nonsense' is not a base URL"),
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
            (["generate", str(tmp_path / "none"), "hi"], "model: must be a directory"),
            (
                ["serve", directory, "--port", "0", "--chat-template", "no.jinja"],
                "'no.jinja' is no template",
            ),
            (
                ["up", directory, "--port", "0", "--chat-template", "{% if %}"],
                "the chat template does not compile",
            ),
            (["router", "--port", "0", "--chat-template", directory], "cannot be read as a file: Is a directory"),
            (["up", directory, "--port", "0", "--tool-call-parser", "none"], "tool_call_parser: "),
            (["up", directory, "--port", "0", "--ssl-keyfile", "key.pem"], "ssl_keyfile: needs ssl_certfile"),
            (["up", directory, "--port", "0", "--allowed-origins", "*"], "allowed_origins: must be a JSON list"),
            (
                ["serve", directory, "--port", "0", "--role", "decode", "--chat-template", "{{ messages }}"],
                "chat_template: is not for role decode",
            ),
            (
                ["serve", directory, "--port", "0", "--role", "prefill", "--chat-template-content-format", "openai"],
                "chat_template_content_format: is not for role prefill",
            ),
        ]
        for arguments, message in cases:
            monkeypatch.setattr(sys, "argv", ["baton", *arguments])
            with pytest.raises(SystemExit) as ended:
                cli.main()
            assert ended.value.code in (1, 2), arguments
            stderr = capsys.readouterr().err
            # A command that serves has set up logging before it needs the port.
            assert stderr.count("error: ") + stderr.count(" ERROR baton: ") == 1, stderr
            assert message in stderr
            assert len(stderr.splitlines()) == 1, stderr


def test_unknown_flag_and_help(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERMINAL_WIDTH", "200")
    monkeypatch.setattr(sys, "argv", ["baton", "serve", "somewhere", "--tensor-paralel-size", "2"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert "No such option" in capsys.readouterr().err
    flags: dict[str, list[str]] = {
        "serve": ["--speculative-config", "--no-enable-prefix-caching", "--kv-transfer-config", "--role"],
        "up": ["--prefill", "--decode", "--block-size", "--decode-block-size", "--kv-mode", "--kv-transport"],
        "router": ["--prefill", "--ticket-key-file", "--allow-mode-override"],
        "generate": ["--chat", "--max-tokens", "--dtype"],
    }
    for command, names in flags.items():
        monkeypatch.setattr(sys, "argv", ["baton", command, "--help"])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert ended.value.code == 0
        text = capsys.readouterr().out
        assert all(name in text for name in names), text
        assert "--ready-fd" not in text
