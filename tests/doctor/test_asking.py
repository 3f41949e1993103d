"""The command over servers that answer: fakes of Baton's engines, of vLLM and of SGLang, and real routers."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web

from baton.doctor.checkup import Checkup
from baton.doctor.diagnose import check_up, findings_of
from baton.errors import DrainingError, EngineStalledError
from baton.openai.http.access import Access
from baton.router import RouterConfig, build_app
from baton.server import build_app as build_engine_app
from baton.text import Tokenizer
from testkit.servers.fake_serving import KEY, FakeEngine, served
from testkit.servers.fake_vllm import FakeVllm
from testkit.servers.fleets import QUICK, Setup
from testkit.servers.vllm_pair import Pair

VERSION = b'{"version": "0.32.0"}'
FIRST = '{"output.first_step": "recompute"}'


async def ask(*urls: str, router: str | None = None, **options: Any) -> Checkup:
    return await check_up(urls, router, timeout_s=5.0, clock_s=0.0, **options)


def names(checkup: Checkup) -> set[str]:
    """Names of findings, without those of all fakes: clocks that stand still, loopback addresses, small limits."""
    return {finding.name for finding in findings_of(checkup)} - {"clock", "loopback", "nofile", "shm", "memlock"}


@contextlib.asynccontextmanager
async def engine(directory: Path, fake: FakeEngine, **settings: Any) -> AsyncIterator[str]:
    async with served(build_engine_app(fake, Tokenizer.load(directory), **settings)) as url:  # type: ignore[arg-type]
        yield url


@contextlib.asynccontextmanager
async def pair(directory: Path, p: dict[str, Any], d: dict[str, Any]) -> AsyncIterator[list[str]]:
    """Engines of both roles, with changes of their `EngineInfo`."""
    handed: dict[bytes, asyncio.Future[str]] = {}
    async with contextlib.AsyncExitStack() as stack:
        urls = []
        for role, changes in (("prefill", p), ("decode", d)):
            fake = FakeEngine(directory, role=role, handed=handed)
            fake.info = msgspec.structs.replace(fake.info, **changes)
            urls.append(await stack.enter_async_context(engine(directory, fake)))
        yield urls


async def test_a_handoff_is_tried_through_the_router_and_its_engines_are_asked(directory: Path) -> None:
    setup = Setup(directory)
    async with setup.run() as (url, _):
        checkup = await ask(url)
        assert names(checkup) == set()
        assert [server.roles for server in checkup.servers] == [("prefill",), ("decode",)]
        assert checkup.trial is not None
        assert checkup.trial.num_tokens == 8
        assert checkup.trial.handoffs == {"started": 1, "completed": 1}
        assert checkup.trial.ttft_s <= checkup.trial.total_s
        again = await ask(*setup.urls, router=url)
        assert len(again.servers) == 2


async def test_a_failed_handoff_is_found(directory: Path) -> None:
    setup = Setup(directory)
    setup.decode.fail = "handoff"
    async with setup.run(recovery="none") as (url, _):
        assert "handoff_failed" in names(await ask(url))


async def test_a_handoff_that_the_router_recovered_from_is_found(directory: Path) -> None:
    setup = Setup(directory)
    setup.decode.fail = "recoverable"
    async with setup.run() as (url, _):
        assert "handoff_failed" in names(await ask(url))


async def test_prompts_that_stay_on_the_decode_engine_are_found(directory: Path) -> None:
    async with Setup(directory).run(max_local_prefill_length=4096) as (url, _):
        assert "not_handed_off" in names(await ask(url))


async def test_a_router_over_other_engines_than_named_is_found(directory: Path) -> None:
    async with Setup(directory).run() as (url, _), engine(directory, FakeEngine(directory, model="fake")) as both:
        found = findings_of(await ask(both, router=url))
        assert ("not_joined", both) in {(finding.name, finding.server) for finding in found}


async def test_an_engine_that_its_router_refuses_is_found(directory: Path) -> None:
    async with pair(directory, {}, {}) as (p, d):
        config = RouterConfig(prefill=(p, "http://127.0.0.1:9"), decode=(d,), ticket_key=KEY)
        async with served(await build_app(config)) as url:
            found = {(finding.name, finding.server) for finding in findings_of(await ask(url))}
            assert ("router_engine", "http://127.0.0.1:9") in found
            assert ("unreachable", "http://127.0.0.1:9") in found


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("weights", {"fingerprint": '{"weights": "b"}'}),
        ("max_model_len", {"max_model_len": 128}),
        ("seed", {"default_seed": 1}),
        ("served_model_name", {"model": "other"}),
        ("kv_transport", {"kv_transport": "nixl UCX"}),
        ("engine_id", {"engine_id": "prefill-engine"}),
        ("control_bind", {"control_addresses": []}),
        ("no_decode", {"role": "prefill", "engine_id": "other"}),
    ],
)
async def test_engines_that_do_not_fit_are_found(directory: Path, name: str, changes: dict[str, Any]) -> None:
    async with pair(directory, {"kv_transport": "shm"}, {"kv_transport": "shm", **changes}) as urls:
        assert names(await ask(*urls)) == {name}


async def test_a_loopback_address_told_to_another_host_is_found(directory: Path) -> None:
    """The fakes' clocks are those of two hosts."""
    async with pair(directory, {}, {}) as urls:
        (one, other) = [finding for finding in findings_of(await ask(*urls)) if finding.name == "loopback"]
        assert {one.server, other.server} == set(urls)
        assert one.value == "tcp://127.0.0.1:1"


