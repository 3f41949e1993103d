"""Dependencies point one way, and every package exports what it declares."""

from __future__ import annotations

import ast
import functools
import graphlib
import importlib
import importlib.util
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import baton

SOURCE = Path(baton.__file__).parent
HAS_VLLM = importlib.util.find_spec("vllm") is not None
NEEDS_TRITON = "baton.kernels.triton."
NEED_VLLM = ("baton.vllm",)
NEEDS_SGLANG = "baton.sglang.conn"
# The rooms, lowest first, and what each may import of Baton besides itself and the common modules. A room sees only
# rooms above its own line here, so no two import each other.
COMMON = {
    "baton.checkpoint_files",
    "baton.children",
    "baton.clock",
    "baton.comparison",
    "baton.directories",
    "baton.histogram",
    "baton.error_help",
    "baton.errors",
    "baton.event_loop",
    "baton.imports",
    "baton.jit_cache",
    "baton.log_limit",
    "baton.own_memory",
    "baton.sampling_params",
    "baton.setting",
    "baton.urls",
    "baton.wire",
    "baton.zeromq",
}
ROOMS: dict[str, set[str]] = {
    "kv": set(),
    "kvstore": {"kv"},
    "kvevents": {"kv"},
    "transports": {"kv", "kvstore"},
    "handoff.plan": {"kv"},
    "handoff.protocol": {"kv", "handoff.plan"},
    "handoff.session": {"kv", "handoff.plan", "handoff.protocol", "transports"},
    "handoff.agent": {"kv", "handoff.plan", "handoff.protocol", "handoff.session", "transports"},
    "text": set(),
    "parsing": set(),
    "structured": {"text"},
    "kernels": set(),
    "models": {"kernels"},
    "drafters": {"models"},
    "openai": {"text", "parsing"},
    "observe": set(),
    "engine": {
        "kv",
        "kvstore",
        "kvevents",
        "handoff.plan",
        "handoff.protocol",
        "handoff.session",
        "handoff.agent",
        "transports",
        "kernels",
        "models",
        "drafters",
        "text",
        "structured",
        "openai",
    },
    "server": {"engine", "openai", "text"},
    "router": {"kvevents", "openai", "observe", "text", "handoff.protocol"},
    "plugin_base": {
        "kv",
        "handoff.plan",
        "handoff.protocol",
        "handoff.session",
        "handoff.agent",
        "transports",
        "models",
    },
    "vllm": {
        "plugin_base",
        "kv",
        "handoff.plan",
        "handoff.protocol",
        "handoff.session",
        "handoff.agent",
        "transports",
    },
    "sglang": {
        "plugin_base",
        "kv",
        "handoff.plan",
        "handoff.protocol",
        "handoff.session",
        "handoff.agent",
        "transports",
    },
    "testing": {"kv", "kvstore", "transports", "handoff.protocol", "handoff.agent"},
    "deployment": {"handoff.session", "handoff.protocol", "transports", "engine"},
    "verify": {"engine", "openai", "text", "transports", "deployment"},
    "bench": {
        "kv",
        "handoff.plan",
        "handoff.protocol",
        "handoff.agent",
        "transports",
        "testing",
        "engine",
        "text",
        "openai",
        "verify",
        "deployment",
    },
    "doctor": {"handoff.session", "openai", "router"},
    "cli": {
        "parsing",
        "handoff.session",
        "handoff.protocol",
        "kernels",
        "engine",
        "text",
        "openai",
        "observe",
        "server",
        "router",
        "verify",
        "bench",
        "doctor",
        "deployment",
    },
}
# The handoff sees transports only through one module, the seam.
SEAMS = {"handoff.session": {"baton.transports.base"}, "handoff.agent": {"baton.transports.base"}}
SEAMS["router"] = {"baton.handoff.protocol.ticket"}
# No clock, no thread, no socket, no file: events in, actions out.
PURE = ("handoff.plan", "handoff.protocol", "kv")
IMPURE = {"time", "threading", "socket", "asyncio", "zmq", "queue", "subprocess", "multiprocessing", "logging"}
# `LLM` is exported at the top, and the ticket module reads the ticket key from a file.
EXEMPT = {"baton", "baton.handoff.protocol.ticket"}


