"""Deployments as processes: they start, serve, fail with one clear line, and leave nothing."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import baton
from baton.cli import main
from baton.deployment import BATON, processes
from baton.errors import ConfigError, EngineUnavailableError
from baton.transports.registry import parse_uri
from benchmarks.deployment import BreakableDeployment
from testkit.processes.running import run
from testkit.servers.fake_serving import TEXT, write_tokenizer

FAKE = (sys.executable, "-m", "testkit.servers.fake_baton")
LIMIT_S = 60.0


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tokenizer(tmp_path_factory.mktemp("model")))


# A child that reports again and again, and ends.
REPORTS = """
import os, sys, time
for step in range(%d):
    os.write(int(sys.argv[sys.argv.index("--ready-fd") + 1]), b'{"progress": "loading"%s}\\n')
    time.sleep(0.02)
"""


def ask(url: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url, data=data), timeout=60) as response:
        return json.loads(response.read() or "null")


def gone(pid: int) -> bool:
    """Whether a process has ended; a zombie counts."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def wait_gone(*pids: int) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not all(gone(pid) for pid in pids):
        assert time.monotonic() < deadline, "processes are left"
        time.sleep(0.01)


def test_deployment_serves_and_leaves_nothing(directory: str) -> None:
    with BreakableDeployment(directory, prefill=1, decode=2, engine_flags=["--seed", "3"], command=FAKE) as deployment:
        status = ask(f"{deployment.url}/status")
        assert [e["role"] for e in status["engines"]] == ["prefill", "decode", "decode"]
        assert [e["url"] for e in status["engines"]] == deployment.engine_urls
        assert deployment.decode_urls == deployment.engine_urls[1:]
        answer = ask(f"{deployment.url}/v1/completions", {"prompt": "a", "max_tokens": 12})
        assert answer["choices"][0]["text"] == TEXT[:12]
        pids = deployment.pids
        assert set(pids) == {"prefill-0", "decode-0", "decode-1", "router"}
        command = Path(f"/proc/{pids['decode-1']}/cmdline").read_text()
        assert "\0--engines-per-host\x003\0" in command, "memory is shared by three"
        key = Path(deployment.ticket_key_file)
        assert key.parent.stat().st_mode & 0o077 == 0
        assert deployment.ended() == {}
        os.kill(pids["decode-1"], signal.SIGKILL)
        wait_gone(pids["decode-1"])
        deadline = time.monotonic() + LIMIT_S
        while not deployment.ended():  # a process whose first thread has ended may still have others
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert list(deployment.ended()) == ["decode-1"]
    wait_gone(*pids.values())
    assert not key.parent.exists()
    deployment.close()


@pytest.mark.usefixtures("forked")
def test_children_are_halted_killed_and_started_again(directory: str) -> None:
    with BreakableDeployment(directory, prefill=1, decode=1, command=FAKE) as deployment:
        before, urls = deployment.pids, deployment.engine_urls
        deployment.stop("decode-0")
        with pytest.raises(TimeoutError):
            urllib.request.urlopen(f"{urls[1]}/inference/v1/info", timeout=0.5)
        deployment.cont("decode-0")
        assert ask(f"{urls[1]}/inference/v1/info")["role"] == "decode"
        deployment.stop("decode-0")
        deployment.kill("decode-0")  # also while it is stopped
        wait_gone(before["decode-0"])
        assert not deployment.ended_cleanly("decode-0")
        deployment.restart("decode-0")
        deployment.terminate("decode-0")
        assert deployment.wait("decode-0") == 0
        assert deployment.ended_cleanly("decode-0")
        deployment.restart("decode-0")
        deployment.restart("router", wait=False)  # while it runs
        deployment.await_ready("router")
        assert deployment.engine_urls == urls
        pids = deployment.pids
        assert pids["prefill-0"] == before["prefill-0"]
        assert len({*pids.values(), *before.values()}) == 5
        wait_gone(before["router"])
        assert ask(f"{urls[1]}/inference/v1/info")["role"] == "decode"
        assert ask(f"{deployment.url}/v1/completions", {"prompt": "a", "max_tokens": 12})["choices"][0]["text"]
        deployment.stop("prefill-0")  # a stopped process ends too
    wait_gone(*pids.values())


