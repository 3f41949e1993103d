"""Dependencies point one way, and every package exports what it says."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import pkgutil
from pathlib import Path

import pytest

import baton

SOURCE = Path(baton.__file__).parent
# The folder tests/vllm looks like a package of that name, so something inside the real one is asked for.
HAS_VLLM = importlib.util.find_spec("vllm") is not None and importlib.util.find_spec("vllm.distributed") is not None
NEED_VLLM = ("baton.vllm", "baton.bench.vllm_peers")
# What each package may import of Baton, besides itself, `baton.errors`, `baton.wire` and `baton.directories`.
ALLOWED: dict[str, set[str]] = {
    "kv": set(),
    "handoff": {"kv", "transports"},
    "transports": {"kv", "handoff"},
    "text": set(),
    "models": set(),
    "drafters": {"models"},
    "openai": {"text"},
    "engine": {"kv", "handoff", "transports", "models", "drafters", "text", "openai"},
    "server": {"engine", "openai", "text"},
    "router": {"openai", "text", "handoff"},
    "vllm": {"kv", "handoff", "transports", "models"},
}
# Finer than packages: the pure part of the handoff knows no transport, a transport knows no protocol.
PURE = {
    "messages",
    "ticket",
    "events",
    "prefill",
    "decode",
    "copies",
    "proofs",
    "digest",
    "interval",
    "planner",
    "fingerprint",
}
ROUTER_SEES = {"baton.handoff.ticket"}


def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("baton"):
            found.add(node.module)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.startswith("baton")}
    return found


@pytest.mark.parametrize("package", sorted(ALLOWED))
def test_imports_point_one_way(package: str) -> None:
    for path in (SOURCE / package).rglob("*.py"):
        for name in imports(path):
            parts = name.split(".")
            if len(parts) < 2 or parts[1] in ("errors", "wire", "directories", package):
                continue
            assert parts[1] in ALLOWED[package], f"{path.relative_to(SOURCE)} imports {name}"
            if package == "handoff" and path.stem in PURE:
                assert parts[1] != "transports", f"{path.relative_to(SOURCE)} is pure and imports {name}"
            if package == "router" and parts[1] == "handoff":
                assert name in ROUTER_SEES, f"{path.relative_to(SOURCE)} imports {name}"


def test_planner_and_protocol_need_no_torch() -> None:
    for package in ("kv", "handoff", "transports", "router", "openai", "text"):
        for path in (SOURCE / package).rglob("*.py"):
            assert "import torch" not in path.read_text(), path


def test_no_pickle_anywhere() -> None:
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                assert not {"pickle", "marshal", "shelve", "dill"} & {a.name for a in node.names}, path
            if isinstance(node, ast.ImportFrom):
                assert node.module not in {"pickle", "marshal", "shelve", "dill"}, path


def test_every_export_exists() -> None:
    modules = [baton.__name__] + [m.name for m in pkgutil.walk_packages(baton.__path__, "baton.")]
    for name in modules:
        if name.endswith("__main__") or (name.startswith(NEED_VLLM) and not HAS_VLLM):
            continue
        module = importlib.import_module(name)
        for exported in getattr(module, "__all__", []):
            assert hasattr(module, exported), f"{name}.__all__ names {exported}"


def test_top_level_exports() -> None:
    assert set(baton.__all__) == {"LLM", "SamplingParams", "__version__"}
