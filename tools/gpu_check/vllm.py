"""vLLM with `BatonConnector` over NIXL on one GPU: P, D and a server to compare with share it. About ten minutes.

    python -m tools.gpu_check.vllm [--cases eager,graphs] [--jobs 2] [--seconds 300] [--logs DIR]

Each case changes what the case before leaves alone, so a failure names the assumption that does not hold:

1. eager steps in turns, `--no-async-scheduling`: memory of the device is registered, opened and copied whole;
2. CUDA graphs and asynchronous scheduling: the connector's waits suffice, since a step that was only queued is neither
   committed nor overwritten;
3. EAGLE-3 and unequal blocks: a drafter's KV is there when its step ends, and rows have addresses;
4. the V1 model runner in turns, EAGLE-3: the decode server's first step verifies the first token, so verifications
   begin one token later than with one server, and acceptance is not compared;
5. vLLM's defaults, with `torch.compile`. This case has not run yet.

In each: `baton verify` against one vLLM, clients that leave, and the prefill server's death under load, after which no
block may be held. vLLM computes batch-invariantly, so tokens are to be equal; near-ties are counted apart.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from baton.children import die_with_parent
from baton.errors import BatonError, EngineUnavailableError
from baton.handoff.session.keys import make_keys
from benchmarks.vllm.servers import ServerConfig, VllmServer, free_port, serve
from tools.gpu_check import vllm_requests

MODELS = Path(__file__).parents[2] / "models"
_LENGTHS, _AT_ONCE, _SAMPLED = "1-40,63,64,65,200,1000", "2-33,500,1500,3000", "5-20,100"
_START_S = 60.0
_LOG_TAIL = 1500


@dataclass(frozen=True, slots=True)
class Case:
    """`flags` and `environment` of all servers; `prefill`: flags of P alone. `drafts`: with EAGLE-3. `counted`:
    accepted drafts are compared."""

    what: str
    flags: Sequence[str] = ()
    prefill: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    drafts: bool = False
    counted: bool = False


# Graphs of whole steps need no compiler, so the case is about graphs alone.
_GRAPHS = ["--no-enforce-eager", "--compilation-config", json.dumps({"mode": 0, "cudagraph_mode": "FULL"})]
_TURNS = "--no-async-scheduling"
_V1 = {"VLLM_USE_V2_MODEL_RUNNER": "0"}
CASES = {
    "eager": Case("eager, in turns", ["--enforce-eager", _TURNS]),
    "graphs": Case("CUDA graphs, asynchronous scheduling", [*_GRAPHS, "--async-scheduling"]),
    "drafts": Case(
        "the same, EAGLE-3, blocks of 32 and 16", _GRAPHS, ["--block-size", "32"], drafts=True, counted=True
    ),
    "v1": Case("V1 runner in turns, EAGLE-3", [*_GRAPHS, _TURNS], environment=_V1, drafts=True),
    "compiled": Case("vLLM's defaults", ["--no-enforce-eager"]),
}
_ON_GPU = ["--dtype", "bfloat16", "--gpu-memory-utilization", "0.05", "--kv-cache-memory-bytes", "1G"]
_ON_GPU += ["--max-num-seqs", "32"]
_INVARIANT = {"VLLM_BATCH_INVARIANT": "1"}
_TIE = "0.1"  # nats


@dataclass(frozen=True)
class Options:
    """`jobs`: cases that share the GPU. `seconds`: for one case. `logs`: where the servers' logs are kept. `flags`: of
    all servers, before a case's."""

    jobs: int = 1
    seconds: float = 300.0
    logs: Path | None = None
    flags: str = ""


def check(models: Path = MODELS, names: Sequence[str] = tuple(CASES), options: Options | None = None) -> bool:
    """Each case in a process of its own; what it told is printed when it has ended."""
    for package in ("vllm", "nixl"):
        try:
            print(f"- {package} {version(package)}", flush=True)
        except PackageNotFoundError:
            print(f"- {package} is not installed: not run")
            return False
    chosen = options or Options()
    with ThreadPoolExecutor(chosen.jobs) as pool:
        return all(list(pool.map(lambda name: _run(name, models, chosen), names)))


