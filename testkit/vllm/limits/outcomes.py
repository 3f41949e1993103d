"""What vLLM does alone with each of `cases.CASES`, and what `BatonConnector` says to it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from testkit.vllm.forks import Forks
from testkit.vllm.limits.cases import CASES, Arguments
from testkit.vllm.quiet import small_servers
from testkit.vllm.servers import MODEL, demo_prompts

# With the engine's core in the first process its errors come as they are.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_SSM_CONV_STATE_LAYOUT": "DS",
}
LIMIT_S = 400.0  # only ends a hang
_ERROR = re.compile(r"\b((?:[A-Z]\w*)?(?:Error|Exception)(?:: .+)?)$")
RUNS = "runs; "
RIGHT = f"{RUNS}0 of "  # how an outcome begins if vLLM can do it


def engine_arguments(name: str, folder: Path) -> Arguments:
    """vLLM's, with `CASES[name]` over the demo model."""
    common = {"dtype": "float32", "enforce_eager": True, "max_model_len": 512, "kv_cache_memory_bytes": 32 << 20}
    return {"model": str(MODEL), **common, **CASES[name](folder)}


def connector_says(arguments: Arguments) -> str:
    """What `BatonConnector` says of a configuration at start; nothing if vLLM itself does not take it."""
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs

    from baton.errors import ConfigError
    from baton.vllm import support

    transfer = KVTransferConfig(
        kv_connector="BatonConnector", kv_connector_module_path="baton.vllm", kv_role="kv_both", engine_id="ONE"
    )
    try:
        config = EngineArgs(**arguments, kv_transfer_config=transfer).create_engine_config()
    except Exception:
        return ""
    try:
        support.check_config(config)
    except ConfigError as error:
        return str(error)
    return "takes it"


def _generate(forks: Forks, arguments: Arguments, path: Path) -> bool:
    """What vLLM generates goes to a file, and its output to another. Returns whether it had to be killed."""
    prompts = demo_prompts(range(40, 60), seed=3)
    told = [*(json.dumps(each) for each in (arguments, prompts)), str(path)]
    process = forks.run("testkit.vllm.limits.generate", told, ENVIRONMENT, path.with_suffix(".log"))
    try:
        process.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        return True
    finally:  # workers may outlive an engine that fails
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return False


def limits_of(names: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Of each of `CASES`: what vLLM does alone, and what the connector says."""
    with (
        tempfile.TemporaryDirectory(prefix="baton-limits-") as directory,
        small_servers(Path(directory) / "quiet") as forks,
    ):
        for number, name in enumerate(names):
            folder = Path(directory) / str(number)
            folder.mkdir()
            yield _outcome(forks, name, folder)


def _outcome(forks: Forks, name: str, folder: Path) -> tuple[str, str]:
    drafting, plain, arguments = folder / "drafting", folder / "plain", engine_arguments(name, folder)
    text = connector_says(arguments)
    hangs = _generate(forks, arguments, drafting)
    if not drafting.exists():
        lines = drafting.with_suffix(".log").read_text(errors="replace").splitlines()
        found = next((match[1] for each in lines if (match := _ERROR.search(each))), "ends")
        return f"{'hangs: ' if hangs else ''}`{found}`", text
    del arguments["speculative_config"]
    if _generate(forks, arguments, plain):
        return "hangs without speculation", text
    answers = [json.loads(path.read_text()) for path in (drafting, plain)]
    other = sum(one != without for one, without in zip(*answers, strict=True))
    return f"{RUNS}{other} of {len(answers[0])} answers are others than without speculation", text
