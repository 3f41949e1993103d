"""Public test suites for added transports and stores."""

from baton.testing.store_suite import check_store
from baton.testing.transport_suite import check_transport

__all__ = ["check_store", "check_transport"]
