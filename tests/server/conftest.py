"""Commands are run here too: the log that one begins ends with its test."""

from tests.cli.conftest import _no_log_stays

__all__ = ["_no_log_stays"]
