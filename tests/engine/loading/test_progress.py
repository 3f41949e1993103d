"""How far the loading of weights is: a bar on a terminal, else lines."""

from __future__ import annotations

import io
import itertools
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from safetensors.torch import load_file, save_file

from baton.engine.config import EngineConfig
from baton.engine.loading import progress
from baton.engine.loading.checkpoints import load_checkpoints
from baton.engine.loading.progress import show_loading
from baton.models.loading.filling import watch_tensors
from baton.models.loading.loader import load_model
from testkit.checkpoints.common import make_checkpoint


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "llama")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_all_bytes_are_told_once_they_are_read(model: Path, tmp_path: Path) -> None:
    (whole,) = model.glob("*.safetensors")
    tensors = load_file(whole)
    names = sorted(tensors)
    first, second = ({name: tensors[name] for name in names[start::2]} for start in (0, 1))
    for file in model.glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    shards = {"model-1.safetensors": first, "model-2.safetensors": second}
    for name, held in shards.items():
        save_file(held, tmp_path / name)
    index = {name: file for file, held in shards.items() for name in held}
    (tmp_path / "model.safetensors.index.json").write_text(f'{{"weight_map": {index}}}'.replace("'", '"'))
    total = sum((tmp_path / name).stat().st_size for name in shards)
    told: list[tuple[int, int]] = []
    with watch_tensors(lambda read, of: told.append((read, of))):
        load_model(tmp_path)
    load_model(tmp_path)
    assert len(told) == len(names)
    assert told == sorted(told)
    assert {of for _, of in told} == {total}
    assert told[len(first) - 1][0] == (tmp_path / "model-1.safetensors").stat().st_size
    assert told[-1][0] == total


def test_lines_every_few_seconds(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(0, 2)
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    told: list[str] = []
    load_checkpoints(EngineConfig(model=str(model)), told.append)
    assert told[0] == f"loading target {model}"
    assert len(told) > 3
    assert all(f"loading target {model}: " in line and " GiB, " in line for line in told[1:])
    assert [line.rpartition(", ")[2] for line in told[1:4]] == ["4 s", "8 s", "12 s"]
    assert not any("100%" in line for line in told)


def test_loading_that_is_quick_is_one_line(model: Path) -> None:
    told: list[str] = []
    load_checkpoints(EngineConfig(model=str(model)), told.append)
    assert told == [f"loading target {model}"]


def test_a_rank_beside_another_tells_the_step_alone(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(0, 2)
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    told: list[str] = []
    with show_loading("loading", told.append, shows=False):
        load_model(model)
    assert told == ["loading"]


def test_a_bar_on_a_terminal(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_EVERY_S", 0.0)
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    told: list[str] = []
    load_checkpoints(EngineConfig(model=str(model)), told.append)
    assert told == [f"loading target {model}", ""]
    assert "Loading safetensors checkpoint:" in terminal.getvalue()
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    monkeypatch.setenv("TQDM_DISABLE", "1")  # as with --log-format json
    load_checkpoints(EngineConfig(model=str(model)), told.append)
    assert terminal.getvalue() == ""
    assert f"loading target {model}: " in told[-1]
