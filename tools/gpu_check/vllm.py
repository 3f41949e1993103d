"""vLLM with `BatonConnector` over NIXL on one GPU: P, D and a server to compare with share it. About ten minutes.

Each case changes what the case before leaves alone, so a failure names the assumption that does not hold:

1. eager steps in turns, `--no-async-scheduling`: memory of the device is registered, opened and copied whole;
2. vLLM's defaults, CUDA graphs and asynchronous scheduling: the connector's waits suffice, since a step that was only
   queued is neither committed nor overwritten;
3. EAGLE-3 and unequal blocks: a drafter's KV is there when its step ends, and rows have addresses.

It has not run yet: it needs a machine with a GPU, vLLM and NIXL.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from baton.errors import EngineUnavailableError
from baton.handoff.session.keys import make_keys
from benchmarks.vllm.servers import ServerConfig, free_port, serve

_START_S = 60.0


@dataclass(frozen=True, slots=True)
class Case:
    """`flags` of all servers; `prefill` of P alone."""

    name: str
    flags: Sequence[str] = ()
    prefill: Sequence[str] = ()
    drafts: bool = False


CASES = (
    Case("eager, in turns", ["--enforce-eager", "--no-async-scheduling"]),
    Case("CUDA graphs, asynchronous scheduling", ["--no-enforce-eager", "--async-scheduling"]),
    Case("the same, EAGLE-3, blocks of 32 and 16", ["--no-enforce-eager"], ["--block-size", "32"], drafts=True),
)
_ON_GPU = ["--dtype", "bfloat16", "--gpu-memory-utilization", "0.2"]


def check(models: Path, device: Sequence[str] = _ON_GPU) -> bool:
    """`baton verify` of each case against one vLLM. `device`: flags of all servers."""
    for package in ("vllm", "nixl"):
        try:
            print(f"- {package} {version(package)}")
        except PackageNotFoundError:
            print(f"- {package} is not installed: not run")
            return False
    good = True
    for case in CASES:
        with tempfile.TemporaryDirectory(prefix="baton-vllm-") as folder:
            good &= _verified(case, models, Path(folder), device)
    return good


def _verified(case: Case, models: Path, folder: Path, device: Sequence[str]) -> bool:
    target = models / "baton-demo-llama"
    spec = {"method": "eagle3", "model": str(models / "baton-demo-eagle3"), "num_speculative_tokens": 3}
    flags = [*device, *case.flags, *(["--speculative-config", json.dumps(spec)] if case.drafts else [])]
    keys = folder / "keys"
    make_keys(keys, ["P", "D"])
    configs = [
        ServerConfig(name, [*flags, *more], None if role is None else _transfer(name, role, keys))
        for name, role, more in (("P", "kv_producer", case.prefill), ("D", "kv_consumer", ()), ("one", None, ()))
    ]
    with serve(sys.executable, str(target), folder, configs) as (p, d, one), _router(p.url, d.url, keys, target) as url:
        command = [sys.executable, "-m", "baton.cli", "verify", "--reference", one.url, "--candidate", url]
        command += ["--modes", "push,pull", "--lengths", "1-40,63,64,65,200,1000", "--max-tokens", "24"]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = ended.stdout.strip().splitlines() or ended.stderr.strip().splitlines()[-3:]
    print(f"- {case.name}: {lines[-1] if lines else 'no output'}")
    for line in lines[:-1]:
        print(f"  - {line}")
    return ended.returncode == 0


def _transfer(name: str, role: str, keys: Path) -> dict[str, object]:
    return {
        "kv_connector": "BatonConnector",
        "kv_connector_module_path": "baton.vllm",
        "kv_role": role,
        "engine_id": name,
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": {"keys": str(keys)},
    }


@contextlib.contextmanager
def _router(prefill: str, decode: str, keys: Path, target: Path) -> Iterator[str]:
    port = free_port()
    command = [sys.executable, "-m", "baton.cli", "router", "--engine", "vllm", "--prefill", prefill]
    command += ["--decode", decode, "--keys", str(keys), "--tokenizer", str(target), "--port", str(port)]
    router, url = subprocess.Popen(command), f"http://127.0.0.1:{port}"

    until = time.monotonic() + _START_S
    try:
        while True:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{url}/health", timeout=5).close()
                break
            if router.poll() is not None or time.monotonic() > until:
                raise EngineUnavailableError("the router did not start")
            time.sleep(0.5)
        yield url
    finally:
        router.terminate()
        router.wait(30)
