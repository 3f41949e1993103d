"""A benchmark that lacks a program or a package, or is asked for too little, says so at once, in one line."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HAS_SDK = importlib.util.find_spec("opentelemetry") and importlib.util.find_spec("opentelemetry.sdk")


@pytest.mark.parametrize(
    ("arguments", "end"),
    [
        (["benchmarks.engine.against_llama_cpp", "/nowhere"], "error: /nowhere has no llama-bench"),
        (["benchmarks.serving.event_index", "5"], "error: BLOCKS must be above 2048, which shared prefixes take"),
        pytest.param(
            ["benchmarks.serving.span_encoding"],
            "pip install opentelemetry-exporter-otlp-proto-http",
            marks=pytest.mark.skipif(bool(HAS_SDK), reason="OpenTelemetry's SDK is here"),
        ),
    ],
)
def test_what_is_missing_is_named(arguments: list[str], end: str) -> None:
    command = [sys.executable, "-m", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode in (1, 2)
    assert done.stderr.rstrip().endswith(end)
    assert "Traceback" not in done.stderr
