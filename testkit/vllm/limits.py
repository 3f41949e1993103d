"""`python -m testkit.vllm.limits`: configurations with drafters that vLLM itself cannot run on CPUs, or that
`BatonConnector` refuses. Needs vLLM's environment (`tools/install_vllm.py`).

Starts each one without Baton, and prints what vLLM says, and what the connector says to the same configuration.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from testkit.vllm.limit_cases import CASES, Arguments
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
RIGHT = f"{RUNS}0 of "  # how `outcome` begins if vLLM can do it


def engine_arguments(name: str, folder: Path) -> Arguments:
    """vLLM's, with `CASES[name]` over the demo model."""
    common = {"dtype": "float32", "enforce_eager": True, "max_model_len": 512, "kv_cache_memory_bytes": 32 << 20}
    return {"model": str(MODEL), **common, **CASES[name](folder)}


def connector_says(arguments: Arguments) -> str:
    """What `BatonConnector` says of a configuration at start; nothing if vLLM itself does not take it."""
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs

    from baton.errors import ConfigError
    from baton.vllm import compat

    transfer = KVTransferConfig(
        kv_connector="BatonConnector", kv_connector_module_path="baton.vllm", kv_role="kv_both", engine_id="ONE"
    )
    try:
        config = EngineArgs(**arguments, kv_transfer_config=transfer).create_engine_config()
    except Exception:
        return ""
    try:
        compat.check_config(config)
    except ConfigError as error:
        return str(error)
    return "takes it"


# vLLM looks through all imported modules for kernels to replace, and fails at those of other libraries: a process that
# imports vLLM alone.
_GENERATE = """
import json, sys
from vllm import LLM, SamplingParams
arguments, prompts, path = (json.loads(text) for text in sys.argv[1:])
sampling = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)
prompts = [{"prompt_token_ids": prompt} for prompt in prompts]
found = LLM(**arguments).generate(prompts, sampling, use_tqdm=False)
json.dump([list(each.outputs[0].token_ids) for each in found], open(path, "w"))
"""


def _generate(arguments: Arguments, path: Path) -> bool:
    """What vLLM generates goes to a file, and its output to another. Returns whether it had to be killed."""
    prompts = demo_prompts(range(40, 60), seed=3)
    command = [sys.executable, "-c", _GENERATE, *(json.dumps(each) for each in (arguments, prompts, str(path)))]
    with path.with_suffix(".log").open("w") as log:
        try:
            subprocess.run(command, stdout=log, stderr=log, timeout=LIMIT_S, env=os.environ | ENVIRONMENT, check=False)
        except subprocess.TimeoutExpired:
            return True
    return False


def outcome(name: str) -> tuple[str, str]:
    """What vLLM does alone, and what the connector says."""
    with tempfile.TemporaryDirectory(prefix="baton-limits-") as directory:
        drafting, plain = Path(directory) / "drafting", Path(directory) / "plain"
        arguments = engine_arguments(name, Path(directory))
        text = connector_says(arguments)
        hangs = _generate(arguments, drafting)
        if not drafting.exists():
            lines = drafting.with_suffix(".log").read_text(errors="replace").splitlines()
            found = next((match[1] for each in lines if (match := _ERROR.search(each))), "ends")
            return f"{'hangs: ' if hangs else ''}`{found}`", text
        del arguments["speculative_config"]
        if _generate(arguments, plain):
            return "hangs without speculation", text
        answers = [json.loads(path.read_text()) for path in (drafting, plain)]
        other = sum(one != without for one, without in zip(*answers, strict=True))
        return f"{RUNS}{other} of {len(answers[0])} answers are others than without speculation", text


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[*CASES], choices=[*CASES])
    arguments = parser.parse_args()
    print(f"| configuration | vLLM {version('vllm-cpu')} | BatonConnector |\n|---|---|---|", flush=True)
    for name in arguments.only:
        alone, connector = outcome(name)
        print(f"| {name} | {alone} | {connector or 'vLLM does not take it'} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
