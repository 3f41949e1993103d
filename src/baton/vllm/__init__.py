"""The vLLM plug-in: KV connector `BatonConnector`, named in vLLM's `--kv-transfer-config`.

vLLM is imported when the connector is asked for, and by `compat`, `connector` and `metrics` alone.
"""

from __future__ import annotations

from typing import Any

__all__ = ["BatonConnector"]


def __getattr__(name: str) -> Any:
    if name != "BatonConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from baton.vllm.compat import check_version

    # Before the import of what another version may not have.
    check_version()
    from baton.vllm.connector import BatonConnector

    return BatonConnector
