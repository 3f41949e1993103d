"""Public test suites for added transports and stores, and an agent for tests of engines and plug-ins."""

from baton.testing.recording_agent import RecordingAgent
from baton.testing.store_suite import check_store
from baton.testing.transport_suite import check_transport

__all__ = ["RecordingAgent", "check_store", "check_transport"]
