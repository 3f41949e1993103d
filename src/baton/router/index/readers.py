"""The subscribers of a router's engines."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

from baton.errors import ConfigError, RequestError
from baton.kvevents.config import check_endpoint
from baton.router.clients.address import checked_url, split_rank
from baton.router.index.blocks import BlockIndex
from baton.router.index.held import HeldPrefixes
from baton.router.index.subscriber import EventSubscriber
from baton.wire import EngineInfo


class EventReaders:
    """Reads the events of engines in `sources`, and of engines that report their ports.

    `sources`, `replay_sources`: endpoints by engine URL, for vLLM and SGLang servers.
    """

    def __init__(
        self, sources: Mapping[str, str] | None = None, replay_sources: Mapping[str, str] | None = None
    ) -> None:
        self._sources, self._replays = dict(sources or {}), dict(replay_sources or {})
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.subscribers: dict[str, EventSubscriber] = {}

    def follow(self, url: str, info: EngineInfo) -> HeldPrefixes | None:
        """Begin to read the events of an engine that started; None: it publishes none. Drops what earlier engines at
        this URL held.
        """
        self.stop(url)
        base, rank = split_rank(url)
        endpoint = self._sources.get(url) or _on_host(base, info.kv_events_port)
        if endpoint is None:
            return None
        replay = self._replays.get(url) or _on_host(base, info.kv_events_replay_port)
        index = BlockIndex(has_salt_keys=info.kv_events_port > 0)
        subscriber = self.subscribers[url] = EventSubscriber(index, endpoint, replay, rank)
        self._tasks[url] = asyncio.get_running_loop().create_task(subscriber.run())
        return HeldPrefixes(index, asyncio.get_running_loop().time)

    def stop(self, url: str) -> None:
        self.subscribers.pop(url, None)
        task = self._tasks.pop(url, None)
        if task is not None:
            task.cancel()

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for url in list(self._tasks):
            self.stop(url)
        if tasks:
            await asyncio.gather(*tasks, return_exceptions=True)


def read_sources(texts: Sequence[str], field: str) -> dict[str, str]:
    """Endpoints by engine URL, from `URL=ENDPOINT` texts. Raises `ConfigError`."""
    sources = {}
    for text in texts:
        url, _, endpoint = text.partition("=")
        if "#" in url and not endpoint.startswith(("tcp://", "ipc://")):  # URL#dp_rank=N=ENDPOINT
            rank, _, endpoint = endpoint.partition("=")
            url = f"{url}={rank}"
        try:
            sources[checked_url(url)] = endpoint
        except RequestError as error:
            raise ConfigError(field, str(error)) from None
        check_endpoint(endpoint, field)
    return sources


def _on_host(base: str, port: int) -> str | None:
    """The endpoint on an engine's own host: an engine reports a port, never a host."""
    if not 0 < port < 1 << 16:
        return None
    host = urlsplit(base).hostname or ""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
