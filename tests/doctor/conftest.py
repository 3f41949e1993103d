"""The directory of the fakes of `tests/server`."""

from tests.router.conftest import directory

__all__ = ["directory"]
