"""These tests start real SGLang servers and are not collected without SGLang. `make test-sglang` installs it."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

try:
    version("sglang")
except PackageNotFoundError:
    collect_ignore_glob = ["test_*.py"]