async def test_a_control_port_that_nobody_listens_on_is_found(directory: Path) -> None:
    fake = FakeEngine(directory, role="prefill")
    fake.info = msgspec.structs.replace(fake.info, control_addresses=["curve://p@127.0.0.1:1"], clock=0.0)
    remote = msgspec.structs.replace(fake.info, control_addresses=["tcp://0.0.0.0:1"])
    fake.info = remote
    async with engine(directory, fake) as url:
        assert "control_unreachable" in names(await ask(url))


async def test_a_clock_that_stands_still_is_found(directory: Path) -> None:
    async with pair(directory, {}, {}) as urls:
        checkup = await check_up(urls, clock_s=0.5)
        assert {(f.name, f.server) for f in findings_of(checkup) if f.name == "clock"} == {
            ("clock", url) for url in urls
        }


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("unhealthy", EngineStalledError("one step takes 200 s")),
        ("draining", DrainingError("this server is shutting down")),
    ],
)
async def test_an_engine_that_serves_nobody_is_found(directory: Path, name: str, error: Exception) -> None:
    class Down(FakeEngine):
        def load(self) -> Any:
            raise error

    async with engine(directory, Down(directory)) as url:
        assert names(await ask(url)) == {name}


async def test_a_missing_api_key_is_found(directory: Path) -> None:
    """Baton's engines are asked without one; a model's list is not."""
    app = web.Application()
    app.router.add_get("/v1/models", _keyed)
    async with served(app) as url:
        assert names(await ask(url)) == {"api_key"}
    async with engine(directory, FakeEngine(directory), access=Access(api_keys=("k",))) as url:
        assert names(await ask(url)) == set()


async def _keyed(request: web.Request) -> web.Response:
    return web.json_response({"error": {"message": "a key is needed"}}, status=401)


async def test_a_web_page_is_no_engine() -> None:
    async def page(request: web.Request) -> web.Response:
        return web.Response(text="<html>welcome</html>", content_type="text/html")

    app = web.Application()
    app.router.add_get("/{any:.*}", page)
    async with served(app) as url:
        assert names(await ask(url)) == {"not_an_engine"}
        router = await ask(router=url)
        assert names(router) == {"not_an_engine"}


