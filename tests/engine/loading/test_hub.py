"""Models by their names on the hub: from its cache, by a download, or one line that names what is missing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import typer

from baton import LLM, SamplingParams
from baton.cli import app
from baton.cli.options import EngineOptions, to_flags
from baton.engine.config import EngineConfig, SpeculativeConfig
from baton.engine.loading.hub import checkpoint_directory
from baton.errors import ConfigError

DEMO = Path("models/baton-demo-llama")
HEAD = Path("models/baton-demo-eagle3")
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def downloads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """Record requests to a hub that has the demo's models under the name `org`."""
    asked: list[tuple[str, Any]] = []

    def snapshot_download(
        name: str, *, revision: str | None, allow_patterns: list[str], ignore_patterns: list[str]
    ) -> str:
        asked.append((name, revision))
        assert "*.safetensors" in allow_patterns
        assert "original/*" in ignore_patterns
        assert not any(pattern.startswith("*.bin") for pattern in allow_patterns)
        return str(Path("models") / name.partition("/")[2])

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return asked


def test_a_directory_is_taken_as_it_is(downloads: list[tuple[str, Any]]) -> None:
    assert checkpoint_directory(str(DEMO)) == str(DEMO)
    assert downloads == []
    with pytest.raises(ConfigError, match=r"^revision: is for a model of the hub, and .*baton-demo-llama is a dir"):
        checkpoint_directory(str(DEMO), "main")


def test_target_and_drafter_come_from_the_hub_and_keep_their_name(downloads: list[tuple[str, Any]]) -> None:
    spec = SpeculativeConfig.parse({"method": "eagle3", "model": "org/baton-demo-eagle3", "revision": "v2"})
    config = EngineOptions(speculative_config=spec, revision="v1").to_config("org/baton-demo-llama")
    assert downloads == [("org/baton-demo-llama", "v1"), ("org/baton-demo-eagle3", "v2")]
    assert (config.model, config.served_model_name) == (str(DEMO), "org/baton-demo-llama")
    assert config.speculative_config == SpeculativeConfig("eagle3", str(HEAD))
    # A located config names no repository, so that all engines load the same files.
    assert config.located() == config
    assert EngineConfig("org/baton-demo-llama", served_model_name="mine").located().served_model_name == "mine"


def test_an_engine_of_a_model_on_the_hub_computes(downloads: list[tuple[str, Any]]) -> None:
    with LLM("org/baton-demo-llama", kv_cache_memory=8 << 20) as llm:
        assert llm.generate("The for statement", SamplingParams(max_tokens=2))[0].outputs[0].token_ids
    assert downloads == [("org/baton-demo-llama", None)]


def fill_cache(home: Path) -> None:
    """The cache of a hub client that has downloaded `org/demo` before."""
    root = home / "hub" / "models--org--demo"
    shutil.copytree(DEMO, root / "snapshots" / COMMIT)
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text(COMMIT)


def test_offline_a_filled_cache_is_enough(tmp_path: Path) -> None:
    fill_cache(tmp_path)
    done = offline(tmp_path, "-m", "baton.cli", "generate", "org/demo", *GENERATE, "--revision", "main")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    where = "from baton.engine.loading.hub import checkpoint_directory as find"
    done = offline(tmp_path, "-c", f"{where}; print(*(find('org/demo', name) for name in (None, 'main', '{COMMIT}')))")
    assert done.returncode == 0, done.stderr
    assert [Path(found).name for found in done.stdout.split()] == [COMMIT] * 3


@pytest.mark.parametrize("flags", [("org/other",), ("org/demo", "--revision", "v9")])
def test_offline_what_the_cache_lacks_is_told_in_one_line(tmp_path: Path, flags: tuple[str, ...]) -> None:
    fill_cache(tmp_path)
    done = offline(tmp_path, "-m", "baton.cli", "generate", flags[0], *GENERATE, *flags[1:])
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: model: {flags[0]}")
    assert flags[-1] in line
    assert "the hub does not give it" in line


@pytest.mark.parametrize("name", ["nowhere", "/a/b/c", "a/b/c", "../x/y", ""])
def test_an_invalid_repository_name_is_not_downloaded(name: str, downloads: list[tuple[str, Any]]) -> None:
    with pytest.raises(ConfigError, match=r"^speculative_config.model: must be a directory in Hugging Face format or"):
        checkpoint_directory(name, field="speculative_config.model")
    assert downloads == []


GENERATE = ("The for", "--max-tokens", "2", "--kv-cache-memory", "8M")


def offline(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """An offline Python with the hub's cache in `home`, and kernels that are compiled already."""
    kept = {name: os.environ[name] for name in ("NUMBA_CACHE_DIR",) if name in os.environ}
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        env={
            "PATH": "/usr/bin",
            "PYTHONPATH": "src",
            "HF_HOME": str(home),
            "HF_HUB_OFFLINE": "1",
            "HOME": str(home),
            **kept,
        },
    )


def test_child_processes_are_given_directories_and_the_name(downloads: list[tuple[str, Any]]) -> None:
    spec = SpeculativeConfig.parse({"method": "eagle3", "model": "org/baton-demo-eagle3"})
    options = EngineOptions(speculative_config=spec, revision="v1", max_num_seqs=7)
    config = options.to_config("org/baton-demo-llama")
    children = options.located(config)
    assert children.to_config(config.model) == config
    assert "--revision" not in to_flags(children)
    assert children.max_num_seqs == 7
    assert len(downloads) == 2


def test_commands_that_measure_take_names_of_the_hub(
    downloads: list[tuple[str, Any]], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cli = typer.main.get_command(app)
    monkeypatch.setattr("baton.bench.engine.step_over_forward", lambda model, batch: (1.0, 2.0, len(model)))
    cli.main(["bench", "engine", "org/baton-demo-llama", "--json"], standalone_mode=False)
    assert json.loads(capsys.readouterr().out)["forward_ms"] == len(str(DEMO))
    arguments = ["verify", "org/baton-demo-llama", "--modes", "single", "--lengths", "3", "--max-tokens", "2"]
    cli.main(arguments, standalone_mode=False)
    assert "identical: 1/1" in capsys.readouterr().out
    assert set(downloads) == {("org/baton-demo-llama", None)}
