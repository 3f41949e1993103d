"""What a server's ZeroMQ sockets need against strangers."""

from __future__ import annotations

import ctypes
import secrets


def begin_ids_at_random() -> None:
    """Call it before each ROUTER socket is made. A ROUTER numbers connections that bring no id by C's `rand()`. A peer
    that claims the next number would end the process by an assertion of ZeroMQ (4.3.5, `add_out_pipe`)."""
    ctypes.CDLL(None).srand(secrets.randbits(32))