def _run(name: str, models: Path, options: Options) -> bool:
    command = [sys.executable, "-m", "tools.gpu_check.vllm", "--one", name, "--models", str(models)]
    command += [f"--flags={options.flags}", *([] if options.logs is None else ["--logs", str(options.logs / name)])]
    started, ending = time.monotonic(), ""
    # A file, not a pipe: it has the results of a case that is ended, and no process of it keeps it open.
    with tempfile.TemporaryFile("w+") as told:
        process = subprocess.Popen(command, stdout=told, stderr=subprocess.STDOUT, preexec_fn=die_with_parent)
        try:
            process.wait(options.seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            ending = f"  - ended after {options.seconds:.0f} s\n"
        told.seek(0)
        print(f"- {CASES[name].what} ({time.monotonic() - started:.0f} s):\n{told.read()}{ending}", end="", flush=True)
    return process.returncode == 0


def run_case(case: Case, models: Path, folder: Path, flags: Sequence[str] = ()) -> bool:
    """`flags`: of all servers, before the case's. Prints as it goes."""
    with _deployed(case, models, folder, flags) as (servers, url):
        print(f"  - servers are ready after {time.monotonic() - _BEGAN:.0f} s", flush=True)
        target = models / "baton-demo-llama"
        good = _verify(case, servers, url, target, "--lengths", _LENGTHS)
        good &= vllm_requests.leave(servers, url)
        good &= _verify(case, servers, url, target, "--lengths", _AT_ONCE, "--concurrency", "8")
        if not case.drafts:
            good &= _verify(case, servers, url, target, "--lengths", _SAMPLED, "--temperature", "0.7", "--seed", "1")
        return good & vllm_requests.kill(servers, url)


_BEGAN = time.monotonic()


@contextlib.contextmanager
def _deployed(
    case: Case, models: Path, folder: Path, flags: Sequence[str]
) -> Iterator[tuple[Sequence[VllmServer], str]]:
    """P, D and one that is alone, and the URL of the router before the first two."""
    target = models / "baton-demo-llama"
    spec = {"method": "eagle3", "model": str(models / "baton-demo-eagle3"), "num_speculative_tokens": 3}
    drafting = ["--speculative-config", json.dumps(spec)] if case.drafts else []
    all_flags = [*_ON_GPU, *flags, *case.flags, *drafting]
    keys = folder / "keys"
    make_keys(keys, ["P", "D"])
    environment = {**_INVARIANT, **case.environment}
    configs = [
        ServerConfig(name, [*all_flags, *more], None if role is None else transfer(name, role, keys), environment)
        for name, role, more in (("P", "kv_producer", case.prefill), ("D", "kv_consumer", ()), ("one", None, ()))
    ]
    with (
        serve(sys.executable, str(target), folder, configs) as servers,
        router(servers[0].url, servers[1].url, keys, target) as url,
    ):
        try:
            yield servers, url
        except BatonError:
            for server in servers:
                print(f"  - end of {server.log}:\n{server.log.read_text(errors='replace')[-_LOG_TAIL:]}", flush=True)
            raise


def _verify(case: Case, servers: Sequence[VllmServer], url: str, target: Path, *more: str) -> bool:
    _, decode, one = servers
    command = [sys.executable, "-m", "baton.cli", "verify", str(target), "--reference", one.url, "--candidate", url]
    command += ["--modes", "push,pull", "--max-tokens", "24", "--near-tie", _TIE, *more]
    if case.counted:
        command += ["--reference-metrics", one.url, "--candidate-metrics", decode.url]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = ended.stdout.strip().splitlines() or ended.stderr.strip().splitlines()[-3:]
    for line in [*lines, vllm_requests.outcomes(decode)]:
        print(f"  - {line}", flush=True)
    return ended.returncode == 0


def transfer(name: str, role: str, keys: Path) -> dict[str, object]:
    return {
        "kv_connector": "BatonConnector",
        "kv_connector_module_path": "baton.vllm",
        "kv_role": role,
        "engine_id": name,
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": {"keys": str(keys)},
    }


@contextlib.contextmanager
def router(prefill: str, decode: str, keys: Path, target: Path) -> Iterator[str]:
    port = free_port()
    command = [sys.executable, "-m", "baton.cli", "router", "--engine", "vllm", "--prefill", prefill]
    command += ["--decode", decode, "--keys", str(keys), "--tokenizer", str(target), "--port", str(port)]
    command += ["--allow-mode-override", "--log-level", "warning"]
    process = subprocess.Popen(command, preexec_fn=die_with_parent)
    url = f"http://127.0.0.1:{port}"
    until = time.monotonic() + _START_S
    try:
        while True:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{url}/health", timeout=5).close()
                break
            if process.poll() is not None or time.monotonic() > until:
                raise EngineUnavailableError("the router did not start")
            time.sleep(0.5)
        yield url
    finally:
        process.terminate()
        process.wait(30)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.gpu_check.vllm", allow_abbrev=False)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--jobs", type=int, default=Options.jobs, help="cases that share the GPU")
    parser.add_argument("--seconds", type=float, default=Options.seconds, help="for one case")
    parser.add_argument("--models", type=Path, default=MODELS)
    parser.add_argument("--logs", type=Path, help="keep the servers' logs here")
    parser.add_argument("--flags", default="", help="further flags of all servers")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one is None:
        options = Options(given.jobs, given.seconds, given.logs, given.flags)
        return int(not check(given.models, given.cases.split(","), options))
    with tempfile.TemporaryDirectory(prefix="baton-vllm-") as folder:
        logs = given.logs or Path(folder)
        logs.mkdir(parents=True, exist_ok=True)
        return int(not run_case(CASES[given.one], given.models, logs, shlex.split(given.flags)))


if __name__ == "__main__":
    sys.exit(main())
