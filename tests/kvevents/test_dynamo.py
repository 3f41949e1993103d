"""Dynamo's KV indexer reads the events of Baton's engines.

It is no dependency of the tests: `pip install --no-deps --target DIR ai-dynamo ai-dynamo-runtime`, with DIR on
PYTHONPATH.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from baton.kv.block_tables import BlockTables
from baton.kv.cache import KVCache
from baton.kv.spec import GroupSpec, kv_planes
from baton.kvevents.config import KVEventsConfig
from baton.kvevents.publisher import EventPublisher
from benchmarks.vllm.servers import free_port

pytest.importorskip("dynamo.indexer")

SIZE, LIMIT_S = 16, 60.0
GROUPS = [
    GroupSpec(
        name=owner,
        owner=owner,
        kind="full",
        planes=kv_planes(1, 1, "uint8"),
        page_size=SIZE,
        layer_ids=(0,),
        module=module,
    )
    for owner, module in (("target", 0), ("draft", 1))
]
Ask = Callable[[str, dict[str, Any]], Any]


@pytest.fixture
def ask(tmp_path: Path) -> Iterator[Ask]:
    """Posts to an indexer."""
    port = free_port()

    def post(path: str, body: dict[str, Any]) -> Any:
        data = json.dumps(body).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
            return json.load(answer)

    with (tmp_path / "log").open("wb") as log:
        command = [sys.executable, "-m", "dynamo.indexer", "--port", str(port)]
        with subprocess.Popen(command, stdout=log, stderr=log) as indexer:
            try:
                until = time.monotonic() + LIMIT_S
                while True:
                    with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/workers"):
                        break
                    assert time.monotonic() < until, (tmp_path / "log").read_text()[-2000:]
                    time.sleep(0.1)
                yield post
            finally:
                indexer.terminate()


def run(cache: KVCache, tokens: list[int]) -> None:
    tables = BlockTables()
    assert cache.attach(tables, tokens, len(tokens), len(tokens)) is not None
    cache.advance(tables, tokens, len(tokens), len(tokens))
    cache.release(tables)


def until_held(ask: Ask, cache: KVCache, prompts: list[list[int]]) -> None:
    """Wait until the indexer names what the cache holds of each prompt, in tokens."""
    held = [cache.pools["target"].lookup(tokens, len(tokens)).num_tokens // SIZE * SIZE for tokens in prompts]
    until = time.monotonic() + LIMIT_S
    while True:
        answers = [ask("/query", {"token_ids": tokens, "model_name": "demo"})["scores"] for tokens in prompts]
        told = [scores.get("1", {}).get("0", 0) for scores in answers]
        if told == held:
            return
        assert time.monotonic() < until, (told, held)
        time.sleep(0.1)


def test_dynamos_indexer_knows_what_an_engine_holds(ask: Ask) -> None:
    """What was stored before it listened is replayed, later blocks come, and evicted ones go."""
    cache = KVCache(GROUPS, {group.name: 40 for group in GROUPS}, 2, lambda *_: None)
    endpoints = {f"{name}endpoint": f"tcp://127.0.0.1:{free_port()}" for name in ("", "replay_")}
    with contextlib.closing(EventPublisher(KVEventsConfig(enable_kv_cache_events=True, **endpoints))) as publisher:
        publisher.watch(cache, GROUPS)
        prompts = [[10 + (7 * n + i * i) % 200 for i in range(length)] for n, length in enumerate((40, 64, 100, 300))]
        run(cache, prompts[0])
        ask("/register", {"instance_id": 1, "model_name": "demo", "block_size": SIZE, **endpoints})
        for tokens in prompts[1:3]:
            time.sleep(1.0)  # a subscriber that connects misses what is sent meanwhile, and asks for it with the next
            run(cache, tokens)
        until_held(ask, cache, prompts)
        for number in range(4):
            run(cache, [250 - number, *prompts[0][:5], *range(220)])
        run(cache, prompts[3])
        assert cache.pools["target"].lookup(prompts[0], 40).num_tokens == 0
        until_held(ask, cache, prompts)
