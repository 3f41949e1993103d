"""Flags of `baton serve`, `up` and `router` from a file and from the environment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import typer

import baton.cli
from baton.cli.options import EngineOptions, to_flags
from baton.deployment.processes import _environment
from baton.engine.config import SpeculativeConfig, declared_settings
from baton.errors import ConfigError

TOML = """
model = "some/model"
prefill = 2
decode-block-size = "32"
kv_cache_memory = "512M"
shutdown-timeout = 3
enable-prefix-caching = false
api-key = ["one", "two"]

[speculative-config]
method = "ngram"
num_speculative_tokens = 3
"""
YAML = """
model: some/model
prefill: 2
decode-block-size: 32
kv_cache_memory: 512M
shutdown-timeout: 3
enable-prefix-caching: false
api-key: [one, two]
speculative-config: {method: ngram, num_speculative_tokens: 3}
"""
GIVEN = {
    "model": "some/model",
    "prefill": 2,
    "decode_block_size": "32",
    "kv_cache_memory": 512 << 20,
    "shutdown_timeout": 3.0,
    "enable_prefix_caching": False,
    "api_key": ["one", "two"],
}


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BATON_API_KEY", raising=False)


def parsed(command: str, *arguments: str) -> dict[str, Any]:
    """The parameters of a command as it would run."""
    app: Any = typer.main.get_command(baton.cli.app)
    return dict(app.commands[command].make_context(command, list(arguments)).params)


def written(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize(("name", "text"), [("a.toml", TOML), ("a.yaml", YAML), ("a.yml", YAML)])
def test_a_file_gives_what_the_command_line_would(tmp_path: Path, name: str, text: str) -> None:
    from_file = parsed("up", "--config", written(tmp_path / name, text))
    assert {key: from_file[key] for key in GIVEN} == GIVEN
    assert from_file["speculative_config"] == SpeculativeConfig("ngram", num_speculative_tokens=3)
    flags = ["some/model", "--prefill=2", "--decode-block-size=32", "--kv-cache-memory=512M", "--shutdown-timeout=3"]
    flags += ["--no-enable-prefix-caching", "--api-key=one", "--api-key=two"]
    flags += ["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3}']
    assert {**from_file, "config": None} == parsed("up", *flags)


def test_the_command_line_goes_before_the_environment_and_that_before_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path / "a.toml", 'model = "m"\nport = 1\nprefill = 2\ndecode = 3\n')
    monkeypatch.setenv("BATON_FLAG_PREFILL", "4")
    monkeypatch.setenv("BATON_FLAG_DECODE", "5")
    monkeypatch.setenv("BATON_FLAG_BATCH_INVARIANT", "true")
    found = parsed("up", "--config", path, "--decode", "6")
    assert (found["port"], found["prefill"], found["decode"], found["batch_invariant"]) == (1, 4, 6, True)
    monkeypatch.setenv("BATON_FLAG_CONFIG", path)
    assert parsed("up") == {**parsed("up", "--config", path), "config": path}


def test_lists_of_the_router(tmp_path: Path) -> None:
    path = written(tmp_path / "a.yaml", "prefill: [http://a, http://b]\ndecode: http://c\n")
    found = parsed("router", "--config", path)
    assert (found["prefill"], found["decode"]) == (["http://a", "http://b"], ["http://c"])


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.toml", "blok-size = 16", "blok_size: in .*a.toml: baton up has no such flag"),
        ("a.toml", "ready-fd = 3", "ready_fd: .*no such flag"),
        ("a.toml", 'config = "b.toml"', "config: .*no such flag"),
        ("a.toml", "block-size = 16\nblock_size = 8", "block_size twice"),
        ("a.toml", "port = 1\nport = 2", "config: .*a.toml: .*overwrite"),
        ("a.yaml", "port: 1\nport: 2", "port twice"),
        ("a.yaml", "speculative-config: {method: ngram, method: mtp}", "method twice"),
        ("a.yaml", "port:", "port: .*must be a text"),
        ("a.yaml", "port: [1]", "port: .*must be a text"),
        ("a.yaml", "port: yes", "port: .*must be a text"),
        ("a.yaml", "batch-invariant: 1", "batch_invariant: .*true or false"),
        ("a.yaml", "- port", "must map"),
        ("a.yaml", "", "must map"),
        ("a.yaml", "port: &a [*a]", "port: .*must be a text"),
        ("a.yaml", "port: !!python/object/apply:os.getcwd []", "a.yaml: could not determine a constructor"),
        ("a.yaml", "a: {", "a.yaml: "),
        ("a.yaml", "\x00", "a.yaml: "),
        ("a.toml", "speculative-config = {a = 2026-01-01}", "speculative_config: .*JSON"),
        ("a.ini", "port = 1", "must end in"),
        ("a.toml", "#" * (1 << 20) + "#", "larger than"),
    ],
)
def test_a_bad_line_of_a_config_file_is_refused_by_name(tmp_path: Path, name: str, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parsed("up", "m", "--config", written(tmp_path / name, text))


def test_values_are_checked_as_on_the_command_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        parsed("up", "m", "--config", str(tmp_path / "missing.toml"))


@pytest.mark.parametrize("text", ["port = 70000", 'port = "http"', "log-level = 1", 'batch-invariant = "perhaps"'])
def test_a_value_of_the_wrong_kind_names_its_key_and_file(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=rf"{text.split()[0].replace('-', '_')}: in .*a\.toml: "):
        parsed("up", "m", "--config", written(tmp_path / "a.toml", text))


def test_variables_that_are_no_flags_are_refused_and_engines_inherit_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_FLAG_DECODE", "2")
    assert "BATON_FLAG_DECODE" not in _environment(1)
    assert "BATON_FLAG_DECODE" not in _environment(2)
    with pytest.raises(ConfigError, match="decode: in the variable BATON_FLAG_DECODE: baton serve has no such flag"):
        parsed("serve", "m")


@pytest.mark.parametrize(
    ("variable", "value", "what"),
    [
        ("PORT", "abc", "valid integer"),
        ("PORT", "70000", "65535"),
        ("KV_CACHE_MEMORY", "3X", "must be bytes, or a size"),
        ("RECOVERY", "most", "'most' is not one of"),
        ("ENABLE_PREFIX_CACHING", "perhaps", "boolean"),
        ("GPU_MEMORY_UTILIZATION", "half", "valid number"),
    ],
)
def test_a_variable_is_blamed_by_its_own_name(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, what: str
) -> None:
    monkeypatch.setenv(f"BATON_FLAG_{variable}", value)
    with pytest.raises(ConfigError, match=f"{variable.lower()}: in the variable BATON_FLAG_{variable}: .*{what}"):
        parsed("up", "m")


def test_short_flags_are_vllms() -> None:
    found = parsed("serve", "some/model", "-tp", "2", "-pp=4", "-dp", "2", "-sc", '{"method": "ngram"}')
    assert (found["tensor_parallel_size"], found["pipeline_parallel_size"], found["data_parallel_size"]) == (2, 4, 2)
    assert found["speculative_config"] == SpeculativeConfig("ngram")
    assert parsed("up", "some/model", "-tp", "2")["tensor_parallel_size"] == 2


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--kv-transfer-config", '{"prefix_store": "file:///mnt/k v%25&a?max_bytes=5", "handoff_timeout_s": 7}'],
        ["--kv-transfer-config", '{"prefix_store": "file", "control_bind": "tcp://10.0.0.5:*"}', "--keys", "keys"],
        ["--speculative-config", '{"method": "ngram", "prompt_lookup_min": 2, "num_speculative_tokens": "auto"}'],
        ["--kv-events-config", '{"enable_kv_cache_events": true, "replay_endpoint": "tcp://127.0.0.1:*"}'],
        ["--override-generation-config", '{"temperature": 0.6}', "--block-size", "16,draft=8", "--no-batch-invariant"],
    ],
    ids=lambda flags: flags[0] if flags else "defaults",
)
def test_engines_of_up_get_its_settings(flags: list[str]) -> None:
    names = declared_settings(EngineOptions)
    given = parsed("serve", "some/model", *flags)
    options = EngineOptions(**{name: given[name] for name in names})
    found = parsed("serve", "some/model", *to_flags(options))
    assert {name: found[name] for name in names} == {name: given[name] for name in names}
