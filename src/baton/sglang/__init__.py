"""The SGLang plug-in: the transfer backend `baton`, selected by `--disaggregation-transfer-backend baton`.

`compat`, `hooks` and `conn` import SGLang, and only when SGLang loads the plug-in.
"""

from __future__ import annotations

__all__ = ["register"]


def register() -> None:
    """The entry point of the group `sglang.srt.plugins`, called in each of SGLang's processes.

    Raises `ConfigError` for an unsupported version of SGLang, which logs it and then lacks the backend.
    """
    from baton.sglang.compat import check_version

    # `hooks` names functions that another version may lack.
    check_version()
    from baton.sglang import hooks

    hooks.install()
