"""Shared by several folders of tests. Torch is imported only by fixtures that need it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from baton.log_limit import LogLimit

if TYPE_CHECKING:
    from testkit.clients.reader import Reader
    from testkit.processes.launcher import Launcher

# Assertions in helpers tell their values too.
pytest.register_assert_rewrite("testkit")

# The slowest files come first, so that no worker waits for another at the end of a run. Files that start processes
# take turns with files that compute alone or wait.
LONGEST = (
    "e2e/test_verify_faults.py",
    "simulation/test_simulator.py",
    "transports/test_conformance_remote.py",
    "bench/test_parity.py",
    "server/test_deployment.py",
    "simulation/test_mutations.py",
    "verify/test_engines.py",
    "engine/models/test_every_drafter.py",
    "e2e/test_chaos.py",
    "e2e/test_verify.py",
    "e2e/test_real_model.py",
    "drafters/test_assistant_stages.py",
    "engine/models/test_latents_and_experts.py",
    "e2e/test_leg_aborts.py",
    "router/test_recovery.py",
    "e2e/test_transports.py",
    "engine/models/test_windowed_models.py",
    "e2e/test_bad_input.py",
    "e2e/test_topologies.py",
    "kvstore/test_prefix_store.py",
    "tools/test_demo_checkpoints.py",
    "e2e/test_aborts.py",
    "tools/test_demo_training.py",
    "vllm/integration/test_hybrid.py",
    "vllm/integration/test_handoff.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whole files in the order of `LONGEST`, then the others as collected."""
    here = Path(__file__).parent
    rank = {here / name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.path, len(rank)))


def pytest_configure() -> None:
    """Hypothesis measures time: a wait for a core is no slow test."""
    with contextlib.suppress(ImportError):
        from hypothesis import HealthCheck, settings

        settings.register_profile("shared cores", deadline=None, suppress_health_check=[HealthCheck.too_slow])
        settings.load_profile("shared cores")


def pytest_sessionstart() -> None:
    """Modules and tests are made without collections: they stay."""
    from testkit.processes.commands import keep_commands

    gc.disable()
    keep_commands()


def pytest_collection_finish() -> None:
    """Collections leave out the modules and tests that exist now, and come less often: a tenth of the suite's time."""
    gc.freeze()
    gc.set_threshold(10_000)
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_asyncio_loop_factories(item: pytest.Item) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The event loop of routers; where much depends on it, asyncio's own too, which engines and `baton bench` have."""
    from baton.event_loop import new_event_loop

    if "tests/bench" in item.path.as_posix():
        return {"asyncio": asyncio.new_event_loop}
    marker = item.get_closest_marker("asyncio")
    chooses = marker is not None and "loop_factories" in marker.kwargs
    both = chooses or "openai/http" in item.path.as_posix()
    return {"servers": new_event_loop} | ({"asyncio": asyncio.new_event_loop} if both else {})


@pytest.fixture(autouse=True)
def fresh_log_limits() -> None:
    """Lines that an earlier test logged in this second must not suppress this test's."""
    for name, logger in list(logging.root.manager.loggerDict.items()):
        for limit in getattr(logger, "filters", ()) if name.startswith("baton.") else ():
            if isinstance(limit, LogLimit):
                limit.__init__(limit.lines)  # type: ignore[misc]


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """A fixed summation order on any machine, for a file's tests and their shared fixtures."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def readers() -> Iterator[Callable[..., Reader]]:
    """Makes readers, and closes them at the end."""
    from testkit.clients.reader import Reader

    made: list[Reader] = []

    def make(*arguments: Any) -> Reader:
        made.append(Reader(*arguments))
        return made[-1]

    yield make
    for reader in made:
        reader.socket.close()


@pytest.fixture(scope="session")
def launcher() -> Iterator[Launcher]:
    from testkit.processes import baton_forks

    with contextlib.closing(baton_forks.launcher()) as found:
        yield found


@pytest.fixture(scope="module")
def forks(launcher: Launcher) -> Iterator[None]:
    """Processes of Baton that a file's tests start are forks, which costs a tenth of a new process. Real starts are in
    `e2e/test_openai_client.py`, `test_kubernetes.py` and `test_real_model.py`.
    """
    from testkit.processes import baton_forks

    with baton_forks.forking(launcher):
        yield


@pytest.fixture
def forked(launcher: Launcher) -> Iterator[None]:
    """As `forks`, in one test."""
    from testkit.processes import baton_forks

    with baton_forks.forking(launcher):
        yield


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`checkpoint(model_type, **overrides)`: a random checkpoint of an architecture, written once per session."""
    from testkit.checkpoints.common import make_checkpoint

    made: dict[str, Path] = {}

    def make(model_type: str, **overrides: Any) -> Path:
        key = f"{model_type}{sorted(overrides.items())}"
        if key not in made:
            made[key] = make_checkpoint(tmp_path_factory.mktemp(model_type), model_type, **overrides)
        return made[key]

    return make
