"""These tests start real SGLang servers and are not collected without SGLang. `make test-sglang` installs it."""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, version

from testkit.sglang.launch import SUPPORT

try:
    version("sglang")
    # Some tests import SGLang themselves.
    sys.path.insert(0, str(SUPPORT))
except PackageNotFoundError:
    collect_ignore_glob = ["test_*.py"]
