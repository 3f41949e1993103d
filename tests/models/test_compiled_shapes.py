"""oneDNN's cache of products of many shapes is bounded."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SCRIPT = """
import torch  # as a user's program may, before baton
from baton.models.layers.linear import Build, Linear

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

build = Build(torch.float32, torch.device("cpu"), False)
layer = Linear(256, 256, build)
torch.nn.init.normal_(layer.weight)
layer.pack()
layer(torch.randn(900, 256))
before = resident()
for rows in range(20, 900):
    layer(torch.randn(rows, 256))
print(resident() - before)
"""


def grown(**environment: str) -> int:
    kept = {name: value for name, value in os.environ.items() if not name.endswith("_CACHE_CAPACITY")}
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, env=kept | environment, capture_output=True, text=True, timeout=300, check=True)
    return int(done.stdout)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_shapes_that_are_not_met_again_take_no_memory_for_long() -> None:
    kept = grown(ONEDNN_PRIMITIVE_CACHE_CAPACITY="1024", LRU_CACHE_CAPACITY="1024")
    if kept < 50 << 20:
        pytest.skip("this CPU's products are not compiled for each shape")
    assert grown() < kept / 2
