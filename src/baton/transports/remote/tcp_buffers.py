"""The maximum bytes in flight on a TCP connection of this host: sent and not yet received."""

from __future__ import annotations

from pathlib import Path

# The assumed minimum, also if the kernel hides its limits.
LEAST_BYTES = 16 << 20


def held_bytes(proc: Path = Path("/proc/sys/net")) -> int:
    """The maximum that one side's send buffer and the other's receive buffer hold together.

    A buffer grows up to the last number of `tcp_wmem` and `tcp_rmem`; one that a library sets is at most twice
    `wmem_max` and `rmem_max` (socket(7), tcp(7)).
    """
    total = 0
    for way in ("r", "w"):
        limits = [LEAST_BYTES // 2]
        try:
            limits.append(int((proc / "ipv4" / f"tcp_{way}mem").read_text("ascii").split()[-1]))
            limits.append(2 * int((proc / "core" / f"{way}mem_max").read_text("ascii")))
        except (OSError, ValueError, IndexError):
            pass  # containers may hide them
        total += max(limits)
    return total
