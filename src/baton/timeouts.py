"""`asyncio.timeout` of Python 3.11; on Python 3.10 from async_timeout, a dependency of aiohttp.

`asyncio.wait_for` is no substitute: before Python 3.12 it loses a cancellation that arrives together with the result.
"""

from __future__ import annotations

import sys

if sys.version_info >= (3, 11):
    from asyncio import timeout
else:
    from async_timeout import timeout

__all__ = ["timeout"]