async def test_an_engine_is_no_router(directory: Path) -> None:
    async with engine(directory, FakeEngine(directory)) as url:
        (finding,) = findings_of(await ask(router=url))
        assert (finding.name, finding.server) == ("not_a_router", url)


def vllm(directory: Path, **settings: Any) -> FakeVllm:
    return FakeVllm(directory, **{"raw": {"/version": VERSION}, **settings})


@contextlib.asynccontextmanager
async def serving(*fakes: FakeVllm) -> AsyncIterator[list[str]]:
    async with contextlib.AsyncExitStack() as stack:
        yield [await stack.enter_async_context(fake.serve()) for fake in fakes]


@pytest.mark.parametrize("name", ["BatonConnector", "NixlConnector"])
async def test_two_vllm_servers_and_their_router_are_ready(directory: Path, name: str) -> None:
    both = Pair(directory, name, raw={"/version": VERSION})
    async with both.run() as (url, _):
        checkup = await ask(url)
        assert names(checkup) == set()
        assert {server.kind for server in checkup.servers} == {"vllm"}
        assert checkup.trial is not None
        assert checkup.trial.handoffs == {"started": 1, "completed": 1}


@pytest.mark.parametrize(
    ("name", "p", "d"),
    [
        ("num_speculative_tokens", {}, {"num_drafts": 3}),
        ("output.sampling_defaults", {}, {"defaults": {"top_p": 0.9}}),
        ("max_model_len", {}, {"max_model_len": 128}),
        ("model.dtype", {"fingerprint": '{"model.dtype": "a"}'}, {"fingerprint": '{"model.dtype": "b"}'}),
        ("output.first_step", {"fingerprint": '{"output.first_step": "verify"}'}, {"fingerprint": FIRST}),
        ("version", {}, {"raw": {"/version": VERSION.replace(b"32", b"31")}}),
        ("engine_id", {}, {"name": "P"}),
        ("block_size", {"block_size": 32, "tile": 32}, {"block_size": 64, "tile": 64}),
        ("block_size", {"block_size": 32, "tile": 32}, {"block_size": 32, "tile": 1}),
        ("block_size", {"kind": "pull", "block_size": 32}, {"kind": "pull", "block_size": 64}),
        ("connector", {}, {"kind": "pull"}),
        ("sampling_defaults", {"kind": "pull"}, {"kind": "pull", "defaults": {"top_p": 0.9}}),
        ("num_speculative_tokens", {"kind": "pull"}, {"kind": "pull", "num_drafts": 2}),
    ],
)
async def test_vllm_servers_that_do_not_fit_are_found(
    directory: Path, name: str, p: dict[str, Any], d: dict[str, Any]
) -> None:
    async with serving(vllm(directory, name="P", **p), vllm(directory, **{"name": "D", **d})) as urls:
        assert names(await ask(*urls)) == {name}


async def test_each_data_parallel_rank_is_asked(directory: Path) -> None:
    fakes = [vllm(directory, name=name, has_ranks=True) for name in ("P", "D")]
    async with serving(*fakes) as urls:
        ranks = [f"{url}#dp_rank={rank}" for url in urls for rank in (0, 1)]
        checkup = await ask(*ranks)
        assert names(checkup) == set()
        assert [one.identity and one.identity.engine_id for one in checkup.servers] == [
            "P_dp0",
            "P_dp1",
            "D_dp0",
            "D_dp1",
        ]
        config = RouterConfig(prefill=tuple(ranks[:2]), decode=tuple(ranks[2:]), engine="vllm", ticket_key=KEY)
        async with served(await build_app(config)) as url:
            assert {server.url for server in (await ask(url)).servers} == set(ranks)


async def test_a_url_of_several_ranks_is_found(directory: Path) -> None:
    async with serving(vllm(directory, name="P", has_ranks=True), vllm(directory, name="D")) as urls:
        assert names(await ask(*urls)) == {"data_parallel_rank"}


