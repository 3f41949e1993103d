"""A connector of one engine that behaves as on a data-parallel rank that shares experts, for
`kv_connector_module_path`.
"""

from __future__ import annotations

from baton.vllm import compat
from baton.vllm.connector import BatonConnector

compat.steps_alone = lambda config: False


class Shared(BatonConnector):
    """The connector as it is."""
