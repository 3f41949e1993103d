"""vLLM's own NIXL connectors at their best on few cores, for `kv_connector_module_path`.

NIXL's progress thread, which vLLM starts and which burns a core when idle, is off; its agent, which vLLM calls from
three threads, locks. Then a push whose first message is still in flight when the writer thread goes to sleep would
never end, so that thread polls, at vLLM's own interval.
"""

from __future__ import annotations

import threading
from typing import Any

from nixl._api import nixl_agent_config, nixl_thread_sync_t
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import NixlConnector, NixlPushConnector, push_worker

__all__ = ["NixlConnector", "NixlPushConnector"]


class _Polled(threading.Event):
    """An event whose waiters wake up after an interval, whether it was set or not."""

    def wait(self, timeout: float | None = None) -> bool:
        return super().wait(push_worker._PUSH_WRITER_POLL_INTERVAL_MS / 1000 if timeout is None else timeout)


def _improve() -> None:
    first, *rest = nixl_agent_config.__init__.__defaults__ or (False,)
    if first is True:
        nixl_agent_config.__init__.__defaults__ = (False, *rest[:-1], nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT)
    worker: Any = push_worker.NixlPushConnectorWorker
    create = worker.__init__

    def polled(self: Any, *args: Any, **more: Any) -> None:
        create(self, *args, **more)
        self._push_writer_wake = _Polled()

    worker.__init__ = polled


_improve()
