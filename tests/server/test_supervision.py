"""Engines that end by themselves are restarted, with growing pauses and not forever."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from baton.cli.supervision import Supervisor
from testkit.processes.running import run
from testkit.servers.fake_serving import TEXT, write_tokenizer

FAKE = (sys.executable, "-m", "testkit.servers.fake_baton")


class Children:
    def __init__(self) -> None:
        self.now = 0.0
        self.dead: dict[str, str] = {}
        self.started: list[tuple[float, str]] = []

    def ended(self) -> dict[str, str]:
        return dict(self.dead)

    def ended_cleanly(self, name: str) -> bool:
        return self.dead[name] == "told"

    def restart(self, name: str, wait: bool = True) -> None:
        assert not wait, "the router must go on meanwhile"
        del self.dead[name]
        self.started.append((self.now, name))

    def watched(self, max_restarts: int) -> Supervisor:
        return Supervisor(self, lambda text: None, max_restarts, lambda: self.now)

    def pass_until(self, supervisor: Supervisor, end: float, dies: bool = False) -> None:
        while self.now < end and supervisor.failure is None:
            if dies:
                self.dead["decode-0"] = "out of luck"
            supervisor.poll()
            self.now += 0.25


def test_pauses_grow_and_end() -> None:
    children = Children()
    supervisor = children.watched(7)
    children.pass_until(supervisor, 1000.0, dies=True)
    times = [at for at, _ in children.started]
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert times[0] == 1.0
    assert [round(gap) for gap in gaps] == [2, 4, 8, 16, 30, 30]
    assert supervisor.failure == "decode-0 has ended 8 times, the last time with: out of luck"
    supervisor.poll()
    assert len(children.started) == 7


def test_restarts_are_counted_per_child_and_forgotten_after_a_calm_time() -> None:
    children = Children()
    supervisor = children.watched(2)
    for round_ in range(5):
        children.dead = {"decode-0": "x", "prefill-0": "y"}
        children.pass_until(supervisor, 400.0 * (round_ + 1))
        assert not children.dead
    assert supervisor.failure is None
    assert len(children.started) == 10
    for _ in range(3):  # the calm before counts once
        children.dead["decode-0"] = "z"
        children.pass_until(supervisor, children.now + 20.0)
    assert supervisor.failure == "decode-0 has ended 3 times, the last time with: z"


def test_a_child_that_was_signalled_restarts_at_once_and_is_not_counted() -> None:
    children = Children()
    supervisor = children.watched(1)
    for end in (1.0, 2.0, 3.0):
        children.dead["decode-0"] = "told"
        children.pass_until(supervisor, end)
    assert children.started == [(0.25, "decode-0"), (1.25, "decode-0"), (2.25, "decode-0")]
    assert supervisor.failure is None


def test_without_restarts_the_first_end_is_the_last() -> None:
    children = Children()
    supervisor = children.watched(0)
    children.pass_until(supervisor, 1.0, dies=True)
    assert (children.started, supervisor.failure) == ([], "decode-0 has ended 1 times, the last time with: out of luck")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tokenizer(tmp_path_factory.mktemp("model")))


def test_up_starts_a_killed_engine_again(directory: str) -> None:
    up = subprocess.Popen([*FAKE, "up", directory, "--port", "0"], stderr=subprocess.PIPE, text=True)
    assert up.stderr is not None
    try:
        engines: dict[str, str] = {}
        for line in up.stderr:
            if at := re.search(r"baton: (\w+-0): ready at (\S+)", line):
                engines[at[1]] = at[2]
            if at := re.search(r"baton: ready: (\S+)", line):
                url = at[1]
                break
        children = [int(p) for p in Path(f"/proc/{up.pid}/task/{up.pid}/children").read_text().split()]
        for pid in children:
            os.kill(pid, signal.SIGKILL)
        for line in up.stderr:
            assert "has ended: " not in line or "-0 has ended: it was killed (SIGKILL); it is" in line
            if "is started again\n" in line:
                engines.pop(line.split()[3])
            if not engines:
                break
        assert answered(url) == TEXT[:3]
        after = {int(p) for p in Path(f"/proc/{up.pid}/task/{up.pid}/children").read_text().split()}
        assert len(after) == 2
        assert not after & set(children)
    finally:
        up.terminate()
        up.wait(60)
        up.stderr.close()
    assert up.returncode == 0


def answered(url: str) -> str:
    """The answer to a prompt once engines are back."""
    for _ in range(600):
        body = json.dumps({"prompt": "a", "max_tokens": 3}).encode()
        try:
            with urllib.request.urlopen(urllib.request.Request(f"{url}/completions", data=body), timeout=60) as answer:
                return str(json.loads(answer.read())["choices"][0]["text"])
        except urllib.error.HTTPError:  # while the engines load
            time.sleep(0.1)
    raise AssertionError("the engines do not come back")


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(
    ("name", "cause"), [("fails", "the engine failed: out of luck"), ("exits", "it ended with status 0")]
)
def test_up_ends_with_the_cause_when_an_engine_will_not_stay(directory: str, name: str, cause: str) -> None:
    """Also when an engine exits with status 0 by itself: no signal asked it to end."""
    flags = ["--served-model-name", name, "--max-restarts", "1", "--port", "0"]
    ended = run("up", directory, *flags, command=FAKE)
    assert ended.returncode == 1
    last = ended.stderr.splitlines()[-1]
    said = rf"\S+Z ERROR baton: \w+-0 has ended 2 times, the last time with: {cause} \[engine_unavailable\]"
    assert re.fullmatch(said, last)
