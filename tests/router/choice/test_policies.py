"""How engines are chosen: every policy, its charges, and what stops a herd."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

from baton.errors import ConfigError, OverloadedError
from baton.router.clients.engine_client import EngineClient
from baton.router.index.blocks import BlockIndex
from baton.router.index.held import HeldPrefixes
from baton.router.pairs import Pairs
from baton.router.policies import POLICIES, EngineNeeds, PolicyConfig, create_policies, read_config
from baton.router.pool import EnginePool
from baton.router.pooled_engine import Charge, PooledEngine
from baton.router.prefixes import KnownPrefixes, PromptBlocks
from baton.router.routes import Route, Routes
from baton.wire import EngineInfo, GenerateRequest, LegRole, Role, SamplingParams
from benchmarks.scrape import scrape
from testkit.servers.fake_serving import FakeEngine, status_of, until
from tests.router.choice.test_routes import holding
from tests.router.test_recovery import Cluster, complete


class _Client(EngineClient):
    def __init__(self, url: str) -> None:
        self.url = url

    info = load = generate = None  # type: ignore[assignment]


_Client.__abstractmethods__ = frozenset()


class Pool:
    """Modelled engines, as `Routes` sees them."""

    def __init__(self, directory: Path, num_prefill: int = 2, num_decode: int = 2) -> None:
        self.engines: list[PooledEngine] = []
        self.pairs = Pairs(30.0)
        roles: list[Role] = ["prefill"] * num_prefill + ["decode"] * num_decode
        for number, role in enumerate(roles):
            info: EngineInfo = FakeEngine(directory, role=role).info
            info = msgspec.structs.replace(info, max_model_len=1 << 20, engine_id=f"{role}-{number}")
            engine = PooledEngine(_Client(f"http://e{number}"), role, info, None)
            engine.known = KnownPrefixes(1, 1 << 20)
            self.engines.append(engine)
        self.prefill, self.decode = self.engines[:num_prefill], self.engines[num_prefill:]

    def usable(self, healthy: bool) -> list[PooledEngine]:
        return self.engines if healthy else []

    def routes(self, most: int = 0, **settings: Any) -> Routes:
        pool: EnginePool = self  # type: ignore[assignment]
        return Routes(pool, create_policies(source=random.Random(0), **settings), most)


def asked(tokens: list[int], **fields: Any) -> GenerateRequest:
    return GenerateRequest(request_id="r", prompt_token_ids=tokens, sampling_params=SamplingParams(), **fields)


def begin(route: Route) -> list[Any]:
    """Count the legs of a route, as the backend does when it was chosen."""
    legs: list[LegRole] = ["decode"] if route.prefill is None else ["prefill", "decode"]
    counted = [(route.engine(leg), route.engine(leg).leg(lambda _: None, charge=route.charges[leg])) for leg in legs]
    return [(engine, counting, counting.__enter__()) for engine, counting in counted]


def test_every_policy_is_known_by_its_name() -> None:
    assert set(POLICIES) >= {"cache_aware", "least_loaded", "power_of_two", "round_robin", "consistent_hash"}
    chosen = create_policies("least_loaded", prefill="consistent_hash")
    assert [chosen.of(role).name for role in ("prefill", "decode", "both")] == [  # type: ignore[arg-type]
        "consistent_hash",
        "least_loaded",
        "least_loaded",
    ]
    with pytest.raises(ConfigError, match=r"decode_policy.*cache_aware.*'random'"):
        create_policies(decode="random")
    assert read_config('{"leg_weight": 8}') == PolicyConfig(leg_weight=8)


@pytest.mark.parametrize("text", ['{"leg_weight": -1}', '{"leg": 1}', "[]", '{"leg_weight": "1"}'])
def test_a_policy_config_with_a_bad_value_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="policy_config"):
        read_config(text)


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_a_burst_is_no_herd(directory: Path, name: str) -> None:
    """Equal prompts that come at once spread over all engines: a leg is charged when it is chosen."""
    pool = Pool(directory, 4, 4)
    routes = pool.routes(policy=name)
    for _ in range(16):
        route = routes.choose(asked(list(range(640))), (), False)
        assert route is not None
        begin(route)
    for engines in (pool.prefill, pool.decode):
        counts = [engine.num_inflight for engine in engines]
        assert max(counts) <= (8 if name == "power_of_two" else 5), counts


@pytest.mark.parametrize(("lacking", "why"), [(64, "cached"), (65, "handed_off")])
def test_a_decode_engine_computes_what_it_lacks_up_to_the_limit(directory: Path, lacking: int, why: str) -> None:
    pool, held = Pool(directory, 1, 1), list(range(160))
    pool.decode[0].known.learn(PromptBlocks(held))
    routes = pool.routes(64, config=PolicyConfig(max_turn_prefill_length=0))
    route = routes.choose(asked([*held, *range(500, 500 + lacking)]), (), False)
    assert route is not None
    assert route.why == why


def test_charges_are_in_tokens_and_end_with_their_legs(directory: Path) -> None:
    pool = Pool(directory, 1, 1)
    route = pool.routes().choose(asked(list(range(100))), (), False)
    assert route is not None
    assert route.charges == {"prefill": Charge(100, 100), "decode": Charge(0, 100)}
    legs = begin(route)
    assert [(e.queued_tokens, e.kv_tokens, e.num_inflight) for e in pool.engines] == [(100, 100, 1), (0, 100, 1)]
    for _, _, leg in legs * 2:
        leg()
    assert [(e.queued_tokens, e.kv_tokens, e.num_inflight) for e in pool.engines] == [(0, 100, 1), (0, 100, 1)]
    for _, counting, _ in legs:
        counting.__exit__(None, None, None)
    assert [(e.queued_tokens, e.kv_tokens, e.num_inflight) for e in pool.engines] == [(0, 0, 0), (0, 0, 0)]


@pytest.mark.parametrize("has_events", [False, True], ids=["guesses", "events"])
def test_cache_aware_prefers_what_is_held_until_its_engine_is_busy(directory: Path, has_events: bool) -> None:
    """A prompt that was sent counts as held, whether or not the engine's events have said so."""
    pool = Pool(directory)
    for engine in pool.engines if has_events else ():
        engine.known = HeldPrefixes(BlockIndex(), lambda: 0.0)
    routes = pool.routes()
    system = list(range(480))
    first = routes.choose(asked([*system, 1]), (), False)
    assert first is not None
    assert first.prefill is not None
    (_, _, leg), _ = begin(first)
    early = routes.choose(asked([*system, *range(700, 800)]), (), False)
    assert early is not None
    assert early.prefill is not first.prefill, "to wait for the prompt costs more than to compute it again"
    leg()
    again = routes.choose(asked([*system, *range(900, 1000)]), (), False)
    assert again is not None
    assert again.prefill is first.prefill
    assert again.charges["prefill"] == Charge(100, 580), "it computes only what it lacks"
    first.prefill.queued_tokens = 1000
    other = routes.choose(asked([*system, *range(800, 900)]), (), False)
    assert other is not None
    assert other.prefill is not first.prefill
    salted = routes.choose(asked([*system, 1], cache_salt="tenant"), (), False)
    assert salted is not None
    assert salted.charges["prefill"].prefill_tokens == 481, "another tenant's KV is no hit"


