"""The vLLM plug-in: the KV connector `BatonConnector`, selected in vLLM's `--kv-transfer-config`.

vLLM is imported when `BatonConnector` is first used.
"""

from __future__ import annotations

from typing import Any

__all__ = ["BatonConnector"]


def __getattr__(name: str) -> Any:
    if name != "BatonConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from baton.vllm.support import check_version

    # `connector` imports names that an unsupported version may lack.
    check_version()
    from baton.vllm.connector import BatonConnector

    return BatonConnector
