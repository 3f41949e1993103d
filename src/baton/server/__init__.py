"""The HTTP server of one engine: the OpenAI API for clients, and `/inference/v1` in token ids for routers."""

from baton.server.app import build_app

__all__ = ["build_app"]
