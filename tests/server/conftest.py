"""Commands also run here: logging that one sets up ends with its test."""

from tests.cli.conftest import _no_log_stays

__all__ = ["_no_log_stays"]