def test_a_conversation_stays_with_its_decode_engine(directory: Path) -> None:
    pool = Pool(directory)
    routes = pool.routes(most=16)
    turn = routes.choose(asked(list(range(200))), (), False)
    assert turn is not None
    routes.served(turn, asked(list(range(200))), list(range(200, 300)))
    for _ in range(3):  # round robin would alternate
        request = asked([*range(300), *range(900, 1000)])
        after = routes.choose(request, (), False)
        assert after is not None
        assert after.decode is turn.decode
        # The prefill engine lacks the answer too, so the decode engine computes the few new tokens.
        assert (after.why, after.max_prefill_tokens) == ("cached", 138)
    turn.decode.num_inflight, turn.decode.kv_tokens = (
        3,
        900,
    )  # it is cheaper to wait there than to compute all elsewhere
    stays = routes.choose(asked([*range(300), *range(900, 920)]), (), False)
    assert stays is not None
    assert (stays.why, stays.decode) == ("cached", turn.decode)
    turn.decode.num_inflight, turn.decode.kv_tokens = 0, 0
    far = routes.choose(asked([*range(300), *range(1000, 1400)]), (), False)
    assert far is not None
    assert (far.why, far.decode) == ("handed_off", turn.decode)
    turn.decode.num_inflight, turn.decode.kv_tokens = 9, 9000
    busy = routes.choose(asked([*range(300), *range(2000, 2400)]), (), False)
    assert busy is not None
    assert busy.decode is not turn.decode


def test_long_queues_of_prefill_send_no_new_prompt_to_decode_engines(directory: Path) -> None:
    """Time per token is protected: without a held beginning, only short prompts are computed by a decode engine."""
    pool = Pool(directory)
    for engine in pool.prefill:
        engine.queued_tokens = 100_000
    route = pool.routes(most=16).choose(asked(list(range(200))), (), False)
    assert route is not None
    assert route.why == "handed_off"


