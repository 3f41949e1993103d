"""A `baton verify` of the demo model, in a separate process."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from testkit.processes.leftovers import orphaned_segments

TARGET = "models/baton-demo-llama"
EAGLE3 = {"method": "eagle3", "model": "models/baton-demo-eagle3", "num_speculative_tokens": 3}


def verify(*flags: str, lengths: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "baton.cli", "verify", TARGET, "--lengths", lengths, "--max-tokens", "20", *flags]
    command += ["--speculative-config", json.dumps(EAGLE3)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)
    assert not orphaned_segments()
    return result
