"""The log of `baton up`: each line has a time and a level, from the first to the last, also those of engines."""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from baton.cli.logs import pass_on
from baton.deployment.child_log import ChildLog, LogLine, read_line
from testkit.processes.running import run
from testkit.servers.fake_serving import write_tokenizer

FAKE = [sys.executable, "-m", "testkit.servers.fake_baton"]
TEXT = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z (INFO|WARNING|ERROR) [\w.]+: \S.*")

pytestmark = pytest.mark.usefixtures("forked")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tokenizer(tmp_path_factory.mktemp("model")))


def lines_of_up(directory: str, form: str, name: str) -> list[str]:
    """All that `up` writes until it ends, by itself or by SIGTERM when it is ready."""
    command = [*FAKE, "up", directory, "--port", "0", "--log-format", form, "--served-model-name", name]
    up = subprocess.Popen([*command, "--max-restarts", "0"], stderr=subprocess.PIPE, text=True)
    assert up.stderr is not None
    lines = []
    for line in up.stderr:
        lines.append(line.rstrip("\n"))
        if "ready: http" in line and name != "fails":
            up.send_signal(signal.SIGTERM)
    up.wait(60)
    up.stderr.close()
    return lines


def test_text_has_time_and_level_in_each_line(directory: str) -> None:
    lines = lines_of_up(directory, "text", "warns")
    assert not [line for line in lines if not TEXT.fullmatch(line)]
    text = "\n".join(lines)
    for process in ("prefill-0", "decode-0"):
        assert f"Z WARNING baton.kvstore.prefix_store: {process}: the prefix store takes nothing\n" in text
        assert re.search(rf"Z WARNING baton.py.warnings: {process}: .*something of Python's is old", text)
        assert f"Z WARNING baton.stderr: {process}: a library says this\n" in text


@pytest.mark.parametrize("name", ["warns", "fails", "crash"])
def test_json_from_the_first_line_to_the_last(directory: str, name: str) -> None:
    said: list[dict[str, Any]] = [json.loads(line) for line in lines_of_up(directory, "json", name)]
    assert all({"time", "level", "logger", "message"} <= set(line) for line in said)
    assert said[0]["message"].startswith("starting 1 prefill and 1 decode engines of ")
    if name == "warns":
        assert said[-1]["message"] == "ending all processes"
        warned = [line for line in said if line["logger"] == "baton.kvstore.prefix_store"]
        assert {line["process"] for line in warned} == {"prefill-0", "decode-0"}
        assert {line["level"] for line in warned} == {"warning"}
    if name == "fails":
        assert (said[-1]["level"], said[-1]["logger"]) == ("error", "baton")
        assert said[-1]["message"].endswith("the last time with: the engine failed: out of luck [engine_unavailable]")
    if name == "crash":
        assert said[-1]["message"].endswith("did not start: RuntimeError: boom at start [engine_unavailable]")


@pytest.mark.parametrize("flags", [["--nonsense"], ["--port", "x"], ["--block-size", "0"], []])
def test_a_refusal_is_json_too(tmp_path: Path, flags: list[str]) -> None:
    (tmp_path / "a.toml").write_text('log-format = "json"\n')
    given = ["--log-format=json", *flags] if flags else ["--config", str(tmp_path / "a.toml"), "--port", "0"]
    ended = run("serve", str(tmp_path / "nowhere"), *given, command=FAKE)
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert json.loads(line)["level"] == "error"


def test_lines_of_a_child(tmp_path: Path) -> None:
    assert read_line("2026-11-25T07:05:29.923Z WARNING baton.router.pool: a: b") == LogLine(
        "a: b", "WARNING", "baton.router.pool", "2026-11-25T07:05:29.923"
    )
    line = {"time": "2026-11-25T07:05:29.923Z", "level": "info", "logger": "baton.x", "message": "m", "id": "7"}
    assert read_line(json.dumps(line)) == LogLine("m", "INFO", "baton.x", "2026-11-25T07:05:29.923", {"id": "7"})


@pytest.mark.parametrize(
    "other",
    [
        *("{}", "{", "[W] UCX says", '{"level": 3}', "", '{"a":' * 9999),
        '{"time": "t", "level": "info", "logger": 1, "message": "m"}',
        '{"time": "t", "level": "info", "logger": "l", "message": {}}',
    ],
)
def test_a_line_that_is_no_record_is_text(other: str) -> None:
    assert read_line(other) == LogLine(other)


@pytest.mark.parametrize("time", ["10:30", "2026-99-99T99:99:99.000Z"])
def test_a_line_with_another_time_is_passed_on(time: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    pass_on("P", read_line(json.dumps({"time": time, "level": "info", "logger": "l", "message": "m"})))
    assert caplog.messages == ["P: m"]


def test_a_child_that_says_one_thing_says_it_once(tmp_path: Path) -> None:
    """The last line is left to the code that reports the child's end."""
    now = "2026-11-25T07:05:29.923Z"
    said = [f"{now} ERROR baton: it begins to fail", "then this", f"{now} ERROR baton: out"]
    passed: list[LogLine] = []
    log = ChildLog(tmp_path / "a.log", passed.append)
    with log.writing() as output:
        child = subprocess.Popen([sys.executable, "-c", f"print(*{said}, sep=chr(10))"], stdout=output)
    child.wait()
    assert log.last_words() == "out"
    assert [line.message for line in passed] == ["it begins to fail", "then this"]
    assert log.text().count("\n") == 3
    silent = ChildLog(tmp_path / "b.log")
    assert silent.last_words() is None


def test_a_thread_that_cannot_start_is_an_error_of_the_system_and_holds_no_pipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a process that cannot be made, which the parent outlives."""

    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    log = ChildLog(tmp_path / "a.log", lambda line: None)
    before = os.listdir("/proc/self/fd")
    with monkeypatch.context() as limited:
        limited.setattr(threading.Thread, "start", fail)
        with pytest.raises(OSError, match="can't start new thread"), log.writing():
            pass
    assert os.listdir("/proc/self/fd") == before
    assert log.text() == ""


def test_answers_go_on_while_nobody_reads_the_log(directory: str) -> None:
    with subprocess.Popen([*FAKE, "up", directory, "--port", "0"], stderr=subprocess.PIPE, bufsize=0) as up:
        assert up.stderr is not None
        fcntl.fcntl(up.stderr, fcntl.F_SETPIPE_SZ, 4096)
        said = b""
        try:
            url = next(at[1].decode() for line in up.stderr if (at := re.search(rb"ready: (http\S+)", line)))
            for _ in range(40):
                body = json.dumps({"prompt": "a", "max_tokens": 3}).encode()
                urllib.request.urlopen(urllib.request.Request(f"{url}/completions", data=body), timeout=60).close()
            said = os.read(up.stderr.fileno(), 4096)
        finally:
            up.terminate()
            lines = (said + up.stderr.read()).decode().splitlines()
    assert up.returncode == 0
    assert not [line for line in lines if not TEXT.fullmatch(line)]
    assert sum("finish=length" in line for line in lines) == 40
