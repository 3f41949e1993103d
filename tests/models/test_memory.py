"""Peak memory during loading: the weights once, not again as a mapped file or before packing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from testkit.checkpoints.common import make_checkpoint

LOADS = """
import sys

from baton.models.loading import filling, loader


def peak():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) << 10


before = peak()
filling._MAPPED_SIZE = 1 << 23
model = loader.load_model(sys.argv[1])
print(peak() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peaks are read from /proc")
def test_weights_are_in_memory_once_while_they_are_loaded(tmp_path: Path) -> None:
    wide = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 8, "num_key_value_heads": 8}
    path = make_checkpoint(tmp_path, "llama", num_hidden_layers=4, head_dim=128, torch_dtype="bfloat16", **wide)
    size = (path / "model.safetensors").stat().st_size
    assert size > 100 << 20
    run = subprocess.run([sys.executable, "-c", LOADS, str(path)], capture_output=True, text=True, check=True)
    assert int(run.stdout) < 1.4 * size
