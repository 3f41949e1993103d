"""The order of waiting requests: classes, tenants' shares, deadlines, and the limits of one tenant."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import ConfigError, OverloadedError, RequestError
from baton.openai.http.caller import Caller, note_standing
from baton.router import RouterConfig, build_app
from baton.router.admission.fair_queue import FairQueue
from baton.router.admission.tenants import ANY, Standing, Tenant
from baton.router.policies import read_config
from baton.server import build_app as build_engine_app
from baton.text import Tokenizer
from testkit.servers.fake_serving import KEY, FakeEngine, served, until

NAMES = ("a", "b", "c")
STANDINGS = st.builds(
    Standing,
    st.sampled_from(NAMES),
    st.integers(-1, 1),
    st.floats(0.0, 9.0).map(round),
    st.integers(1, 50),
)


@given(st.lists(st.one_of(STANDINGS, st.just("take"), st.just("leave")), max_size=60))
def test_the_best_class_and_then_the_earliest_deadline_of_a_tenant_runs(steps: list[Any]) -> None:
    queue: FairQueue[int] = FairQueue({})
    waiting: dict[int, Standing] = {}
    for number, step in enumerate(steps):
        if isinstance(step, Standing):
            queue.push(number, step, 0.0)
            waiting[number] = step
        elif step == "leave" and waiting:
            queue.remove(left := min(waiting))
            del waiting[left]
        elif step == "take":
            taken = queue.take(0.0)
            assert (taken is None) is (not waiting)
            if taken is not None:
                mine = waiting.pop(taken)
                assert all(mine.priority <= other.priority for other in waiting.values())
                own = {n: s for n, s in waiting.items() if (s.tenant, s.priority) == (mine.tenant, mine.priority)}
                assert all((mine.deadline, taken) < (s.deadline, n) for n, s in own.items())
        assert len(queue) == len(waiting)


@given(
    st.dictionaries(st.sampled_from(NAMES), st.floats(0.5, 4.0), min_size=2, max_size=3),
    st.lists(st.tuples(st.integers(1, 50), st.integers(0, 50)), min_size=40, max_size=80),
)
def test_tenants_that_always_wait_share_tokens_by_their_weights(
    weights: dict[str, float], sizes: list[tuple[int, int]]
) -> None:
    """The bound of virtual token counters: no two tenants differ by more than one request, over its weight."""
    queue: FairQueue[int] = FairQueue({name: Tenant(weight=weight) for name, weight in weights.items()})
    served: Counter[str] = Counter()
    owners: dict[int, tuple[str, int, int]] = {}

    def ask(name: str) -> None:
        number = len(owners)
        prompt, output = sizes[number % len(sizes)]
        owners[number] = name, prompt, output
        queue.push(number, Standing(name, 0, 0.0, prompt), 0.0)

    for name in [*weights, *weights]:  # one is always left to wait
        ask(name)
    for _ in sizes:
        taken = queue.take(0.0)
        assert taken is not None
        name, prompt, output = owners[taken]
        queue.charge(name, output)
        queue.end(name)
        served[name] += prompt + output
        ask(name)
        shares = [served[other] / weight for other, weight in weights.items()]
        assert max(shares) - min(shares) <= 100 / min(weights.values())


def test_a_tenant_that_was_away_gets_no_credit() -> None:
    queue: FairQueue[str] = FairQueue({})
    for number in range(50):
        queue.push(f"a{number}", Standing("a", 0, 0.0, 10), 0.0)
    for _ in range(20):
        queue.take(0.0)
    for number in range(50):
        queue.push(f"b{number}", Standing("b", 0, 0.0, 10), 0.0)
    taken = [queue.take(0.0) for _ in range(10)]
    assert Counter(str(name)[0] for name in taken) == {"a": 5, "b": 5}


@given(st.lists(st.one_of(STANDINGS, st.sampled_from(NAMES)), max_size=60))
def test_what_starts_at_once_counts_as_if_it_had_waited(steps: list[Standing | str]) -> None:
    tenants = {"a": Tenant(weight=2.0, max_running=2), ANY: Tenant()}
    at_once, waited = FairQueue[int](tenants), FairQueue[int](tenants)
    running: Counter[str] = Counter()
    for number, step in enumerate(steps):
        if isinstance(step, str):
            if running[step]:
                running[step] -= 1
                at_once.end(step)
                waited.end(step)
            continue
        waited.push(number, step, 0.0)
        begun = waited.take(0.0) is not None
        assert at_once.start(step, 0.0) == begun
        running[step.tenant] += begun
        if not begun:
            waited.remove(number)
    assert list(at_once.counts()) == list(waited.counts())
    at_once.push(0, Standing("b"), 0.0)
    assert not at_once.start(Standing("c"), 0.0), "another waits"


def test_the_tokens_of_forgotten_tenants_still_count() -> None:
    """A counter that falls is taken for a restart."""
    queue: FairQueue[int] = FairQueue({"a": Tenant()})

    def run(name: str) -> bool:
        begun = queue.start(Standing(name, prompt_tokens=2), 0.0)
        queue.end(name)
        return begun

    assert all([run("a"), *(run(f"client {number}") for number in range(3000))])
    assert list(queue.counts()) == [("a", 0, 0, 2), (ANY, 0, 0, 6000)]


def test_a_tenant_at_its_limit_lets_others_run_and_is_told_when_to_come_again() -> None:
    queue: FairQueue[int] = FairQueue({"a": Tenant(max_running=1, max_queued=2), ANY: Tenant(priority=3)})
    for number in range(4):
        queue.push(number, Standing("a"), 0.0)
    queue.push(9, Standing("b", 3), 0.0)
    assert [queue.take(float(now)) for now in range(3)] == [0, 9, None]
    queue.check("b", 0.0)
    with pytest.raises(OverloadedError, match="2 requests of this tenant wait already"):
        queue.check("a", 0.0)
    queue.remove(3)
    queue.check("a", 0.0)
    queue.end("a")
    assert queue.take(10.0) is not None
    queue.end("a")
    assert queue.take(20.0) is not None
    queue.push(4, Standing("a"), 1000.0)
    queue.push(5, Standing("a"), 1000.0)
    queue.push(6, Standing("a"), 1000.0)
    with pytest.raises(OverloadedError) as refused:
        queue.check("a", 1000.0)
    assert refused.value.retry_after_s == 30, "while it waited, one in ten seconds ran"


def test_names_that_come_and_go_take_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    queue: FairQueue[int] = FairQueue({})
    for number in range(3000):
        queue.push(number, Standing(f"t{number}"), 0.0)
        assert queue.take(0.0) == number
        queue.end(f"t{number}")
    assert len(vars(queue)["_states"]) == 1024
    for number in range(3000):
        queue.push(number, Standing(f"u{number}"), 0.0)
        queue.remove(number)
    assert len(vars(queue)["_states"]) == 1024


@pytest.mark.parametrize(
    ("tenant", "text"),
    [
        ('{"weight": 0}', "tenants.a.weight must be above 0"),
        ('{"max_running": 0}', "tenants.a.max_running is too small"),
        ('{"max_queued": -1}', "tenants.a.max_queued is too small"),
        ('{"limit": 1}', "unknown field `limit`"),
    ],
)
def test_a_bad_tenant_is_refused_by_name(tenant: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        read_config(f'{{"tenants": {{"a": {tenant}}}}}')


@pytest.mark.parametrize(
    ("header", "value", "text"),
    [
        ("X-Priority", "soon", "must be a number"),
        ("X-Priority", "1_0", "must be a number"),
        ("X-Priority", "\u0663", "must be a number"),
        ("X-Priority", "1.5", "must be an integer"),
        ("X-Priority", "-2147483648", "must be an integer above -2147483648 and below 2147483648"),
        ("x-slo-ttft-ms", "0", "must be above 0"),
        ("x-slo-ttft-ms", "nan", "must be a number"),
    ],
)
def test_a_bad_header_is_refused_by_name(header: str, value: str, text: str) -> None:
    with pytest.raises(RequestError, match=f"{header} {text}"):
        note_standing(Caller("r"), {header: value})


def test_a_key_is_a_tenant() -> None:
    caller = Caller("r", key=2)
    note_standing(caller, {"X-Tenant-Id": "acme"})
    assert caller.tenant == "key-2"


@pytest.mark.parametrize("name", ["X-Tenant-Id", "x-gateway-inference-fairness-id"])
def test_a_header_names_the_tenant_without_keys(name: str) -> None:
    caller = Caller("r")
    note_standing(caller, {name: "acme", "X-Priority": "-3", "x-slo-ttft-ms": "250"})
    assert (caller.tenant, caller.priority, caller.ttft_slo_s) == ("acme", -3, 0.25)


async def test_waiting_requests_run_by_class_and_share_and_engines_know_it(directory: Path) -> None:
    engine = FakeEngine(directory, length=4)
    engine.info = msgspec.structs.replace(engine.info, max_num_seqs=1)
    engine.pause = asyncio.Event()
    config = read_config('{"tenants": {"vip": {"priority": -5}, "small": {"max_queued": 1}}}')

    async def ask(session: aiohttp.ClientSession, url: str, tenant: str, **fields: Any) -> tuple[int, str | None]:
        body = {"prompt": "a", "max_tokens": 4, **fields}
        async with session.post(f"{url}/v1/completions", json=body, headers={"X-Tenant-Id": tenant}) as response:
            await response.read()
            return response.status, response.headers.get("Retry-After")

    app = build_engine_app(engine, Tokenizer.load(directory))
    async with aiohttp.ClientSession() as session, served(app) as e:
        router = await build_app(RouterConfig(both=(e,), ticket_key=KEY, policy_config=config))
        async with served(router) as url:
            tasks = [asyncio.create_task(ask(session, url, "first"))]
            await until(lambda: engine.running == 1)

            async def waits(num: int) -> bool:
                async with session.get(f"{url}/metrics") as response:
                    text = await response.text()
                found = [line for line in text.splitlines() if line.startswith("baton:router_tenant_requests_waiting")]
                return sum(float(line.rpartition(" ")[2]) for line in found) == num

            later = [("big", 7), ("small", -9), ("vip", -9), ("vip", -2)]
            for num, (tenant, priority) in enumerate(later, 1):
                tasks.append(asyncio.create_task(ask(session, url, tenant, priority=priority)))
                while not await waits(num):
                    pass
            assert await ask(session, url, "small") == (429, "1")
            engine.pause.set()
            assert [(await task)[0] for task in tasks] == [200] * 5
    # Nobody has a better class than its tenant's.
    assert [request.priority for request in engine.requests] == [0, -5, -2, 0, 7]