async def test_unequal_blocks_that_are_copied_by_token_fit(directory: Path) -> None:
    fakes = [vllm(directory, name=name, block_size=size, tile=1) for name, size in (("P", 32), ("D", 64))]
    async with serving(*fakes) as urls:
        assert names(await ask(*urls)) == set()


@pytest.mark.parametrize(
    ("outcome", "words"), [("refused", "ticket key"), ("failed_incompatible", "failed_incompatible")]
)
async def test_a_leg_that_a_vllm_server_computes_itself_is_found(directory: Path, outcome: str, words: str) -> None:
    """The router gets all tokens, and counts a handoff."""
    both = Pair(directory, raw={"/version": VERSION})
    both.d.outcome = outcome
    async with both.run() as (url, _):
        (finding,) = [one for one in findings_of(await ask(url)) if one.name == "handoff_failed"]
        assert words in str(finding)


async def test_a_vllm_server_without_a_connector_is_found(directory: Path) -> None:
    alone = json.dumps({"choices": [{"index": 0, "text": "", "finish_reason": "length"}]}).encode()
    fake = vllm(directory)
    fake.raw["/v1/completions"] = alone
    async with serving(fake) as urls:
        assert names(await ask(*urls)) == {"connector"}


async def test_settings_of_a_vllm_server_in_developer_mode_are_compared(directory: Path) -> None:
    def told(role: str, backend: str, method: str) -> bytes:
        transfer = {"kv_connector": "NixlConnector", "kv_role": role, "kv_connector_extra_config": {}}
        transfer["kv_connector_extra_config"] = {"backends": [backend]}
        config = {"kv_transfer_config": transfer, "speculative_config": {"method": method}}
        env = {"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "VLLM_NIXL_SIDE_CHANNEL_PORT": 1}
        return json.dumps({"vllm_config": config, "vllm_env": env}).encode()

    p, d = vllm(directory, name="P", kind="pull"), vllm(directory, name="D", kind="pull")
    p.raw["/server_info"] = told("kv_producer", "UCX", "eagle3")
    d.raw["/server_info"] = told("kv_producer", "LIBFABRIC", "mtp")
    async with serving(p, d) as urls:
        expected = {"nixl_backends", "speculative_config.method", "no_decode", "control_unreachable"}
        assert names(await ask(*urls)) == expected


def sglang(**settings: Any) -> web.Application:
    async def models(request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "demo", "owned_by": "sglang", "max_model_len": 4096}]})

    async def info(request: web.Request) -> web.Response:
        told = {"version": "0.5.23", "disaggregation_mode": "prefill", "page_size": 64, "api_key": "hunter2"}
        return web.json_response({**told, **settings})

    app = web.Application()
    app.router.add_get("/v1/models", models)
    app.router.add_get("/server_info", info)
    return app


async def test_sglang_servers_that_do_not_fit_are_found() -> None:
    apps: Sequence[web.Application] = (sglang(), sglang(disaggregation_mode="decode", page_size=16))
    async with served(apps[0]) as p, served(apps[1]) as d:
        checkup = await ask(p, d)
        assert names(checkup) == {"page_size"}
        assert "hunter2" not in repr(checkup)


async def test_two_kinds_of_engines_are_found(directory: Path) -> None:
    async with engine(directory, FakeEngine(directory, role="prefill")) as p, serving(vllm(directory)) as (d,):
        assert "mixed_engines" in names(await ask(p, d))


async def test_a_router_of_baton_engines_over_vllm_servers_is_found(directory: Path) -> None:
    async with serving(vllm(directory, name="P"), vllm(directory, name="D")) as (p, d):
        config = RouterConfig(prefill=(p,), decode=(d,), ticket_key=KEY, timers=QUICK)
        async with served(await build_app(config)) as url:
            assert {"router_engine", "not_ready"} <= names(await ask(url))
