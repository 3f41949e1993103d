"""The `baton bench` commands."""

from baton.cli.bench.commands import app

__all__ = ["app"]
