"""A `baton verify` of the demo model, in a separate process."""

from __future__ import annotations

import json
import subprocess

from testkit.processes.leftovers import orphaned_segments
from testkit.processes.running import run

TARGET = "models/baton-demo-llama"
EAGLE3 = {"method": "eagle3", "model": "models/baton-demo-eagle3", "num_speculative_tokens": 3}


def verify(*flags: str, lengths: str) -> subprocess.CompletedProcess[str]:
    given = ["--lengths", lengths, "--max-tokens", "20", "--kv-cache-memory", "32M", *flags]
    given += ["--speculative-config", json.dumps(EAGLE3)]
    result = run("verify", TARGET, *given, limit_s=500)
    assert not orphaned_segments()
    return result