def test_consistent_hash_moves_only_the_keys_of_the_engine_that_leaves(directory: Path) -> None:
    pool = Pool(directory, 1, 4)
    policy = create_policies("consistent_hash").decode
    prompt = PromptBlocks(list(range(64)))

    def where(among: list[PooledEngine]) -> dict[str, str]:
        return {str(n): policy.choose(EngineNeeds(prompt, session=str(n)), among).url for n in range(64)}

    before, gone = where(pool.decode), pool.decode[2].url
    after = where([engine for engine in pool.decode if engine.url != gone])
    assert {key for key in before if before[key] != after[key]} == {key for key in before if before[key] == gone}
    assert len(set(before.values())) == 4
    shared = [*range(128)]  # without a session the beginning of the prompt is the key
    found = {policy.choose(EngineNeeds(PromptBlocks([*shared, n])), pool.decode).url for n in range(8)}
    assert len(found) == 1
    hot = next(engine for engine in pool.decode if engine.url == before["1"])
    hot.num_inflight = 9
    assert policy.choose(EngineNeeds(prompt, session="1"), pool.decode) is not hot, "loads are bounded"


async def test_a_session_keeps_its_engine(directory: Path) -> None:
    cluster = Cluster(directory, num_prefill=1, num_decode=2)
    async with cluster.run(policy="consistent_hash") as (url, session):
        for name in ("a", "b", "c", "d"):
            for prompt in ("x", "y", "z"):
                body = {"prompt": prompt, "max_tokens": 4}
                headers = {"X-Session-Id": name}
                async with session.post(f"{url}/v1/completions", json=body, headers=headers) as response:
                    assert response.status == 200
                await until(lambda: not any(engine.running for engine in cluster.decodes))
        counts = Counter({n: len(engine.requests) for n, engine in enumerate(cluster.decodes)})
        assert all(count % 3 == 0 for count in counts.values()), counts
        assert sum(counts.values()) == 12


def test_overloaded_engines_get_nothing_and_all_of_them_refuse(directory: Path) -> None:
    config = PolicyConfig(overload_num_waiting=4, overload_kv_usage=0.9)
    load = FakeEngine(directory).load()
    assert config.has_veto
    assert not PolicyConfig().has_veto
    assert not config.is_overload(load)
    assert config.is_overload(msgspec.structs.replace(load, num_waiting=4))
    assert config.is_overload(msgspec.structs.replace(load, kv_usage=0.9))
    pool = Pool(directory)
    routes, request = pool.routes(), asked(list(range(200)))
    pool.prefill[0].overloaded = pool.decode[1].overloaded = True
    for _ in range(3):
        route = routes.choose(request, (), False)
        assert route is not None
        assert (route.prefill, route.decode) == (pool.prefill[1], pool.decode[0])
    pool.decode[0].overloaded = True
    with pytest.raises(OverloadedError, match="all decode engines"):
        routes.choose(request, (), False)
    resumed = asked(list(range(200)), num_prompt_tokens=199)
    assert routes.choose(resumed, (), False) is not None, "a stream that has begun goes on"


async def test_an_overload_is_a_429_until_a_report_says_otherwise(directory: Path) -> None:
    cluster = Cluster(directory, num_prefill=1, num_decode=1)
    engine, calm = cluster.decodes[0], cluster.decodes[0].load()
    engine.load = lambda: msgspec.structs.replace(calm, num_waiting=7)  # type: ignore[method-assign]
    config = PolicyConfig(overload_num_waiting=4)
    async with cluster.run(policy_config=config) as (url, session):

        async def overloaded() -> bool:
            return bool((await status_of(session, url))["engines"][1]["overloaded"])

        while not await overloaded():
            pass
        assert await scrape(session, url, "baton:router_engine_overloaded") == [0.0, 1.0]
        assert (await complete(session, url))[0] == 429
        assert not engine.requests
        engine.load = lambda: calm  # type: ignore[method-assign]
        while await overloaded():
            pass
        assert (await complete(session, url))[0] == 200


async def test_later_turns_go_where_the_conversation_is(directory: Path) -> None:
    """By default, over real connections: each engine computes a shared beginning once."""
    cluster = holding(Cluster(directory))
    async with cluster.run(policy="cache_aware", max_local_prefill_length=40) as (url, session):
        for turn in range(1, 4):
            for chat in ("a", "b"):
                prompt = f"{chat} {'of which all tokens are bytes ' * turn}"
                assert (await complete(session, url, prompt=prompt, max_tokens=4))[0] == 200
        for engine in cluster.decodes:
            chats = {bytes(request.prompt_token_ids[:1]) for request in engine.requests}
            assert len(chats) == 1, "a chat stays"
