"""The HTTP server of one engine, for clients and routers."""

from baton.server.app import build_app

__all__ = ["build_app"]
