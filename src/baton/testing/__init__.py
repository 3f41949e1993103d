"""Public test suites for those who add parts to Baton."""

from baton.testing.store_suite import check_store
from baton.testing.transport_suite import check_transport

__all__ = ["check_store", "check_transport"]
