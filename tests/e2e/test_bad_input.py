"""Invalid input ends at once, with one line that names the cause."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import msgspec
import pytest

from baton.handoff.protocol.ticket import Ticket, load_or_create_key, request_digest, sign_ticket
from baton.sampling_params import SamplingParams
from baton.wire import EngineInfo
from testkit.checkpoints.common import make_checkpoint, make_drafter
from testkit.processes.running import run, running

MODEL = "models/baton-demo-llama"
pytestmark = pytest.mark.usefixtures("forks")


def refuse(*arguments: str) -> str:
    """Run `baton` with arguments that it must refuse. Returns its one line."""
    result = run(*arguments)
    assert result.returncode not in (0, None), result.stderr
    assert result.returncode > 0, f"ended by signal {-result.returncode}: {result.stderr}"
    assert "Traceback" not in result.stderr
    lines = [re.sub(r"^\S+Z ERROR baton: ", "error: ", line) for line in result.stderr.splitlines()]
    errors = [line for line in lines if line.startswith("error: ")]
    assert len(errors) == 1, result.stderr
    assert lines[-1] == errors[0], "the cause must be the last line"
    return errors[0]


def test_missing_checkpoint(tmp_path: Path) -> None:
    line = refuse("serve", str(tmp_path / "nowhere"), "--port", "0")
    assert "model" in line
    assert "nowhere" in line


def test_truncated_weights(tmp_path: Path) -> None:
    copy = tmp_path / "half"
    shutil.copytree(MODEL, copy)
    weights = copy / "model.safetensors"
    os.truncate(weights, weights.stat().st_size // 2)
    assert "model.safetensors" in refuse("serve", str(copy), "--port", "0")


def test_drafter_of_another_width(tmp_path: Path) -> None:
    target = make_checkpoint(tmp_path / "target", "llama")
    drafter = make_drafter(tmp_path / "drafter", "eagle", target)
    speculative = json.dumps({"method": "eagle", "model": str(drafter), "num_speculative_tokens": 2})
    line = refuse("serve", MODEL, "--port", "0", "--speculative-config", speculative)
    assert "64" in line
    assert "256" in line


def test_a_setting_that_only_an_engine_of_up_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_FLAG_KV_CACHE_MEMORY", "4096")
    line = refuse("up", MODEL, "--port", "0")
    assert line.startswith("error: kv_cache_memory: in the variable BATON_FLAG_KV_CACHE_MEMORY: must be at least ")
    assert re.search(r"\((prefill|decode)-0 did not start\) \[config\]$", line)


def test_unknown_flag() -> None:
    result = run("serve", MODEL, "--frobnicate", "1")
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    assert len([line for line in result.stderr.splitlines() if "No such option" in line]) == 1
    assert "--frobnicate" in result.stderr


def test_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = f"error: port: {port} on 127.0.0.1 is already in use [config]"
        assert refuse("serve", MODEL, "--port", str(port)) == said


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("{not json", "speculative_config: is not JSON"),
        ('{"method": "eagle"}', "speculative_config.model"),
        ('{"method": "eagle", "model": "x", "num_speculative_tokens": 0}', "num_speculative_tokens"),
        ('{"method": "eagle", "model": "x", "nonsense": 1}', "nonsense"),
        ('{"method": "nonsense", "model": "models/baton-demo-eagle"}', "nonsense"),
    ],
)
def test_bad_speculative_config(text: str, names: str) -> None:
    assert names in refuse("serve", MODEL, "--port", "0", "--speculative-config", text)


# ---------------------------------------------------------------- incompatible engines


def ask(url: str, body: object = None, token: str = "") -> tuple[int, bytes]:
    """GET, or POST of JSON. Returns (status, body). Raises if there is no answer in time."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {token}"}
    request = urllib.request.Request(url, data, headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Two targets of one shape, and two drafters of one shape for the first."""
    directory = tmp_path_factory.mktemp("models")
    targets = [make_checkpoint(directory / f"target-{seed}", "llama", seed=seed) for seed in (0, 1)]
    drafters = [make_drafter(directory / f"drafter-{seed}", "eagle", targets[0], seed=seed) for seed in (0, 1)]
    return {path.name: str(path) for path in [*targets, *drafters]}


def engine_flags(models: dict[str, str], target: str, drafter: str | None) -> list[str]:
    flags = [models[target], "--served-model-name", "tiny", "--kv-cache-memory", str(4 * 2**20)]
    if drafter is not None:
        speculative = {"method": "eagle", "model": models[drafter], "num_speculative_tokens": 2}
        flags += ["--speculative-config", json.dumps(speculative)]
    return flags


def decode_leg(prefill: dict[str, Any], decode: dict[str, Any], key: bytes) -> dict[str, object]:
    """The body of a decode leg with a valid ticket for this pair, as from a router that does not compare engines."""
    params = SamplingParams(max_tokens=4, temperature=0.0, seed=0)
    prompt = [5, 6, 7, 8]
    p, d = (msgspec.convert(info, EngineInfo) for info in (prefill, decode))
    expiry = time.monotonic() + 100  # for every engine on this host
    ticket = Ticket.between(p, d, "push", request_digest(prompt, params), (expiry, expiry))
    return {
        "request_id": "leg",
        "prompt_token_ids": prompt,
        "sampling_params": {"max_tokens": 4, "temperature": 0.0, "seed": 0},
        "handoff": {"role": "decode", "ticket": sign_ticket(key, ticket)},
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prefill", "decode", "field"),
    [
        (("target-0", None), ("target-1", None), "model.weights"),
        (("target-0", "drafter-0"), ("target-0", "drafter-1"), "drafter.weights"),
        (("target-0", "drafter-0"), ("target-0", None), "drafter.method"),
    ],
    ids=["target", "drafter", "no drafter"],
)
def test_engines_that_differ(
    tmp_path: Path,
    models: dict[str, str],
    prefill: tuple[str, str | None],
    decode: tuple[str, str | None],
    field: str,
) -> None:
    key_file = str(tmp_path / "ticket.key")
    key = load_or_create_key(key_file)
    with contextlib.ExitStack() as stack:
        urls = [
            stack.enter_context(
                running(
                    tmp_path / role,
                    "serve",
                    *engine_flags(models, *which),
                    *("--role", role, "--engine-id", role, "--ticket-key-file", key_file),
                )
            ).url
            for role, which in (("prefill", prefill), ("decode", decode))
        ]
        # A router that knows both from the start does not start.
        flags = ["--ticket-key-file", key_file, "--prefill", urls[0]]
        assert field in refuse("router", *flags, "--decode", urls[1], "--port", "0")

        # A running router does not let the second join: requests run on the first alone.
        token_file = tmp_path / "admin.token"
        router = stack.enter_context(
            running(tmp_path / "router", "router", *flags, "--admin-token-file", str(token_file))
        ).url
        token = token_file.read_text().strip()
        status, body = ask(f"{router}/instances/add", {"url": urls[1], "role": "decode"}, token)
        assert status == 409
        assert field in body.decode()
        status, body = ask(f"{router}/v1/completions", {"prompt": "a", "max_tokens": 4})
        assert status == 200
        status, body = ask(f"{router}/status")
        assert "no decode engine" in json.dumps(json.loads(body)["decisions"]), body

        # Engines do not rely on the router for this: they refuse each other, and the request ends with that error.
        infos = [json.loads(ask(f"{url}/inference/v1/info")[1]) for url in urls]
        status, body = ask(f"{urls[1]}/inference/v1/generate", decode_leg(*infos, key))
        chunk = json.loads(body.splitlines()[-1])
        assert status == 200
        assert chunk["finish_reason"] == "error"
        assert chunk["error"].startswith("incompatible_peer: ")
        assert field in chunk["error"]
        load = json.loads(ask(f"{urls[1]}/inference/v1/load")[1])
        assert load["num_referenced_pages"] == load["num_quarantined_pages"] == 0
