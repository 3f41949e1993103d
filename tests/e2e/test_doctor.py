"""`baton doctor` over `baton up`: it is ready, and what is planted around its engines is found."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.doctor.checkup import BOTH
from baton.doctor.diagnose import check_up, findings_of
from baton.handoff.session.keys import make_keys
from baton.router import RouterConfig, build_app
from testkit.processes.running import run, running_up
from testkit.servers.fake_serving import served

MODEL = "models/baton-demo-llama"
FLAGS = ("--max-model-len", "512")
pytestmark = pytest.mark.usefixtures("forks")


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running_up(MODEL, tmp_path_factory.mktemp("doctor") / "log", *FLAGS) as up:
        yield up.url


def test_a_healthy_deployment_is_ready(url: str) -> None:
    result = run("doctor", f"{url}/v1")
    assert result.returncode == 0, result.stdout + result.stderr
    lines = result.stdout.splitlines()
    assert lines[-1] == "ready"
    assert "1 prefill, 1 decode" in lines[0]
    assert "256 prompt tokens handed off" in lines[3]
    assert "bytes of KV in" in lines[3]
    assert lines[3].endswith("over shm")


async def test_a_key_directory_without_an_engine_is_found(tmp_path: Path, url: str) -> None:
    make_keys(tmp_path / "keys", ["prefill-0"])
    (finding,) = findings_of(await check_up([url], keys=str(tmp_path / "keys")))
    assert (finding.name, finding.value) == ("keys", "'decode-0'")


async def test_a_router_with_another_ticket_key_is_found(url: str) -> None:
    asked = (await check_up([url])).servers
    prefill, decode = (next(server.url for server in asked if server.roles == (role,)) for role in BOTH)
    config = RouterConfig(prefill=(prefill,), decode=(decode,), ticket_key=b"x" * 32)
    async with served(await build_app(config)) as router:
        (finding,) = findings_of(await check_up([router]))
        assert (finding.name, finding.server) == ("handoff_failed", router)
        assert "the same ticket key" in finding.cure


async def test_an_engine_alone_is_found(url: str) -> None:
    asked = (await check_up([url])).servers
    (finding,) = findings_of(await check_up([server.url for server in asked if server.roles == ("decode",)]))
    assert finding.name == "no_prefill"