@pytest.mark.parametrize("own", [None, "7"])
def test_engines_of_one_host_share_its_cores(directory: str, own: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each uses twice its even share of threads, none pinned or awake for long, unless the user sets it."""
    names = ("OMP_NUM_THREADS", "OMP_PROC_BIND", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    for name in names:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name in names[::3] if own is not None else ():
        monkeypatch.setenv(name, own)
    with pytest.raises(SystemExit):
        main(["--version"])  # `up` configures itself too
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)))
    with BreakableDeployment(directory, prefill=1, decode=2, command=FAKE) as deployment:
        for child in deployment._children:
            environment = Path(f"/proc/{child.process.pid}/environ").read_bytes().split(b"\0")
            assert f"OMP_NUM_THREADS={own or 4}".encode() in environment
            assert f"GOMP_SPINCOUNT={own or 100}".encode() in environment
            assert b"OMP_PROC_BIND=false" in environment


def test_engines_share_a_directory_of_their_own(directory: str) -> None:
    """`file` without a path is this deployment's directory."""
    flags = ["--kv-transport", "nixl", "--kv-transfer-config", '{"kv_transport": "mooncake"}']
    with BreakableDeployment(directory, engine_flags=flags, kv_transport="file", command=FAKE) as deployment:
        flags = [last_transport(pid) for name, pid in deployment.pids.items() if name != "router"]
    scheme, query = parse_uri(flags[0])
    assert flags == [flags[0]] * 2
    assert scheme == "file"
    path = Path(query["path"])
    assert path.name == "kv"
    assert path.parent.name.startswith("baton-")
    assert not path.parent.exists()
    with pytest.raises(ConfigError, match="kv_transport: local moves KV within one process only"):
        BreakableDeployment(directory, kv_transport="faulty+local://?fault=drop", command=FAKE)


def last_transport(pid: int) -> str:
    arguments = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    return [value for name, value in pairwise(arguments) if name == "--kv-transport"][-1]


@pytest.mark.usefixtures("forked")
def test_a_child_that_fails_ends_all_and_is_quoted(directory: str) -> None:
    with pytest.raises(EngineUnavailableError, match="did not start: RuntimeError: boom at start"):
        BreakableDeployment(directory, engine_flags=["--served-model-name", "crash"], command=FAKE)
    with pytest.raises(ConfigError, match=r"block_size: must be .* \((prefill|decode)-0 did not start\)"):
        BreakableDeployment(directory, engine_flags=["--block-size", "0"], command=FAKE)
    with pytest.raises(ConfigError, match="prefill"):
        BreakableDeployment(directory, prefill=1, decode=0, command=FAKE)


@pytest.mark.usefixtures("forked")
def test_a_setting_that_only_a_child_refuses_has_the_users_name(directory: str) -> None:
    def named(role: str, error: ConfigError) -> ConfigError:
        return ConfigError(f"{role}_{error.field}", error.message)

    with pytest.raises(ConfigError, match=r"^decode_block_size: must be") as raised:
        BreakableDeployment(directory, role_flags={"decode": ["--block-size", "0"]}, command=FAKE, named=named)
    assert raised.value.field == "decode_block_size"
    with BreakableDeployment(directory, command=FAKE, named=named) as deployment:
        # It started, and refuses the setting when it is started again.
        child = deployment._child("decode-0")
        child.arguments += ["--block-size", "0"]
        deployment.restart("decode-0", wait=False)
        deployment._child("decode-0").process.wait(60)
        (cause,) = deployment.ended().values()
    assert cause.startswith("decode_block_size: must be")


@pytest.mark.usefixtures("forked")
def test_an_engine_that_fails_ends_its_process_with_the_cause(directory: str) -> None:
    """Otherwise it would answer 503 forever, and would never be restarted."""
    ended = run("serve", directory, "--served-model-name", "fails", "--port", "0", command=FAKE)
    assert ended.returncode == 1
    last = ended.stderr.splitlines()[-1]
    assert re.fullmatch(r"\S+Z ERROR baton: the engine failed: out of luck \[engine_unavailable\]", last)


@pytest.mark.usefixtures("forked")
def test_up_says_what_runs_and_how_to_ask_it(directory: str, tmp_path: Path) -> None:
    """The printed command is run unchanged; `ready:` comes last, for scripts that wait for it."""
    spec = json.dumps({"method": "eagle3", "model": str(tmp_path), "num_speculative_tokens": 2})
    flags = ["--speculative-config", spec, "--served-model-name", "it's mine", "--port", "0"]
    up = subprocess.Popen([*FAKE, "up", directory, *flags], stderr=subprocess.PIPE, text=True)
    assert up.stderr is not None
    try:
        lines: list[str] = []
        while not (lines and lines[-1].startswith("ready: ")):
            line = up.stderr.readline()
            stamped = re.fullmatch(r"\d{4}-\d\d-\d\dT[\d:.]{12}Z INFO (baton[\w.]*): (.*\n)", line)
            assert stamped, line
            if stamped[1] == "baton":
                lines.append(stamped[2])
        said = dict(line.strip().split(maxsplit=1) for line in lines if re.match(r"[\w-]+ +", line))
        assert said["model"] == f"it's mine ({directory})"
        assert said["drafter"] == f"eagle3 ({tmp_path}), 2 drafts a round"
        for name in ("prefill-0", "decode-0"):
            assert re.fullmatch(r"http://127.0.0.1:\d+, \d+ tokens of KV in pages of 16", said[name])
        answer = subprocess.run(said["try"], shell=True, capture_output=True, text=True, timeout=120)
        assert json.loads(answer.stdout)["model"] == "it's mine"
    finally:
        up.terminate()
        up.wait(LIMIT_S)
        up.stderr.close()


def test_version() -> None:
    shown = subprocess.run([*FAKE, "--version"], capture_output=True, text=True, timeout=60)
    assert (shown.returncode, shown.stdout) == (0, f"{baton.__version__}\n")


@contextlib.contextmanager
def killed_at_the_end(process: subprocess.Popen[str]) -> Iterator[None]:
    try:
        yield
    finally:
        process.kill()
        process.wait(LIMIT_S)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_up_ends_every_process(directory: str, number: signal.Signals) -> None:
    inherited = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under `nohup`, children ignore it
    try:
        up = subprocess.Popen([*FAKE, "up", directory, "--port", "0"], stderr=subprocess.PIPE, text=True)
    finally:
        signal.signal(signal.SIGHUP, inherited)
    assert up.stderr is not None
    with up.stderr, killed_at_the_end(up):
        lines: list[str] = []
        for line in up.stderr:
            lines.append(line)
            if " INFO baton: ready: " in line:
                break
        text = "".join(lines)
        assert "prefill-0: ready at http://127.0.0.1:" in text
        url = lines[-1].split()[4]
        assert ask(f"{url}/completions", {"prompt": "a", "max_tokens": 3})["choices"][0]["text"] == TEXT[:3]
        children = [int(p) for p in Path(f"/proc/{up.pid}/task/{up.pid}/children").read_text().split()]
        assert len(children) == 2
        up.send_signal(number)
        if number == signal.SIGTERM:
            up.send_signal(number)  # the second signal, which `timeout` sends to the group
        up.wait(LIMIT_S)
    wait_gone(*children)
    if number != signal.SIGKILL:
        assert up.returncode == 0


def test_a_signal_while_loading_ends_the_process(directory: str) -> None:
    read, write = os.pipe()
    command = [
        *FAKE,
        "serve",
        directory,
        "--served-model-name",
        "slow",
        "--port",
        "0",
        "--ready-fd",
        str(write),
    ]
    child = subprocess.Popen(command, pass_fds=(write,))
    os.close(write)
    seen = b""
    while b"loading nothing" not in seen:
        seen += os.read(read, 4096)
    os.close(read)
    deadline = time.monotonic() + LIMIT_S
    while child.poll() is None and time.monotonic() < deadline:  # as `timeout` and an impatient shell do
        child.terminate()
    assert child.wait(LIMIT_S) == 128 + signal.SIGTERM


def test_a_parent_that_died_while_its_child_imported(directory: str) -> None:
    """The kernel tells a child only of deaths after it has asked."""
    read, write = os.pipe()
    os.close(read)
    child = subprocess.Popen([*FAKE, "serve", directory, "--port", "0", "--ready-fd", str(write)], pass_fds=(write,))
    os.close(write)
    assert child.wait(LIMIT_S) == -signal.SIGTERM


def test_a_server_needs_no_standard_streams(directory: str) -> None:
    """As a daemon may start it: `baton serve ... <&- >&- 2>&-`."""
    read, write = os.pipe()
    command = [*FAKE, "serve", directory, "--port", "0", "--ready-fd", str(write)]
    child = subprocess.Popen(["sh", "-c", 'exec "$@" <&- >&- 2>&-', "-", *command], pass_fds=(write,))
    os.close(write)
    with os.fdopen(read) as reports:
        assert any('"ready"' in line for line in reports)
    assert {os.readlink(f"/proc/{child.pid}/fd/{number}") for number in range(3)} == {"/dev/null"}
    child.terminate()
    assert child.wait(LIMIT_S) == 0


@pytest.mark.parametrize(
    ("given", "spins"),
    [({}, "20000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, None)],
)
def test_idle_threads_let_go_of_a_core_soon(
    given: dict[str, str], spins: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command configures the OpenMP runtime, unless the user has."""
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit):
        main(["--version"])
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_char_p
    assert getenv(b"GOMP_SPINCOUNT") == (spins and spins.encode())


@pytest.mark.parametrize(
    ("num", "more", "error"),
    [(100, "", "did not start: it ended with status 0"), (10**6, ', "again": true', "no progress for 60 s")],
)
def test_a_start_may_take_as_long_as_it_makes_progress(
    directory: str, num: int, more: str, error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten seconds pass with each look at the clock, however long a slow machine takes for a report."""
    monkeypatch.setattr(processes, "time", SimpleNamespace(monotonic=itertools.count(0.0, 10.0).__next__))
    command = (sys.executable, "-c", REPORTS % (num, more))
    with pytest.raises(EngineUnavailableError, match=error):
        BreakableDeployment(directory, prefill=0, decode=0, both=1, command=command, start_timeout_s=60.0)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python has no flag for it")
def test_children_import_nothing_from_the_working_directory(tmp_path: Path) -> None:
    (tmp_path / "types.py").write_text("raise SystemExit('a stranger')")
    subprocess.run([*BATON, "--version"], cwd=tmp_path, check=True)
    modules = Path(baton.__file__).parent.rglob("*.py")
    assert [path.name for path in modules if "[sys.executable" in path.read_text(encoding="utf-8")] == []
