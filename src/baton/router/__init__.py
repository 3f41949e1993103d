"""The server for clients (docs/router.md).

Names are imported on first use, since commands need only the settings.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from baton.router.app import build_app
    from baton.router.config.router_config import RouterConfig
    from baton.router.pool import EnginePool
    from baton.router.pooled_engine import PooledEngine
    from baton.router.router_backend import RouterBackend

__all__ = ["EnginePool", "PooledEngine", "RouterBackend", "RouterConfig", "build_app"]
_MODULES = {
    "EnginePool": "pool",
    "PooledEngine": "pooled_engine",
    "RouterBackend": "router_backend",
    "RouterConfig": "config.router_config",
    "build_app": "app",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