def room_of(module: str) -> str:
    """The longest room that contains a module, named without `baton.`; empty for common modules."""
    parts = module.split(".")[1:]
    for length in range(len(parts), 0, -1):
        if ".".join(parts[:length]) in ROOMS:
            return ".".join(parts[:length])
    return ""


def module_of(path: Path) -> str:
    parts = ("baton", *path.relative_to(SOURCE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def import_statements(path: Path) -> list[ast.Import | ast.ImportFrom]:
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Import | ast.ImportFrom)]


def imports(path: Path) -> set[str]:
    """Names of Baton's modules that a file imports."""
    found: set[str] = set()
    for node in import_statements(path):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "baton":
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            modules = {name for name in names if is_module(name)}
            found |= modules
            if modules != names:
                found.add(node.module)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.split(".")[0] == "baton"}
    return found


def is_module(name: str) -> bool:
    """True if a dotted name is a source file or a package."""
    path = SOURCE.joinpath(*name.split(".")[1:])
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


SOURCES = sorted(path for path in SOURCE.rglob("*.py"))


def test_every_module_is_in_a_room() -> None:
    homeless = {module_of(path) for path in SOURCES if not room_of(module_of(path))}
    packages = {module_of(path) for path in SOURCES if path.name == "__init__.py" and "/baton/handoff" in str(path)}
    assert homeless <= COMMON | {"baton", "baton.handoff"}, homeless
    assert {f"baton.{room}" for room in ROOMS if room.startswith("handoff.")} == packages - {"baton.handoff"}


def test_rooms_are_in_order() -> None:
    seen: set[str] = set()
    for room, allowed in ROOMS.items():
        assert allowed <= seen, f"{room} sees {allowed - seen} further down"
        seen.add(room)


