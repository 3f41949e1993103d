"""`timeout(seconds)`: as `asyncio.timeout` of Python 3.11, which aiohttp brings along for Python 3.10.

Not `asyncio.wait_for`: before Python 3.12 it loses a cancellation that comes when the result does, and the request of a
client that has left would run for ever.
"""

from __future__ import annotations

import sys

if sys.version_info >= (3, 11):
    from asyncio import timeout
else:
    from async_timeout import timeout

__all__ = ["timeout"]
