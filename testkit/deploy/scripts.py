"""What the example scripts run, recorded by stand-ins for `baton`, the engines and `curl`."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPTS = sorted(EXAMPLES.glob("*/*.sh"))
# The arguments of each script, by its name.
CALLS: dict[str, list[list[str]]] = {
    "cpu.sh": [["MODEL"]],
    "gpu_host.sh": [["MODEL"]],
    "two_hosts.sh": [
        ["prefill", "MODEL", "10.0.0.1"],
        ["decode", "MODEL", "10.0.0.2"],
        ["router", "MODEL", "10.0.0.1", "10.0.0.2"],
    ],
}
# `curl` succeeds when both servers of a script are there, after `baton keys`.
_STAND_IN = f"""#!{sys.executable}
import json, os, sys, time
folder = os.environ["RECORDED"]
if os.path.basename(sys.argv[0]) == "curl":
    while sum(name.endswith(".json") for name in os.listdir(folder)) < 3:
        time.sleep(0.01)
    sys.exit()
path = os.path.join(folder, str(os.getpid()))
words = [os.path.basename(sys.argv[0]), *sys.argv[1:]]
with open(path, "w") as file:
    json.dump({{"words": words, "variables": dict(os.environ), "at": time.monotonic()}}, file)
os.rename(path, path + ".json")
"""


@dataclass(frozen=True, slots=True)
class Command:
    """A command line of a script with its environment. `words`: without the interpreter and `-m`."""

    words: list[str]
    variables: dict[str, str]

    def flag(self, name: str) -> str:
        return self.words[self.words.index(name) + 1]


def commands(script: Path, arguments: Sequence[str], folder: Path) -> list[Command]:
    """Raises `CalledProcessError` if the script fails."""
    programs, recorded = folder / "bin", folder / "recorded"
    programs.mkdir(parents=True)
    recorded.mkdir()
    for name in ("baton", "vllm", "sglang", "python", "curl"):
        (programs / name).write_text(_STAND_IN)
        (programs / name).chmod(0o755)
    path = os.pathsep.join([str(programs), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "RECORDED": str(recorded), "KEYS": str(folder / "keys")}
    subprocess.run(["bash", str(script), *arguments], env=environment, check=True, timeout=300)
    found = sorted((json.loads(file.read_text()) for file in recorded.glob("*.json")), key=lambda each: each["at"])
    return [Command(_program(each["words"]), each["variables"]) for each in found]


def _program(words: list[str]) -> list[str]:
    if words[:2] != ["python", "-m"]:
        return words
    return ["baton" if words[2] == "baton.cli" else words[2], *words[3:]]


def engine_commands(engine: str, folder: Path) -> list[list[str]]:
    """The arguments of each server that the scripts of "vllm" or "sglang" start."""
    calls = [(script, words) for script in SCRIPTS if script.parent.name == engine for words in CALLS[script.name]]
    ran = [each for n, (script, words) in enumerate(calls) for each in commands(script, words, folder / str(n))]
    return _servers(engine, ran)


def documented_commands(engine: str, folder: Path) -> list[list[str]]:
    """The arguments of each server that docs/vllm.md or docs/sglang.md starts in a code block."""
    text = (EXAMPLES.parent / "docs" / f"{engine}.md").read_text("utf-8")
    script = folder / f"{engine}.sh"
    blocks = re.findall(r"^ *```\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL)
    script.write_text("".join(block for block in blocks if f"{engine} serve" in block))
    return _servers(engine, commands(script, [], folder / engine))


def _servers(engine: str, ran: Sequence[Command]) -> list[list[str]]:
    programs = [engine, "serve"], ["vllm.entrypoints.openai.api_server"]
    words = [each.words for each in ran]
    return [each[len(program) :] for each in words for program in programs if each[: len(program)] == program]