@pytest.mark.parametrize("room", sorted(ROOMS))
def test_imports_point_one_way(room: str) -> None:
    for path in SOURCES:
        if room_of(module_of(path)) != room:
            continue
        for name in imports(path) - COMMON:
            if name == "baton":
                continue
            other = room_of(name)
            assert other == room or other in ROOMS[room], f"{module_of(path)} imports {name}"
            seam = SEAMS.get(room)
            if seam is not None and {other} == {room_of(next(iter(seam)))} and other != room:
                assert name in seam, f"{module_of(path)} imports {name}"


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Modules that import each other in a circle, the first again at the end; empty if there is none."""
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def test_no_modules_import_each_other() -> None:
    """Imports inside functions and for type checkers count too: they only hide a circle."""
    modules = {module_of(path): imports(path) for path in SOURCES}
    assert circle({name: found - {name} for name, found in modules.items()}) == []
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"a"}}) != []


@pytest.mark.parametrize("room", PURE)
def test_pure_rooms_know_no_clock_and_no_socket(room: str) -> None:
    for path in SOURCES:
        if room_of(module_of(path)) != room or module_of(path) in EXEMPT:
            continue
        for node in import_statements(path):
            names = {alias.name.split(".")[0] for alias in node.names} if isinstance(node, ast.Import) else set()
            if isinstance(node, ast.ImportFrom) and node.module:
                names = {node.module.split(".")[0]}
            assert not names & IMPURE, f"{module_of(path)} imports {names & IMPURE}"


def test_the_package_imports_nothing_that_is_not_installed() -> None:
    for path in SOURCES:
        for node in import_statements(path):
            names = {alias.name.split(".")[0] for alias in node.names} if isinstance(node, ast.Import) else set()
            if isinstance(node, ast.ImportFrom) and node.module:
                names = {node.module.split(".")[0]}
            assert not names & {"simulation", "benchmarks", "testkit", "tests", "tools"}, path


@pytest.mark.parametrize("folder", ["benchmarks", "simulation", "testkit", "tools"])
def test_only_tests_import_tests(folder: str) -> None:
    """What several need is in `testkit`."""
    files = [*(SOURCE.parents[1] / folder).rglob("*.py")]
    assert files
    found = [str(path) for path in files if re.search(r"^\s*(?:from|import) tests\b", path.read_text(), re.MULTILINE)]
    assert not found


@pytest.mark.parametrize("package", ["kv", "handoff", "transports", "router", "openai", "text"])
def test_planner_and_protocol_need_no_torch(package: str) -> None:
    """In any form, also inside functions."""
    files = [*(SOURCE / package).rglob("*.py")]
    assert files
    for path in files:
        for node in import_statements(path):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            assert "torch" not in {name.split(".")[0] for name in names}, path


def test_the_engines_decisions_need_no_torch() -> None:
    """Everything but the executor and its dependencies: the simulator runs it over cells."""
    names = ("core", "scheduler", "legs.handoff_legs", "step", "request_checks")
    command = f"import sys, {', '.join('baton.engine.' + name for name in names)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", command], timeout=300).returncode == 0


def test_commands_without_a_model_need_no_torch() -> None:
    """A router, and the parent of a deployment, start without the time and memory of torch and of compiled kernels. A
    checkpoint that cannot be served is refused before torch is imported."""
    command = (
        "import sys; import baton.cli, baton.cli.roles, baton.deployment, baton.router.app\n"
        "from baton.engine.config.engine_config import EngineConfig\n"
        "EngineConfig(model='models/baton-demo-llama').located()\n"
        "sys.exit(str({'torch', 'numba', 'transformers'} & set(sys.modules) or 0))"
    )
    found = subprocess.run([sys.executable, "-c", command], timeout=300, capture_output=True, text=True, check=False)
    assert found.stderr.strip() == "0", found.stderr


def _named_things(path: Path) -> Iterator[tuple[str, str]]:
    """Public classes of a file with their module, and its public type aliases with their definitions."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef):
            yield node.name, module_of(path)
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            if name[0].isupper() and not name.isupper():
                yield name, ast.unparse(node.value)


def test_a_name_stands_for_one_thing() -> None:
    """A reader of a public name must know which thing it is. Aliases of one type may be in several modules."""
    things: dict[str, set[str]] = {}
    for path in SOURCES:
        for name, thing in _named_things(path):
            if not name.startswith("_"):
                things.setdefault(name, set()).add(thing)
    assert not {name: found for name, found in things.items() if len(found) > 1}


def test_no_pickle_anywhere() -> None:
    for path in SOURCES:
        for node in import_statements(path):
            if isinstance(node, ast.Import):
                assert not {"pickle", "marshal", "shelve", "dill"} & {a.name for a in node.names}, path
            if isinstance(node, ast.ImportFrom):
                assert node.module not in {"pickle", "marshal", "shelve", "dill"}, path


def test_every_export_exists() -> None:
    modules = [baton.__name__] + [m.name for m in pkgutil.walk_packages(baton.__path__, "baton.")]
    for name in modules:
        if name.endswith("__main__") or (name.startswith(NEED_VLLM) and not HAS_VLLM):
            continue
        if name == NEEDS_SGLANG and not importlib.util.find_spec("sglang"):
            continue
        if name.startswith(NEEDS_TRITON) and not importlib.util.find_spec("triton"):
            continue
        module = importlib.import_module(name)
        for exported in getattr(module, "__all__", []):
            assert hasattr(module, exported), f"{name}.__all__ names {exported}"


def test_top_level_exports() -> None:
    assert set(baton.__all__) == {"LLM", "SamplingParams", "StructuredOutputsParams", "__version__"}
