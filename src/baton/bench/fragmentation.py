"""Block tables of prompts from a pool that is fresh, churned by many requests, or maximally fragmented."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

import numpy as np

from baton.errors import CapacityError, ConfigError
from baton.kv.page_pool import PagePool
from baton.kv.prefix import Chain

Fragmentation = Literal["fresh", "churned", "full"]
FRAGMENTATIONS: tuple[Fragmentation, ...] = get_args(Fragmentation)


@dataclass(frozen=True, slots=True)
class Churn:
    """Lengths are in pages, uniform in [low, high]. `running` requests are served at once; with `grows` they grow page
    by page in turns. With `caching` their pages go to the prefix cache, and a share `hits` of them begins with the
    first pages of an earlier request.
    """

    requests: int = 1500
    prompt: tuple[int, int] = (32, 128)
    output: tuple[int, int] = (4, 8)
    running: int = 8
    grows: bool = True
    caching: bool = True
    hits: float = 0.25


@dataclass(slots=True)
class _Served:
    tokens: list[int]
    pages: list[int]
    left: int
    chain: Chain = field(default_factory=Chain)


def churn(pool: PagePool, load: Churn, seed: int = 0) -> list[list[int]]:
    """Serve `load` from a pool of one-token pages. Returns each prompt's pages after its prefix hit.

    The last `load.running` requests stay in the pool. Raises `CapacityError`.
    """
    rng = np.random.default_rng(seed)
    served: deque[_Served] = deque()
    past: deque[list[int]] = deque(maxlen=64)
    fresh: list[list[int]] = []
    for _ in range(load.requests):
        while len(served) >= load.running:
            _finish(pool, served.popleft(), past)
            for one in served if load.grows else ():
                if one.left:
                    one.left -= 1
                    one.tokens.append(int(rng.integers(0, 1 << 40)))
                    one.pages += pool.allocate(1, one.pages[-1])
        length, output = (int(rng.integers(*bounds, endpoint=True)) for bounds in (load.prompt, load.output))
        tokens = rng.integers(0, 1 << 40, length).tolist()
        if past and rng.random() < load.hits:
            begin = past[int(rng.integers(len(past)))]
            shared = min(int(rng.integers(1, len(begin) + 1)), length - 1)
            tokens[:shared] = begin[:shared]
        hit = pool.lookup(tokens, length - 1).pages
        pool.share(hit)
        own = pool.allocate(length - len(hit), hit[-1] if hit else None)
        fresh.append(own)
        served.append(_Served(tokens, hit + own, output))
    return fresh


def _finish(pool: PagePool, one: _Served, past: deque[list[int]]) -> None:
    pool.cache(one.tokens, one.pages, one.chain, len(one.tokens))
    pool.release(one.pages)
    past.append(one.tokens)


def fragmented_tables(
    fragmentation: str, num_pages: int, count: int, tables_wanted: int, seed: int = 0
) -> list[list[int]]:
    """Block tables of `count` pages each, for `tables_wanted` prompts in turn, from a pool of `num_pages`.

    "churned": after a `Churn` of as many running requests as fit beside the prompt, at most 8. "full": in random order,
    from pages without neighbours. Raises `ConfigError`, or `CapacityError` for a pool of less than twice a table's
    pages.
    """
    if fragmentation not in FRAGMENTATIONS:
        raise ConfigError("fragmentation", f"{fragmentation!r} is none of {', '.join(FRAGMENTATIONS)}")
    pool = PagePool(num_pages, 1)
    if fragmentation == "full":
        rng = np.random.default_rng(seed)
        pages = np.arange(1, num_pages, 2)
        if count > pages.size:
            raise CapacityError(f"{count} pages wanted, {pages.size} have no neighbour")
        return [rng.permutation(pages)[:count].tolist() for _ in range(tables_wanted)]
    if fragmentation == "churned":
        load = Churn(prompt=(count // 4 or 1, count))
        running = min(load.running, (num_pages - 1) // (count + load.output[1]) - 1)
        churn(pool, replace(load, running=max(1, running)), seed)
    out = []
    for index in range(tables_wanted):
        pages_of = pool.allocate(count)
        pool.cache(list(range(index << 20, (index << 20) + count)), pages_of, Chain(), count)
        pool.release(pages_of)
        out.append(pages_of)
    return out
