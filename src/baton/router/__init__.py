"""The server for clients, over many engines: chooses engines, starts both legs of a handoff, and joins their tokens."""

from baton.router.app import RouterConfig, build_app
from baton.router.backend import RouterBackend
from baton.router.pool import EnginePool
from baton.router.pooled_engine import PooledEngine

__all__ = ["EnginePool", "PooledEngine", "RouterBackend", "RouterConfig", "build_app"]
