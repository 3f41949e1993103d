"""The front door over many engines: chooses them, starts both legs of a handoff, joins their tokens."""

from baton.router.app import RouterConfig, build_app
from baton.router.backend import RouterBackend
from baton.router.pool import EnginePool, Instance

__all__ = ["EnginePool", "Instance", "RouterBackend", "RouterConfig", "build_app"]
