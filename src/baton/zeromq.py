"""Protects a server's ZeroMQ sockets from unknown peers."""

from __future__ import annotations

import ctypes
import secrets


def begin_ids_at_random() -> None:
    """Call it before each ROUTER socket is made. A ROUTER numbers connections without an id by C's `rand()`: a peer
    that claims the next number would end the process by an assertion of ZeroMQ (4.3.5, `add_out_pipe`).
    """
    ctypes.CDLL(None).srand(secrets.randbits(32))
